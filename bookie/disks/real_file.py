"""The files of a real disk: their system calls, the disk's threads, and the ring of last bytes.

The calls are complete writes and reads.  Some of them exist only on Linux.  If one is missing, a
POSIX call replaces it: `pwrite` and `pread` take one buffer at a time, and every write goes through
the page cache.  On macOS `fsync` leaves bytes in the cache of the device; therefore a sync is
`F_FULLFSYNC` there.

A file that has appends has a ring buffer with its last bytes: appends are written from it, and
followers read it.  The ring holds byte `offset` of the file at `offset` modulo the ring's size.
This has four uses.  Blocks of the file are aligned in memory, as direct writes must be.  The last
block, partly filled, is in memory when the next append continues it.  Reads at the end of the file
need neither the device nor the page cache.  Nothing is allocated per append or per entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import numpy as np

from bookie.disks.port import DiskFullError
from dlcore.base.background import outcome_of
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from dlcore.wire.frames import BytesLike

P = ParamSpec("P")
T = TypeVar("T")

# Some file systems know RWF_NOWAIT and cannot do it; then a thread reads, as for uncached bytes.
_WOULD_BLOCK = (errno.EAGAIN, errno.EOPNOTSUPP)
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_NO_FULL_SYNC = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
# A quota that is used up ends as a full disk does: with space that is freed later.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
BLOCK_BYTES = 4096
"""Alignment of direct writes, in the file and in memory."""
_SMALL_BYTES = 4096
"""Buffers that are smaller than this on average are joined before the copy: one join costs less
than many small copies."""
_PIECES = 4
"""No write is longer than the ring divided by this, so that older bytes can still be read."""
_ZEROS = bytes(BLOCK_BYTES)
_RECENT_BYTES = 32 * 1024 * 1024
"""Size of a ring: the writes of some tenths of a second at the rate of a disk."""
_INLINE_BYTES_MAX = 16 * 1024
"""Appends up to this size run on the event loop while the device is quick: two switches between
threads cost more than the sync itself."""
_QUICK_S_MAX = 0.002
"""After a write that takes longer, appends use the thread, until one of them is quick again."""
_READ_THREADS = 4
"""Uncached entries of 512 KB come at 440 a second one by one, and at 810 with four or more."""


@contextlib.contextmanager
def device_errors(action: str, path: Path) -> Iterator[None]:
    """Raise an `OSError` of the device as an error of the port that names the file."""
    try:
        yield
    except OSError as error:
        raise device_error(action, path, error) from error


def device_error(action: str, path: Path, error: OSError) -> BookieStorageError:
    """Return the error of the port for an error of the device."""
    kind = DiskFullError if error.errno in NO_ROOM else BookieStorageError
    return kind(f"cannot {action} {path}: {error.strerror}")


def sync_data(path: Path, descriptor: int) -> None:
    """Make the bytes of a file durable, with the metadata that is needed to read them."""
    if _FULL_SYNC is not None or not hasattr(os, "fdatasync"):
        sync_file(path, descriptor)
    else:
        sync(path, os.fdatasync, descriptor)


def sync_file(path: Path, descriptor: int) -> None:
    """Make the bytes of a file, or the names in a folder, durable with all their metadata."""
    if _FULL_SYNC is None:
        sync(path, os.fsync, descriptor)
    else:
        sync(path, _sync_fully, descriptor, _FULL_SYNC)


def _sync_fully(descriptor: int, command: int) -> None:
    """Sync on macOS.  Some file systems, such as network mounts, offer only `fsync`."""
    try:
        fcntl.fcntl(descriptor, command)
    except OSError as error:
        if error.errno not in _NO_FULL_SYNC:
            raise
        os.fsync(descriptor)


def sync(path: Path, call: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function that syncs a file or a folder.

    After any failure the state of the written bytes is unknown.  Therefore a sync that fails
    because the disk is full is not a `DiskFullError` either, which would promise the opposite.
    """
    try:
        call(*args, **kwargs)
    except OSError as error:
        raise BookieStorageError(f"cannot sync {path}: {error.strerror}") from error


