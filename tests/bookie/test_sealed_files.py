"""Files that are full become sealed ones, whatever else goes on."""

from __future__ import annotations

import asyncio

import pytest

from bookie.files import sealed_files as sealed_files_module
from bookie.files.entry_log import check_place
from dlcore.base.errors import BookieStorageError
from tests.fixtures.aio import until
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, small_config


def test_a_batch_is_not_written_at_another_place() -> None:
    """Goal: a file that ends elsewhere than the log believes fails it before it is written."""

    async def main() -> None:
        file = await MemoryDisk().create("a", [b"head"])
        check_place(file, 4)
        with pytest.raises(BookieStorageError, match="a has 4 bytes, expected 100"):
            check_place(file, 100)

    asyncio.run(main())


def test_adds_do_not_wait_until_all_ledgers_of_a_sealed_file_know_of_it() -> None:
    """Goal: a file of very many ledgers, which takes long, does not hold up the next one.

    Method: what comes behind the file is durable while that is not over, and all is found then,
    before and after.
    """

    async def main() -> None:
        disk = MemoryDisk()
        count = 5 * sealed_files_module._LEDGERS_AT_A_TIME
        config = small_config(file_entries_max=count, file_bytes_max=2**30)
        async with open_storage(disk, config) as storage:
            frames = [make_frame(ledger_id, 0) for ledger_id in range(count)]
            await asyncio.gather(*map(storage.writes.add_entry, frames))
            await storage.writes.add_entry(make_frame(count, 0))
            assert storage.core.files.numbers() == []
            assert await storage.reads.read_entry(count - 1, 0, fence=False) == frames[-1]
            await until(lambda: storage.core.files.numbers() == [1])
            assert await storage.reads.read_entry(0, 0, fence=False) == frames[0]
            assert await storage.reads.read_entry(count, 0, fence=False) == make_frame(count, 0)
        async with open_storage(disk, config) as storage:
            assert await storage.reads.read_entry(count - 1, 0, fence=False) == frames[-1]

    asyncio.run(main())
