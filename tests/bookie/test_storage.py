"""The storage on a disk in memory: adds that it accepts, those that it refuses, and answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bookie.config import GarbageConfig, SpaceConfig
from bookie.storage.status import StorageState
from dlcore.base.errors import (
    BadRequestError,
    BookieOverloadedError,
    BookieReadOnlyError,
    BookieStorageError,
    BookieUnavailableError,
    DigestMismatchError,
    EntryTooLargeError,
    LedgerFencedError,
    MetadataConnectionError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.wire.port import EntryRange
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import (
    ManualClock,
    make_frame,
    open_storage,
    read_all,
    read_entries,
    small_config,
)
from tests.simulation.loop import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie.ledger_storage import LedgerStorage

SPACE = SpaceConfig(
    read_only_below_bytes=10_000,
    writable_above_bytes=20_000,
    minimum_bytes=2_000,
    check_interval_s=0.01,
)


async def add(storage: LedgerStorage, ledger_id: int, *entry_ids: int) -> None:
    """Add entries of a ledger in one go and wait until all are durable."""
    await asyncio.gather(
        *(storage.writes.add_entry(make_frame(ledger_id, entry_id)) for entry_id in entry_ids)
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def test_entries_come_back_as_they_were_across_files_and_owners() -> None:
    """Goal: several ledgers, holes, out-of-order adds, many files, before and after reopening."""
    held = {1: [*range(30)], 2: [*range(0, 90, 3)], 3: [7, 5, 6, 1]}

    config = small_config(file_bytes_max=1500)

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, config) as storage:
            for position in range(30):
                for ledger_id, ids in held.items():
                    if position < len(ids):
                        await add(storage, ledger_id, ids[position])
            await check(storage)
        assert len(disk.names()) > 3
        async with open_storage(disk, config) as storage:
            await check(storage)

    async def check(storage: LedgerStorage) -> None:
        assert storage.core.live_ledgers() == [1, 2, 3]
        for ledger_id, ids in held.items():
            for entry_id in range(100):
                if entry_id in ids:
                    frame = await storage.reads.read_entry(ledger_id, entry_id, fence=False)
                    assert frame == make_frame(ledger_id, entry_id)
                else:
                    with pytest.raises(NoSuchEntryError):
                        await storage.reads.read_entry(ledger_id, entry_id, fence=False)
        assert await storage.reads.read_lac(2, fence=False) == 86
        assert list(storage.reads.list_entries(1)) == [
            EntryRange(first_entry_id=0, last_entry_id=29)
        ]
        assert list(storage.reads.list_entries(3)) == [
            EntryRange(first_entry_id=1, last_entry_id=1),
            EntryRange(first_entry_id=5, last_entry_id=7),
        ]
        assert len(list(storage.reads.list_entries(2))) == 30
        expected = [make_frame(2, entry_id) for entry_id in range(0, 90, 3)]
        assert await read_all(storage, 2, first=0, last=89, stride=3) == expected
        assert await read_all(storage, 1, first=5, last=4) == []
        # These lie in one file in another order than they are read in.
        assert await read_all(storage, 3, first=5, last=7) == [make_frame(3, e) for e in (5, 6, 7)]

    run(main())


def test_range_reads_end_at_the_first_entry_that_is_not_held() -> None:
    """Goal: everything before the hole is delivered, then the proven no; chunks keep their size."""

    async def main() -> None:
        async with open_storage(MemoryDisk()) as storage:
            await add(storage, 1, *range(600), *range(601, 610))
            sizes, frames = [], 0
            chunks = read_entries(storage, 1, first_entry_id=3, last_entry_id=609, chunk_bytes=700)
            while frames < 597:
                chunk = await anext(chunks)
                sizes.append(sum(map(len, chunk)))
                frames += len(chunk)
            with pytest.raises(NoSuchEntryError, match="1:600"):
                await anext(chunks)
            assert frames == 597
            assert max(sizes) <= 700
            assert max(sizes) > 500
            one = [
                len(chunk)
                async for chunk in read_entries(
                    storage, 1, first_entry_id=0, last_entry_id=4, chunk_bytes=1
                )
            ]
            assert one == [1, 1, 1, 1, 1]
            with pytest.raises(NoSuchLedgerError):
                await read_all(storage, 99, first=0, last=0)

    run(main())


@pytest.mark.parametrize("stride", [1, 7])
def test_a_range_may_reach_to_the_last_id_there_is(stride: int) -> None:
    """Goal: "all there is" is a range like others: what is held, then the proven no."""

    async def main() -> None:
        async with open_storage(MemoryDisk()) as storage:
            await add(storage, 1, *range(300))
            last = 2**63 - 1
            chunks = read_entries(
                storage, 1, first_entry_id=0, last_entry_id=last, stride=stride, chunk_bytes=500
            )
            expected = [make_frame(1, entry_id) for entry_id in range(0, 300, stride)]
            frames: list[bytes] = []
            while len(frames) < len(expected):
                frames += map(bytes, await anext(chunks))
            assert frames == expected
            with pytest.raises(NoSuchEntryError):
                await anext(chunks)
            await add(storage, 1, last)
            assert await read_all(storage, 1, first=last, last=last) == [make_frame(1, last)]
            with pytest.raises(BadRequestError):
                await read_all(storage, 1, first=0, last=last + 1)

    run(main())


def test_bad_input_is_refused_by_name_and_writes_nothing() -> None:
    """Goal: each kind of bad frame or request has its own error; the log does not grow."""
    good = make_frame(1, 5)
    frames = {
        b"": DigestMismatchError,
        b"x" * 100: DigestMismatchError,
        good[:-1]: DigestMismatchError,
        good + b"!": DigestMismatchError,
        good[:-1] + b"?": DigestMismatchError,
        make_frame(1, 5, b"y" * 3000): EntryTooLargeError,
        make_frame(-1, 5): BadRequestError,
        make_frame(1, -5): BadRequestError,
        make_frame(1, 5, last_add_confirmed=5): BadRequestError,
        make_frame(1, 5, last_add_confirmed=-2): BadRequestError,
    }

    async def main() -> None:
        async with open_storage(MemoryDisk(), small_config(entry_size_bytes_max=2048)) as storage:
            before = storage.status.stats().stored_bytes
            for frame, error in frames.items():
                with pytest.raises(error):
                    await storage.writes.add_entry(frame)
            for ledger_id, entry_id in ((-1, 0), (0, -1), (2**63, 0), (0, 2**63)):
                with pytest.raises(BadRequestError):
                    await storage.reads.read_entry(ledger_id, entry_id, fence=True)
            with pytest.raises(BadRequestError):
                storage.writes.write_lac(1, -2)
            with pytest.raises(BadRequestError):
                await anext(
                    read_entries(
                        storage, 1, first_entry_id=0, last_entry_id=1, stride=0, chunk_bytes=1
                    )
                )
            assert storage.status.stats().stored_bytes == before
            assert storage.core.live_ledgers() == []

    run(main())


def test_adding_again_succeeds_with_the_same_bytes_only() -> None:
    """Goal: a repeated add waits for durability too, and never stores a second version."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        async with open_storage(disk) as storage:
            first = storage.writes.add_entry(make_frame(1, 0))
            again = storage.writes.add_entry(make_frame(1, 0))
            other = storage.writes.add_entry(make_frame(1, 0, b"other"))
            await again
            assert first.done()
            with pytest.raises(BadRequestError, match="1:0 is held with other bytes"):
                await other
            size = storage.status.stats().stored_bytes
            await storage.writes.add_entry(make_frame(1, 0))
            with pytest.raises(BadRequestError):
                await storage.writes.add_entry(make_frame(1, 0, last_add_confirmed=-1, body=b"x"))
            assert storage.status.stats().stored_bytes == size
            assert await storage.reads.read_entry(1, 0, fence=False) == make_frame(1, 0)

    run(main())


