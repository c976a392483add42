"""Compaction moves what is needed and frees the rest; it races with nothing and stops at nothing.

Most tests fill files with entries of ledgers to keep and of one that is deleted, so that the files
are mostly dead, and compact them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest

from bookie.config import CompactionConfig, GarbageConfig, SpaceConfig
from bookie.files.format import RECORD_HEADER_BYTES, file_name
from bookie.ledger_storage import LedgerStorage
from dlcore.base.errors import (
    BookieError,
    BookieStorageError,
    LedgerFencedError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.wire.frames import decode_frame
from tests.fixtures.aio import run, until
from tests.fixtures.lengths import amount, sample
from tests.fixtures.memory_disk import DiskOwner, MemoryDisk
from tests.fixtures.storage import (
    ManualClock,
    follow,
    make_frame,
    open_storage,
    read_all,
    small_config,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie.disks.port import DiskSpace

CONFIG = small_config(
    file_bytes_max=2000,
    batch_bytes_max=400,
    open_files_max=2,
    garbage=GarbageConfig(age_ms=0),
    compact=CompactionConfig(bytes_per_second=10**9, floor_bytes=0),
)
DOOMED = 100
"""The ledger that is deleted; one entry in four is of another."""
ENTRIES = 200
NEVER = 10**9
LAST = 24
"""Last entry of ledgers 1 and 2."""


async def is_doomed(ledger_id: int) -> bool:
    """Say which ledger the metadata store no longer knows."""
    return ledger_id == DOOMED


def frame_of(number: int) -> bytes:
    """Return the frame that `fill` adds as its `number`th: every fourth is of a ledger to keep."""
    if number % 4:
        return make_frame(DOOMED, number)
    return make_frame(1 + number // 4 % 2, number // 8, last_add_confirmed=-1)


async def fill(storage: LedgerStorage) -> None:
    """Fill files with mostly doomed entries; ledger 3 is fenced, ledger 4 has a LAC only."""
    await storage.reads.read_lac(3, fence=True)
    storage.writes.write_lac(4, 17)
    for number in range(ENTRIES):
        await storage.writes.add_entry(frame_of(number))


async def delete_doomed(storage: LedgerStorage) -> None:
    """Prove the doomed ledger deleted."""
    for _ in range(2):
        report = await storage.upkeep.collect_garbage(is_doomed)
    assert report.ledgers_deleted == 1


async def check_kept(storage: LedgerStorage) -> None:
    """Check every answer about the ledgers to keep."""
    for number in range(0, ENTRIES, 4):
        ledger_id, entry_id = 1 + number // 4 % 2, number // 8
        assert await storage.reads.read_entry(ledger_id, entry_id, fence=False) == frame_of(number)
    for ledger_id, last in ((1, LAST), (2, LAST)):
        frames = await read_all(storage, ledger_id, first=0, last=last)
        assert frames == [
            make_frame(ledger_id, entry_id, last_add_confirmed=-1) for entry_id in range(last + 1)
        ]
        listed = [
            (e.first_entry_id, e.last_entry_id) for e in storage.reads.list_entries(ledger_id)
        ]
        assert listed == [(0, last)]
        with pytest.raises(NoSuchEntryError):
            await storage.reads.read_entry(ledger_id, last + 1, fence=False)
    with pytest.raises(LedgerFencedError):
        await storage.writes.add_entry(make_frame(3, 0))
    assert await storage.reads.read_lac(3, fence=False) == -1
    assert await storage.reads.read_lac(4, fence=False) == 17
    with pytest.raises(NoSuchLedgerError):
        await storage.reads.read_lac(5, fence=False)
    assert [each for each in storage.core.live_ledgers() if each != DOOMED] == [1, 2, 3, 4]


def held_bytes(storage: LedgerStorage) -> tuple[int, int]:
    """Return bytes of kept entries' records that are in sealed files once, and that are doubled."""
    sealed: dict[tuple[int, int], int] = {}
    twice = 0
    for number in storage.core.files.numbers():
        ledger_ids, entry_ids, _, sizes = storage.core.handles.footer(number).columns()
        for ledger_id, entry_id, size in zip(ledger_ids, entry_ids, sizes, strict=True):
            key = int(ledger_id), int(entry_id)
            if key[0] != DOOMED:
                twice += sealed.get(key, 0)
                sealed[key] = RECORD_HEADER_BYTES + int(size)
    for index in storage.core.log.unsealed.indexes():
        for ledger_id in (1, 2):
            entries = index.entries(ledger_id)
            for entry_id in () if entries is None else entries.entry_ids:
                twice += sealed.pop((ledger_id, entry_id), 0)
    return sum(sealed.values()), twice


