"""The parts that only a real directory has: locking, threads, and descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bookie.disks import folder_calls, real as real_disk, real_file
from bookie.disks.real import RealDisk
from bookie.disks.real_file import BLOCK_BYTES, RealFile
from dlcore.base.errors import BookieStorageError, ConfigurationError

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    """Goal: the lock is the kernel's.  Method: a second process tries while this one holds it."""
    attempt = (
        "import pathlib, sys\nfrom bookie.disks.real import RealDisk\n"
        "RealDisk(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", attempt, str(tmp_path)]

    def try_to_open() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)

    async def main() -> None:
        disk = RealDisk(tmp_path)
        refused = try_to_open()
        assert refused.returncode == 1
        assert f"data directory {tmp_path} is in use" in refused.stderr
        await disk.aclose()
        assert try_to_open().returncode == 0

    asyncio.run(main())


def test_a_path_that_cannot_be_a_directory_is_a_configuration_error(tmp_path: Path) -> None:
    """Goal: bad `--data-dir` is named."""
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigurationError, match="file"):
        RealDisk(tmp_path / "file")


def test_leftovers_of_an_interrupted_creation_are_removed(tmp_path: Path) -> None:
    """Goal: a temporary file holds no data of a client."""
    (tmp_path / "0000000002.log.tmp").write_bytes(b"half a header")

    async def main() -> None:
        disk = RealDisk(tmp_path)
        assert disk.names() == []
        await disk.aclose()

    asyncio.run(main())
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_cancelled_append_does_not_let_go_of_its_descriptor(tmp_path: Path) -> None:
    """Goal: a write under way cannot hit a file that reuses its descriptor number.

    Method: the writer thread is blocked, the append cancelled and the file closed; the append must
    not end before the thread did, and the bytes must be in the right file.
    """

    async def main() -> None:
        disk = RealDisk(tmp_path)
        file = await disk.create("a", [])
        gate = threading.Event()
        blocker = asyncio.create_task(disk.open_files.threads.write(gate.wait))
        append = asyncio.create_task(file.append([b"late"]))
        await asyncio.sleep(0)
        append.cancel()
        file.close()
        done, _ = await asyncio.wait([append], timeout=0.2)
        gate.set()
        assert not done
        with pytest.raises(asyncio.CancelledError):
            await append
        await blocker
        assert await disk.read_file("a") == b"late"
        await disk.aclose()

    asyncio.run(main())


def test_no_descriptor_or_thread_is_left(tmp_path: Path) -> None:
    """Goal: closing the disk closes what was forgotten."""

    async def main() -> None:
        disk = RealDisk(tmp_path)
        for number in range(20):
            file = await disk.create(str(number), [b"x"])
            await file.append([b"y"])
            await disk.compute(len, b"")
        await disk.aclose()
        with pytest.raises(BookieStorageError):
            await disk.read_file("1")

    asyncio.run(main())  # the loop itself makes threads once
    descriptors = open_descriptors()
    asyncio.run(main_again(tmp_path / "again"))
    assert open_descriptors() == descriptors
    assert not [each for each in threading.enumerate() if each.name.startswith("bookie-disk")]


def open_descriptors() -> set[str]:
    """Return what this process has open, the directory that is listed left out."""
    return {str(path) for path in Path("/dev/fd").iterdir() if path.exists()}


async def main_again(directory: Path) -> None:
    """Open files, and forget them."""
    disk = RealDisk(directory)
    for number in range(20):
        await disk.create(str(number), [b"x"])
    await disk.aclose()


def test_a_device_error_is_a_storage_error_that_names_the_file(tmp_path: Path) -> None:
    """Goal: OSError stops at the adapter.  Method: a directory where a file should be."""

    async def main() -> None:
        disk = RealDisk(tmp_path)
        (tmp_path / "folder").mkdir()
        with pytest.raises(BookieStorageError, match="folder"):
            disk.open("folder")
        with pytest.raises(BookieStorageError, match="folder"):
            await disk.write_file("folder", b"")
        await disk.aclose()

    asyncio.run(main())


