"""The entries that a bookie says it holds above the LAC: durable ones, and what it can prove."""

from __future__ import annotations

import pytest

from bookie.storage.reads import _ABSENT_MAX
from dlcore.base.errors import BookieUnavailableError, NoSuchLedgerError
from dlcore.wire.messages import HELD_RANGES_MAX
from dlcore.wire.port import ENTRY_ID_MAX
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, small_config
from tests.simulation.loop import run


def test_an_entry_that_is_not_durable_is_not_held() -> None:
    """Goal: no reader counts an entry that a crash would lose."""

    async def main() -> None:
        async with open_storage(MemoryDisk(latency_s=lambda: 0.01)) as storage:
            with pytest.raises(NoSuchLedgerError):
                await storage.reads.read_held(1)
            await storage.writes.add_entry(make_frame(1, 0, last_add_confirmed=-1))
            added = storage.writes.add_entry(make_frame(1, 1, last_add_confirmed=-1))
            assert await storage.reads.read_held(1) == (-1, ENTRY_ID_MAX, [(0, 0)])
            await added
            assert await storage.reads.read_held(1) == (-1, ENTRY_ID_MAX, [(0, 1)])
        with pytest.raises(BookieUnavailableError):
            await storage.reads.read_held(1)

    run(main())


def test_it_says_nothing_of_what_takes_too_long_to_tell() -> None:
    """Goal: an answer is bounded, and true as far as it goes."""

    async def main() -> None:
        async with open_storage(MemoryDisk(), small_config()) as storage:
            for entry_id in range(0, 200, 2):
                await storage.writes.add_entry(make_frame(1, entry_id, last_add_confirmed=-1))
            held = await storage.reads.read_held(1)
            assert held.known_to == 2 * HELD_RANGES_MAX - 1
            assert (
                held.ranges == [(e, e) for e in range(0, held.known_to + 1, 2)][: len(held.ranges)]
            )
            await storage.writes.add_entry(make_frame(2, 0, last_add_confirmed=-1))
            await storage.writes.add_entry(make_frame(2, 1000, last_add_confirmed=-1))
            held = await storage.reads.read_held(2)
            assert held == (-1, _ABSENT_MAX, [(0, 0)])

    run(main())