def test_a_fence_stops_the_writer_and_not_recovery() -> None:
    """Goal: after a fencing request was called no ordinary add is taken, also after reopening."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        async with open_storage(disk) as storage:
            await add(storage, 1, 0)
            before = storage.writes.add_entry(make_frame(1, 1))
            fencing = asyncio.ensure_future(storage.reads.read_entry(1, 1, fence=True))
            await asyncio.sleep(0)
            with pytest.raises(LedgerFencedError):
                await storage.writes.add_entry(make_frame(1, 2))
            with pytest.raises(LedgerFencedError):
                await storage.writes.add_entry(make_frame(1, 0))
            assert await fencing == make_frame(1, 1)
            assert before.done()
            await storage.writes.add_entry(make_frame(1, 2), is_recovery=True)
            assert await storage.reads.read_lac(1, fence=True) == 1
            await add(storage, 2, 0)
        async with open_storage(disk) as storage:
            with pytest.raises(LedgerFencedError):
                await storage.writes.add_entry(make_frame(1, 3))
            await add(storage, 2, 1)

    run(main())


def test_fencing_requests_share_one_record_and_work_on_unknown_ledgers() -> None:
    """Goal: the no of a fencing read is monotonic even for a ledger never seen."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        async with open_storage(disk) as storage:
            before = storage.status.stats().stored_bytes
            results = await asyncio.gather(
                *(storage.reads.read_entry(9, 0, fence=True) for _ in range(5)),
                storage.reads.read_lac(9, fence=True),
                return_exceptions=True,
            )
            assert [type(each) for each in results] == [NoSuchEntryError] * 5 + [int]
            assert results[-1] == -1
            assert storage.status.stats().stored_bytes == before + 40 + 8
            with pytest.raises(LedgerFencedError):
                await storage.writes.add_entry(make_frame(9, 0))

    run(main())


