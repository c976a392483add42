"""A damaged entry is replaced by a good copy, which counts from then on; an intact one never."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from bookie.config import CompactionConfig, GarbageConfig
from bookie.files.format import file_name
from bookie.ledger_storage import LedgerStorage
from dlcore.base.clock import SystemClock
from dlcore.base.errors import (
    BadRequestError,
    BookieError,
    BookieStorageError,
    DigestMismatchError,
    LedgerFencedError,
)
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import follow, make_frame, open_storage, read_all, small_config
from tests.simulation.loop import run as run_virtually

CONFIG = small_config(
    file_bytes_max=2000,
    batch_bytes_max=400,
    garbage=GarbageConfig(age_ms=0),
    compact=CompactionConfig(bytes_per_second=10**9, floor_bytes=0),
)
ENTRIES = 40
SEALED_ID, UNSEALED_ID = 3, ENTRIES - 1
"""An entry in a sealed file, and one in the file that is written."""


async def fill(storage: LedgerStorage) -> None:
    """Fill some files with entries of one ledger."""
    for entry_id in range(ENTRIES):
        await storage.writes.add_entry(make_frame(1, entry_id))


def damage(disk: MemoryDisk, storage: LedgerStorage, entry_id: int) -> int:
    """Change a byte of the copy that counts, and return its file."""
    location = storage.core.reader.find(1, entry_id)
    assert location is not None
    disk.folder.corrupt(
        file_name(location.file_number), location.offset + location.size - 1, b"\xff"
    )
    return location.file_number


async def check_all(storage: LedgerStorage) -> None:
    """Check that everything is readable, once each."""
    expected = [make_frame(1, entry_id) for entry_id in range(ENTRIES)]
    assert await read_all(storage, 1, first=0, last=ENTRIES - 1) == expected
    (held,) = storage.reads.list_entries(1)
    assert (held.first_entry_id, held.last_entry_id) == (0, ENTRIES - 1)
    updates = follow(storage, 1, first_entry_id=0)
    update = await anext(updates)
    await updates.aclose()
    assert [bytes(each) for each in update.frames] == expected[: ENTRIES - 1]


@pytest.mark.parametrize("entry_id", [SEALED_ID, UNSEALED_ID])
@pytest.mark.parametrize("way", ["repair", "add", "recovery add"])
def test_the_new_copy_counts_at_once_and_after_restarts(entry_id: int, way: str) -> None:
    """Goal: reads, ranges, follows and listings give the good copy, by whichever way it came."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            damage(disk, storage, entry_id)
            with pytest.raises(BookieStorageError, match=f"entry 1:{entry_id} is damaged"):
                await storage.reads.read_entry(1, entry_id, fence=False)
            assert storage.core.damage.entries() == [(1, entry_id)]
            frame = make_frame(1, entry_id)
            if way == "repair":
                await storage.writes.repair_entry(frame)
            else:
                await storage.writes.add_entry(frame, is_recovery=way == "recovery add")
            assert storage.core.damage.entries() == []
            assert storage.status.stats().repaired_entry_count == 1
            await check_all(storage)
            with pytest.raises(BadRequestError):
                await storage.writes.add_entry(make_frame(1, entry_id, b"other"))
        for _ in range(2):
            async with open_storage(disk, CONFIG) as storage:
                await check_all(storage)
                assert storage.core.damage.entries() == []

    run(main())


def test_an_intact_entry_is_never_overwritten() -> None:
    """Goal: repair takes no bytes but the held ones, and no entry that is not held."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            before = storage.status.stats().stored_bytes
            await storage.writes.repair_entry(make_frame(1, SEALED_ID))
            with pytest.raises(BadRequestError, match="other bytes"):
                await storage.writes.repair_entry(make_frame(1, SEALED_ID, b"other"))
            for ledger_id, entry_id in ((1, ENTRIES), (2, 0)):
                with pytest.raises(BadRequestError, match="not held"):
                    await storage.writes.repair_entry(make_frame(ledger_id, entry_id))
            with pytest.raises(DigestMismatchError):
                await storage.writes.repair_entry(make_frame(1, SEALED_ID)[:-1] + b"?")
            assert storage.status.stats().stored_bytes == before
            assert storage.status.stats().repaired_entry_count == 0
            await check_all(storage)

    run(main())


@pytest.mark.parametrize("header_is_damaged", [False, True])
def test_one_of_many_replacements_at_once_wins_and_stays(header_is_damaged: bool) -> None:
    """Goal: the others meet an intact entry, though it was damaged when they were called.

    Method: with the record's header gone too, nothing says any more which bytes are right.
    """

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            damage(disk, storage, SEALED_ID)
            if header_is_damaged:
                location = storage.core.reader.find(1, SEALED_ID)
                assert location is not None
                disk.folder.corrupt(file_name(location.file_number), location.offset - 30, b"?")
            bodies = [b"other", b"other", None, None]
            results = await asyncio.gather(
                *(storage.writes.add_entry(make_frame(1, SEALED_ID, body)) for body in bodies),
                storage.writes.repair_entry(make_frame(1, SEALED_ID)),
                return_exceptions=True,
            )
            refused = [isinstance(each, BadRequestError) for each in results]
            if header_is_damaged:
                assert refused == [False, False, True, True, True]
                won = make_frame(1, SEALED_ID, b"other")
            else:
                assert refused == [True, True, False, False, False]
                won = make_frame(1, SEALED_ID)
            assert [each for each in results if not isinstance(each, BadRequestError)].count(
                None
            ) == refused.count(False)
            assert await storage.reads.read_entry(1, SEALED_ID, fence=False) == won
            assert storage.status.stats().repaired_entry_count == 1
        async with open_storage(disk, CONFIG) as storage:
            assert await storage.reads.read_entry(1, SEALED_ID, fence=False) == won

    run(main())


def test_one_failing_read_is_no_proof_of_damage() -> None:
    """Goal: an entry that can be read the second time is compared, not replaced."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            await storage.reads.read_entry(1, SEALED_ID, fence=False)
            disk.device.read_error = "Input/output error"
            with pytest.raises(BadRequestError, match="other bytes"):
                await storage.writes.add_entry(make_frame(1, SEALED_ID, b"other"))
            assert storage.core.damage.entries() == []

    run(main())


