"""A full disk ends nothing: what is kept stays there for fences and for making room again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie.config import GarbageConfig, SpaceConfig
from bookie.disks.port import DiskFullError, DiskSpace, write_with_room
from bookie.files.format import file_name
from bookie.ledger_storage import LedgerStorage
from bookie.storage.status import StorageState
from dlcore.base.errors import (
    BookieOverloadedError,
    BookieReadOnlyError,
    BookieStorageError,
)
from tests.fixtures.aio import until
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import ManualClock, make_frame, open_storage, read_all, small_config
from tests.simulation.loop import run

if TYPE_CHECKING:
    from pathlib import Path

SPACE = SpaceConfig(
    read_only_below_bytes=300_000,
    writable_above_bytes=320_000,
    minimum_bytes=280_000,
    check_interval_s=0.001,
)
CONFIG = small_config(space=SPACE, garbage=GarbageConfig(age_ms=0), settle_interval_s=0.001)
DISK_BYTES = 1_000_000


async def is_doomed(ledger_id: int) -> bool:
    """Say which ledger the metadata store no longer knows."""
    return ledger_id == 2


async def fill(storage: LedgerStorage) -> None:
    """Add ten entries to keep, and more of a ledger to be deleted until they are refused."""
    for entry_id in range(10):
        await storage.writes.add_entry(make_frame(1, entry_id))
    with contextlib.suppress(BookieReadOnlyError):
        for entry_id in range(10_000):
            await storage.writes.add_entry(make_frame(2, entry_id, b"x" * 500))
    assert storage.status.state is StorageState.READ_ONLY


class CountingDisk(MemoryDisk):
    """Counts how often its space is asked for."""

    looks = 0

    def space(self) -> DiskSpace:
        """Count."""
        self.looks += 1
        return super().space()


def test_a_disk_is_looked_at_seldom_and_never_filled_further() -> None:
    """Between two looks what was written counts as taken: the limit holds to the byte."""

    async def main() -> None:
        disk = CountingDisk(total_bytes=DISK_BYTES)
        space = replace(SPACE, check_interval_s=3600)
        async with open_storage(disk, small_config(space=space)) as storage:
            before = disk.looks
            added = 0
            with contextlib.suppress(BookieReadOnlyError):
                for entry_id in range(10_000):
                    await storage.writes.add_entry(make_frame(1, entry_id, b"x" * 500))
                    added += 1
            assert storage.status.state is StorageState.READ_ONLY
            assert added > 500
            assert disk.looks - before < added / 5
            assert SPACE.minimum_bytes <= disk.space().free_bytes <= SPACE.writable_above_bytes

    run(main())


async def count_lacs(storage: LedgerStorage) -> int:
    """Write LACs until they are refused."""
    written = 0
    while written < 100_000:
        lacs = []
        try:
            for _ in range(50):
                lacs.append(storage.writes.write_lac(1, 10 + written))
                written += 1
        except BookieReadOnlyError:
            return written
        finally:
            await asyncio.gather(*lacs)
    raise AssertionError("LACs are never refused")


async def fence_on(storage: LedgerStorage) -> None:
    """Fence ledgers until that is refused."""
    for first in range(1000, 100_000, 50):
        fences = [storage.reads.read_lac(first + number, fence=True) for number in range(50)]
        answers = await asyncio.gather(*fences, return_exceptions=True)
        if any(isinstance(each, BookieReadOnlyError) for each in answers):
            return
    raise AssertionError("fences are never refused")


async def check_kept(storage: LedgerStorage) -> None:
    """See that what was acknowledged is read."""
    expected = [make_frame(1, entry_id) for entry_id in range(10)]
    assert await read_all(storage, 1, first=0, last=9) == expected


def test_lacs_leave_what_is_kept_for_fences() -> None:
    """Goal: however many LACs come, fences, marks and garbage collection still have their room."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=DISK_BYTES)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            written = await count_lacs(storage)
            assert written >= 50
            await storage.writes.write_lac(1, written)  # known already: nothing is to be written
            with pytest.raises(BookieReadOnlyError):
                await storage.writes.add_entry(make_frame(3, 0), is_recovery=True)
            await fence_on(storage)
            assert await storage.reads.read_lac(1000, fence=True) == -1  # is fenced already
            await asyncio.sleep(0.01)  # for the mark
            for _ in range(2):
                await storage.upkeep.collect_garbage(is_doomed)
            await until(lambda: storage.status.state is StorageState.WRITABLE)
            await check_kept(storage)

    run(main())


