"""Scrubbing finds every damaged byte, mends footers, and goes on behind anything bad."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bookie.config import CompactionConfig, GarbageConfig, ScrubConfig
from bookie.disks.real import RealDisk
from bookie.files.format import RECORD_HEADER_BYTES, file_name
from dlcore.base.errors import BookieStorageError
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, small_config

if TYPE_CHECKING:
    from bookie.ledger_storage import LedgerStorage

CONFIG = small_config(
    file_bytes_max=2000,
    batch_bytes_max=400,
    garbage=GarbageConfig(age_ms=0),
    compact=CompactionConfig(bytes_per_second=10**9, floor_bytes=0),
    scrub=ScrubConfig(bytes_per_second=10**9),
)
ENTRIES = 60


async def fill(storage: LedgerStorage) -> None:
    """Fill some files with entries of two ledgers, a fence and LACs between; one entry is big."""
    await storage.reads.read_lac(7, fence=True)
    for entry_id in range(ENTRIES):
        body = b"x" * 1500 if entry_id == 30 else None
        await storage.writes.add_entry(make_frame(1 + entry_id % 2, entry_id, body))
        if entry_id % 5 == 0:
            storage.writes.write_lac(8, entry_id)
    await storage.core.log.commits.flush()


def flip(disk: MemoryDisk, number: int, offset: int) -> None:
    """Change one byte of a file."""
    byte = disk.folder.files[file_name(number)].cache[offset]
    disk.folder.corrupt(file_name(number), offset, bytes([byte ^ 0x20]))


def test_a_whole_storage_is_found_whole() -> None:
    """Goal: no false alarm, everything read; also while adds go on and files are sealed."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            scrubbing = asyncio.create_task(storage.upkeep.scrub())
            for entry_id in range(40):
                await storage.writes.add_entry(make_frame(3, entry_id))
            report = await scrubbing
            assert report.damaged_files == []
            assert report.damaged_records == 0
            report = await storage.upkeep.scrub()
            assert report.damaged_files == []
            sealed = storage.core.files.numbers()
            assert report.files_scrubbed == len(sealed) + 1
            files = [*sealed, sealed[-1] + 1]
            headers = [disk.open(file_name(each)) for each in files]
            stored = storage.status.stats().stored_bytes
            assert stored - 500 * len(headers) < report.bytes_read < stored

    run(main())


@pytest.mark.parametrize("part", ["frame", "record header"])
def test_each_damaged_entry_is_found_wherever_it_is(part: str) -> None:
    """Goal: any entry, in a sealed file or the one being written, and no other one."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            damaged = [(1 + each % 2, each) for each in (0, 1, 15, 16, 29, 30, 31, 44, ENTRIES - 1)]
            for ledger_id, entry_id in damaged:
                found = storage.core.reader.find(ledger_id, entry_id)
                assert found is not None
                start = 0 if part == "frame" else -RECORD_HEADER_BYTES
                flip(disk, found.file_number, found.offset + start + 10)
            report = await storage.upkeep.scrub()
            assert storage.core.damage.entries() == sorted(damaged)
            assert report.damaged_records == len(damaged)
            assert storage.status.stats().damaged_entry_count == len(damaged)

    run(main())


def test_any_flipped_byte_of_a_sealed_file_is_found() -> None:
    """Goal: header, records of all types, footer: nothing in a file is without a checksum."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            size = disk.open(file_name(2)).size
            rng = random.Random(3)
            for offset in sorted({*range(0, size, 7), *rng.sample(range(size), 50)}):
                before = bytes(disk.folder.files[file_name(2)].cache)
                flip(disk, 2, offset)
                report = await storage.upkeep.scrub()
                assert report.damaged_files == [2], offset
                disk.folder.corrupt(file_name(2), 0, before)
            report = await storage.upkeep.scrub()
            assert report.damaged_files == []

    run(main())


