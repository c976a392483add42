"""The read half of the entry log keeps no more in memory than it needs."""

from __future__ import annotations

from dlcore.base.config import MIB
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, read_entries, small_config

ENTRIES = 1500


def test_a_range_looks_only_at_the_footers_it_has_come_to() -> None:
    """Goal: reading a ledger that lies in many files does not hold all their footers at once."""

    async def main() -> None:
        disk = MemoryDisk()
        config = small_config(file_bytes_max=2000, batch_bytes_max=400)
        async with open_storage(disk, config) as storage:
            for entry_id in range(ENTRIES):
                added = storage.writes.add_entry(make_frame(1, entry_id))
                if entry_id % 50 == 49:
                    await added
        async with open_storage(disk, config) as storage:
            file_count = len(disk.names())
            chunks = read_entries(
                storage, 1, first_entry_id=0, last_entry_id=ENTRIES - 1, chunk_bytes=1
            )
            assert [bytes(frame) for frame in await anext(chunks)] == [make_frame(1, 0)]
            looked_at = len(storage.core.handles._footers)
            rest = [bytes(frame) async for chunk in chunks for frame in chunk]
            assert rest == [make_frame(1, entry_id) for entry_id in range(1, ENTRIES)]
            assert looked_at < len(storage.core.handles._footers) / 3 < file_count / 2

    run(main())


def test_the_last_confirmed_entry_is_found_at_once() -> None:
    """Goal: along a busy tail, where an add tells that the one before is confirmed, nothing is
    searched.  Method: whatever else is held of the ledger."""

    async def main() -> None:
        async with open_storage(MemoryDisk()) as storage:
            reader = storage.core.reader
            assert reader.read_newest(1, 0, bytes_max=MIB) is None
            await storage.writes.add_entry(make_frame(1, 0))
            assert reader.read_newest(1, 0, bytes_max=MIB) is None  # not confirmed
            following = storage.writes.add_entry(make_frame(1, 1))
            assert not following.done()
            assert bytes(reader.read_newest(1, 0, bytes_max=MIB) or b"") == make_frame(1, 0)
            storage.writes.write_lac(1, 1)
            assert reader.read_newest(1, 1, bytes_max=MIB) is None  # not durable
            await following
            assert bytes(reader.read_newest(1, 1, bytes_max=MIB) or b"") == make_frame(1, 1)
            for entry_id in (3, 5):  # the others are on other bookies
                await storage.writes.add_entry(make_frame(1, entry_id))
            assert reader.read_newest(1, 4, bytes_max=MIB) is None
            await storage.writes.add_entry(make_frame(2, 7))
            storage.writes.write_lac(2, 6)
            assert reader.read_newest(2, 6, bytes_max=MIB) is None

    run(main())