def damage(disk: MemoryDisk, storage: LedgerStorage, ledger_id: int, entry_id: int) -> int:
    """Change a byte of a stored frame, and return its file."""
    location = storage.core.reader.find(ledger_id, entry_id)
    assert location is not None
    disk.folder.corrupt(
        file_name(location.file_number), location.offset + location.size - 1, b"\xff"
    )
    return location.file_number


def test_mostly_dead_files_go_and_what_they_held_stays() -> None:
    """Goal: space comes back; entries, fences and LACs stay, after a restart too."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            assert (await storage.upkeep.compact()).files_compacted == 0
            await delete_doomed(storage)
            files = len(storage.core.files.numbers())
            before = storage.status.stats().stored_bytes
            report = await storage.upkeep.compact()
            assert report.files_compacted == files > 5
            assert report.bytes_freed > 3 * report.bytes_copied > 0
            assert storage.status.stats().stored_bytes < before * 0.6
            assert not {file_name(number) for number in range(1, files + 1)} & set(disk.names())
            await check_kept(storage)
            await storage.upkeep.compact()
            assert (await storage.upkeep.compact()).files_compacted == 0
        for _ in range(2):
            async with open_storage(disk, CONFIG) as storage:
                await check_kept(storage)

    run(main())


def test_compacting_again_and_again_keeps_everything() -> None:
    """Goal: what was moved is moved again when its new file dies, fences and LACs included."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            for round_number in range(6):
                await delete_doomed(storage)
                assert (await storage.upkeep.compact()).files_compacted > 0
                await check_kept(storage)
                for entry_id in range(60):
                    entry = 1000 * (round_number + 1) + entry_id
                    await storage.writes.add_entry(make_frame(DOOMED, entry))
            assert storage.status.stats().stored_bytes < 30_000

    run(main())


def crash_while_compacting(seed: int, step: int) -> tuple[int, int]:
    """Crash at a step of the pass, or after it; return its steps, and files compacted later."""

    async def main() -> tuple[int, int]:
        disk = MemoryDisk(random.Random(seed * 1000 + step))
        storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
        await fill(storage)
        await delete_doomed(storage)
        before = disk.device.steps
        disk.device.crash_at_step = before + step
        with contextlib.suppress(BookieError):
            await storage.upkeep.compact()
        steps = disk.device.steps - before
        disk.crash(keep_cache=seed % 2 == 1)
        await storage.aclose()
        async with open_storage(disk, CONFIG) as storage:
            await check_kept(storage)
            await delete_doomed(storage)
            held = storage.status.stats().stored_bytes
            report = await storage.upkeep.compact()
            assert not report.files_left_alone
            assert storage.status.stats().stored_bytes <= held
            await check_kept(storage)
        async with open_storage(disk, CONFIG) as storage:
            await check_kept(storage)
            assert storage.status.stats().stored_bytes < 15_000
        return steps, report.files_compacted

    return asyncio.run(main())


