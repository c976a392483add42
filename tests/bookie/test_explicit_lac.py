"""An explicit LAC is known at once, and durable when it is answered."""

from __future__ import annotations

import asyncio
import random

import pytest

from bookie.config import GarbageConfig
from bookie.ledger_storage import LedgerStorage
from dlcore.base.errors import BookieStorageError
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import ManualClock, make_frame, open_storage, small_config
from tests.simulation.loop import run


def test_a_lac_written_while_its_ledger_is_collected_harms_no_other() -> None:
    """Goal: what waits to be logged never names a ledger that is forgotten.

    Method: write the LAC of a ledger that is just being dropped, and then one of a living ledger.
    """
    config = small_config(
        file_bytes_max=400, settle_interval_s=0.01, garbage=GarbageConfig(age_ms=1000)
    )

    async def is_deleted(ledger_id: int) -> bool:
        return ledger_id == 1

    async def main() -> None:
        disk, clock = MemoryDisk(), ManualClock()
        async with open_storage(disk, config, clock=clock) as storage:
            for ledger_id, count in ((1, 3), (2, 12)):
                for entry_id in range(count):
                    await storage.writes.add_entry(make_frame(ledger_id, entry_id))
            await storage.upkeep.collect_garbage(is_deleted)
            clock.now += 1000
            written = storage.writes.write_lac(1, 2)
            report = await storage.upkeep.collect_garbage(is_deleted)
            # Marks between slow adds may have filled a file more.
            assert report.files_deleted >= 1
            assert written.done()
            await storage.writes.write_lac(2, 11)
        async with open_storage(disk, config, clock=clock) as storage:
            assert await storage.reads.read_lac(2, fence=False) == 11

    run(main())


def test_an_answered_lac_survives_a_crash_at_once() -> None:
    """Goal: a client with an answer to its LAC can rely on it, whatever happens next."""

    async def main(crash_at: int | None) -> None:
        disk = MemoryDisk(random.Random(1), latency_s=lambda: 0.001)
        storage = await LedgerStorage.open(disk, small_config(), clock=ManualClock())
        await storage.writes.add_entry(make_frame(1, 0))
        if crash_at is not None:
            disk.device.crash_at_step = disk.device.steps + crash_at
        answer = storage.writes.write_lac(1, 0)
        again = storage.writes.write_lac(1, 0)
        assert await storage.reads.read_lac(1, fence=False) == 0
        assert not answer.done()
        assert not again.done()
        if crash_at is None:
            await asyncio.gather(answer, again)
            assert storage.writes.write_lac(1, 0).done()
        else:
            for each in (answer, again):
                with pytest.raises(BookieStorageError):
                    await each
        disk.crash()
        await storage.aclose()
        disk.device.latency_s = None
        if crash_at is None:
            async with open_storage(disk) as storage:
                assert await storage.reads.read_lac(1, fence=False) == 0

    for crash_at in (None, 1, 2):
        run(main(crash_at))


def test_a_lac_shares_the_flush_of_the_add_that_follows() -> None:
    """Goal: a writer that adds again at once never waits for the flush of a LAC.

    Method: the LAC may wait for ever; an add takes it along, and so does a fence.
    """

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, small_config(lac_delay_s=3600.0)) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            steps = disk.device.steps
            written = storage.writes.write_lac(1, 0)
            await asyncio.sleep(0.01)
            assert not written.done()
            assert disk.device.steps == steps
            await storage.writes.add_entry(make_frame(1, 1))
            assert written.done()
            assert disk.device.steps == steps + 2
            written = storage.writes.write_lac(1, 1)
            assert await storage.reads.read_lac(1, fence=True) == 1
            assert written.done()

    run(main())


def test_many_lacs_share_a_flush() -> None:
    """Goal: one write and one sync for all ledgers whose LAC moved meanwhile."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, small_config(file_bytes_max=2**20)) as storage:
            for ledger_id in range(10):
                await storage.writes.add_entry(make_frame(ledger_id, 0))
            steps = disk.device.steps
            await asyncio.gather(
                *(storage.writes.write_lac(ledger_id, 0) for ledger_id in range(10))
            )
            assert disk.device.steps == steps + 2

    run(main())


def test_a_file_takes_only_so_many_lacs() -> None:
    """Goal: what a start has to replay is bounded, also where hardly anything but LACs comes."""
    config = small_config(file_bytes_max=1_000_000, file_records_max=100)

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, config) as storage:
            for last_add_confirmed in range(1000):
                storage.writes.write_lac(1, last_add_confirmed)
            await storage.core.log.commits.flush()
            assert len(storage.core.files.numbers()) == 9
        async with open_storage(disk, config) as storage:
            assert await storage.reads.read_lac(1, fence=False) == 999

    run(main())