def test_only_a_quick_device_is_waited_for_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a slow sync holds the loop up once.

    Method: writes take as long as the test says, by a clock of the test's, so that a busy machine
    changes nothing, and tell their thread.
    """
    threads: list[int] = []
    now_s = 0.0
    write_s = 0.0
    write_all = real_file.write_all

    def slow_write(*arguments: Any) -> None:
        nonlocal now_s
        write_all(*arguments)
        now_s += write_s
        threads.append(threading.get_ident())

    monkeypatch.setattr(real_file, "write_all", slow_write)
    monkeypatch.setattr(real_file, "time", SimpleNamespace(perf_counter=lambda: now_s))

    async def append_quickly(file: RealFile, data: bytes) -> None:
        if not file.append_now([data]):
            await file.append([data])

    async def main() -> None:
        nonlocal write_s
        disk = RealDisk(tmp_path)
        file = await disk.create("log", [b"head"])
        for duration_s in (0.0, 0.0, 0.5, 0.5, 0.0, 0.0):
            write_s = duration_s
            await append_quickly(file, b"small")
        await append_quickly(file, b"x" * 1_000_000)
        file.close()
        await disk.aclose()

    asyncio.run(main())
    here = threading.get_ident()
    on_loop = [thread == here for thread in threads]
    assert on_loop == [False, True, True, False, False, True, False]


WAYS = {"direct": (True, True), "allocated": (True, False), "growing": (False, False)}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """One of the ways to append; the file system may offer less."""
    can_allocate, is_direct = folder_calls.capabilities(tmp_path) or (False, False)
    wanted = WAYS[request.param]
    found = wanted[0] and can_allocate, wanted[1] and is_direct
    monkeypatch.setattr(real_disk, "capabilities", lambda _: found)
    monkeypatch.setattr(real_file, "_RECENT_BYTES", 16 * BLOCK_BYTES)
    monkeypatch.setattr(real_disk, "_ALLOCATE_BYTES", 5 * BLOCK_BYTES)
    return str(request.param)


def test_appends_of_all_sizes_are_read_back_at_once_and_later(way: str, tmp_path: Path) -> None:
    """Goal: whole blocks are written, and the file holds the bytes, whichever way they go.

    Method: a ring so small that appends go round it, and are written in pieces.
    """
    rng = random.Random(way)
    expected = bytearray(b"head")

    async def write() -> None:
        disk = RealDisk(tmp_path)
        file = await disk.create("log", [expected])
        other = disk.open("log")
        for number in range(200):
            size = rng.choice((1, 100, BLOCK_BYTES - 1, BLOCK_BYTES, 70_000))
            data = rng.randbytes(rng.randrange(size) + 1)
            cut = rng.randrange(len(data))
            await file.append([data[:cut], memoryview(data)[cut:]])
            expected.extend(data)
            assert file.size == len(expected)
            start = rng.randrange(len(expected))
            part = min(len(expected) - start, rng.choice((10, 5000, 100_000)))
            assert bytes(await file.read(start, part)) == expected[start : start + part]
            buffers = [memoryview(bytearray(each)) for each in (part // 2, 0, part - part // 2)]
            await (file if number % 2 else other).read_into(start, buffers)
            assert b"".join(buffers) == expected[start : start + part]
            if number % 20 == 0:  # past the ring, through the page cache
                assert bytes(await other.read(0, len(expected))) == expected
        await disk.aclose()

    asyncio.run(write())
    assert (tmp_path / "log").read_bytes() == expected


@pytest.mark.usefixtures("way")
def test_a_short_write_goes_on_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a write cut at a block goes on there; within a block it is right or fails for good."""
    call = "pwritev" if hasattr(os, "pwritev") else "pwrite"
    write = getattr(os, call)
    allowed = [2 * BLOCK_BYTES, BLOCK_BYTES, 100]

    def short(descriptor: int, data: Any, *arguments: int) -> int:
        size = allowed.pop(0) if allowed else 1 << 30
        part = [data[0][:size]] if call == "pwritev" else data[:size]
        return int(write(descriptor, part, *arguments))

    async def main() -> None:
        disk = RealDisk(tmp_path)
        file = await disk.create("log", [b"head"])
        monkeypatch.setattr(os, call, short)
        data = random.Random(1).randbytes(7 * BLOCK_BYTES)
        try:
            await file.append([data])
        except BookieStorageError:
            assert disk.open_files.can.write_directly
            assert not allowed
        else:
            # Direct writes need no alignment on tmpfs: there, too, such a write may go on.
            assert (tmp_path / "log").read_bytes()[: len(data) + 4] == b"head" + data
        await disk.aclose()

    asyncio.run(main())


def test_a_file_system_is_tried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what cannot be done here is found out at the start, and what only seems to be done."""
    probe = folder_calls.capabilities
    assert probe(tmp_path) in {(True, True), (True, False), (False, False)}

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    with monkeypatch.context() as patched:
        patched.setattr(folder_calls, "fallocate", refuse)
        assert probe(tmp_path) == (False, False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", lambda *_: BLOCK_BYTES, raising=False)
        assert probe(tmp_path) in {(True, False), (False, False)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["open", "fallocate"])
def test_a_full_file_system_is_tried_out_once_it_has_room(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a bookie that was started on a full disk writes as well as others, once it may."""

    def full(path: object, *_: object) -> int:
        if not isinstance(path, Path) or path.name == "probe.tmp":
            raise OSError(errno.ENOSPC, "no space left on device")
        return os_open(path, *_)  # type: ignore[arg-type]

    os_open = os.open

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os if call == "open" else folder_calls, call, full)
            disk = RealDisk(tmp_path)
            (await disk.create("first", [b"first"])).close()
            assert (disk.open_files.can.allocate, disk.open_files.can.write_directly) == (
                False,
                False,
            )
        (await disk.create("second", [b"second"])).close()
        assert (
            disk.open_files.can.allocate,
            disk.open_files.can.write_directly,
        ) == folder_calls.capabilities(tmp_path)
        await disk.aclose()

    asyncio.run(main())


@pytest.mark.usefixtures("way")
def test_spares_are_given_up_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: space that is kept for recycling never makes a write fail."""
    fallocate = folder_calls.fallocate

    def full_with_spares(descriptor: int, offset: int, size: int) -> None:
        if spares_of(tmp_path):
            raise OSError(errno.ENOSPC, "no space left on device")
        fallocate(descriptor, offset, size)

    async def main() -> None:
        disk = RealDisk(tmp_path)
        for name in "abcd":
            (await disk.create(name, [bytes(10_000)])).close()
        file = await disk.create("log", [b"head"])
        await disk.recycle(["a", "b", "c", "d"])
        assert len(spares_of(tmp_path)) == (2 if disk.open_files.can.allocate else 0)
        monkeypatch.setattr(real_disk, "fallocate", full_with_spares)
        await file.append([b"x"])
        assert spares_of(tmp_path) == []
        assert disk.open("log").size > (2 * BLOCK_BYTES if disk.open_files.can.allocate else 5)
        await disk.aclose()

    asyncio.run(main())


def spares_of(directory: Path) -> list[Path]:
    """Return the files that are kept for recycling."""
    return list(directory.glob("*.spare"))