@pytest.mark.parametrize("seed", range(2))
def test_a_crash_at_every_step(seed: int) -> None:
    """Goal: nothing is lost at any step, with an entry held twice too, and the next pass ends it.

    Method: power cuts and kills at each write, sync and name change of a pass over many files.
    """
    steps, _ = crash_while_compacting(seed, NEVER)
    assert steps > 60
    done = set()
    for step in sample(range(1, steps + 1), 20):
        try:
            reached, files = crash_while_compacting(seed, step)
        except BaseException as error:
            error.add_note(f"crash_while_compacting({seed}, {step})")
            raise
        assert reached == step
        done.add(files)
    assert len(done) > 5


def test_garbage_that_is_only_in_the_cache_is_not_deleted_yet() -> None:
    """Goal: replay makes sure of the garbage record before it deletes: the power may go then.

    Method: the process is killed when the record is written and not synced; the machine crashes at
    each step of the next start.
    """

    async def main(seed: int, step: int) -> None:
        disk = MemoryDisk(random.Random(seed))
        storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
        await fill(storage)
        await delete_doomed(storage)
        append_garbage, sync = storage.core.log.append_garbage, disk.sync

        async def die(_inode: object, owner: DiskOwner) -> None:
            disk.crash(keep_cache=True)
            owner.check_alive()

        def append_and_die(numbers: Sequence[int]) -> None:
            disk.sync = die  # type: ignore[method-assign,assignment]
            append_garbage(numbers)

        storage.core.log.append_garbage = append_and_die  # type: ignore[method-assign]
        with pytest.raises(BookieStorageError):
            await storage.upkeep.compact()
        await storage.aclose()
        disk.sync = sync  # type: ignore[method-assign]
        disk.device.crash_at_step = disk.device.steps + step
        with contextlib.suppress(BookieError):
            storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
            await storage.aclose()
        disk.crash()
        async with open_storage(disk, CONFIG) as storage:
            await check_kept(storage)

    for seed in range(4):
        for step in range(1, 6):
            asyncio.run(main(seed, step))


def test_a_crash_between_copy_and_drop_copies_nothing_twice() -> None:
    """Goal: after the crash entries are held twice; the next pass only drops the older copies."""

    async def main() -> None:
        disk = MemoryDisk()
        storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
        await fill(storage)
        await delete_doomed(storage)
        storage.core.log.append_garbage = None  # type: ignore[assignment,method-assign]
        with pytest.raises(TypeError):
            await storage.upkeep.compact()
        disk.crash(keep_cache=True)
        await storage.aclose()
        async with open_storage(disk, CONFIG) as storage:
            await check_kept(storage)
            await delete_doomed(storage)
            once, twice = held_bytes(storage)
            assert twice > 0
            report = await storage.upkeep.compact()
            assert report.files_compacted > 5
            assert report.bytes_copied <= once
            await check_kept(storage)

    run(main())


def test_a_damaged_newer_copy_is_replaced_by_the_older_one() -> None:
    """Goal: compaction never drops the only good copy."""

    async def main() -> None:
        disk = MemoryDisk()
        config = small_config(
            file_bytes_max=2000,
            garbage=GarbageConfig(age_ms=0),
            compact=CompactionConfig(bytes_per_second=10**9, floor_bytes=0, below_live_share=0.6),
        )
        async with open_storage(disk, config) as storage:
            await fill(storage)
            await delete_doomed(storage)
            older = storage.core.reader.find(1, 0)
            assert older is not None
            (frame,) = await storage.core.reader.read([older])
            storage.core.log.copy_entry(decode_frame(frame))
            await storage.core.log.commits.flush()
            newer = storage.core.reader.find(1, 0)
            assert newer is not None
            assert newer > older
            damage(disk, storage, 1, 0)
            with pytest.raises(BookieStorageError):
                await storage.reads.read_entry(1, 0, fence=False)
            report = await storage.upkeep.compact()
            assert older.file_number not in storage.core.files
            assert report.files_compacted > 3
            await check_kept(storage)
            assert storage.core.damage.entries() == []

    run(main())


