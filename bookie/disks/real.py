"""A directory of the machine's file system.

One thread does all writes and syncs, so that they do not overlap on the device, and the event loop
does not wait for a slow device.  Small appends skip the thread while the device is quick.  Reads
first try the page cache without waiting; only the rest takes a thread.  Entries are read with
`preadv` and not through a memory mapping, because a bad sector under a mapping kills the process.

An append is one write past the page cache (O_DIRECT, RWF_DSYNC) from a ring buffer, see
`real_file`.  It goes into preallocated space, or into the blocks of a recycled file; therefore
no sync waits for the file system's journal.  The write begins with the block that the last append
left partly filled, so acknowledged bytes of this block are written again, unchanged.  They are
safe, because a device writes a sector completely or not at all.  The last block ends in zeros.
`python -m benchmarks.disk_write` shows that this way is the best at every size.

Reads of older parts of such a file go through the page cache, and never see stale bytes.  The
kernel drops the cached pages of a range before and after a direct write to it.  No page is ever
dirty.  Nothing is read behind the durable end, and the block that is written again is read from the
ring.  The start tries out whether the file system supports this; only Linux does.  If it does not,
appends go through the page cache, into a file that grows.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bookie.disks.folder_calls import (
    LOCK_NAME,
    SPARE_SUFFIX,
    Spares,
    allocated_bytes,
    capabilities,
    fallocate,
    hold,
    lock_directory,
    read_if_exists,
    sync_directory,
    write_file,
)
from bookie.disks.port import DiskSpace
from bookie.disks.real_file import BLOCK_BYTES, Capabilities, OpenFiles, device_error, device_errors
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bookie.disks.real_file import RealFile
    from dlcore.wire.frames import BytesLike

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

RESERVE_NAME = "reserve"
"""A file whose only use is the space that it reserves."""
_OWN_NAMES = (LOCK_NAME, RESERVE_NAME)
_TEMPORARY_SUFFIX = ".tmp"
_ALLOCATE_BYTES = 16 * 1024 * 1024
"""Bytes preallocated at a time: a fifth of a millisecond, once in thousands of commits."""
_ALLOCATE_SHARE_OF_FREE = 1 / 64
"""Most of the free space that is preallocated: other users of the file system need the rest."""


class RealDisk:
    """One directory, created if missing and locked against other processes.

    Raises:
        ConfigurationError: the directory is in use, or cannot be created.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)
        self._lock = lock_directory(self._directory)
        self.open_files = OpenFiles(self._directory, self._allocate)
        self._held_bytes = allocated_bytes(self._directory / RESERVE_NAME)
        for path in self._directory.glob(f"*{_TEMPORARY_SUFFIX}"):
            path.unlink()  # left by a crash before the rename: it was never part of the directory
        self._spares = Spares(self._directory)
        self._try_out()

    @property
    def place(self) -> str:
        """The directory, for messages."""
        return str(self._directory)

    def space(self) -> DiskSpace:
        """Return free and total space; preallocated and recycled space counts as free."""
        try:
            status = os.fstatvfs(self._lock)
        except OSError as error:
            raise device_error("examine", self._directory, error) from error
        return DiskSpace(
            free_bytes=status.f_bavail * status.f_frsize
            + self._held_bytes
            + self.open_files.ahead_bytes
            + self._spares.size_bytes,
            total_bytes=status.f_blocks * status.f_frsize,
        )

    @property
    def held_bytes(self) -> int:
        """Space that is reserved now."""
        return self._held_bytes

    async def hold(self, size_bytes: int) -> None:
        """Reserve `size_bytes` in all; no more than now if the file system cannot allocate."""
        path = self._directory / RESERVE_NAME
        with device_errors("reserve space in", path):
            self._held_bytes = await self.open_files.threads.write(hold, path, size_bytes)

    async def release(self, size_bytes: int) -> bool:
        """Release up to `size_bytes` of the reserve for writes; False if the reserve is empty."""
        if not self._held_bytes:
            return False
        path = self._directory / RESERVE_NAME
        size = max(0, self._held_bytes - size_bytes)
        with device_errors("release space of", path):
            await self.open_files.threads.write(os.truncate, path, size)
        self._held_bytes = size
        return True

    def names(self) -> list[str]:
        """Return the names of all files, sorted, without folders such as a mount's lost+found."""
        with device_errors("list", self._directory):
            return sorted(
                path.name
                for path in self._directory.iterdir()
                if path.name not in _OWN_NAMES and path.suffix != SPARE_SUFFIX and not path.is_dir()
            )

    async def create(self, name: str, content: Sequence[BytesLike]) -> RealFile:
        """Create a file that begins with `content`; after a crash it is complete or missing."""
        path = self._directory / name
        if path.exists():
            raise BookieStorageError(f"cannot create {path}: it exists")
        with device_errors("create", path):
            await self.open_files.threads.write(self._create, path, content)
        return self.open_files.open(path, size=sum(len(buffer) for buffer in content))

    def open(self, name: str) -> RealFile:
        """Open an existing file for reading and appending."""
        return self.open_files.open(self._directory / name)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete files durably; a missing file is no error."""
        with device_errors("delete files in", self._directory):
            await self.open_files.threads.write(self._delete, names)

    async def recycle(self, names: Sequence[str]) -> None:
        """Delete files durably, and keep the blocks of some for files that are created later."""
        with device_errors("recycle files in", self._directory):
            await self.open_files.threads.write(self._recycle, names)

    async def use_spares(self, *, allowed: bool) -> None:
        """Keep space of recycled files, or delete what is kept."""
        self._spares.allowed = allowed
        if not allowed:
            with device_errors("delete recycled files in", self._directory):
                await self.open_files.threads.write(self._spares.delete)

    async def read_file(self, name: str) -> bytes | None:
        """Return a small file's content; None if it does not exist."""
        path = self._directory / name
        with device_errors("read", path):
            return await self.open_files.threads.read(read_if_exists, path)

    async def write_file(self, name: str, data: bytes) -> None:
        """Set a small file's content atomically and durably."""
        path = self._directory / name
        with device_errors("write", path):
            await self.open_files.threads.write(self._place, path, data)

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a long function in a thread."""
        return await self.open_files.threads.read(function, *args, **kwargs)

    async def aclose(self) -> None:
        """Close every file, end the threads and unlock the directory."""
        if self.open_files.threads.has_ended:
            return
        await self.open_files.aclose()
        os.close(self._lock)

    def _allocate(self, descriptor: int, start: int, end: int) -> int:
        """Allocate a part of a file and some space behind it, if need be by deleting spares.

        Returns: the end of what is allocated; `start` if nothing is, and the write allocates.
        """
        if not self.open_files.can.allocate:
            return start
        # Fewer bytes ahead, or none, on a disk that is nearly full.
        free_bytes = self.space().free_bytes - self._held_bytes
        ahead = min(_ALLOCATE_BYTES, int(free_bytes * _ALLOCATE_SHARE_OF_FREE)) & -BLOCK_BYTES
        if not ahead:
            return start
        try:
            self._spares.with_room(
                functools.partial(fallocate, descriptor, start, end + ahead - start)
            )
        except OSError:
            return start  # a limit of the device or the process: the write will report it
        return end + ahead

    def _try_out(self) -> None:
        """Find out what the file system can do; if it is full, it is tried again later."""
        found = capabilities(self._directory)
        if found is not None:
            self.open_files.can = Capabilities(*found, is_known=True)

    def _create(self, path: Path, content: Sequence[BytesLike]) -> None:
        """Create a file; if it reuses a spare, old bytes of the spare follow the content."""
        # The start found the disk full; the space that came since allows the trial.
        if not self.open_files.can.is_known:
            self._try_out()
        data = b"".join(content)
        spare = self._spares.unused(self.open_files.inodes)
        if spare is None:
            self._place(path, data)
            return
        self._spares.with_room(functools.partial(write_file, spare, data))
        # Only now, when its header is durable: the header makes the spare's old records invalid.
        self._spares.give(spare, path)
        sync_directory(self._directory)

    def _place(self, path: Path, data: bytes) -> None:
        """Write a file under a temporary name, and rename it when its content is durable."""
        temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        try:
            self._spares.with_room(functools.partial(write_file, temporary, data))
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)  # a full disk needs this space back
            raise
        sync_directory(self._directory)

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            (self._directory / name).unlink(missing_ok=True)
        sync_directory(self._directory)

    def _recycle(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._directory / name
            if not path.exists():
                continue
            free_bytes = self.space().free_bytes - self._held_bytes
            can_allocate = self.open_files.can.allocate
            if not (can_allocate and self._spares.keep(path, free_bytes=free_bytes)):
                path.unlink()
        sync_directory(self._directory)
