"""Logs that come and go under a query by pattern: what is asked of each is drawn from the seed.

Two at a time are written, truncated beside their writer, renamed, deleted, and created again under
the same name.  A record may be lost only if a truncation or a deletion that takes it was asked for
when the target did not hold it yet; that is noted before it is asked for.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from dlcore import DLError, LogRecord
from dlcore.base.errors import LogExistsError
from tests.chaos_spark.checker import Written

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from dlcore import DLSN, DistributedLogManager, Namespace

PREFIX = "churn-"
_LANES = 2
_BATCH_RECORDS = 10
_BATCH_GAP_S = 0.3
_PAUSE_S = 0.5


@dataclass(slots=True)
class Life:
    """One log from its creation to its deletion."""

    source: str
    name: str
    written: Written = field(default_factory=Written)
    places: dict[int, DLSN] = field(default_factory=dict)
    """Where acknowledged records are, in their order."""


class Churn:
    """The written and the lost records, by source; `run` goes on until it is cancelled."""

    def __init__(
        self,
        seed: int,
        open_namespace: Callable[[], Awaitable[AbstractAsyncContextManager[Namespace]]],
        held_by_target: Callable[[], Awaitable[dict[str, int]]],
    ) -> None:
        """`held_by_target` returns the highest number of each source that the target holds."""
        self.sources: dict[str, Written] = {}
        self.asked = {"created": 0, "truncated": 0, "renamed": 0, "deleted": 0}
        self._seed = seed
        self._open = open_namespace
        self._held = held_by_target
        self._numbers = count(1)

    async def run(self) -> None:
        """Let logs live one after the other."""
        await asyncio.gather(*(self._lane(lane) for lane in range(_LANES)))

    async def _lane(self, lane: int) -> None:
        rng = random.Random(f"churn {self._seed} {lane}")
        name = ""
        while True:
            number = next(self._numbers)
            life = Life(source=f"source-c{number}", name=name or f"{PREFIX}{number}")
            name = await self._live(life, rng)

    async def _live(self, life: Life, rng: random.Random) -> str:
        """Return the name that the lane's next log has to take, if one."""
        self.sources[life.source] = life.written
        await self._insist(lambda namespace: _create(namespace, life.name))
        self.asked["created"] += 1
        for turn in range(rng.randint(1, 3)):
            cuts = [rng.random() if rng.random() < 0.4 else None for _ in range(rng.randint(3, 9))]
            left = iter(cuts)
            await self._insist(lambda namespace: self._write(namespace, life, left))  # noqa: B023
            if rng.random() < 0.4:
                await self._rename(life, f"{PREFIX}{life.source.rpartition('c')[2]}-{turn}")
        if rng.random() < 0.3:
            return ""
        await self._delete(life)
        return life.name if rng.random() < 0.5 else ""

    async def _write(self, namespace: Namespace, life: Life, cuts: Iterator[float | None]) -> None:
        """Write a batch for each of `cuts`, and then truncate there if it says where."""
        log, written = await namespace.open_log(life.name), life.written
        payload = life.source.rpartition("-")[2]
        async with await log.open_writer() as writer:
            for cut in cuts:
                numbers = range(written.attempted, written.attempted + _BATCH_RECORDS)
                written.attempted = numbers.stop
                futures = [
                    writer.write(LogRecord(txid=number, payload=f"{payload}:{number}".encode()))
                    for number in numbers
                ]
                results = await asyncio.gather(*futures, return_exceptions=True)
                for number, result in zip(numbers, results, strict=True):
                    if not isinstance(result, BaseException):
                        written.acked.add(number)
                        life.places[number] = result
                await writer.commit()
                if cut is not None and life.places:
                    await self._truncate(log, life, cut)
                await asyncio.sleep(_BATCH_GAP_S)

    async def _truncate(self, log: DistributedLogManager, life: Life, cut: float) -> None:
        """Drop what is below an acknowledged record; `cut` says which, by chance a late one."""
        numbers = list(life.places)
        first = numbers[int(cut**0.25 * len(numbers))]
        await self._note_gone(life, below=first)
        self.asked["truncated"] += 1
        await log.truncate(life.places[first])

    async def _rename(self, life: Life, name: str) -> None:
        was, life.name = life.name, name

        async def rename(namespace: Namespace) -> None:
            if await namespace.log_exists(was):  # or an earlier try did it
                await namespace.rename_log(was, name)

        await self._insist(rename)
        self.asked["renamed"] += 1

    async def _delete(self, life: Life) -> None:
        await self._insist(lambda _: self._note_gone(life, below=life.written.attempted))
        self.asked["deleted"] += 1
        await self._insist(lambda namespace: _delete(namespace, life.name))

    async def _note_gone(self, life: Life, *, below: int) -> None:
        held = (await self._held()).get(life.source, -1)
        life.written.gone.update(range(held + 1, below))

    async def _insist(self, ask: Callable[[Namespace], Awaitable[None]]) -> None:
        """Ask until nothing fails: a server that is needed may be away."""
        while True:
            try:
                async with await self._open() as namespace:
                    return await ask(namespace)
            except DLError:
                await asyncio.sleep(_PAUSE_S)


async def _create(namespace: Namespace, name: str) -> None:
    with suppress(LogExistsError):  # an earlier try did it
        await namespace.create_log(name)


async def _delete(namespace: Namespace, name: str) -> None:
    if await namespace.log_exists(name):
        await namespace.delete_log(name)
