"""Scrubbing over sectors that cannot be read, records larger than a read, and files that vanish.

Goal: whatever fails, each whole record is found whole and no other one is, and the pass goes on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bookie.config import GarbageConfig, ScrubConfig
from bookie.files.format import RECORD_HEADER_BYTES, file_name
from dlcore.base.config import MIB
from dlcore.base.errors import BookieStorageError
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, small_config

if TYPE_CHECKING:
    from bookie.files.index import Location
    from bookie.ledger_storage import LedgerStorage

SECTOR = 512
CONFIG = small_config(
    file_bytes_max=12_000,
    batch_bytes_max=400,
    garbage=GarbageConfig(age_ms=0),
    scrub=ScrubConfig(bytes_per_second=10**9),
)
LARGE = small_config(
    file_bytes_max=2 * MIB, batch_bytes_max=MIB, scrub=ScrubConfig(bytes_per_second=10**9)
)
SIZES = (100_000, 700_000, 10, 263_000, 100_000, 600_000, 50_000, 90_000)
"""Sizes of entries around the size of a read, so that reads end within headers and bodies."""
ENTRIES = 160


async def fill(storage: LedgerStorage) -> None:
    """Fill one file and begin another one."""
    for entry_id in range(ENTRIES):
        await storage.writes.add_entry(make_frame(1, entry_id))
    assert storage.core.files.numbers() == [1]


def place_of(storage: LedgerStorage, entry_id: int) -> Location:
    """Return where an entry is."""
    found = storage.core.reader.find(1, entry_id)
    assert found is not None
    return found


def hit_by(storage: LedgerStorage, sector: Location) -> list[tuple[int, int]]:
    """Return the entries of which the sector at the beginning of one holds a byte."""
    start = sector.offset // SECTOR * SECTOR
    places = {entry_id: place_of(storage, entry_id) for entry_id in range(ENTRIES)}
    return [
        (1, entry_id)
        for entry_id, place in places.items()
        if place.file_number == sector.file_number
        and place.offset < start + SECTOR
        and place.offset + place.size > start
    ]


@pytest.mark.parametrize("entry_id", [40, 130], ids=["sealed", "being written"])
def test_only_what_lies_in_a_lost_sector_is_damaged(entry_id: int) -> None:
    """The rest of what was to be read at once is verified entry by entry."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            place = place_of(storage, entry_id)
            damaged = hit_by(storage, place)
            assert 1 < len(damaged) < 20
            disk.folder.lose_sector(file_name(place.file_number), place.offset)
            report = await storage.upkeep.scrub()
            assert report.damaged_files == [place.file_number]
            assert report.files_scrubbed == 2
            assert storage.core.damage.entries() == damaged
            beside = damaged[-1][1] + 1
            assert await storage.reads.read_entry(1, beside, fence=False) == make_frame(1, beside)
            with pytest.raises(BookieStorageError):
                await storage.reads.read_entry(*damaged[0], fence=False)

    run(main())


@pytest.mark.parametrize("also", ["a lost sector", "a damaged header"])
def test_without_a_footer_records_behind_the_damage_are_unknown(also: str) -> None:
    """Nothing is guessed: no footer is made of half of the records, and the file stays known."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            place = storage.core.handles.place(1)
            assert place is not None
            if also == "a lost sector":
                disk.folder.lose_sector(file_name(1), place_of(storage, 40).offset)
            else:
                disk.folder.flip(file_name(1), 20, 0x20)
            disk.folder.flip(file_name(1), place.offset + 60, 0x20)
            report = await storage.upkeep.scrub()
            assert (report.damaged_files, report.footers_made_again) == ([1], 0)
            assert report.files_scrubbed == 2
            assert storage.core.damage.footers == {1}
            assert storage.core.damage.entries() == []
            last = ENTRIES - 1
            assert await storage.reads.read_entry(1, last, fence=False) == make_frame(1, last)

    run(main())


def test_a_file_that_cannot_be_opened_is_reported() -> None:
    """The file is gone: the others are still read."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            storage.core.handles.close()
            disk.folder.files.pop(file_name(1))
            report = await storage.upkeep.scrub()
            assert (report.damaged_files, report.files_scrubbed) == ([1], 1)

    run(main())


async def fill_large(storage: LedgerStorage) -> None:
    """Fill a file with entries of all sizes, and begin another one."""
    for entry_id, size in enumerate(SIZES * 2):
        await storage.writes.add_entry(make_frame(1, entry_id, b"%d" % entry_id * (size // 2)))
    assert storage.core.files.numbers()[0] == 1


def test_records_larger_than_a_read() -> None:
    """None is taken for damaged or left out because a read ends within it."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, LARGE) as storage:
            await fill_large(storage)
            assert (await storage.upkeep.scrub()).damaged_files == []
            for entry_id in range(len(SIZES)):
                place = storage.core.reader.find(1, entry_id)
                assert place is not None
                for offset in (4 - RECORD_HEADER_BYTES, place.size - 1):
                    name, at = file_name(place.file_number), place.offset + offset
                    disk.folder.flip(name, at, 0x20)
                    report = await storage.upkeep.scrub()
                    assert report.damaged_files == [place.file_number]
                    assert report.damaged_records == 1
                    assert storage.core.damage.entries() == [(1, entry_id)]
                    disk.folder.flip(name, at, 0x20)
                    storage.core.damage.forget_entry(1, entry_id, is_repaired=False)

    run(main())


def test_a_footer_is_made_again_over_records_larger_than_a_read() -> None:
    """The same bytes as before."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, LARGE) as storage:
            await fill_large(storage)
            place = storage.core.handles.place(1)
            assert place is not None
            before = bytes(disk.folder.files[file_name(1)].cache)
            disk.folder.flip(file_name(1), place.offset + 60, 0x20)
            storage.core.handles.close()
            assert (await storage.upkeep.scrub()).footers_made_again == 1
            assert bytes(disk.folder.files[file_name(1)].cache) == before

    run(main())


@pytest.mark.parametrize("rounds", range(12))
def test_files_that_are_dropped_while_they_are_read_are_not_damaged(rounds: int) -> None:
    """At whichever step of the pass: also while a damaged footer is made again."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            for entry_id in range(2 * ENTRIES):
                await storage.writes.add_entry(make_frame(1, entry_id))
            sealed = storage.core.files.numbers()
            assert sealed == [1, 2]
            for number in sealed:
                place = storage.core.handles.place(number)
                assert place is not None
                disk.folder.flip(file_name(number), place.offset + 60, 0x20)
            storage.core.handles.close()
            scrubbing = asyncio.create_task(storage.upkeep.scrub())
            for _ in range(rounds):
                await asyncio.sleep(0)
            dropping = asyncio.create_task(storage.core.files.drop(sealed, [1]))
            report = await scrubbing
            assert sorted(await dropping) == sealed
            assert report.damaged_records == 0
            assert not storage.core.damage.footers
            assert (await storage.upkeep.scrub()).damaged_files == []

    run(main())
