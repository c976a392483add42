"""Goal: the model's bookie is the real one.  Method: every step a search took, on real storage.

Each step is replayed from the start on a `LedgerStorage` over a disk whose syncs wait while the
model's bookie is doomed; the answers must be the same.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, TypeVar

from bookie.config import StorageConfig
from bookie.ledger_storage import LedgerStorage
from dlcore.base.clock import SystemClock
from dlcore.base.errors import (
    BadRequestError,
    LedgerFencedError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from tests.fixtures.memory_disk import DiskOwner, MemoryDisk
from tests.model import exploring, lacs
from tests.model.bookie import LEDGER_ID, Bookie, Crash, Deliver, Message
from tests.model.search import search
from tests.model.system import Protocol, Scope
from tests.simulation.loop import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.model.parts import Parts

T = TypeVar("T")
Event = Deliver | Crash
_TURNS = 25
CONFIG = StorageConfig(lac_delay_s=1e-12)
"""A LAC does not wait for the next add to share its flush."""
_KINDS = {
    LedgerFencedError: "refused",
    BadRequestError: "mismatch",
    NoSuchEntryError: "missing",
    NoSuchLedgerError: "missing",
}


class _LosingRandom(random.Random):
    """Chooses to lose everything that was not synced."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 1.0

    def getrandbits(self, k: int) -> int:
        assert k >= 0
        return 0


class _StoppedDisk(MemoryDisk):
    """A disk whose syncs wait while it is stopped."""

    def __init__(self) -> None:
        super().__init__(_LosingRandom())
        self.is_running = asyncio.Event()
        self.is_running.set()

    async def sync(self, inode: Any, owner: DiskOwner) -> None:
        await self.is_running.wait()
        await super().sync(inode, owner)


async def _answers_of(events: Sequence[Event]) -> list[Message]:
    """Return what the real storage answers at the last of `events`."""
    disk = _StoppedDisk()
    storage = await LedgerStorage.open(disk, CONFIG, clock=SystemClock())
    requests: list[asyncio.Task[Message]] = []

    async def crash(*, keep_cache: bool) -> None:
        disk.crash(keep_cache=keep_cache)
        disk.is_running.set()
        await storage.aclose()
        await asyncio.gather(*requests, return_exceptions=True)
        requests.clear()

    for event in events:
        if isinstance(event, Crash):
            await crash(keep_cache=event.kept == 1)
            storage = await LedgerStorage.open(disk, CONFIG, clock=SystemClock())
            continue
        if event.doomed:
            disk.is_running.clear()
        requests.append(asyncio.ensure_future(_request(storage, event.request)))
        for _ in range(_TURNS):
            await asyncio.sleep(0)
    answers = [requests[-1].result()] if requests and requests[-1].done() else []
    await crash(keep_cache=True)
    return answers


async def _request(storage: LedgerStorage, request: Message) -> Message:
    data: bytes | int = b""
    try:
        match request.kind:
            case "fence":
                kind, data = "fenced", await storage.reads.read_lac(LEDGER_ID, fence=True)
            case "lac":
                assert isinstance(request.data, int)
                await storage.writes.write_lac(LEDGER_ID, request.data)
                return request._replace(kind="lac accepted")
            case "read":
                frame = await storage.reads.read_entry(LEDGER_ID, request.entry_id, fence=True)
                kind, data = "found", bytes(frame)
            case _:
                assert isinstance(request.data, bytes)
                is_recovery = request.kind == "recovery add"
                await storage.writes.add_entry(request.data, is_recovery=is_recovery)
                kind = "added"
    except tuple(_KINDS) as error:
        kind = _KINDS[type(error)]
    return request._replace(kind=kind, data=data)


def _histories(parts: Parts) -> list[tuple[list[Event], list[Message]]]:
    """Return a shortest history of every step that bookies took, and its answers in the model."""
    steps: dict[int, list[tuple[Event, int, tuple[Message, ...]]]] = {}
    for (number, event), (after, answers) in parts.taken():
        if isinstance(event, Deliver | Crash):
            steps.setdefault(number, []).append((event, after, answers))
    first = parts.number(Bookie())
    histories: dict[int, list[Event]] = {first: []}
    found: list[tuple[list[Event], list[Message]]] = []
    queue = [first]
    for number in queue:
        for event, after, answers in steps.get(number, []):
            if isinstance(event, Crash) and event.kept > 1:
                continue  # a real one writes one batch at a time: the others are in memory
            if isinstance(event, Deliver) and event.doomed > parts.content(after).is_doomed:
                continue  # it asked nothing of the disk, and searches do not take this step
            history = [*histories[number], event]
            found.append((history, list(answers)))
            if after not in histories:
                histories[after] = history
                queue.append(after)
    return found


def test_every_step_of_the_model_is_one_of_the_real_storage() -> None:
    """Adds, fences and reads are answered alike, before and after crashes."""
    protocol = Protocol(Scope(entries=2, crashes=1))
    search(protocol, states_max=15_000)
    _replay(_histories(protocol.parts), at_least=150)


def test_lacs_are_accepted_as_by_the_real_storage() -> None:
    """Only once they are durable, and a crash forgets none of them."""
    model = lacs.Model(lacs.Scope(appends=2, publishes=0, crashes=1))
    exploring.search(model, states_max=15_000)
    _replay(_histories(model.parts), at_least=50)


def _replay(histories: list[tuple[list[Event], list[Message]]], *, at_least: int) -> None:
    assert len(histories) > at_least
    for history, expected in histories:
        answers, _ = run(_answers_of(history))
        assert answers == expected, "\n".join(map(str, history))
