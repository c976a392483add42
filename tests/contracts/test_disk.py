"""One suite for the disk port: the directory in memory and the real one behave alike."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bookie.disks.real import RealDisk
from dlcore.base.errors import BookieStorageError
from tests.fixtures.aio import until
from tests.fixtures.memory_disk import MemoryDisk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from bookie.disks.port import Disk

    OpenDisk = Callable[[], Disk]


@pytest.fixture(params=["memory", "real"])
def open_disk(request: pytest.FixtureRequest, tmp_path: Path) -> OpenDisk:
    """Return a function that opens the same directory again and again."""
    if request.param == "real":
        return lambda: RealDisk(tmp_path / "made" / "here")
    memory = MemoryDisk()
    return lambda: memory


def run(open_disk: OpenDisk, test: Callable[[Disk], Awaitable[None]]) -> None:
    """Run `test` as one owner of the directory."""

    async def main() -> None:
        disk = open_disk()
        try:
            await test(disk)
        finally:
            await disk.aclose()

    asyncio.run(main())


def test_created_content_and_appends_are_there_for_the_next_owner(open_disk: OpenDisk) -> None:
    """Goal: bytes survive a change of owner.  Many small and one big buffer go both write paths."""
    small = [bytes([i % 256]) * 3 for i in range(1500)]
    big = b"x" * 400_000

    async def write(disk: Disk) -> None:
        file = await disk.create("a", [b"he", b"ad"])
        assert (file.name, file.size) == ("a", 4)
        await file.append(small)
        await file.append([big, memoryview(b""), b"end", *small])
        assert file.size == 4 + 4500 + 400_003 + 4500

    async def read(disk: Disk) -> None:
        file = disk.open("a")
        expected = b"head" + b"".join(small) + big + b"end" + b"".join(small)
        assert file.size == len(expected)
        assert bytes(await file.read(0, file.size)) == expected
        assert file.read_now(0, file.size) == expected
        assert bytes(await file.read(5000, 10)) == expected[5000:5010]

    run(open_disk, write)
    run(open_disk, read)


def test_a_record_appended_just_now_can_be_read_without_waiting(open_disk: OpenDisk) -> None:
    """Goal: it is whole and right, or to be waited for; what is behind the end never comes."""

    async def test(disk: Disk) -> None:
        file = await disk.create("a", [b"head"])
        await file.append([b"x" * 5000, b"end"])
        recent = file.read_recent(5002, 5)
        assert recent is not None
        assert bytes(recent) == b"xxend"
        assert file.read_recent(5002, 5000) is None
        assert bytes(file.read_recent(0, 4) or b"head") == b"head"
        file.close()
        assert bytes(disk.open("a").read_recent(5002, 5) or b"xxend") == b"xxend"

    run(open_disk, test)


def test_reading_beyond_the_end_is_an_error(open_disk: OpenDisk) -> None:
    """Goal: a short file never gives fewer bytes than asked for."""

    async def test(disk: Disk) -> None:
        file = await disk.create("a", [b"12345"])
        assert bytes(await file.read(5, 0)) == b""
        with pytest.raises(BookieStorageError):
            await file.read(3, 3)
        with pytest.raises(BookieStorageError):
            file.read_now(3, 3)

    run(open_disk, test)


def test_rewrite_and_truncate_change_what_is_there(open_disk: OpenDisk) -> None:
    """Goal: the two in-place changes that replay makes; appending goes on at the new end."""

    async def write(disk: Disk) -> None:
        file = await disk.create("a", [b"0123456789"])
        await file.rewrite(2, b"ab")
        await file.truncate(6)
        assert file.size == 6
        await file.append([b"!"])

    async def read(disk: Disk) -> None:
        assert bytes(await disk.open("a").read(0, 7)) == b"01ab45!"

    run(open_disk, write)
    run(open_disk, read)


def test_names_are_listed_and_deleted(open_disk: OpenDisk) -> None:
    """Goal: deletion reaches the next owner, twice is fine, an open handle outlives the name."""

    async def write(disk: Disk) -> None:
        assert disk.names() == []
        file = await disk.create("b", [b"bb"])
        await disk.create("a", [])
        await disk.create("c", [b"c"])
        await disk.delete(["b", "missing"])
        assert bytes(await file.read(0, 2)) == b"bb"
        file.close()
        assert disk.names() == ["a", "c"]
        with pytest.raises(BookieStorageError):
            disk.open("b")

    async def read(disk: Disk) -> None:
        assert disk.names() == ["a", "c"]

    run(open_disk, write)
    run(open_disk, read)


def keeps_blocks(disk: Disk) -> bool:
    """Return whether recycled files are used again: not where nothing can be allocated ahead."""
    return not isinstance(disk, RealDisk) or disk.open_files.can.allocate


def test_without_spares_nothing_of_an_earlier_life_is_kept(open_disk: OpenDisk) -> None:
    """Goal: neither what was recycled before nor what is recycled now, until that is allowed."""
    old = b"old life " * 2000

    async def recycle(disk: Disk) -> None:
        for name in ("1", "2", "3"):
            (await disk.create(name, [old])).close()
        await disk.recycle(["1"])
        await disk.use_spares(allowed=False)
        await disk.recycle(["2"])
        (await disk.create("4", [b"new"])).close()
        assert disk.open("4").size == 3
        await disk.use_spares(allowed=True)
        await disk.recycle(["3"])
        if keeps_blocks(disk):
            await disk.create("5", [b"new"])
            assert disk.open("5").size == len(old)

    run(open_disk, recycle)


def test_a_file_that_is_being_recycled_is_no_spare_either(open_disk: OpenDisk) -> None:
    """Goal: once no spares are allowed, none appears: bytes that must go would be in a new file."""

    async def recycle(disk: Disk) -> None:
        (await disk.create("1", [b"old life " * 2000])).close()
        if isinstance(disk, MemoryDisk):
            disk.device.latency_s = lambda: 0.05
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(disk.recycle(["1"]))
            await until(lambda: not disk.names(), interval_s=0)
            await disk.use_spares(allowed=False)
        (await disk.create("2", [b"new"])).close()
        assert disk.open("2").size == 3

    run(open_disk, recycle)


def test_a_recycled_file_is_gone_and_what_is_made_of_it_is_new(open_disk: OpenDisk) -> None:
    """Goal: the earlier life shows behind the end at most, and only after a new opening."""
    old = b"old life " * 2000

    async def recycle(disk: Disk) -> None:
        file = await disk.create("1", [old])
        file.close()
        await disk.recycle(["1", "missing"])
        assert disk.names() == []
        with pytest.raises(BookieStorageError):
            disk.open("1")

    async def write(disk: Disk) -> None:
        assert disk.names() == []
        file = await disk.create("2", [b"new"])
        assert file.size == 3
        await file.append([b" life"])
        assert disk.names() == ["2"]
        again = disk.open("2")
        assert bytes(await again.read(0, 8)) == b"new life"
        if keeps_blocks(disk):
            assert again.size >= len(old)
            assert bytes(await again.read(len(old) - 9, 9)) == b"old life "

    async def read(disk: Disk) -> None:
        file = disk.open("2")
        assert bytes(await file.read(0, file.size)) == b"new life"  # it was cut when it was closed

    run(open_disk, recycle)
    run(open_disk, write)
    run(open_disk, read)


def test_a_file_is_not_used_again_while_it_is_read(open_disk: OpenDisk) -> None:
    """Goal: a reader that found its file before it was dropped never reads another one's bytes."""

    async def test(disk: Disk) -> None:
        reader = await disk.create("1", [b"old life " * 100])
        await disk.recycle(["1"])
        second = await disk.create("2", [b"new life"])
        assert second.size == 8
        assert bytes(await reader.read(0, 900)) == b"old life " * 100
        reader.close()
        await disk.create("3", [b"new"])
        assert disk.open("3").size >= (900 if keeps_blocks(disk) else 3)

    run(open_disk, test)


