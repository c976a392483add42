"""The storage against a deliberately dumb one, on random requests with restarts between."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from hypothesis import given, settings, strategies as st

from bookie.config import CompactionConfig, GarbageConfig
from bookie.ledger_storage import LedgerStorage
from dlcore.base.errors import (
    BadRequestError,
    BookieError,
    LedgerFencedError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.wire.port import ENTRY_ID_MAX
from tests.fixtures.lengths import amount
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import ManualClock, make_frame, read_all, small_config

LEDGERS = st.integers(0, 2)
ENTRIES = st.integers(0, 12)

requests = st.one_of(
    st.tuples(st.just("add"), LEDGERS, ENTRIES, st.integers(0, 1), st.booleans()),
    st.tuples(st.just("add"), LEDGERS, ENTRIES, st.just(0), st.just(False)),
    st.tuples(st.just("read"), LEDGERS, ENTRIES, st.booleans()),
    st.tuples(st.just("range"), LEDGERS, ENTRIES, ENTRIES, st.integers(1, 3)),
    st.tuples(st.just("lac"), LEDGERS, st.integers(-1, 14)),
    st.tuples(st.just("read_lac"), LEDGERS, st.booleans()),
    st.tuples(st.just("read_held"), LEDGERS),
    st.tuples(st.just("list"), LEDGERS),
    st.tuples(st.just("restart")),
    st.tuples(st.just("compact"), st.booleans()),
    st.tuples(st.just("doom"), st.integers(1, 8)),
)
DOOMED = 9
"""A ledger that comes and goes, so that files die; nothing is asked about it."""


@dataclass
class Ledger:
    """Everything known of a ledger, the obvious way."""

    entries: dict[int, bytes] = field(default_factory=dict)
    fenced: bool = False
    last_add_confirmed: int = -1


class DumbStorage:
    """The right answers of the storage."""

    def __init__(self) -> None:
        self.ledgers: dict[int, Ledger] = {}

    def add(self, ledger_id: int, entry_id: int, version: int, is_recovery: bool) -> Any:
        """Add an entry in one of two versions."""
        ledger = self.ledgers.get(ledger_id, Ledger())
        frame = frame_of(ledger_id, entry_id, version)
        if ledger.fenced and not is_recovery:
            return LedgerFencedError
        if ledger.entries.get(entry_id, frame) != frame:
            return BadRequestError
        self.ledgers[ledger_id] = ledger
        ledger.entries[entry_id] = frame
        ledger.last_add_confirmed = max(ledger.last_add_confirmed, entry_id - 1)
        return None

    def read(self, ledger_id: int, entry_id: int, fence: bool) -> Any:
        """Read an entry."""
        if fence:
            self.ledgers.setdefault(ledger_id, Ledger()).fenced = True
        if ledger_id not in self.ledgers:
            return NoSuchLedgerError
        return self.ledgers[ledger_id].entries.get(entry_id, NoSuchEntryError)

    def range(self, ledger_id: int, first: int, last: int, stride: int) -> Any:
        """Read a range."""
        frames = [
            self.read(ledger_id, entry_id, False) for entry_id in range(first, last + 1, stride)
        ]
        errors = [each for each in frames if not isinstance(each, bytes)]
        return errors[0] if errors else frames

    def lac(self, ledger_id: int, last_add_confirmed: int) -> Any:
        """Take an explicit LAC."""
        ledger = self.ledgers.setdefault(ledger_id, Ledger())
        ledger.last_add_confirmed = max(ledger.last_add_confirmed, last_add_confirmed)

    def read_lac(self, ledger_id: int, fence: bool) -> Any:
        """Read the LAC."""
        if fence:
            self.ledgers.setdefault(ledger_id, Ledger()).fenced = True
        if ledger_id not in self.ledgers:
            return NoSuchLedgerError
        return self.ledgers[ledger_id].last_add_confirmed

    def read_held(self, ledger_id: int) -> Any:
        """Tell the LAC and the entries above it, one by one."""
        if ledger_id not in self.ledgers:
            return NoSuchLedgerError
        lac = self.ledgers[ledger_id].last_add_confirmed
        return lac, sorted(each for each in self.ledgers[ledger_id].entries if each > lac)

    def list(self, ledger_id: int) -> Any:
        """List the entries one by one."""
        if ledger_id not in self.ledgers:
            return NoSuchLedgerError
        return sorted(self.ledgers[ledger_id].entries)

    def forget_idle(self) -> None:
        """A ledger of which nothing was ever said on disk is unknown after a restart."""
        for ledger_id, ledger in list(self.ledgers.items()):
            if not ledger.entries and not ledger.fenced and ledger.last_add_confirmed < 0:
                del self.ledgers[ledger_id]


def frame_of(ledger_id: int, entry_id: int, version: int) -> bytes:
    """Return one of two versions of an entry; they are not of one size."""
    return make_frame(ledger_id, entry_id, b"body" * (1 + version))


async def ask(storage: LedgerStorage, request: tuple[Any, ...]) -> Any:
    """Return the real storage's answer, or the type of its error."""
    try:
        match request:
            case ("add", ledger_id, entry_id, version, is_recovery):
                frame = frame_of(ledger_id, entry_id, version)
                return await storage.writes.add_entry(frame, is_recovery=is_recovery)
            case ("read", ledger_id, entry_id, fence):
                return bytes(await storage.reads.read_entry(ledger_id, entry_id, fence=fence))
            case ("range", ledger_id, first, last, stride):
                return await read_all(storage, ledger_id, first=first, last=last, stride=stride)
            case ("lac", ledger_id, last_add_confirmed):
                return await storage.writes.write_lac(ledger_id, last_add_confirmed)
            case ("read_lac", ledger_id, fence):
                return await storage.reads.read_lac(ledger_id, fence=fence)
            case ("read_held", ledger_id):
                held = await storage.reads.read_held(ledger_id)
                assert held.known_to == ENTRY_ID_MAX
                ids = (range(first, last + 1) for first, last in held.ranges)
                return held.last_add_confirmed, [*chain.from_iterable(ids)]
            case ("list", ledger_id):
                return [
                    entry_id
                    for each in storage.reads.list_entries(ledger_id)
                    for entry_id in range(each.first_entry_id, each.last_entry_id + 1)
                ]
    except BookieError as error:
        return type(error)
    raise AssertionError(request)


