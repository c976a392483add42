"""Subscribers over proxies: the real client, above gRPC, on the calls of the simulation.

Several consumers read for one subscriber of each log: they take the subscription from each other,
read, and commit.  Their proxies die and pause, answers are lost, and requests are carried out late
and twice; they stop waiting for a commit, die, and come back.  Two logs change their names
meanwhile, so that one who knows a log by its name alone would meet the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore.backends.flight.log import FlightLog
from dlcore.backends.flight.planning import get_info
from dlcore.base.errors import (
    AlreadyTruncatedError,
    DLError,
    EndOfStreamError,
    LogExistsError,
    LogNotFoundError,
    SubscriptionMovedError,
)
from dlcore.base.ids import DLSN
from dlcore.log.metadata.values import LogKey
from tests.simulation.remote_calls import Calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.backends.flight.reader import FlightReader
    from tests.simulation.log_process import LogProcess
    from tests.simulation.logs import Logs
    from tests.simulation.proxies import Proxies
    from tests.simulation.subscription_checkers import Consuming

SUBSCRIBER = "sub"
SHIFTED = ("s", "t", "u")
"""The names of two logs."""
_DEATH_CHANCE = 0.1
_WAITS_S = (0.005, 0.1, 60.0)
"""For so long a commit is waited for."""


class Consumer:
    """Reads for the subscriber of some log from its position, as one holder after the other."""

    def __init__(self, proxies: Proxies, name: str, logs: Sequence[str], *, is_last: bool) -> None:
        self.name = name
        self._is_last = is_last
        self._proxies = proxies
        self._rng = proxies.rng
        self._names = (*logs, *SHIFTED)
        self._known: list[LogKey] = []  # under the names that they had
        self._asked = DLSN.INITIAL  # to be stored last
        self._logs = proxies.log_checkers
        self._checkers = proxies.checkers.subscriptions

    async def run(self) -> None:
        """Consume, until the end is near; then the last one consumes all that there is."""
        while not self._proxies.is_ending:
            if self._known and self._rng.random() < 0.7:
                await self._try(self._rng.choice(self._known), until_caught_up=False)
            else:
                await self._try(self._rng.choice(self._names), until_caught_up=False)
            await asyncio.sleep(self._rng.expovariate(3.0))
        left = [*self._names] if self._is_last else []
        while left:
            if await self._try(left[-1], until_caught_up=True):
                left.pop()
            await asyncio.sleep(self._rng.expovariate(3.0))

    async def _try(self, log: str | LogKey, *, until_caught_up: bool) -> bool:
        """Consume of a log; return whether that came to its end, or there is no such log."""
        try:
            async with Calls(self._proxies, self.name) as calls:
                if isinstance(log, str):
                    log = LogKey(name=log, log_id=(await get_info(calls, log)).log_id)
                    self._known.append(log)
                remote = FlightLog(calls, log)
                if not until_caught_up and self._rng.random() < 0.05:
                    await remote.delete_subscription(SUBSCRIBER)
                return await self._consume(remote, until_caught_up=until_caught_up)
        except LogNotFoundError:
            return True
        except DLError as error:
            self._proxies.note(self.name, f"{type(error).__name__}: {error}")
            return False

    async def _consume(self, log: FlightLog, *, until_caught_up: bool) -> bool:
        first: DLSN | None = None
        try:
            reader = await log.open_reader(subscriber=SUBSCRIBER)
        except AlreadyTruncatedError:
            info = await log._info()
            first = DLSN.parse(info.first or info.end)
            reader = await log.open_reader(subscriber=SUBSCRIBER, dlsn=first)
        hold: Any = reader._hold
        # A reader that begins at the very first position reads whatever is there.
        begins = (first or hold.position) == DLSN.INITIAL
        consuming = self._checkers.new_holder(
            log.log_id,
            SUBSCRIBER,
            hold._token,
            hold.position,
            DLSN.INITIAL if begins else reader.position,
        )
        self._asked = hold.position
        try:
            return await self._read(reader, consuming, until_caught_up=until_caught_up)
        except SubscriptionMovedError:
            consuming.on_moved()
            self._proxies.count("subscription taken")
            raise
        finally:
            await reader.aclose()

    async def _read(
        self, reader: FlightReader, consuming: Consuming, *, until_caught_up: bool
    ) -> bool:
        rng = self._rng
        turns = 1_000_000 if until_caught_up else rng.randint(1, 5)
        for _ in range(turns):
            timeout_s = None if until_caught_up else rng.choice((0.0, 0.1, 0.5))
            try:
                records = await reader.read_bulk(
                    rng.choice((1, 3, 20)), until_caught_up=until_caught_up, timeout_s=timeout_s
                )
            except AlreadyTruncatedError:
                consuming.reading.on_truncated()
                return False
            except EndOfStreamError:
                return True
            consuming.on_records(records)
            if rng.random() < _DEATH_CHANCE and not until_caught_up:
                self._proxies.note(self.name, "dies")
                return False
            if rng.random() < 0.7 or (until_caught_up and not records):
                await self._commit(reader, consuming, is_patient=until_caught_up)
            if until_caught_up and not records:
                return True
            if not until_caught_up:
                await asyncio.sleep(rng.expovariate(3.0))
        return True

    async def _commit(
        self, reader: FlightReader, consuming: Consuming, *, is_patient: bool
    ) -> None:
        """Commit what was read, or part of it; wait for that, or not for long."""
        position, wait_s = reader.position, _WAITS_S[-1]
        if not is_patient:
            left = [each for each in consuming.got if each >= self._asked]
            position = self._rng.choice((position, self._asked, *left))
            wait_s = self._rng.choice(_WAITS_S)
        self._asked = position
        consuming.on_ask(position)
        try:
            async with asyncio.timeout(wait_s):
                await reader.commit(position)
        except TimeoutError:
            self._proxies.note(self.name, "does not wait for its commit")
            self._proxies.count("commit given up")
            return
        consuming.on_stored(position)
        self._proxies.count("commit over proxies")


async def shift_names(logs: Logs, process: LogProcess) -> None:
    """Write to one of two logs, or give it the name that is free, which the other one had."""
    rng, checkers = logs.world.rng, logs.world.log_checkers
    await logs.sleep(rng.uniform(0.0, 0.5))
    names = [name for name in SHIFTED if name in checkers.life.names]
    if len(names) < len(SHIFTED) - 1:
        await logs.create_again(process.namespace, rng.choice(SHIFTED))
        return
    log = await process.namespace.open_log(rng.choice(names), config=process.config)
    if rng.random() < 0.5:
        free = [name for name in SHIFTED if name not in names]
        with contextlib.suppress(LogExistsError):
            await log.rename(rng.choice(free or names))
        return
    writing = checkers.new_writing(log.log_id, log.name)
    first = rng.getrandbits(40)
    payloads = [f"shifter/{first + number}/0".encode() for number in range(rng.randint(1, 5))]
    async with await log.open_writer() as writer:
        writing.on_write(payloads)
        written = writer.write_batch(pa.record_batch({"value": payloads}))
        writing.on_acknowledged(payloads, await written)
