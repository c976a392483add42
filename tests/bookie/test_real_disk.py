"""What only the real directory does: locking, threads, and descriptors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bookie.disk import RealDisk
from dlcore.errors import BookieStorageError, ConfigurationError

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    """Goal: the lock is the kernel's.  Method: a second process tries while this one holds it."""
    attempt = (
        "import pathlib, sys\nfrom bookie.disk import RealDisk\nRealDisk(pathlib.Path(sys.argv[1]))"
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
    """Goal: a temporary file is nobody's data."""
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
        blocker = asyncio.create_task(disk.write_in_thread(gate.wait))
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
    return {str(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}


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

    Method: syncs take as long as the test says and tell their thread; the loop's clock is the
    test's, so that a busy machine changes nothing.
    """
    threads: list[int] = []
    now_s = 0.0
    sync_s = 0.0

    def sync(_: int) -> None:
        nonlocal now_s
        now_s += sync_s
        threads.append(threading.get_ident())

    monkeypatch.setattr("bookie.real_disk.os.fdatasync", sync)

    async def main() -> None:
        nonlocal sync_s
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
        disk = RealDisk(tmp_path)
        file = await disk.create("log", [b"head"])
        for duration_s in (0.0, 0.0, 0.5, 0.5, 0.0, 0.0):
            sync_s = duration_s
            await file.append([b"small"])
        await file.append([b"x" * 1_000_000])
        file.close()
        await disk.aclose()

    asyncio.run(main())
    here = threading.get_ident()
    on_loop = [thread == here for thread in threads]
    assert on_loop == [False, True, True, False, False, True, False]