async def doom(storage: LedgerStorage, count: int) -> None:
    """Add entries of the ledger that goes."""
    for entry_id in range(count):
        await storage.writes.add_entry(frame_of(DOOMED, entry_id, 0), is_recovery=True)


async def compact(storage: LedgerStorage, *, after_deletion: bool) -> None:
    """Compact whatever has anything dead in it."""

    async def is_deleted(ledger_id: int) -> bool:
        return ledger_id == DOOMED

    for _ in range(2 if after_deletion else 0):
        await storage.upkeep.collect_garbage(is_deleted)
    report = await storage.upkeep.compact()
    assert not report.files_left_alone


@settings(max_examples=amount(150, sampled=50))
@given(st.lists(requests, min_size=5, max_size=60), st.sampled_from([300, 900, 2**20]))
def test_every_answer_is_the_dumb_one(requests: list[tuple[Any, ...]], file_bytes: int) -> None:
    """Goal: no order of requests, rolls and restarts makes a difference to any answer."""
    config = small_config(
        file_bytes_max=file_bytes,
        batch_bytes_max=150,
        open_files_max=2,
        footer_bytes_max=500,
        garbage=GarbageConfig(age_ms=0),
        compact=CompactionConfig(bytes_per_second=10**9, below_live_share=0.9),
    )

    async def main() -> None:
        disk = MemoryDisk()
        dumb = DumbStorage()
        storage = await LedgerStorage.open(disk, config, clock=ManualClock())
        for request in requests:
            if request[0] == "restart":
                await storage.aclose()
                dumb.forget_idle()
                storage = await LedgerStorage.open(disk, config, clock=ManualClock())
            elif request[0] == "doom":
                await doom(storage, request[1])
            elif request[0] == "compact":
                await compact(storage, after_deletion=request[1])
            else:
                expected = getattr(dumb, request[0])(*request[1:])
                assert await ask(storage, request) == expected, request
        assert sorted({*storage.core.live_ledgers()} - {DOOMED}) == sorted(dumb.ledgers)
        await storage.aclose()

    asyncio.run(main())