def test_one_bad_entry_and_one_bad_footer_stop_nothing() -> None:
    """Goal: the damage is known, its files stay and answer unknown, all others are compacted."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            await delete_doomed(storage)
            files = len(storage.core.files.numbers())
            bad_entry_file = damage(disk, storage, 1, 0)
            bad_footer_file = next(each for each in storage.core.files.numbers() if each > 2)
            place = storage.core.handles.place(bad_footer_file)
            assert place is not None
            storage.core.handles.let_go(bad_footer_file)
            disk.folder.corrupt(file_name(bad_footer_file), place.offset + 60, b"\xff\xff")
            report = await storage.upkeep.compact()
            assert report.files_compacted == files - 2
            assert sorted(report.files_left_alone) == [bad_entry_file, bad_footer_file]
            assert storage.core.damage.entries() == [(1, 0)]
            assert storage.core.damage.footers == {bad_footer_file}
            with pytest.raises(BookieStorageError, match="entry 1:0 is damaged"):
                await storage.reads.read_entry(1, 0, fence=False)
            assert await storage.reads.read_entry(1, 12, fence=False) == frame_of(96)
            again = await storage.upkeep.compact()
            assert again.files_left_alone == [bad_entry_file]
            assert bad_entry_file in storage.core.files
            assert bad_footer_file not in storage.core.files, "its footer was mended first"
            assert not storage.core.damage.footers

    run(main())


def test_a_damaged_entry_of_a_deleted_ledger_does_not_stop_compaction() -> None:
    """Goal: a file whose damaged entry is of a deleted ledger is compacted like any other."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            damage(disk, storage, DOOMED, 1)
            await delete_doomed(storage)
            files = len(storage.core.files.numbers())
            assert (await storage.upkeep.compact()).files_compacted == files
            await check_kept(storage)

    run(main())


def test_a_place_found_before_its_file_was_dropped_is_looked_up_again() -> None:
    """Goal: a read that compaction overtakes is still answered."""

    async def main() -> None:
        async with open_storage(MemoryDisk(), CONFIG) as storage:
            await fill(storage)
            await delete_doomed(storage)
            found = storage.core.reader.between(1, 0, 12, count_max=100)
            await storage.upkeep.compact()
            assert all(each.file_number not in storage.core.files for each in found[:5])
            frames = await storage.core.reader.read(found)
            assert frames == [
                make_frame(1, entry_id, last_add_confirmed=-1) for entry_id in range(13)
            ]

    run(main())


async def read_on(storage: LedgerStorage, over: asyncio.Event) -> None:
    """Read everything again and again."""
    while not over.is_set():
        await check_kept(storage)
        await asyncio.sleep(0)


async def follow_on(storage: LedgerStorage, over: asyncio.Event) -> None:
    """Follow from the start again and again."""
    while not over.is_set():
        updates = follow(storage, 1, first_entry_id=0)
        update = await anext(updates)
        await updates.aclose()
        assert update.last_add_confirmed == LAST
        expected = [make_frame(1, e, last_add_confirmed=-1) for e in range(LAST + 1)]
        assert list(update.frames) == expected
        await asyncio.sleep(0)


async def add_again(storage: LedgerStorage, over: asyncio.Event) -> None:
    """Add what is held again and again."""
    while not over.is_set():
        for number in range(0, ENTRIES, 4):
            await storage.writes.add_entry(frame_of(number))


def test_readers_followers_and_writers_notice_nothing() -> None:
    """Goal: no request fails, and none sees anything else, while files go on being compacted."""

    async def main() -> None:
        rng = random.Random(5)
        disk = MemoryDisk(rng, latency_s=lambda: rng.random() * 0.0005)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            await storage.writes.write_lac(1, LAST)
            over = asyncio.Event()
            others = [
                asyncio.create_task(each(storage, over)) for each in (read_on, follow_on, add_again)
            ]
            compacted = 0
            for round_number in range(amount(3, sampled=2)):
                for entry_id in range(40):
                    await storage.writes.add_entry(
                        make_frame(DOOMED, 1000 * round_number + entry_id)
                    )
                await delete_doomed(storage)
                compacted += (await storage.upkeep.compact()).files_compacted
            over.set()
            await asyncio.gather(*others)
            assert compacted > 10

    run(main())