def test_a_disk_that_does_not_tell_its_space_for_a_while_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a look that fails is not the last one: a bookie without writes would stay read-only."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=DISK_BYTES)
        async with open_storage(disk, CONFIG) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            await until(lambda: disk.held_bytes == SPACE.held_bytes)
            disk.room.fill()
            storage.status.look()
            assert storage.status.state is StorageState.READ_ONLY

            def fail() -> DiskSpace:
                raise BookieStorageError("cannot examine the disk")

            with monkeypatch.context() as patch:
                patch.setattr(disk, "space", fail)
                await until(lambda: "cannot examine the disk" in caplog.text)
                with pytest.raises(BookieReadOnlyError):
                    await storage.writes.add_entry(make_frame(1, 1))
            disk.room.filler_bytes = 0
            await until(lambda: storage.status.state is StorageState.WRITABLE)

    run(main())


def test_a_disk_that_others_fill_is_waited_for() -> None:
    """Goal: nothing is acknowledged and nothing fails; reads go on; room ends the wait."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=DISK_BYTES)
        states: list[StorageState] = []
        async with open_storage(disk, CONFIG) as storage:
            storage.status.on_state(states.append)
            for entry_id in range(10):
                await storage.writes.add_entry(make_frame(1, entry_id))
            await until(lambda: disk.held_bytes == SPACE.held_bytes)
            await disk.release(SPACE.held_bytes)
            disk.room.fill()
            waiting = [
                storage.writes.add_entry(make_frame(1, 10, bytes(5000)))
            ]  # more than is ahead
            waiting += [
                storage.writes.add_entry(make_frame(1, entry_id)) for entry_id in range(11, 60)
            ]
            await until(lambda: states == [StorageState.READ_ONLY])
            for request in (
                storage.writes.add_entry(make_frame(1, 60)),
                storage.writes.add_entry(make_frame(1, 60), is_recovery=True),
                storage.reads.read_lac(5, fence=True),
            ):
                with pytest.raises(BookieReadOnlyError):
                    await request
            with pytest.raises(BookieReadOnlyError):
                storage.writes.write_lac(2, 58)
            await check_kept(storage)
            await asyncio.sleep(0.02)
            assert not any(each.done() for each in waiting)
            disk.room.filler_bytes = 0
            await asyncio.gather(*waiting)
            await until(lambda: states == [StorageState.READ_ONLY, StorageState.WRITABLE])
            await until(lambda: disk.held_bytes == SPACE.held_bytes)
        async with open_storage(disk, CONFIG) as storage:
            await check_kept(storage)
            assert len(await read_all(storage, 1, first=0, last=59)) == 60

    run(main())


def test_held_back_garbage_is_collected_on_a_full_disk() -> None:
    """Goal: with not a byte left by others, fences are taken and room is made, over a restart."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=DISK_BYTES)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            disk.room.fill()
            assert await storage.reads.read_lac(7, fence=True) == -1
        disk.room.fill()
        async with open_storage(disk, CONFIG) as storage:
            assert storage.status.state is StorageState.READ_ONLY
            await check_kept(storage)
            with pytest.raises(BookieReadOnlyError):
                await storage.writes.add_entry(make_frame(7, 0), is_recovery=True)
            await asyncio.sleep(0.01)  # for the mark that follows a start
            assert not storage.status.stats().failed
            for _ in range(2):
                report = await storage.upkeep.collect_garbage(is_doomed)
            assert report.files_deleted > 5
            await until(lambda: storage.status.state is StorageState.WRITABLE)
            await storage.writes.add_entry(make_frame(3, 0))
            await check_kept(storage)

    run(main())


@pytest.mark.parametrize("step", range(1, 24))
def test_a_disk_may_be_full_at_any_step(step: int) -> None:
    """Goal: entries, footers, new files and notes all wait, and all come; crashes lose nothing.

    Method: others take all from some step of the disk on, for a while; then the power goes off.
    """

    async def main() -> None:
        disk = MemoryDisk(random.Random(step), total_bytes=600_000)
        config = small_config(space=SPACE, file_bytes_max=700, settle_interval_s=0.001)
        storage = await LedgerStorage.open(disk, config, clock=ManualClock())
        await disk.release(disk.held_bytes)
        began = disk.device.steps
        owner, take_step = disk.owner, disk.owner.step

        async def fill_at() -> None:
            if disk.device.steps - began == step:
                await disk.release(disk.held_bytes)
                disk.room.fill()
            await take_step()

        owner.step = fill_at  # type: ignore[method-assign]
        adds = []
        for entry_id in range(12):
            adds.append(storage.writes.add_entry(make_frame(1, entry_id), is_recovery=True))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert not storage.status.stats().failed
        if step % 2:
            disk.crash()
            durable = [number for number, each in enumerate(adds) if _is_good(each)]
        else:
            disk.room.filler_bytes = 0
            done = await asyncio.gather(*adds, return_exceptions=True)
            durable = [number for number, error in enumerate(done) if error is None]
            assert len(durable) == sum(not isinstance(e, BookieReadOnlyError) for e in done)
        with contextlib.suppress(BookieStorageError):
            await storage.aclose()
        await asyncio.gather(*adds, return_exceptions=True)
        disk.room.fill()
        async with open_storage(disk, config) as storage:  # a full one
            for entry_id in durable:
                frame = await storage.reads.read_entry(1, entry_id, fence=False)
                assert bytes(frame) == make_frame(1, entry_id)
            await asyncio.sleep(0.005)
            assert not storage.status.stats().failed

    run(main())


