"""Upkeep that meets other upkeep: what one pass sees must not change what another promised."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest

from bookie.config import CompactionConfig, GarbageConfig, ScrubConfig
from bookie.files.format import file_name
from dlcore.base.errors import BookieStorageError, LedgerFencedError
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, small_config
from tests.simulation.loop import run

if TYPE_CHECKING:
    from bookie.ledger_storage import LedgerStorage

CONFIG = small_config(
    file_bytes_max=2000,
    batch_bytes_max=400,
    garbage=GarbageConfig(age_ms=0, brake_count=100),
    compact=CompactionConfig(bytes_per_second=10**9, floor_bytes=0),
    scrub=ScrubConfig(bytes_per_second=10**9),
)
BIG = small_config(
    file_bytes_max=3_000_000,
    batch_bytes_max=100_000,
    garbage=GarbageConfig(age_ms=0, brake_count=100),
    compact=CompactionConfig(bytes_per_second=100_000, floor_bytes=0),
)
"""One chunk of copies takes 2.5 s."""
DOOMED = 100


def damage(disk: MemoryDisk, storage: LedgerStorage, ledger_id: int, entry_id: int) -> int:
    """Change a byte of a stored frame, and return its file."""
    found = storage.core.reader.find(ledger_id, entry_id)
    assert found is not None
    disk.folder.flip(file_name(found.file_number), found.offset + found.size - 1, 0x20)
    return found.file_number


async def delete(storage: LedgerStorage, *ledger_ids: int) -> None:
    """Prove ledgers deleted."""

    async def is_deleted(ledger_id: int) -> bool:
        return ledger_id in ledger_ids

    for _ in range(2):
        await storage.upkeep.collect_garbage(is_deleted)


def listed(storage: LedgerStorage, ledger_id: int) -> list[tuple[int, int]]:
    """Return the ranges that the storage lists."""
    return [
        (each.first_entry_id, each.last_entry_id) for each in storage.reads.list_entries(ledger_id)
    ]


@pytest.mark.parametrize("is_idle", [True, False])
def test_damage_elsewhere_does_not_keep_a_damaged_file_open(is_idle: bool) -> None:
    """Goal: the newest file, which is read whole at a start, never keeps a damaged record.

    Method: after the newest file's damage, that of a sealed one is found; then nothing is written
    any more, or an entry.
    """

    async def main() -> None:
        disk = MemoryDisk()
        config = small_config(file_bytes_max=9000)
        async with open_storage(disk, config) as storage:
            for entry_id in range(100):
                await storage.writes.add_entry(make_frame(1, entry_id))
            storage._settle()
            await storage.core.log.commits.flush()
            newest = damage(disk, storage, 1, 98)
            assert newest not in storage.core.files
            assert damage(disk, storage, 1, 2) in storage.core.files
            for entry_id in (98, 2):
                with pytest.raises(BookieStorageError):
                    await storage.reads.read_entry(1, entry_id, fence=False)
            if not is_idle:
                await storage.writes.add_entry(make_frame(1, 100))
        async with open_storage(disk, config) as storage:
            assert newest in storage.core.files
            assert await storage.reads.read_entry(1, 97, fence=False) == make_frame(1, 97)

    run(main())


def test_a_fence_is_kept_by_a_ledger_that_is_deleted_while_an_entry_is_repaired() -> None:
    """Goal: the replacement of a damaged entry brings back the fence of its ledger.

    Method: the fence is in a file that goes while the damaged copy, in another, is looked at.
    """

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await storage.reads.read_lac(1, fence=True)
            while not storage.core.files.numbers():
                await storage.writes.add_entry(make_frame(DOOMED, disk.device.steps))
            (fence_file,) = storage.core.files.numbers()
            await storage.writes.add_entry(make_frame(1, 0), is_recovery=True)
            await storage.writes.add_entry(make_frame(2, 0))
            while len(storage.core.files.numbers()) < 2:
                await storage.writes.add_entry(make_frame(DOOMED, disk.device.steps))
            assert damage(disk, storage, 1, 0) != fence_file
            dropping = asyncio.create_task(storage.core.files.drop_dead())
            repairing = storage.writes.add_entry(make_frame(1, 0), is_recovery=True)
            for ledger_id in (1, DOOMED):
                storage.core.ledgers[ledger_id].is_deleted = True
            assert fence_file in await dropping
            await repairing
        async with open_storage(disk, CONFIG) as storage:
            assert await storage.reads.read_entry(1, 0, fence=False) == make_frame(1, 0)
            with pytest.raises(LedgerFencedError):
                await storage.writes.add_entry(make_frame(1, 1))

    run(main())


def test_a_ledger_deleted_and_used_again_within_a_pass_keeps_its_file() -> None:
    """Goal: entries and fences that a pass left out are looked at again before the file goes.

    Method: at each second of a slow pass, the ledgers are found deleted for some seconds.
    """

    async def main(deleted_at_s: float, for_s: float) -> bool:
        disk = MemoryDisk()
        async with open_storage(disk, BIG) as storage:
            await storage.reads.read_lac(2, fence=True)
            for entry_id in range(60):
                ledger_id = DOOMED if entry_id % 4 else 1
                await storage.writes.add_entry(make_frame(ledger_id, entry_id, b"x" * 50_000))
            await delete(storage, DOOMED)
            assert storage.core.files.numbers() == [1]
            disk.device.latency_s = lambda: 0.5
            passing = asyncio.create_task(storage.upkeep.compact())
            await asyncio.sleep(deleted_at_s)
            is_copied = passing.done()
            states = [storage.core.ledgers[ledger_id] for ledger_id in (1, 2)]
            for state in states:
                state.is_deleted = True
            await asyncio.sleep(for_s)
            is_over = 1 not in storage.core.files
            for state in () if is_over else states:
                state.is_deleted = False
            await passing
            if is_over:
                return is_copied
            disk.device.latency_s = None
            for entry_id in range(0, 60, 4):
                frame = await storage.reads.read_entry(1, entry_id, fence=False)
                assert frame == make_frame(1, entry_id, b"x" * 50_000)
        async with open_storage(disk, BIG) as storage:
            with pytest.raises(LedgerFencedError):
                await storage.writes.add_entry(make_frame(2, 0))
        return False

    for for_s in (1.0, 4.0):
        seconds = itertools.count(1.0)
        while not run(main(next(seconds), for_s))[0]:
            pass


def test_a_dead_file_is_looked_at_again_before_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: a ledger that is in use again keeps its file, however late in a pass that happens.

    Method: its turn is over, others are still looked at, and an entry is added to it.
    """
    monkeypatch.setattr("bookie.files.sealed_files._LEDGERS_AT_A_TIME", 1)

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            for ledger_id in (DOOMED, 1):
                for entry_id in range(40):
                    await storage.writes.add_entry(make_frame(ledger_id, entry_id))
            alone = set(storage.core.ledgers[DOOMED].files()) - set(storage.core.ledgers[1].files())
            assert alone
            storage.core.ledgers[DOOMED].is_deleted = True
            dropping = asyncio.create_task(storage.core.files.drop_dead())
            await asyncio.sleep(0)
            assert not dropping.done()
            await storage.writes.add_entry(make_frame(DOOMED, 40))
            assert await dropping == {}
            assert listed(storage, DOOMED) == [(0, 40)]
        async with open_storage(disk, CONFIG) as storage:
            for entry_id in range(41):
                frame = await storage.reads.read_entry(DOOMED, entry_id, fence=False)
                assert frame == make_frame(DOOMED, entry_id)

    run(main())