def test_a_ledger_in_use_again_keeps_its_file() -> None:
    """Goal: what was left out of the copy must still be unneeded when the file is dropped.

    Method: the disk is slow; in the middle of the pass a recovery add comes to the deleted ledger.
    """

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            await delete_doomed(storage)
            files = storage.core.files.numbers()
            passing = asyncio.create_task(storage.upkeep.compact())
            copied = storage.core.log.unsealed.written_bytes
            await until(lambda: storage.core.log.unsealed.written_bytes > copied)
            await storage.writes.add_entry(make_frame(DOOMED, 5000), is_recovery=True)
            held = [n for n in range(ENTRIES) if n % 4 and storage.core.reader.find(DOOMED, n)]
            assert held
            report = await passing
            assert report.files_compacted < len(files)
            await check_kept(storage)
            for number in held:
                frame = await storage.reads.read_entry(DOOMED, number, fence=False)
                assert frame == frame_of(number)

    run(main())


def test_a_read_only_bookie_frees_space_by_compaction() -> None:
    """Goal: a full disk is no dead end: the reserve is used down to the floor; room returns."""
    config = small_config(
        file_bytes_max=2000,
        batch_bytes_max=400,
        garbage=GarbageConfig(age_ms=0),
        compact=CompactionConfig(bytes_per_second=10**9, floor_bytes=500),
        space=SpaceConfig(
            read_only_below_bytes=12_000,
            writable_above_bytes=16_000,
            minimum_bytes=10_000,
            check_interval_s=3600,
        ),
    )

    async def main() -> None:
        disk = MemoryDisk(total_bytes=80_000)
        async with open_storage(disk, config) as storage:
            await fill(storage)
            await delete_doomed(storage)
            left = storage.core.log.claimed_bytes + 4_000
            disk.room.filler_bytes = disk.space().free_bytes - left
            storage.status.look()
            assert storage.status.stats().is_read_only
            report = await storage.upkeep.compact()
            assert report.files_compacted == 0
            assert report.files_without_room > 5
            assert report.bytes_copied == 0
            disk.room.filler_bytes -= 4_000
            lowest = []
            space = disk.space

            def watched() -> object:
                lowest.append(space().free_bytes)
                return space()

            disk.space = watched  # type: ignore[method-assign,assignment]
            report = await storage.upkeep.compact()
            assert report.files_without_room == 0
            assert report.files_compacted > 5
            assert min(lowest) >= 500
            assert not storage.status.stats().is_read_only
            await check_kept(storage)

    run(main())


def test_a_disk_that_fills_up_meanwhile_gets_no_copies() -> None:
    """Goal: room is looked at again before each copy, not only when a file is chosen.

    Method: another program takes all the space right after the choice.
    """

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            await delete_doomed(storage)
            await disk.release(disk.held_bytes)
            space = disk.space

            def full_from_now_on() -> DiskSpace:
                now = space()
                disk.room.fill(leave_bytes=100)
                return now

            disk.space = full_from_now_on  # type: ignore[method-assign]
            report = await storage.upkeep.compact()
            assert (report.files_compacted, report.bytes_copied) == (0, 0)
            assert report.files_without_room > 5
            await check_kept(storage)

    run(main())


def test_a_pass_can_be_cancelled_anywhere() -> None:
    """Goal: the server stops when it likes; the next pass goes on."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.0)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            await delete_doomed(storage)
            for turns in range(1, 200, 7):
                passing = asyncio.create_task(storage.upkeep.compact())
                for _ in range(turns):
                    await asyncio.sleep(0)
                passing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await passing
                await check_kept(storage)
            await storage.upkeep.compact()
            await check_kept(storage)
        async with open_storage(disk, CONFIG) as storage:
            await check_kept(storage)

    run(main())