def write_all(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> None:
    """Write all bytes of `buffers` from `offset` on.

    After a short write the rest is written.  A direct write cannot continue within a block: the
    kernel refuses it, and the append fails with this error.
    """
    while buffers:
        if hasattr(os, "pwritev"):
            count = os.pwritev(descriptor, buffers, offset, flags)
        else:
            count = os.pwrite(descriptor, buffers[0], offset)
        offset += count
        buffers = without_first(buffers, count)


def read_some(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill one buffer or more from `offset` on; return the count of bytes, 0 at the file's end.

    None of the buffers is empty.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, offset)
    data = os.pread(descriptor, len(buffers[0]), offset)
    buffers[0][: len(data)] = data
    return len(data)


def read_cached(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill buffers from the page cache only; return the count of bytes."""
    if not hasattr(os, "RWF_NOWAIT"):
        return 0
    try:
        return os.preadv(descriptor, buffers, offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _WOULD_BLOCK:
            return 0
        raise


def without_first(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first `count` bytes, and without empty buffers."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if count < len(buffer):
            rest.append(buffer[count:])
        count = max(0, count - len(buffer))
    return rest


def rounded_up(size: int) -> int:
    """Return `size` in whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class RecentBytes:
    """The ring of one file; one append at a time fills it, in any thread.

    Args:
        ring: memory of whole pages; their number is a power of two.
        block: the bytes of the file's last, partly filled block.
        offset: the end of the file.
    """

    def __init__(self, ring: mmap.mmap, block: BytesLike, offset: int) -> None:
        self.ring = ring
        self._view = memoryview(ring)
        self._first = offset - len(block)
        self.end = offset
        """The end of the durable bytes."""
        # The end of the bytes in the ring: during an append it is ahead of `end`.
        self._filled = offset
        self._put(memoryview(block), self._first)

    def fill(
        self, buffers: Sequence[BytesLike], offset: int, size: int
    ) -> Iterable[tuple[int, list[memoryview]]]:
        """Copy `buffers`, `size` bytes in all, into the ring at the file's end, which is `offset`.

        Returns: pairs (offset, memory) to write in this order.  They are whole blocks: the first
        one begins with the bytes that it held before, the last one is padded with zeros.  Write
        each pair before the next one is taken, which may overwrite memory of the ring.
        """
        # Set before any byte changes: `read_into` in another thread relies on this order.
        end = self._filled = rounded_up(offset + size)
        if len(buffers) * _SMALL_BYTES <= size:
            return self._fill_pieces(buffers, offset)
        data = b"".join(buffers)
        start = offset - offset % BLOCK_BYTES
        at = start % len(self.ring)
        memory = self._view[at : at + end - start]
        if len(memory) < end - start or not self.is_one_piece(offset, size):
            return self._fill_pieces([data], offset)
        filled = offset - start + size
        memory[offset - start : filled] = data
        memory[filled:] = _ZEROS[: len(memory) - filled]
        return [(start, [memory])]

    def _fill_pieces(
        self, buffers: Sequence[BytesLike], offset: int
    ) -> Iterator[tuple[int, list[memoryview]]]:
        start = offset - offset % BLOCK_BYTES
        piece_bytes = len(self.ring) // _PIECES
        for buffer in buffers:
            data = memoryview(buffer)
            while data:
                if offset == start + piece_bytes:
                    yield start, self._memory(start, offset)
                    start = offset
                part = data[: start + piece_bytes - offset]
                self._put(part, offset)
                offset += len(part)
                data = data[len(part) :]
        self._put(memoryview(_ZEROS)[: self._filled - offset], offset)
        yield start, self._memory(start, self._filled)

    def is_one_piece(self, offset: int, size: int) -> bool:
        """Return whether the append of `size` bytes at `offset` is a single write."""
        return offset % BLOCK_BYTES + size <= len(self.ring) // _PIECES

    def note_written(self, end: int) -> None:
        """Allow reads up to `end`: these bytes are durable now."""
        self.end = end

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fill buffers, one after the other; False if the ring does not hold all these bytes."""
        if offset < self._first or offset + sum(map(len, buffers)) > self.end:
            return False
        at = offset
        for buffer in buffers:
            filled = 0
            for memory in self._memory(at, at + len(buffer)):
                buffer[filled : filled + len(memory)] = memory
                filled += len(memory)
            at += filled
        # An append in another thread may have overwritten these bytes during the copy.  It moves
        # `_filled` first, so this check finds it.
        return offset >= self._filled - len(self.ring)

    def _put(self, data: memoryview, offset: int) -> None:
        for memory in self._memory(offset, offset + len(data)):
            memory[:] = data[: len(memory)]
            data = data[len(memory) :]

    def _memory(self, start: int, end: int) -> list[memoryview]:
        """Return the memory of a range, in two parts if the range wraps around the ring's end."""
        at = start % len(self.ring)
        first = self._view[at : at + end - start]
        rest = end - start - len(first)
        return [first, self._view[:rest]] if rest else [first]


class Capabilities(NamedTuple):
    """The work that the file system of a disk can do; nothing, before it is known."""

    allocate: bool = False
    """Space can be preallocated."""
    write_directly: bool = False
    """Direct writes are coherent with the page cache."""
    is_known: bool = False


class _DiskThreads:
    """Runs blocking calls of one disk; `name` is for the error after the end."""

    def __init__(self, name: object) -> None:
        self._name = name
        # One, because writes must reach the device in their order, and never overlap.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="bookie-disk-write")
        self._readers = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="bookie-disk-read")
        self.has_ended = False

    async def write(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` after all earlier writes; a cancelled caller does not interrupt it."""
        return await self._run(self._writer, functools.partial(function, *args, **kwargs))

    async def read(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in one of several threads."""
        return await self._run(self._readers, functools.partial(function, *args, **kwargs))

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self.has_ended:
            raise BookieStorageError(f"{self._name} is closed")
        future = asyncio.get_running_loop().run_in_executor(executor, work)
        try:
            return await outcome_of(future)
        finally:
            # A cancelled caller waits too: the thread still uses the descriptor and the buffers.
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            future.exception()  # else asyncio would log an error that a cancelled caller left

    async def aclose(self) -> None:
        """Wait for the calls under way, and end the threads; nothing can be run from now on."""
        self.has_ended = True
        await asyncio.get_running_loop().run_in_executor(None, self._stop)

    def _stop(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()


class OpenFiles:
    """The open files of one disk, and the objects that they share.

    Args:
        name: the disk's name, for errors.
        allocate: allocates the part of a file between two offsets, and some space behind it;
            returns the end of what is allocated, or the first offset if nothing is.
    """

    def __init__(self, name: object, allocate: Callable[[int, int, int], int]) -> None:
        self.threads = _DiskThreads(name)
        self.allocate = allocate
        self.can = Capabilities()
        self.is_quick = False
        """Whether the last append was so fast that a thread is not worth its cost."""
        self._files: set[RealFile] = set()
        self._appended: set[RealFile] = set()
        self._free_ring: mmap.mmap | None = None  # one is kept: one file at a time has appends

    @property
    def ahead_bytes(self) -> int:
        """Space that the files have preallocated."""
        # The set is copied first, because another thread may add a file meanwhile.
        return sum([file.ahead_bytes for file in list(self._appended)])

    @property
    def inodes(self) -> set[int]:
        """The inodes of the files."""
        return {file.inode for file in list(self._files)}

    def open(self, path: Path, *, size: int = sys.maxsize) -> RealFile:
        """Open an existing file; without the bytes behind `size`."""
        with device_errors("open", path):
            # Without O_DIRECT: reads of older bytes go through the page cache.
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            file = RealFile(self, path, descriptor, size=size)
        self._files.add(file)
        return file

    def take_ring(self, file: RealFile) -> mmap.mmap:
        """Return memory of whole pages, as direct writes require, for a file that gets appends."""
        self._appended.add(file)
        ring, self._free_ring = self._free_ring, None
        return mmap.mmap(-1, _RECENT_BYTES) if ring is None else ring

    def give_ring(self, ring: mmap.mmap) -> None:
        """Take the memory of a ring back."""
        # A second one comes only while a file is being rolled, and goes back to the system.
        self._free_ring = self._free_ring or ring

    def forget(self, file: RealFile) -> None:
        """Drop a file that is closed."""
        self._files.discard(file)
        self._appended.discard(file)

    async def aclose(self) -> None:
        """Close every file, and end the threads."""
        for file in list(self._files):
            file.close()
        await self.threads.aclose()


class RealFile:
    """An open file of a `RealDisk`."""

    def __init__(self, shared: OpenFiles, path: Path, descriptor: int, *, size: int) -> None:
        self._shared = shared
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
        shared = self._shared
        size = sum(map(len, buffers))
        if (
            not shared.is_quick
            or self._recent is None
            or self._is_closed
            or size > _INLINE_BYTES_MAX
            # Less one block, because the last block is written whole.
            or (shared.can.allocate and self._size + size > self._allocated - BLOCK_BYTES)
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
        # The ring first: it has the newest bytes, for which followers ask.
        if self._recent is not None and self._recent.read_into(offset, buffers):
            return
        size = sum(map(len, buffers))
        self._uses += 1
        try:
            with device_errors("read", self._path):
                # Cached bytes cost less than the way to a thread and back.
                done = read_cached(self._descriptor, buffers, offset)
                if done < size:
                    await self._shared.threads.read(self._read_rest, buffers, offset, done)
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
        # A close meanwhile must leave the descriptor, whose number another file could get.
        self._uses += 1
        try:
            with device_errors(action, self._path):
                await self._shared.threads.write(function, *args, **kwargs)
        finally:
            self._uses -= 1
            self._close_when_unused()

    def _append(self, buffers: Sequence[BytesLike], offset: int, size: int) -> None:
        recent = self._recent
        if recent is None:
            self._recent = recent = self._start_recent(offset)
        end = rounded_up(offset + size)
        if end > self._allocated:
            self._allocated = self._shared.allocate(self._descriptor, self._allocated, end)
        pieces = recent.fill(buffers, offset, size)
        started_s = time.perf_counter()
        if self._direct >= 0 and end <= self._allocated and recent.is_one_piece(offset, size):
            # Write and sync in one call.  The blocks exist, so only data has to reach the device.
            ((start, memory),) = pieces
            # Its failure counts as that of a sync, because the bytes may be there or not.
            sync(self._path, write_all, self._direct, memory, start, os.RWF_DSYNC)
        else:
            descriptor = self._direct if self._direct >= 0 else self._descriptor
            with self._cut_if_full():
                for start, memory in pieces:
                    write_all(descriptor, memory, start)
            sync_data(self._path, descriptor)
        # Without the wait for a thread: on a busy machine this wait speaks against threads.
        self._shared.is_quick = time.perf_counter() - started_s <= _QUICK_S_MAX
        self._allocated = max(self._allocated, end)
        recent.note_written(offset + size)

    def _start_recent(self, offset: int) -> RecentBytes:
        """Prepare appends from `offset` on: open for direct writes, and load the last block."""
        if self._shared.can.write_directly and self._direct < 0:
            flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
            self._direct = os.open(self._path, flags)
        block = bytearray(offset % BLOCK_BYTES)
        self._read_rest([memoryview(block)], offset - len(block), 0)
        return RecentBytes(self._shared.take_ring(self), block, offset)

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
            self._shared.give_ring(self._recent.ring)
            self._recent = None

    def _read_rest(self, buffers: Sequence[memoryview], offset: int, done: int) -> None:
        rest = without_first(buffers, done)
        offset += done
        while rest:
            count = read_some(self._descriptor, rest, offset)
            # An error, because the index names these bytes: fewer of them must never be returned.
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
            self._shared.forget(self)