def test_a_fence_that_came_meanwhile_refuses_the_writer_and_not_recovery() -> None:
    """Goal: replacing is adding: after a fence only recovery and repair may."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            damage(disk, storage, SEALED_ID)
            fencing = asyncio.create_task(storage.reads.read_lac(1, fence=True))
            adding = storage.writes.add_entry(
                make_frame(1, SEALED_ID)
            )  # before the fence is accepted
            with pytest.raises(LedgerFencedError):
                await adding
            await fencing
            with pytest.raises(LedgerFencedError):
                await storage.writes.add_entry(make_frame(1, SEALED_ID))
            await storage.writes.add_entry(make_frame(1, SEALED_ID), is_recovery=True)
            await check_all(storage)

    run(main())


@pytest.mark.parametrize("way", ["scrub", "read"])
def test_a_file_with_damage_in_it_is_sealed_so_that_it_opens_again(way: str) -> None:
    """Goal: the file being written is sealed if it is damaged: a restart would refuse it."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            number = damage(disk, storage, UNSEALED_ID)
            assert number not in storage.core.files
            if way == "scrub":
                await storage.upkeep.scrub()
            else:
                with pytest.raises(BookieStorageError):
                    await storage.reads.read_entry(1, UNSEALED_ID, fence=False)
            await storage.writes.repair_entry(make_frame(1, UNSEALED_ID))
            assert number in storage.core.files
            await check_all(storage)
        async with open_storage(disk, CONFIG) as storage:
            await check_all(storage)

    run(main())


def test_a_repaired_file_is_compacted_away() -> None:
    """Goal: damage keeps a mostly dead file only until its entries were repaired."""

    async def is_deleted(ledger_id: int) -> bool:
        return ledger_id == 2

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            for entry_id in range(40):
                await storage.writes.add_entry(make_frame(2, entry_id))
            number = damage(disk, storage, 0)
            for _ in range(2):
                await storage.upkeep.collect_garbage(is_deleted)
            assert (await storage.upkeep.compact()).files_left_alone == [number]
            assert storage.core.damage.entries() == [(1, 0)]
            await storage.writes.repair_entry(make_frame(1, 0))
            assert (await storage.upkeep.compact()).files_left_alone == []
            assert number not in storage.core.files
        async with open_storage(disk, CONFIG) as storage:
            assert await storage.reads.read_entry(1, 0, fence=False) == make_frame(1, 0)

    run(main())


def test_a_crash_at_every_step_of_a_repair() -> None:
    """Goal: the entry is damaged or good, never absent, and good once the repair was answered."""

    async def main(step: int) -> bool:
        disk = MemoryDisk(random.Random(step))
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            damage(disk, storage, SEALED_ID)
            disk.device.crash_at_step = disk.device.steps + step
            is_repaired = False
            with contextlib.suppress(BookieError):
                await storage.writes.repair_entry(make_frame(1, SEALED_ID))
                is_repaired = True
            has_crashed = disk.device.crash_at_step is None
            disk.crash()
        async with open_storage(disk, CONFIG) as storage:
            (held,) = storage.reads.list_entries(1)
            assert (held.first_entry_id, held.last_entry_id) == (0, ENTRIES - 1)
            try:
                frame = await storage.reads.read_entry(1, SEALED_ID, fence=True)
                assert frame == make_frame(1, SEALED_ID)
            except BookieStorageError:
                assert not is_repaired
            await storage.writes.repair_entry(make_frame(1, SEALED_ID))
            await check_all(storage)
        return has_crashed

    outcomes = [asyncio.run(main(step)) for step in range(1, 8)]
    assert outcomes[0]
    assert not outcomes[-1]


def test_the_list_of_damage_is_bounded() -> None:
    """Goal: more damage than fits is found again once there is room."""
    config = small_config(file_bytes_max=2000, damaged_entries_max=3)

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, config) as storage:
            await fill(storage)
            for entry_id in range(5):
                damage(disk, storage, entry_id)
            await storage.upkeep.scrub()
            assert storage.core.damage.entries() == [(1, 0), (1, 1), (1, 2)]
            for entry_id in range(3):
                await storage.writes.repair_entry(make_frame(1, entry_id))
            await storage.upkeep.scrub()
            assert storage.core.damage.entries() == [(1, 3), (1, 4)]

    run(main())


def test_a_replacement_that_no_caller_waits_for_may_fail() -> None:
    """Goal: a cancelled add leaves no error behind that a caller must look at.

    Method: the virtual loop fails a run in which an error was never looked at.
    """

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 1.0)
        storage = await LedgerStorage.open(disk, CONFIG, clock=SystemClock())
        await storage.writes.add_entry(make_frame(1, 0))
        damage(disk, storage, 0)
        add = storage.writes.add_entry(make_frame(1, 0))
        while not storage.writes._held._replacements:  # noqa: ASYNC110  # virtual time
            await asyncio.sleep(0.1)
        add.cancel()
        await asyncio.wait([add])
        disk.crash()
        await storage.aclose()

    run_virtually(main())
