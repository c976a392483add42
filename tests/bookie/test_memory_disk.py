"""The disk in memory forgets what a machine forgets, and nothing else."""

from __future__ import annotations

import asyncio
import random

import pytest

from dlcore.base.errors import BookieStorageError
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.memory_folder import SECTOR_BYTES


def test_a_power_cut_keeps_synced_bytes_and_tears_the_rest() -> None:
    """Goal: over many seeds an unfinished append is lost, whole and torn; what was synced stays."""
    outcomes = set()
    for seed in range(60):

        async def main(seed: int = seed) -> bytes:
            disk = MemoryDisk(random.Random(seed))
            file = await disk.create("a", [b"A" * 700])
            disk.device.crash_at_step = disk.device.steps + 2  # the append's sync
            with pytest.raises(BookieStorageError):
                await file.append([b"B" * 1500])
            with pytest.raises(BookieStorageError):
                await file.read(0, 1)
            content = await disk.read_file("a")
            assert content is not None
            return content

        content = asyncio.run(main())
        assert content[:700] == b"A" * 700
        rest = content[700:2200].rstrip(b"\0")
        assert set(content[700:]) <= {0, ord("B")}
        outcomes.add("lost" if not rest else "torn" if 0 in rest or len(rest) < 1500 else "whole")
    assert outcomes == {"lost", "torn", "whole"}


def test_a_name_without_directory_sync_may_vanish() -> None:
    """Goal: both outcomes of a crash between rename and directory sync occur, but never half."""
    outcomes = set()
    for seed in range(20):

        async def main(seed: int = seed) -> list[str]:
            disk = MemoryDisk(random.Random(seed))
            await disk.create("a", [b"1"])
            disk.device.crash_at_step = disk.device.steps + 3
            with pytest.raises(BookieStorageError):
                await disk.create("b", [b"2"])
            return disk.names()

        outcomes.add(tuple(asyncio.run(main())))
    assert outcomes == {("a",), ("a", "b")}


def test_a_killed_process_leaves_the_cache() -> None:
    """Goal: SIGKILL is not a power cut."""

    async def main() -> None:
        disk = MemoryDisk()
        file = await disk.create("a", [b"1"])
        disk.device.sync_error = "Input/output error"
        with pytest.raises(BookieStorageError, match="Input/output error"):
            await file.append([b"2" * 5000])
        disk.crash(keep_cache=True)
        content = await disk.read_file("a")
        assert content is not None
        assert content.rstrip(b"\0") == b"1" + b"2" * 5000
        with pytest.raises(BookieStorageError):
            await file.append([b"3"])

    asyncio.run(main())


def test_a_failed_sync_is_not_mended_by_the_next_one() -> None:
    """Goal: pages are marked clean by a failed sync, as on Linux; a retry hides the loss."""

    async def main() -> None:
        disk = MemoryDisk(random.Random(1))
        file = await disk.create("a", [b""])
        disk.device.sync_error = "Input/output error"
        with pytest.raises(BookieStorageError):
            await file.append([b"2" * 5120])
        await file.append([b"3" * 512])
        disk.crash()
        content = await disk.read_file("a")
        assert content is not None
        assert content[:5120] != b"2" * 5120
        assert content[5120:].rstrip(b"\0") == b"3" * 512

    asyncio.run(main())


def test_a_full_disk_refuses_growth_only() -> None:
    """Goal: no space left is an error of appends, not of rewriting what is there."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=1000)
        file = await disk.create("a", [b"1" * 900])
        with pytest.raises(BookieStorageError, match="no space"):
            await file.append([b"2" * 200])
        await file.rewrite(0, b"3" * 900)
        disk.room.filler_bytes = 100
        assert disk.space().free_bytes == 0

    asyncio.run(main())


def test_latency_is_waited_on_the_loop() -> None:
    """Goal: other tasks run while the device works."""

    async def main() -> None:
        disk = MemoryDisk(latency_s=lambda: 0.001)
        file = await disk.create("a", [b"1"])
        append = asyncio.create_task(file.append([b"2"]))
        await asyncio.sleep(0)
        assert not append.done()
        await append

    asyncio.run(main())


def test_a_lost_sector_fails_reads_until_it_is_written() -> None:
    """Its neighbours can be read; small files fail alike."""

    async def main() -> None:
        disk = MemoryDisk()
        file = await disk.create("a", [bytes(3 * SECTOR_BYTES)])
        disk.folder.lose_sector("a", SECTOR_BYTES + 7)
        assert len(await file.read(0, SECTOR_BYTES)) == SECTOR_BYTES
        assert len(await file.read(2 * SECTOR_BYTES, SECTOR_BYTES)) == SECTOR_BYTES
        for start in (SECTOR_BYTES - 1, SECTOR_BYTES, 2 * SECTOR_BYTES - 1):
            with pytest.raises(BookieStorageError, match="lost sector"):
                await file.read(start, 2)
        with pytest.raises(BookieStorageError, match="lost sector"):
            await disk.read_file("a")
        await file.rewrite(SECTOR_BYTES, b"x" * SECTOR_BYTES)
        assert bytes(await file.read(SECTOR_BYTES, 1)) == b"x"

    asyncio.run(main())


def test_a_crash_at_a_step_tells_who_runs_there() -> None:
    """The callback is called once, and after the crash."""

    async def main() -> None:
        disk = MemoryDisk()
        file = await disk.create("a", [b"1"])
        steps: list[int] = []
        disk.device.on_crash = lambda: steps.append(disk.device.steps)
        disk.device.crash_at_step = disk.device.steps + 2
        with pytest.raises(BookieStorageError):
            await file.append([b"2"])
        assert len(steps) == 1
        with pytest.raises(BookieStorageError):
            await file.append([b"3"])
        assert len(steps) == 1

    asyncio.run(main())


def test_open_handles_are_counted_for_each_owner() -> None:
    """A handle of a dead owner does not count, whenever it is closed."""

    async def main() -> None:
        disk = MemoryDisk()
        first = await disk.create("a", [b"1"])
        second = disk.open("a")
        assert disk.open_files == 2
        first.close()
        first.close()
        assert disk.open_files == 1
        disk.crash()
        third = disk.open("a")
        second.close()
        assert disk.open_files == 1
        third.close()
        assert disk.open_files == 0

    asyncio.run(main())


def test_a_recycled_file_has_its_new_header_or_not_its_name() -> None:
    """Goal: power lost between any two steps of a creation leaves no file of an earlier life.

    Method: many seeds, since each decides which sectors and names are kept.
    """
    old, new = b"old" * 700, b"new" * 500

    async def main(seed: int, step: int) -> str:
        disk = MemoryDisk(random.Random(seed))
        (await disk.create("1", [old])).close()
        await disk.recycle(["1"])
        disk.device.crash_at_step = disk.device.steps + step
        try:
            await disk.create("2", [new])
        except BookieStorageError:
            pass
        else:
            disk.crash()
        assert disk.names() in ([], ["2"])
        content = await disk.read_file("2")
        if content is None:
            return "absent"
        assert content[: len(new)] == new
        return "recycled" if content[len(new) :] == old[len(new) :] else "fresh"

    outcomes = {asyncio.run(main(seed, step)) for seed in range(30) for step in range(1, 5)}
    assert outcomes == {"absent", "recycled"}
