"""Compaction while garbage collection takes away what it works at, and in small turns.

Goal: a file that goes meanwhile is no error and no damage, and what stays is whole.
"""

from __future__ import annotations

import asyncio

import pytest

from bookie.upkeep import compaction
from dlcore.base.errors import NoSuchEntryError, NoSuchLedgerError
from tests.bookie.test_compaction import (
    CONFIG,
    DOOMED,
    check_kept,
    delete_doomed,
    fill,
)
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import open_storage


async def is_dead(ledger_id: int) -> bool:
    """Say that only ledgers 3 and 4, which have no entries, are still known."""
    return ledger_id in (1, 2, DOOMED)


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_files_that_garbage_collection_drops_meanwhile(turns: int) -> None:
    """At whichever step: compaction gives the file up, and the next pass finds nothing to do."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.0)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            await delete_doomed(storage)
            passing = asyncio.create_task(storage.upkeep.compact())
            for _ in range(turns):
                await asyncio.sleep(0)
            for _ in range(2):
                await storage.upkeep.collect_garbage(is_dead)
            await passing
            assert storage.core.damage.entry_count == 0
            assert await storage.reads.read_lac(3, fence=False) == -1
            assert await storage.reads.read_lac(4, fence=False) == 17
            with pytest.raises((NoSuchEntryError, NoSuchLedgerError)):
                await storage.reads.read_entry(1, 0, fence=False)
            await storage.upkeep.compact()
        async with open_storage(disk, CONFIG) as storage:
            assert await storage.reads.read_lac(4, fence=False) == 17

    run(main())


@pytest.mark.parametrize("at_a_time", [1, 2, 500])
def test_ledgers_in_small_turns(monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    """Others have their turn on the loop; what comes out is the same."""
    monkeypatch.setattr(compaction, "_LEDGERS_AT_A_TIME", at_a_time)

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            await delete_doomed(storage)
            assert (await storage.upkeep.compact()).files_compacted > 5
            await check_kept(storage)

    run(main())