def test_a_read_waits_for_an_add_that_is_under_way() -> None:
    """Goal: nothing is read before it is durable, and nothing accepted is called absent."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        async with open_storage(disk) as storage:
            added = storage.writes.add_entry(make_frame(1, 0))
            assert list(storage.reads.list_entries(1)) == []
            read = asyncio.ensure_future(storage.reads.read_entry(1, 0, fence=False))
            chunk = asyncio.ensure_future(read_all(storage, 1, first=0, last=0))
            await asyncio.sleep(0)
            assert not read.done()
            assert await read == make_frame(1, 0)
            assert added.done()
            assert await chunk == [make_frame(1, 0)]

    run(main())


def test_too_much_under_way_is_refused_early() -> None:
    """Goal: memory is bounded; what is refused can be sent again; one big entry always fits."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        async with open_storage(disk, small_config(in_flight_bytes_max=990)) as storage:
            futures = [storage.writes.add_entry(make_frame(1, entry_id)) for entry_id in range(50)]
            results = await asyncio.gather(*futures, return_exceptions=True)
            refused = [entry_id for entry_id, each in enumerate(results) if each is not None]
            assert refused == list(range(9, 50))
            assert {type(results[entry_id]) for entry_id in refused} == {BookieOverloadedError}
            await storage.writes.add_entry(make_frame(1, 50, b"z" * 2000))

    run(main())


def test_one_flush_is_bounded_and_shared() -> None:
    """Goal: what waits is written together, up to the batch size, with one write and one sync."""

    async def main() -> None:
        disk = MemoryDisk()
        config = small_config(file_bytes_max=2**20, batch_bytes_max=10 * 105)
        async with open_storage(disk, config) as storage:
            steps = disk.device.steps
            await add(storage, 1, *range(10, 99))
            assert disk.device.steps - steps == 2 * 9

    run(main())


def test_a_full_disk_makes_the_storage_read_only_until_there_is_space() -> None:
    """Goal: ordinary adds stop; reads, fences and recovery adds go on; it opens by itself again."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=100_000)
        states: list[StorageState] = []
        async with open_storage(disk, small_config(space=SPACE)) as storage:
            storage.status.on_state(states.append)
            await add(storage, 1, 0)
            disk.room.filler_bytes = 82_000
            await add(storage, 1, 1)
            await until(lambda: states == [StorageState.READ_ONLY])
            assert storage.status.stats().is_read_only
            with pytest.raises(BookieReadOnlyError):
                await storage.writes.add_entry(make_frame(1, 2))
            await storage.writes.add_entry(make_frame(1, 2), is_recovery=True)
            assert await storage.reads.read_lac(1, fence=True) == 1
            assert len(await read_all(storage, 1, first=0, last=2)) == 3
            disk.room.filler_bytes = 75_000
            await asyncio.sleep(0.03)
            assert storage.status.state is StorageState.READ_ONLY
            disk.room.filler_bytes = 0
            await until(lambda: storage.status.state is StorageState.WRITABLE)
            await add(storage, 2, 0)
            assert states == [StorageState.READ_ONLY, StorageState.WRITABLE]
        async with open_storage(disk, small_config(space=SPACE)) as storage:
            assert storage.status.state is StorageState.WRITABLE

    run(main())


def test_the_reserve_ends_before_the_disk_does() -> None:
    """Goal: however many adds come, none meets a full disk; fences still work at the end."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=60_000)
        async with open_storage(disk, small_config(space=SPACE)) as storage:
            refused = 0
            for entry_id in range(1000):
                try:
                    await storage.writes.add_entry(
                        make_frame(1, entry_id), is_recovery=entry_id > 300
                    )
                except BookieReadOnlyError:
                    refused += 1
            assert refused > 0
            assert storage.status.state is StorageState.READ_ONLY
            assert await storage.reads.read_lac(1, fence=True) > 100
            assert not storage.status.stats().failed

    run(main())