def test_a_damaged_footer_is_made_again() -> None:
    """Goal: the very same bytes as before, and every lookup works again."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            before = bytes(disk.folder.files[file_name(1)].cache)
            place = storage.core.handles.place(1)
            assert place is not None
            for offset in (place.offset + 5, place.offset + 60, len(before) - 1):
                storage.core.handles.close()
                flip(disk, 1, offset)
                with pytest.raises(BookieStorageError, match="footer"):
                    await storage.reads.read_entry(1, 0, fence=False)
                report = await storage.upkeep.scrub()
                assert report.footers_made_again == 1
                assert bytes(disk.folder.files[file_name(1)].cache) == before
                assert await storage.reads.read_entry(1, 0, fence=False) == make_frame(1, 0)
                assert not storage.core.damage.footers
            inode = disk.folder.files[file_name(1)]
            storage.core.handles.close()
            inode.truncate(place.offset + 7)
            report = await storage.upkeep.scrub()
            assert report.footers_made_again == 1
            assert bytes(inode.cache) == before

    run(main())


def test_a_crash_while_a_footer_is_made_again_leaves_it_mendable() -> None:
    """Goal: the directory opens after a crash at each step, with nothing lost."""

    async def main(step: int) -> bool:
        disk = MemoryDisk(random.Random(step))
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            place = storage.core.handles.place(1)
            assert place is not None
            storage.core.handles.close()
            flip(disk, 1, place.offset + 60)
            disk.device.crash_at_step = disk.device.steps + step
            await storage.upkeep.scrub()
            has_crashed = disk.device.crash_at_step is None
            disk.crash()
        async with open_storage(disk, CONFIG) as storage:
            for entry_id in range(ENTRIES - 1):
                frame = await storage.reads.read_entry(1 + entry_id % 2, entry_id, fence=False)
                assert len(frame) > 48
        return has_crashed

    assert asyncio.run(main(1))
    assert asyncio.run(main(2))
    assert not asyncio.run(main(3))


def test_a_footer_and_a_record_damaged_in_one_file_stay_unknown() -> None:
    """Goal: what cannot be made again is reported, never guessed, and harms no other file."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            found = storage.core.reader.find(1, 0)
            place = storage.core.handles.place(1)
            assert found is not None
            assert place is not None
            storage.core.handles.close()
            flip(disk, 1, found.offset + 50)
            flip(disk, 1, place.offset + 60)
            report = await storage.upkeep.scrub()
            assert report.damaged_files == [1]
            assert report.footers_made_again == 0
            for fence in (False, True):
                with pytest.raises(BookieStorageError):
                    await storage.reads.read_entry(1, 0, fence=fence)
            last = ENTRIES - 1
            frame = await storage.reads.read_entry(1 + last % 2, last, fence=False)
            assert frame == make_frame(1 + last % 2, last)

    run(main())


def test_damage_in_two_files_of_one_ledger_ends_no_pass() -> None:
    """Goal: whether a damaged entry counts needs a footer that is damaged, too."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            for number in range(60):
                await storage.writes.add_entry(make_frame(1, number % 2 * 30 + number // 2))
            found = storage.core.reader.find(1, 1)
            place = storage.core.handles.place(2)
            assert found is not None
            assert place is not None
            flip(disk, found.file_number, found.offset + 50)
            flip(disk, 2, place.offset - 3)
            flip(disk, 2, place.offset + 60)
            storage.core.handles.close()
            report = await storage.upkeep.scrub()
            assert report.damaged_files == [found.file_number, 2]
            assert report.files_scrubbed == len(storage.core.files.numbers()) + 1
            assert storage.core.damage.entries() == [(1, 1)]

    run(main())


def test_compaction_moves_what_a_file_with_a_damaged_header_holds() -> None:
    """Goal: the next start would refuse such a file, so it must be gone by then."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            flip(disk, 1, 20)
            assert (await storage.upkeep.compact()).files_compacted == 0
            assert (await storage.upkeep.scrub()).damaged_files == [1]
            assert (await storage.upkeep.compact()).files_compacted == 1
            assert file_name(1) not in disk.names()
        async with open_storage(disk, CONFIG) as storage:
            for entry_id in range(ENTRIES):
                if entry_id != 30:
                    frame = await storage.reads.read_entry(1 + entry_id % 2, entry_id, fence=False)
                    assert frame == make_frame(1 + entry_id % 2, entry_id)
            assert await storage.reads.read_lac(7, fence=False) == -1
            assert await storage.reads.read_lac(8, fence=False) == 55

    run(main())


def test_sectors_that_cannot_be_read_are_damage_like_any_other() -> None:
    """Goal: one failing read is noted, and the rest of the file is still read."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            disk.device.read_error = "Input/output error"
            report = await storage.upkeep.scrub()
            assert report.damaged_files == [1]
            assert report.files_scrubbed == len(storage.core.files.numbers()) + 1
            assert (await storage.upkeep.scrub()).damaged_files == []

    run(main())


def test_damage_on_a_real_disk_is_found() -> None:
    """Goal: the scrub reads the file on the device, not the kernel's cached copy of it."""

    async def main(directory: Path) -> None:
        disk = RealDisk(directory)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            assert await storage.reads.read_entry(1, 0, fence=False) == make_frame(1, 0)
            found = storage.core.reader.find(1, 0)
            assert found is not None
            with (directory / file_name(found.file_number)).open("r+b") as file:
                file.seek(found.offset + 50)
                file.write(b"\xff")
            assert (await storage.upkeep.scrub()).damaged_files == [found.file_number]
            assert storage.core.damage.entries() == [(1, 0)]
        await disk.aclose()

    with tempfile.TemporaryDirectory() as directory:
        run(main(Path(directory)))