def test_space_allocated_ahead_counts_as_free(open_disk: OpenDisk) -> None:
    """Goal: an append costs its own size of the space, however much was allocated for it.

    Others write to the real disk too, and free space there: the middle of many costs is ours.
    """

    async def cost(disk: Disk, name: str) -> int:
        file = await disk.create(name, [b"head"])
        before = disk.space().free_bytes
        await file.append([bytes(5000)])
        after = disk.space().free_bytes
        assert disk.open(name).size > file.size
        file.close()
        assert disk.open(name).size == 5004
        return before - after

    async def test(disk: Disk) -> None:
        costs = sorted([await cost(disk, str(number)) for number in range(21)])
        assert costs[10] < 10_000_000, costs

    run(open_disk, test)


def test_a_cut_file_can_be_appended_to(open_disk: OpenDisk) -> None:
    """Goal: cutting takes what is behind the end with it, and appends go on at the new end."""

    async def write(disk: Disk) -> None:
        file = await disk.create("1", [b"head"])
        await file.append([b"x" * 10_000])
        await file.truncate(6000)
        assert disk.open("1").size == 6000
        await file.append([b"y" * 10])
        await file.rewrite(0, b"HEAD")
        await file.append([b"z" * 9000])
        await file.truncate(file.size)
        await file.rewrite(file.size, b"end")
        assert disk.open("1").size == file.size == 15_013

    async def read(disk: Disk) -> None:
        expected = b"HEAD" + b"x" * 5996 + b"y" * 10 + b"z" * 9000 + b"end"
        assert bytes(await disk.open("1").read(0, 15_013)) == expected

    run(open_disk, write)
    run(open_disk, read)