@pytest.mark.parametrize("fault", ["write_error", "sync_error"])
def test_a_failed_write_stops_the_log_for_good(fault: str) -> None:
    """Goal: no ack, no retry, no write; what was durable stays readable; absence is unknown."""

    async def main() -> None:
        disk = MemoryDisk()
        states: list[StorageState] = []
        async with open_storage(disk) as storage:
            storage.status.on_state(states.append)
            await add(storage, 1, 0)
            setattr(disk.device, fault, "Input/output error")
            failed = [
                storage.writes.add_entry(make_frame(1, entry_id)) for entry_id in range(1, 40)
            ]
            for each in failed:
                with pytest.raises(BookieStorageError, match="Input/output error"):
                    await each
            assert states == [StorageState.FAILED]
            assert storage.status.stats().failed
            names, steps = disk.names(), disk.device.steps
            for request in (
                storage.writes.add_entry(make_frame(1, 100)),
                storage.writes.add_entry(make_frame(1, 100), is_recovery=True),
                storage.writes.add_entry(make_frame(1, 0)),
                storage.reads.read_lac(1, fence=True),
                storage.reads.read_lac(5, fence=True),
                storage.reads.read_entry(1, 0, fence=True),
                storage.reads.read_entry(1, 1, fence=False),
                storage.reads.read_entry(1, 200, fence=False),
                storage.reads.read_lac(5, fence=False),
            ):
                with pytest.raises(BookieStorageError):
                    await request
            with pytest.raises(BookieStorageError):
                storage.writes.write_lac(1, 50)
            assert await storage.reads.read_entry(1, 0, fence=False) == make_frame(1, 0)
            assert list(storage.reads.list_entries(1)) == [
                EntryRange(first_entry_id=0, last_entry_id=0)
            ]
        assert (disk.names(), disk.device.steps) == (names, steps)

    run(main())


def test_a_read_error_concerns_that_read_only() -> None:
    """Goal: unknown, not absent, and nothing else fails."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk) as storage:
            await add(storage, 1, 0)
            disk.device.read_error = "Input/output error"
            with pytest.raises(BookieStorageError, match="Input/output error"):
                await storage.reads.read_entry(1, 0, fence=False)
            assert await storage.reads.read_entry(1, 0, fence=False) == make_frame(1, 0)
            await add(storage, 1, 1)

    run(main())


def test_an_explicit_lac_only_rises_and_survives_a_clean_stop() -> None:
    """Goal: the LAC is the highest of what entries and explicit writes carried."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk) as storage:
            with pytest.raises(NoSuchLedgerError):
                await storage.reads.read_lac(1, fence=False)
            await add(storage, 1, *range(5))
            assert await storage.reads.read_lac(1, fence=False) == 3
            storage.writes.write_lac(1, 4)
            storage.writes.write_lac(1, 2)
            assert await storage.reads.read_lac(1, fence=False) == 4
            storage.writes.write_lac(2, -1)
        async with open_storage(disk) as storage:
            assert await storage.reads.read_lac(1, fence=False) == 4

    run(main())


