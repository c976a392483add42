"""An explicit LAC is known at once, and durable when it is answered."""

from __future__ import annotations

import asyncio

from bookie.config import GarbageConfig
from bookie.disk import MemoryDisk
from tests.fixtures.aio import run
from tests.fixtures.storage import ManualClock, make_frame, open_storage, small_config


def test_a_lac_told_while_its_ledger_is_collected_harms_no_other() -> None:
    """Goal: what waits to be logged never names a ledger that is forgotten.

    Method: tell the LAC of a ledger that is just being dropped, and then one of a living ledger.
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
                    await storage.add_entry(make_frame(ledger_id, entry_id))
            await storage.collect_garbage(is_deleted)
            clock.now += 1000
            storage.write_lac(1, 2)
            report = await storage.collect_garbage(is_deleted)
            assert report.files_deleted == 1
            storage.write_lac(2, 11)
            await asyncio.sleep(0.05)
        async with open_storage(disk, config, clock=clock) as storage:
            assert await storage.read_lac(2, fence=False) == 11

    run(main())