def test_a_name_is_created_once(open_disk: OpenDisk) -> None:
    """Goal: an existing file is never overwritten by creating it."""

    async def test(disk: Disk) -> None:
        await disk.create("a", [b"1"])
        with pytest.raises(BookieStorageError):
            await disk.create("a", [b"2"])
        assert bytes(await disk.open("a").read(0, 1)) == b"1"

    run(open_disk, test)


def test_small_files_are_replaced_whole(open_disk: OpenDisk) -> None:
    """Goal: the cookie's way to disk."""

    async def write(disk: Disk) -> None:
        assert await disk.read_file("cookie") is None
        await disk.write_file("cookie", b"first, and longer")
        await disk.write_file("cookie", b"second")

    async def read(disk: Disk) -> None:
        assert await disk.read_file("cookie") == b"second"

    run(open_disk, write)
    run(open_disk, read)


def test_space_shrinks_no_further_than_the_total(open_disk: OpenDisk) -> None:
    """Goal: both numbers are bytes of the same thing."""

    async def test(disk: Disk) -> None:
        space = disk.space()
        assert 0 < space.free_bytes <= space.total_bytes

    run(open_disk, test)


def test_a_closed_file_does_nothing_more(open_disk: OpenDisk) -> None:
    """Goal: a handle kept by mistake cannot reach another file."""

    async def test(disk: Disk) -> None:
        file = await disk.create("a", [b"1"])
        file.close()
        file.close()
        with pytest.raises(BookieStorageError):
            await file.append([b"2"])
        with pytest.raises(BookieStorageError):
            await file.truncate(0)
        with pytest.raises(BookieStorageError):
            await file.read(0, 1)
        assert bytes(await disk.open("a").read(0, 1)) == b"1"

    run(open_disk, test)


def test_a_closed_disk_does_nothing_more(open_disk: OpenDisk) -> None:
    """Goal: after `aclose` the directory is the next owner's."""

    async def test(disk: Disk) -> None:
        file = await disk.create("a", [b"1"])
        await disk.aclose()
        with pytest.raises(BookieStorageError):
            await file.append([b"2"])
        await disk.aclose()

    run(open_disk, test)


def test_compute_returns_and_raises_what_the_function_does(open_disk: OpenDisk) -> None:
    """Goal: long work is called with its arguments, and its error is not lost."""

    async def test(disk: Disk) -> None:
        assert await disk.compute(divmod, 7, 3) == (2, 1)
        with pytest.raises(ZeroDivisionError):
            await disk.compute(divmod, 7, 0)

    run(open_disk, test)
