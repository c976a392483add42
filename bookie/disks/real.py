"""A directory of the machine's file system.

One thread does all writes and syncs, so that they do not overlap on the device, and the event loop
does not wait for a slow device.  Small appends skip the thread while the device is quick.  Reads
first try the page cache without waiting; only the rest takes a thread.  Entries are read with
`preadv` and not through a memory mapping, because a bad sector under a mapping kills the process.

An append is one write past the page cache (O_DIRECT, RWF_DSYNC) from a ring buffer, see
recent_bytes.py.  It goes into preallocated space, or into the blocks of a recycled file; therefore
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

import contextlib
import errno
import functools
import logging
import mmap
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import numpy as np

from bookie.disks.file_calls import (
    LOCK_NAME,
    NO_ROOM,
    SPARE_SUFFIX,
    DiskThreads,
    Spares,
    allocated_bytes,
    capabilities,
    device_error,
    device_errors,
    fallocate,
    hold,
    lock_directory,
    read_cached,
    read_if_exists,
    read_some,
    sync,
    sync_data,
    sync_directory,
    sync_file,
    without_first,
    write_all,
    write_file,
)
from bookie.disks.port import DiskSpace
from bookie.disks.recent_bytes import BLOCK_BYTES, RecentBytes, rounded_up
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlcore.wire.frames import BytesLike

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

RESERVE_NAME = "reserve"
"""A file whose only use is the space that it reserves."""
_OWN_NAMES = (LOCK_NAME, RESERVE_NAME)
_TEMPORARY_SUFFIX = ".tmp"
_RECENT_BYTES = 32 * 1024 * 1024
"""Size of a ring: the writes of some tenths of a second at the rate of a disk."""
_ALLOCATE_BYTES = 16 * 1024 * 1024
"""Bytes preallocated at a time: a fifth of a millisecond, once in thousands of commits."""
_ALLOCATE_SHARE_OF_FREE = 1 / 64
_INLINE_BYTES_MAX = 16 * 1024
"""Appends up to this size run on the event loop while the device is quick: two switches between
threads cost more than the sync itself."""
_QUICK_S_MAX = 0.002
"""After a write that takes longer, appends use the thread, until one of them is quick again."""


class RealFile:
    """An open file of a `RealDisk`."""

    def __init__(self, disk: RealDisk, path: Path, descriptor: int, *, size: int) -> None:
        self._disk = disk
        self._path = path
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self.inode = status.st_ino
        self._size = min(size, status.st_size)
        self._allocated = status.st_size
        self._direct = -1
        self._recent: RecentBytes | None = None
        self._uses = 0
        self._is_closed = False

    @property
    def name(self) -> str:
        """The file's name in its directory."""
        return self._path.name

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._size

    @property
    def ahead_bytes(self) -> int:
        """Bytes preallocated behind the end, for the next appends."""
        return max(0, self._allocated - self._size)

    async def append(self, buffers: Sequence[BytesLike]) -> None:
        """Write `buffers` at the end and make them durable."""
        size = sum(map(len, buffers))
        await self._write("append to", self._append, buffers, self._size, size)
        self._size += size

    def append_now(self, buffers: Sequence[BytesLike]) -> bool:
        """Append on the event loop, if this costs less than a thread."""
        # No new ring and no preallocation here: both are work for the thread.
        disk = self._disk
        size = sum(map(len, buffers))
        if (
            not disk.is_quick
            or self._recent is None
            or self._is_closed
            or size > _INLINE_BYTES_MAX
            or (disk.can.allocate and self._size + size > self._allocated - BLOCK_BYTES)
        ):
            return False
        try:
            self._append(buffers, self._size, size)
        except OSError as error:
            raise device_error("append to", self._path, error) from error
        self._size += size
        return True

    async def rewrite(self, offset: int, data: BytesLike) -> None:
        """Write `data` over existing bytes, or at the end, and make it durable."""
        await self._write("rewrite", self._rewrite, offset, data)
        self._size = max(self._size, offset + len(data))

    async def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, durably, with the space preallocated behind them."""
        await self._write("truncate", self._truncate, size)
        self._size = size

    async def read(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes."""
        # The memory need not be zeroed: the caller gets it only when all its bytes are read.
        buffer = np.empty(size, np.uint8).data
        await self.read_into(offset, [buffer])
        return buffer.toreadonly()

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other."""
        if self._is_closed:
            raise BookieStorageError(f"{self._path} is closed")
        if self._recent is not None and self._recent.read_into(offset, buffers):
            return
        size = sum(map(len, buffers))
        self._uses += 1
        try:
            with device_errors("read", self._path):
                done = read_cached(self._descriptor, buffers, offset)
                if done < size:
                    await self._disk.threads.read(self._read_rest, buffers, offset, done)
        finally:
            self._uses -= 1
            self._close_when_unused()

    def read_recent(self, offset: int, size: int) -> memoryview | None:
        """Return exactly `size` bytes if they are in memory."""
        data = memoryview(bytearray(size))
        is_here = self._recent is not None and self._recent.read_into(offset, [data])
        return data.toreadonly() if is_here else None

    def read_now(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes, blocking."""
        if self._is_closed:
            raise BookieStorageError(f"{self._path} is closed")
        buffer = bytearray(size)
        with device_errors("read", self._path):
            self._read_rest([memoryview(buffer)], offset, 0)
        return memoryview(buffer).toreadonly()

    def close(self) -> None:
        """Close the file when the operations in progress have ended."""
        self._is_closed = True
        self._close_when_unused()

    async def _write(
        self, action: str, function: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        if self._is_closed:
            raise BookieStorageError(f"{self._path} is closed")
        self._uses += 1
        try:
            with device_errors(action, self._path):
                await self._disk.threads.write(function, *args, **kwargs)
        finally:
            self._uses -= 1
            self._close_when_unused()

    def _append(self, buffers: Sequence[BytesLike], offset: int, size: int) -> None:
        recent = self._recent
        if recent is None:
            self._recent = recent = self._start_recent(offset)
        end = rounded_up(offset + size)
        if end > self._allocated:
            self._allocated = self._disk.allocate(self._descriptor, self._allocated, end)
        pieces = recent.fill(buffers, offset, size)
        started_s = time.perf_counter()
        if self._direct >= 0 and end <= self._allocated and recent.is_one_piece(offset, size):
            # Write and sync in one call.  The blocks exist, so only data has to reach the device.
            ((start, memory),) = pieces
            sync(self._path, write_all, self._direct, memory, start, os.RWF_DSYNC)
        else:
            descriptor = self._direct if self._direct >= 0 else self._descriptor
            with self._cut_if_full():
                for start, memory in pieces:
                    write_all(descriptor, memory, start)
            sync_data(self._path, descriptor)
        # Without the wait for a thread: on a busy machine this wait speaks against threads.
        self._disk.is_quick = time.perf_counter() - started_s <= _QUICK_S_MAX
        self._allocated = max(self._allocated, end)
        recent.note_written(offset + size)

    def _start_recent(self, offset: int) -> RecentBytes:
        """Prepare appends from `offset` on: open for direct writes, and load the last block."""
        if self._disk.can.write_directly and self._direct < 0:
            flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
            self._direct = os.open(self._path, flags)
        block = bytearray(offset % BLOCK_BYTES)
        self._read_rest([memoryview(block)], offset - len(block), 0)
        self._disk.note_appended(self)
        return RecentBytes(self._disk.rings.take(), block, offset)

    @contextlib.contextmanager
    def _cut_if_full(self) -> Iterator[None]:
        """Cut off a part that was written before the disk was full, so that nothing is written."""
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                os.ftruncate(self._descriptor, self._allocated)
            raise

    def _rewrite(self, offset: int, data: BytesLike) -> None:
        # The ring would return the old bytes, and the next append could write them back.
        self._forget_recent()
        with self._cut_if_full():
            write_all(self._descriptor, [memoryview(data)], offset)
        sync_data(self._path, self._descriptor)
        self._allocated = max(self._allocated, offset + len(data))

    def _truncate(self, size: int) -> None:
        self._forget_recent()
        os.ftruncate(self._descriptor, size)
        sync_file(self._path, self._descriptor)
        self._allocated = size

    def _forget_recent(self) -> None:
        if self._recent is not None:
            self._disk.rings.give(self._recent.ring)
            self._recent = None

    def _read_rest(self, buffers: Sequence[memoryview], offset: int, done: int) -> None:
        rest = without_first(buffers, done)
        offset += done
        while rest:
            count = read_some(self._descriptor, rest, offset)
            if count == 0:
                end = offset + sum(map(len, rest))
                raise OSError(errno.EIO, f"the file ends before offset {end}")
            rest = without_first(rest, count)
            offset += count

    def _close_when_unused(self) -> None:
        if self._is_closed and self._uses == 0 and self._descriptor >= 0:
            if self._recent is not None and self._allocated > self._recent.end:
                with contextlib.suppress(OSError):  # the next owner cuts the file as well
                    os.ftruncate(self._descriptor, self._recent.end)
            self._forget_recent()
            os.close(self._descriptor)
            self._descriptor = -1
            if self._direct >= 0:
                os.close(self._direct)
            self._disk.forget(self)


class _Rings:
    """Memory for the rings of files.  One is kept, because one file at a time has appends."""

    def __init__(self) -> None:
        self._free: mmap.mmap | None = None

    def take(self) -> mmap.mmap:
        """Return memory of whole pages, as direct writes require."""
        ring, self._free = self._free, None
        return mmap.mmap(-1, _RECENT_BYTES) if ring is None else ring

    def give(self, ring: mmap.mmap) -> None:
        """Take memory back."""
        self._free = self._free or ring


class Capabilities(NamedTuple):
    """The work that the file system of a disk can do; nothing, before it is known."""

    allocate: bool = False
    """Space can be preallocated."""
    write_directly: bool = False
    """Direct writes are coherent with the page cache."""
    is_known: bool = False


class RealDisk:
    """One directory, created if missing and locked against other processes.

    Raises:
        ConfigurationError: the directory is in use, or cannot be created.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)
        self._lock = lock_directory(self._directory)
        self.threads = DiskThreads(self._directory)
        self.rings = _Rings()
        self._files: set[RealFile] = set()
        self._appended: set[RealFile] = set()
        self._held_bytes = allocated_bytes(self._directory / RESERVE_NAME)
        self.is_quick = False
        """Whether the last append was so fast that a thread is not worth its cost."""
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
        # The set is copied first, because another thread may add a file meanwhile.
        ahead = sum([file.ahead_bytes for file in list(self._appended)])
        return DiskSpace(
            free_bytes=status.f_bavail * status.f_frsize
            + self._held_bytes
            + ahead
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
            self._held_bytes = await self.threads.write(hold, path, size_bytes)

    async def release(self, size_bytes: int) -> bool:
        """Release up to `size_bytes` of the reserve for writes; False if the reserve is empty."""
        if not self._held_bytes:
            return False
        path = self._directory / RESERVE_NAME
        size = max(0, self._held_bytes - size_bytes)
        with device_errors("release space of", path):
            await self.threads.write(os.truncate, path, size)
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
            await self.threads.write(self._create, path, content)
        return self._open(name, size=sum(len(buffer) for buffer in content))

    def open(self, name: str) -> RealFile:
        """Open an existing file for reading and appending."""
        return self._open(name)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete files durably; a missing file is no error."""
        with device_errors("delete files in", self._directory):
            await self.threads.write(self._delete, names)

    async def recycle(self, names: Sequence[str]) -> None:
        """Delete files durably, and keep the blocks of some for files that are created later."""
        with device_errors("recycle files in", self._directory):
            await self.threads.write(self._recycle, names)

    async def use_spares(self, *, allowed: bool) -> None:
        """Keep space of recycled files, or delete what is kept."""
        self._spares.allowed = allowed
        if not allowed:
            with device_errors("delete recycled files in", self._directory):
                await self.threads.write(self._spares.delete)

    async def read_file(self, name: str) -> bytes | None:
        """Return a small file's content; None if it does not exist."""
        path = self._directory / name
        with device_errors("read", path):
            return await self.threads.read(read_if_exists, path)

    async def write_file(self, name: str, data: bytes) -> None:
        """Set a small file's content atomically and durably."""
        path = self._directory / name
        with device_errors("write", path):
            await self.threads.write(self._place, path, data)

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a long function in a thread."""
        return await self.threads.read(function, *args, **kwargs)

    async def aclose(self) -> None:
        """Close every file, end the threads and unlock the directory."""
        if self.threads.has_ended:
            return
        for file in list(self._files):
            file.close()
        await self.threads.aclose()
        os.close(self._lock)

    def forget(self, file: RealFile) -> None:
        """Drop a closed file from the list of open ones."""
        self._files.discard(file)
        self._appended.discard(file)

    def note_appended(self, file: RealFile) -> None:
        """Count the space that the file has preallocated as free."""
        self._appended.add(file)

    def allocate(self, descriptor: int, start: int, end: int) -> int:
        """Allocate a part of a file and some space behind it, if need be by deleting spares.

        Returns: the end of what is allocated; `start` if nothing is, and the write allocates.
        """
        if not self.can.allocate:
            return start
        # Fewer bytes ahead, or none, on a disk that is nearly full.
        free_bytes = self.space().free_bytes - self._held_bytes
        ahead = min(_ALLOCATE_BYTES, int(free_bytes * _ALLOCATE_SHARE_OF_FREE)) & -BLOCK_BYTES
        if not ahead:
            return start
        try:
            self._with_room(functools.partial(fallocate, descriptor, start, end + ahead - start))
        except OSError:
            return start  # a limit of the device or the process: the write will report it
        return end + ahead

    def _try_out(self) -> None:
        """Find out what the file system can do; if it is full, it is tried again later."""
        found = capabilities(self._directory)
        self.can = Capabilities() if found is None else Capabilities(*found, is_known=True)

    def _open(self, name: str, *, size: int = sys.maxsize) -> RealFile:
        path = self._directory / name
        with device_errors("open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            file = RealFile(self, path, descriptor, size=size)
        self._files.add(file)
        return file

    def _create(self, path: Path, content: Sequence[BytesLike]) -> None:
        """Create a file; if it reuses a spare, old bytes of the spare follow the content."""
        if not self.can.is_known:
            self._try_out()
        data = b"".join(content)
        spare = self._spares.unused({file.inode for file in list(self._files)})
        if spare is None:
            self._place(path, data)
            return
        self._with_room(functools.partial(write_file, spare, data))
        self._spares.give(spare, path)
        sync_directory(self._directory)

    def _place(self, path: Path, data: bytes) -> None:
        """Write a file under a temporary name, and rename it when its content is durable."""
        temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        try:
            self._with_room(functools.partial(write_file, temporary, data))
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
            if not (self.can.allocate and self._spares.keep(path, free_bytes=free_bytes)):
                path.unlink()
        sync_directory(self._directory)

    def _with_room(self, write: Callable[[], None]) -> None:
        """Call `write`; if the file system is full, delete the spares and call it again."""
        try:
            write()
        except OSError as error:
            if error.errno not in NO_ROOM or not self._spares:
                raise
            self._spares.delete()
            write()