def test_an_explicit_lac_and_the_proof_of_the_last_flush_are_logged_soon() -> None:
    """Goal: both reach the disk without another add, and then nothing is written any more."""
    config = small_config(file_bytes_max=2**20, batch_bytes_max=2**20, settle_interval_s=0.01)

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, config) as storage:
            await add(storage, 1, 0)
            size, steps = storage.status.stats().stored_bytes, disk.device.steps
            storage.writes.write_lac(1, 0)
            await until(lambda: disk.device.steps == steps + 4)
            await asyncio.sleep(0.05)
            assert disk.device.steps == steps + 4
            proof_offset = -(-(size + (40 + 16) + 40) // 4096) * 4096
            assert storage.status.stats().stored_bytes == proof_offset + 40
            disk.crash()
        async with open_storage(disk) as storage:
            assert await storage.reads.read_lac(1, fence=False) == 0

    run(main())


def test_closing_makes_everything_accepted_durable_and_refuses_the_rest() -> None:
    """Goal: a drain, not a cut; closing twice is fine."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.0005)
        async with open_storage(disk) as storage:
            futures = [storage.writes.add_entry(make_frame(1, entry_id)) for entry_id in range(40)]
            closing = asyncio.ensure_future(storage.aclose())
            await asyncio.sleep(0)
            with pytest.raises(BookieUnavailableError):
                await storage.writes.add_entry(make_frame(1, 40))
            await closing
            assert all(each.done() and each.exception() is None for each in futures)
            await storage.aclose()
            for request in (
                storage.reads.read_entry(1, 0, fence=False),
                storage.reads.read_lac(1, fence=True),
                storage.upkeep.collect_garbage(never_deleted),
            ):
                with pytest.raises(BookieUnavailableError):
                    await request
        async with open_storage(disk) as storage:
            assert len(await read_all(storage, 1, first=0, last=39)) == 40

    run(main())


async def never_deleted(ledger_id: int) -> bool:
    """Say that a ledger lives."""
    return ledger_id < 0


def test_files_of_deleted_ledgers_are_dropped_whole() -> None:
    """Goal: two sightings, then only files without a live ledger go; the rest stays readable."""

    async def main() -> None:
        disk, clock = MemoryDisk(), ManualClock()
        config = small_config(garbage=GarbageConfig(age_ms=1000))
        deleted = {1, 2}

        async def is_deleted(ledger_id: int) -> bool:
            return ledger_id in deleted

        async with open_storage(disk, config, clock=clock) as storage:
            for ledger_id in (1, 2, 3):
                await add(storage, ledger_id, *range(100))
            before = set(disk.names())
            assert (await storage.upkeep.collect_garbage(is_deleted)).files_deleted == 0
            clock.now += 999
            assert (await storage.upkeep.collect_garbage(is_deleted)).ledgers_deleted == 0
            clock.now += 1
            report = await storage.upkeep.collect_garbage(is_deleted)
            assert report.ledgers_deleted == 2
            assert report.files_deleted >= 4
            assert len(before - set(disk.names())) == report.files_deleted
            assert report.bytes_freed > 10_000
            assert storage.core.live_ledgers() == [3]
            with pytest.raises(NoSuchLedgerError):
                await storage.reads.read_entry(1, 0, fence=False)
            assert len(await read_all(storage, 3, first=0, last=99)) == 100
            assert (await storage.upkeep.collect_garbage(is_deleted)).files_deleted == 0
            await add(storage, 4, *range(100))
        async with open_storage(disk, config, clock=clock) as storage:
            assert len(await read_all(storage, 3, first=0, last=99)) == 100
            assert len(await read_all(storage, 4, first=0, last=99)) == 100
            assert 1 not in storage.core.live_ledgers()

    run(main())


def test_garbage_collection_believes_no_mass_deletion_and_no_error() -> None:
    """Goal: a metadata store that answers wrongly or not at all costs nothing."""

    async def main() -> None:
        disk, clock = MemoryDisk(), ManualClock()

        async def all_deleted(_: int) -> bool:
            return True

        async def unreachable(_: int) -> bool:
            raise MetadataConnectionError("no answer")

        async with open_storage(disk, small_config(), clock=clock) as storage:
            for ledger_id in range(5):
                await add(storage, ledger_id, *range(40))
            names = disk.names()
            for _ in range(3):
                clock.now += 5000
                report = await storage.upkeep.collect_garbage(all_deleted)
                assert "5 of 5 ledgers looked deleted" in report.held
                with pytest.raises(MetadataConnectionError):
                    await storage.upkeep.collect_garbage(unreachable)
            assert disk.names() == names

    run(main())


def test_few_open_files_are_enough_for_many() -> None:
    """Goal: sealed files are opened again as needed; ledgers spread over all of them are read."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, small_config(open_files_max=1)) as storage:
            for entry_id in range(300):
                await add(storage, entry_id % 2, entry_id // 2)
            assert len(disk.names()) > 6
            both = await asyncio.gather(
                *(read_all(storage, ledger_id, first=0, last=149) for ledger_id in (0, 1))
            )
            assert [len(frames) for frames in both] == [150, 150]

    run(main())
