"""Goal: what the real disk promises is durable when it returns, whatever the operation is.

Method: its calls of the kernel are noted, and after each operation no change may be without the
sync that makes it durable.  That syncs sync is the kernel's promise, which the device may break.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import pytest

from bookie.disks import folder_calls, real as real_disk
from bookie.disks.real import RealDisk
from dlcore.base.errors import BookieStorageError
from tests.fixtures.disk_changes import Promised, Unsynced
from tests.fixtures.disk_recorder import DiskRecorder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from bookie.disks.real_file import RealFile
    from tests.fixtures.disk_changes import Event

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it watches the calls of Linux")
LARGE_BYTES = 9 * 1024 * 1024
"""More than one write of the ring."""


class Watched:
    """A folder whose changes are noted."""

    def __init__(self, root: Path, replace: Callable[[object, str, object], None]) -> None:
        self.root = root
        self.unsynced = Unsynced()
        self.calls: list[str] = []
        DiskRecorder(root, self._note, keeps_written=False).install(replace)

    def _note(self, event: Event) -> None:
        assert not isinstance(event, Promised)
        self.unsynced.handle(event)
        self.calls.append(type(event).__name__)

    async def check(self, operation: Awaitable[object]) -> list[str]:
        """Perform an operation, see that it is durable; return the kinds of calls it made."""
        before = len(self.calls)
        await operation
        assert self.unsynced.describe() == []
        assert len(self.calls) > before
        return self.calls[before:]

    async def opened(self) -> RealDisk:
        """Return the disk, after a write: what it tried out at the start is durable, too."""
        disk = RealDisk(self.root)
        await disk.write_file("first", b"")
        return disk


@pytest.fixture(params=["direct", "through the page cache"])
def watched(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Watched:
    """A folder, written in both ways."""
    if request.param != "direct":
        monkeypatch.setattr(real_disk, "capabilities", lambda _: (False, False))
    elif folder_calls.capabilities(tmp_path) != (True, True):
        pytest.skip("this file system takes no direct writes")
    return Watched(tmp_path, monkeypatch.setattr)


async def append_soon(file: RealFile, data: bytes) -> None:
    """Append at once, on the event loop, if the device was quick; else the longer way."""
    if not file.append_now([data]):
        await file.append([data])


def test_appends_are_durable(watched: Watched) -> None:
    """Small and large ones, on the loop and in the thread, within a block and over several."""

    async def main() -> None:
        disk = await watched.opened()
        file = await disk.create("1.log", [b"head"])
        for size in (1, 10, 5000, 4096, 200_000, LARGE_BYTES, 7):
            await watched.check(file.append([b"x" * size]))
        disk.open_files.is_quick = True
        for size in (1, 10, 5000, 4096):
            await watched.check(append_soon(file, b"x" * size))
        await disk.aclose()

    asyncio.run(main())


def test_changes_of_a_file_are_durable(watched: Watched) -> None:
    """Bytes written over, an end that is cut, and appends that follow."""

    async def main() -> None:
        disk = await watched.opened()
        file = await disk.create("1.log", [b"head"])
        await watched.check(file.append([b"x" * 10_000]))
        await watched.check(file.rewrite(100, b"y" * 50))
        await watched.check(file.rewrite(file.size, b"behind the end"))
        await watched.check(file.truncate(5000))
        await watched.check(file.append([b"z"]))
        await disk.aclose()

    asyncio.run(main())


def test_names_are_durable(watched: Watched) -> None:
    """New files, small ones that are replaced, files made of spares, and what is deleted."""

    async def main() -> None:
        disk = await watched.opened()
        for number in (1, 2, 3):
            await watched.check(disk.create(f"{number}.log", [b"head"]))
        for content in (b"1", b"2"):
            await watched.check(disk.write_file("note", content))
        await watched.check(disk.delete(["note", "1.log", "never there"]))
        await watched.check(disk.recycle(["2.log"]))
        await disk.aclose()
        # A file is made of a spare where there is one, with one more rename and no new file.
        again = RealDisk(watched.root)
        again.open_files.can = again.open_files.can._replace(allocate=True)
        await watched.check(again.recycle(["3.log"]))
        assert (watched.root / "3.log.spare").exists()
        calls = await watched.check(again.create("4.log", [b"head"]))
        assert "Created" not in calls
        await again.aclose()

    asyncio.run(main())


def test_a_new_folder_is_durable_and_so_are_those_that_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power takes it away with all that was acknowledged."""
    watched = Watched(tmp_path, monkeypatch.setattr)

    async def main() -> None:
        disk = RealDisk(tmp_path / "new" / "and" / "deep")
        await watched.check(disk.write_file("first", b""))
        await disk.aclose()

    asyncio.run(main())


def test_a_failed_sync_raises_and_leaves_the_change_unsynced(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caller may then take the written bytes for durable."""

    async def main() -> None:
        disk = await watched.opened()
        file = await disk.create("1.log", [b"head"])
        assert watched.unsynced.describe() == []

        def fail(*_: object) -> None:
            raise OSError(5, os.strerror(5))

        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(BookieStorageError, match=r"cannot sync .*1\.log: "):
            await file.append([b"x" * LARGE_BYTES])
        assert watched.unsynced.describe() != []
        await disk.aclose()

    asyncio.run(main())
