"""Damage to acknowledged data is noticed: it makes an answer unknown, never a "no".

Each test acknowledges something, damages what holds it, and asks as recovery does.
"""

from __future__ import annotations

import asyncio
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bookie.disks.real import RealDisk
from bookie.files.format import file_name
from bookie.ledger_storage import LedgerStorage
from dlcore.base.errors import BookieStorageError, NoSuchEntryError
from tests.fixtures.aio import run, until
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import ManualClock, make_frame, open_storage, read_all, small_config

if TYPE_CHECKING:
    from bookie.config import StorageConfig

ONE_FILE = small_config(file_bytes_max=2**20, batch_bytes_max=2**20, settle_interval_s=0.01)


def damage(disk: MemoryDisk, storage: LedgerStorage, ledger_id: int, entry_id: int) -> None:
    """Change a byte of a stored frame."""
    location = storage.core.reader.find(ledger_id, entry_id)
    assert location is not None
    disk.folder.corrupt(
        file_name(location.file_number), location.offset + location.size - 1, b"\xff"
    )


async def expect_refusal(disk: MemoryDisk, config: StorageConfig) -> None:
    """Check that the disk does not open as if the damage were a torn tail."""
    with pytest.raises(BookieStorageError, match="after it had been acknowledged"):
        await LedgerStorage.open(disk, config, clock=ManualClock())


async def marked(disk: MemoryDisk, storage: LedgerStorage) -> None:
    """Wait until the storage has written its proof and come to rest."""
    await until(
        lambda: storage.core.log.is_marked and storage.core.log.commits.queue.pending_bytes == 0
    )


def test_the_last_batch_is_proven_also_if_the_mark_was_due_while_it_waited() -> None:
    """Goal: a mark in the batch it should prove would prove nothing.

    Method: the settle timer fires while one batch is written and the next one waits.
    """

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.002)
        storage = await LedgerStorage.open(disk, ONE_FILE, clock=ManualClock())
        first = storage.writes.add_entry(make_frame(1, 0))
        await asyncio.sleep(0)
        assert not first.done()
        last = storage.writes.add_entry(make_frame(1, 1))
        storage._settle()
        await last
        await marked(disk, storage)
        disk.crash(keep_cache=True)
        damage(disk, storage, 1, 1)
        await storage.aclose()
        await expect_refusal(disk, ONE_FILE)

    run(main())


@pytest.mark.parametrize("with_lac", [False, True])
def test_a_clean_stop_proves_what_it_flushed(with_lac: bool) -> None:
    """Goal: adds that `aclose` itself made durable are acknowledged, and protected like others."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        storage = await LedgerStorage.open(disk, ONE_FILE, clock=ManualClock())
        added = storage.writes.add_entry(make_frame(1, 0))
        if with_lac:
            storage.writes.write_lac(1, 0)
        await storage.aclose()
        assert added.done()
        assert added.exception() is None
        damage(disk, storage, 1, 0)
        await expect_refusal(disk, ONE_FILE)

    run(main())


def test_entries_that_a_restart_found_are_proven_soon() -> None:
    """Goal: the last batch before a kill is served after it, so it must be protected then."""

    async def main() -> None:
        disk = MemoryDisk()
        storage = await LedgerStorage.open(disk, ONE_FILE, clock=ManualClock())
        await storage.writes.add_entry(make_frame(1, 0))
        disk.crash(keep_cache=True)
        await storage.aclose()
        storage = await LedgerStorage.open(disk, ONE_FILE, clock=ManualClock())
        await marked(disk, storage)
        disk.crash(keep_cache=True)
        damage(disk, storage, 1, 0)
        await storage.aclose()
        await expect_refusal(disk, ONE_FILE)

    run(main())


def test_a_footer_whose_sync_failed_is_written_again() -> None:
    """Goal: pages of a failed sync look written and are not, footers no less than entries.

    Method: the sync that seals a file fails, the process is killed, the next one finds a whole
    footer in the cache; then the machine loses what is not on the device.
    """
    config = small_config(file_bytes_max=600)

    async def main() -> None:
        disk = MemoryDisk()
        storage = await LedgerStorage.open(disk, config, clock=ManualClock())
        held = 0
        while len(storage.core.log.unsealed.indexes()) == 1:
            added = storage.writes.add_entry(make_frame(1, held))
            if len(storage.core.log.unsealed.indexes()) == 1:
                await added
                held += 1
        disk.device.sync_error = "Input/output error"
        with pytest.raises(BookieStorageError):
            await added
        await storage.aclose()
        disk.crash(keep_cache=True)
        storage = await LedgerStorage.open(disk, config, clock=ManualClock())
        inode = disk.folder.files[file_name(1)]
        assert inode.durable == inode.cache
        await storage.aclose()
        disk.crash()
        async with open_storage(disk, config) as storage:
            for entry_id in range(held):
                frame = await storage.reads.read_entry(1, entry_id, fence=True)
                assert frame == make_frame(1, entry_id)

    run(main())


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("hidden_id", [3 | 64, 0])
def test_a_rotted_footer_hides_no_entry(is_open: bool, hidden_id: int) -> None:
    """Goal: recovery counts noes, so a "no" out of a footer that changed would lose an entry.

    Method: the id of an entry is changed in the footer of a sealed file, while that is in use and
    while it is not.  The used copy is in memory, and stays right; but a footer that is
    damaged on the disk proves nothing absent, whatever the copy says.
    """
    config = small_config(file_bytes_max=900, open_files_max=1)
    said = r"footer of 0000000001\.log is damaged"

    async def main(directory: Path) -> None:
        disk = RealDisk(directory)
        async with open_storage(disk, config) as storage:
            for entry_id in range(30):
                await storage.writes.add_entry(make_frame(1, entry_id))
            location = storage.core.reader.find(1, 3)
            assert location is not None
            path = directory / file_name(location.file_number)
            data = path.read_bytes()
            offset = storage.core.handles._places[location.file_number].offset
            position = data.index(struct.pack("<q", 3), offset)
            if not is_open:
                assert await storage.reads.read_entry(1, 29, fence=False)
                storage.core.handles.close()
            with path.open("r+b") as file:
                file.seek(position)
                file.write(struct.pack("<q", hidden_id))
            if is_open:
                assert await storage.reads.read_entry(1, 3, fence=True) == make_frame(1, 3)
                with pytest.raises(BookieStorageError, match=said):
                    await storage.core.reader.prove_absent(1, 3)
            for fence in (False, True):
                with pytest.raises(BookieStorageError, match=said):
                    await storage.reads.read_entry(1, 3, fence=fence)
            with pytest.raises(BookieStorageError, match=said):
                await read_all(storage, 1, first=3, last=3)
            with pytest.raises(NoSuchEntryError):
                await storage.reads.read_entry(1, 30, fence=True)
        await disk.aclose()

    with tempfile.TemporaryDirectory() as directory:
        run(main(Path(directory)))


def test_a_true_no_is_still_proven() -> None:
    """Goal: a hole among entries of a sealed file is answered as one."""

    async def main() -> None:
        async with open_storage(MemoryDisk(), small_config(file_bytes_max=900)) as storage:
            for entry_id in range(0, 60, 2):
                await storage.writes.add_entry(make_frame(1, entry_id))
            for entry_id in range(1, 60, 2):
                with pytest.raises(NoSuchEntryError):
                    await storage.reads.read_entry(1, entry_id, fence=True)

    run(main())