def test_scrubbing_for_days_does_not_keep_compaction_from_freeing_space() -> None:
    """Goal: the two overlap, also while a footer is damaged for good."""
    config = small_config(
        file_bytes_max=2000,
        batch_bytes_max=400,
        garbage=GarbageConfig(age_ms=0),
        compact=CompactionConfig(bytes_per_second=10**9, floor_bytes=0),
        scrub=ScrubConfig(bytes_per_second=1000),
    )

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, config) as storage:
            for entry_id in range(400):
                await storage.writes.add_entry(
                    make_frame(1 if entry_id % 5 == 0 else DOOMED, entry_id)
                )
            files = storage.core.files.numbers()
            await delete(storage, DOOMED)
            bad = damage(disk, storage, 1, 0)
            place = storage.core.handles.place(bad)
            assert place is not None
            disk.folder.flip(file_name(bad), place.offset + 60, 0x20)
            scrubbing = asyncio.create_task(storage.upkeep.scrub())
            await asyncio.sleep(5)
            assert storage.core.damage.footers == {bad}
            report = await storage.upkeep.compact()
            assert not scrubbing.done()
            assert report.files_left_alone == [bad]
            assert report.files_compacted == len(files) - 1
            await scrubbing

    run(main())


def test_a_footer_that_failed_to_be_read_once_is_not_damaged_for_ever() -> None:
    """Goal: its file is compacted as any other."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            for entry_id in range(100):
                await storage.writes.add_entry(
                    make_frame(1 if entry_id % 5 == 0 else DOOMED, entry_id)
                )
            await delete(storage, DOOMED)
            storage.core.handles.let_go(1)
            disk.device.read_error = "busy"
            with pytest.raises(BookieStorageError):
                await storage.reads.read_entry(1, 0, fence=False)
            assert storage.core.damage.footers == {1}
            report = await storage.upkeep.compact()
            assert report.files_left_alone == []
            assert 1 not in storage.core.files

    run(main())


def test_an_entry_added_again_revives_its_ledger() -> None:
    """Goal: an add that is acknowledged keeps what it names, also if it was held already."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            for entry_id in range(40):
                await storage.writes.add_entry(make_frame(1, entry_id))
            storage.core.ledgers[1].is_deleted = True
            await storage.writes.add_entry(make_frame(1, 3), is_recovery=True)
            await delete(storage)
            assert await storage.reads.read_entry(1, 3, fence=False) == make_frame(1, 3)

    run(main())