def _is_good(future: asyncio.Future[None]) -> bool:
    return future.done() and future.exception() is None


def test_a_footer_that_cannot_be_made_again_stops_no_start() -> None:
    """Goal: its entries are unknown, not absent, until there is room for the footer."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=DISK_BYTES)
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            assert 1 in storage.core.files
        disk.folder.flip(file_name(1), disk.folder.size_of(file_name(1)) - 20, 1)
        await disk.release(disk.held_bytes)
        disk.room.fill()
        write = disk.write

        async def fill_again(*args: object) -> None:
            disk.room.fill()  # others take what the cut footer gave back
            await write(*args)  # type: ignore[arg-type]

        disk.write = fill_again  # type: ignore[method-assign, assignment]
        async with open_storage(disk, CONFIG) as storage:
            with pytest.raises(BookieStorageError, match="damaged"):
                await storage.reads.read_entry(1, 0, fence=False)
            del disk.write
            disk.room.filler_bytes = 0
            await storage.upkeep.compact()
            await check_kept(storage)

    run(main())


def test_a_storage_that_waits_for_room_can_be_closed() -> None:
    """Goal: closing does not wait for an operator; what had no room was never acknowledged."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=DISK_BYTES)
        async with open_storage(disk, CONFIG) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            await disk.release(disk.held_bytes)
            disk.room.fill()
            waiting = storage.writes.add_entry(make_frame(1, 1, bytes(5000)))  # more than is ahead
            await until(lambda: storage.status.stats().is_read_only)
        with pytest.raises(DiskFullError):
            await waiting

    run(main())


def test_a_flood_of_adds_keeps_no_fence_out() -> None:
    """Goal: LACs and fences count as bytes in flight; fences have an eighth of the limit more."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.01)
        async with open_storage(disk, small_config(in_flight_bytes_max=1000)) as storage:
            adds = [storage.writes.add_entry(make_frame(1, entry_id)) for entry_id in range(20)]
            for ledger_id in range(2, 10):
                with contextlib.suppress(BookieOverloadedError):
                    storage.writes.write_lac(ledger_id, 1)
            with pytest.raises(BookieOverloadedError):
                storage.writes.write_lac(10, 1)
            assert await storage.reads.read_lac(50, fence=True) == -1
            await asyncio.gather(*adds, return_exceptions=True)
            many = [storage.reads.read_lac(1000 + number, fence=True) for number in range(100)]
            answers = await asyncio.gather(*many, return_exceptions=True)
            refused = [each for each in answers if isinstance(each, BookieOverloadedError)]
            assert 50 < len(refused) < 100

    run(main())


def test_a_write_takes_what_is_held_back_step_by_step() -> None:
    """Goal: no more is given up than the write needs, since others take what is free."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=200_000)
        file = await disk.create("a", [b""])
        await disk.hold(100_000)
        with pytest.raises(DiskFullError):
            await disk.hold(300_000)
        disk.room.fill()
        await write_with_room(disk, 5000, lambda: file.append([b"x" * 5000]))
        assert 50_000 < disk.held_bytes < 95_000
        disk.room.fill()
        with pytest.raises(DiskFullError):
            await write_with_room(disk, 200_000, lambda: file.append([b"x" * 200_000]))
        assert (disk.held_bytes, file.size) == (0, 5000)

    run(main())


def test_on_a_real_file_system_without_room(tmp_path: Path) -> None:
    """Goal: all of this on a tmpfs of 4 MB, filled by LACs and by another program."""
    program = "tests.fixtures.small_disk"
    privileges = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    done = subprocess.run(
        ["unshare", *privileges, "--mount", sys.executable, "-m", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "adds are refused",
        "LACs are refused",
        "fences are taken",
        "fences are taken while others take all the rest",
        "it starts, and reads",
        "garbage is collected, and it is writable again",
    ]