def test_fence_and_lac_of_a_ledger_used_again_hold_after_a_restart() -> None:
    """Goal: fence and LAC are durable when they are answered, though their old file is gone.

    Method: ledger 1's fence and LAC are in a file that only deleted ledgers need; an entry of it is
    in another file, so that the ledger stays known.
    """

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await storage.reads.read_lac(1, fence=True)
            storage.writes.write_lac(1, 7)
            for entry_id in range(20):
                await storage.writes.add_entry(make_frame(DOOMED, entry_id))
            await storage.writes.add_entry(make_frame(1, 0), is_recovery=True)
            for entry_id in range(40):
                await storage.writes.add_entry(make_frame(2, entry_id))
            await delete(storage, 1, DOOMED)
            assert 1 not in storage.core.files
            assert await storage.reads.read_lac(1, fence=True) == 7
        async with open_storage(disk, CONFIG) as storage:
            assert await storage.reads.read_lac(1, fence=False) == 7
            with pytest.raises(LedgerFencedError):
                await storage.writes.add_entry(make_frame(1, 1))

    run(main())


def test_a_file_whose_deletion_was_cancelled_or_failed_is_deleted_later() -> None:
    """Goal: the space of a dropped file comes back without a restart."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 1.0)
        async with open_storage(disk, CONFIG) as storage:
            for entry_id in range(40):
                await storage.writes.add_entry(make_frame(DOOMED, entry_id))
            storage.core.ledgers[DOOMED].is_deleted = True
            collecting = asyncio.create_task(delete(storage))
            await asyncio.sleep(0.5)
            assert storage.core.files.numbers() == []
            assert file_name(1) in disk.names()
            collecting.cancel()
            await asyncio.wait([collecting])
            assert file_name(1) in disk.names()
            await delete(storage)
            assert file_name(1) not in disk.names()

    run(main())


def test_lookups_miss_nothing_while_files_are_sealed_and_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: with many ledgers both take many turns of the event loop; each shows all that is held.

    Method: a ledger per turn; at every turn all kept entries are looked up and listed.
    """
    monkeypatch.setattr("bookie.files.sealed_files._LEDGERS_AT_A_TIME", 1)
    kept = range(1, 9)
    doomed = range(DOOMED, DOOMED + 20)

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            added = -1
            looks = 0
            is_over = False

            async def look() -> None:
                nonlocal looks
                while not is_over:
                    for ledger_id in kept if added >= 0 else ():
                        assert storage.core.reader.find(ledger_id, added) is not None
                        ((first, last),) = listed(storage, ledger_id)
                        assert (first, last - added) in ((0, 0), (0, 1))
                        looks += 1
                    await asyncio.sleep(0)

            async def add(ledger_id: int, entry_id: int) -> None:
                await storage.writes.add_entry(
                    make_frame(ledger_id, entry_id, last_add_confirmed=-1)
                )

            looking = asyncio.create_task(look())
            for entry_id in range(12):
                for ledger_id in doomed:
                    await add(ledger_id, entry_id)
                await asyncio.gather(*(add(ledger_id, entry_id) for ledger_id in kept))
                added = entry_id
            files = storage.core.files.numbers()
            await delete(storage, *doomed)
            report = await storage.upkeep.compact()
            assert report.files_compacted > 5
            assert not set(files) & set(storage.core.files.numbers())
            is_over = True
            await looking
            assert looks > 500
            assert [each for each in storage.core.live_ledgers() if each < DOOMED] == list(kept)
        async with open_storage(disk, CONFIG) as storage:
            for ledger_id in kept:
                assert listed(storage, ledger_id) == [(0, 11)]

    run(main())


def test_runs_of_a_ledger_in_many_files_are_joined() -> None:
    """Goal: a list names each entry once, whichever files hold it, in whatever order it came."""
    ids = [*range(40), 3, 4, *range(60, 80), *range(40, 55), 90]

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            for entry_id in ids:
                await storage.writes.add_entry(make_frame(1, entry_id, last_add_confirmed=-1))
            assert listed(storage, 1) == [(0, 54), (60, 79), (90, 90)]

    run(main())


def test_a_known_lac_of_a_ledger_in_use_again_is_answered() -> None:
    """Goal: what is logged again for a ledger thought deleted waits for no other record."""

    async def main() -> None:
        async with open_storage(MemoryDisk(), CONFIG) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            await storage.writes.write_lac(1, 0)
            await delete(storage, 1)
            async with asyncio.timeout(60):
                await storage.writes.write_lac(1, 0)

    run(main())
