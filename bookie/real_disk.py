"""A directory of the machine's file system.

Writes and syncs go through one thread, so that nothing overlaps on the device and the event loop
never waits for a slow one; small appends to a device that was quick last time do without the
thread.  Reads are tried without waiting first; only what is not cached takes a thread.  Entries
are read with `preadv` and not through a mapping, because a bad sector under a mapping kills the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bookie.disk_port import DiskFullError, DiskSpace
from dlcore.errors import BookieStorageError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlcore.ledger.digest import BytesLike

P = ParamSpec("P")
T = TypeVar("T")

LOCK_NAME = "lock"
RESERVE_NAME = "reserve"
"""A file that holds nothing but space."""
_OWN_NAMES = (LOCK_NAME, RESERVE_NAME)
_TEMPORARY_SUFFIX = ".tmp"
_READ_THREADS = 4
_JOIN_BYTES_MAX = 256 * 1024
"""A gathered write up to this size is joined first: a copy is cheaper than many vectors."""
_INLINE_BYTES_MAX = 16 * 1024
"""Appends up to this size are written and synced on the event loop while the device is quick: two
switches of threads cost more than the sync itself."""
_QUICK_S_MAX = 0.001
"""One append that takes longer sends the following to the thread, until one there was quick."""
_VECTORS_MAX = 512
"""Buffers per `writev`; Linux takes 1024."""
_WOULD_BLOCK = (errno.EAGAIN, errno.EOPNOTSUPP)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""


@contextlib.contextmanager
def _device_errors(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = DiskFullError if error.errno in _NO_ROOM else BookieStorageError
        raise kind(f"cannot {action} {path}: {error.strerror}") from error


class RealFile:
    """An open file of a `RealDisk`."""

    def __init__(self, disk: RealDisk, path: Path, descriptor: int, size: int) -> None:
        self._disk = disk
        self._path = path
        self._descriptor = descriptor
        self._size = size
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

    async def append(self, buffers: Sequence[BytesLike]) -> None:
        """Write `buffers` at the end and make them durable."""
        offset = self._size
        size = sum(len(buffer) for buffer in buffers)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        if size <= _INLINE_BYTES_MAX and self._disk.is_quick and not self._is_closed:
            with _device_errors("append to", self._path):
                self._append(buffers, offset)
        else:
            await self._write("append to", self._append, buffers, offset)
        self._size += size
        self._disk.is_quick = loop.time() - started_s <= _QUICK_S_MAX

    async def rewrite(self, offset: int, data: BytesLike) -> None:
        """Write `data` over existing bytes and make them durable."""
        await self._write("rewrite", self._append, [data], offset)

    async def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, durably."""
        await self._write("truncate", self._truncate, size)
        self._size = size

    async def read(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes."""
        if self._is_closed:
            raise BookieStorageError(f"{self._path} is closed")
        buffer = bytearray(size)
        self._uses += 1
        try:
            with _device_errors("read", self._path):
                done = self._read_cached(buffer, offset)
                if done < size:
                    await self._disk.read_in_thread(self._read_rest, buffer, offset, done)
        finally:
            self._uses -= 1
            self._close_when_unused()
        return memoryview(buffer).toreadonly()

    def read_now(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes, waiting for the device."""
        if self._is_closed:
            raise BookieStorageError(f"{self._path} is closed")
        buffer = bytearray(size)
        with _device_errors("read", self._path):
            self._read_rest(buffer, offset, 0)
        return memoryview(buffer).toreadonly()

    def view(self, offset: int, size: int) -> memoryview:
        """Return a read-only mapping of bytes that will not change any more."""
        if offset + size > self._size:
            raise BookieStorageError(
                f"{self._path} has {self._size} bytes, not {size} at offset {offset}"
            )
        if size == 0:
            return memoryview(b"")
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        with _device_errors("map", self._path):
            mapping = mmap.mmap(
                self._descriptor, offset + size - start, access=mmap.ACCESS_READ, offset=start
            )
        return memoryview(mapping)[offset - start :]

    def close(self) -> None:
        """Close the file once the operations under way are done."""
        self._is_closed = True
        self._close_when_unused()

    async def _write(
        self, action: str, function: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        if self._is_closed:
            raise BookieStorageError(f"{self._path} is closed")
        self._uses += 1
        try:
            with _device_errors(action, self._path):
                await self._disk.write_in_thread(function, *args, **kwargs)
        finally:
            self._uses -= 1
            self._close_when_unused()

    def _append(self, buffers: Sequence[BytesLike], offset: int) -> None:
        if sum(len(buffer) for buffer in buffers) <= _JOIN_BYTES_MAX:
            buffers = [b"".join(buffers)]
        end = offset
        try:
            for start in range(0, len(buffers), _VECTORS_MAX):
                end = _write_all(self._descriptor, buffers[start : start + _VECTORS_MAX], end)
        except OSError as error:
            if error.errno in _NO_ROOM and offset == self._size:
                os.ftruncate(self._descriptor, offset)
            raise
        _sync(os.fdatasync, self._descriptor)

    def _truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        _sync(os.fsync, self._descriptor)

    def _read_cached(self, buffer: bytearray, offset: int) -> int:
        try:
            return os.preadv(self._descriptor, [buffer], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in _WOULD_BLOCK:
                return 0
            raise

    def _read_rest(self, buffer: bytearray, offset: int, done: int) -> None:
        with memoryview(buffer) as view:
            while done < len(buffer):
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, f"the file ends before offset {offset + len(buffer)}")
                done += count

    def _close_when_unused(self) -> None:
        if self._is_closed and self._uses == 0 and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._disk.forget(self)


def _sync(sync: Callable[[int], None], descriptor: int) -> None:
    """Sync; whatever fails, what was written is unknown from then on, also for want of room."""
    try:
        sync(descriptor)
    except OSError as error:
        raise BookieStorageError(f"cannot sync: {error.strerror}") from error


def _write_all(descriptor: int, buffers: Sequence[BytesLike], offset: int) -> int:
    """Write every byte of `buffers` from `offset` on; return the offset after them."""
    remaining = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while remaining:
        count = os.pwritev(descriptor, remaining, offset)
        offset += count
        while count and count >= len(remaining[0]):
            count -= len(remaining.pop(0))
        if count:
            remaining[0] = remaining[0][count:]
    return offset


class RealDisk:
    """One directory, made if missing and locked against other processes.

    Raises:
        ConfigurationError: the directory is in use, or cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)
        self._lock = _lock_directory(self._directory)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="bookie-disk-write")
        self._readers = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="bookie-disk-read")
        self._files: set[RealFile] = set()
        self._is_closed = False
        self._held_bytes = _allocated_bytes(self._directory / RESERVE_NAME)
        self.is_quick = False
        """Whether the last append was durable faster than a thread is worth."""
        for path in self._directory.glob(f"*{_TEMPORARY_SUFFIX}"):
            path.unlink()  # left by a crash before its rename: nobody ever relied on it

    def space(self) -> DiskSpace:
        """Return free and total space."""
        with _device_errors("examine", self._directory):
            status = os.statvfs(self._directory)
        return DiskSpace(
            free_bytes=status.f_bavail * status.f_frsize + self._held_bytes,
            total_bytes=status.f_blocks * status.f_frsize,
        )

    @property
    def held_bytes(self) -> int:
        """Space held back now."""
        return self._held_bytes

    async def hold(self, size_bytes: int) -> None:
        """Hold back `size_bytes` in all; nothing where the file system cannot do that."""
        path = self._directory / RESERVE_NAME
        with _device_errors("hold back space in", path):
            self._held_bytes = await self.write_in_thread(_hold, path, size_bytes)

    async def release(self, size_bytes: int) -> bool:
        """Give up to `size_bytes` of what is held back to writes; False if nothing is."""
        if not self._held_bytes:
            return False
        path = self._directory / RESERVE_NAME
        size = max(0, self._held_bytes - size_bytes)
        with _device_errors("release space of", path):
            await self.write_in_thread(os.truncate, path, size)
        self._held_bytes = size
        return True

    def names(self) -> list[str]:
        """Return the names of all files, sorted; folders are not ours (a mount has lost+found)."""
        with _device_errors("list", self._directory):
            return sorted(
                path.name
                for path in self._directory.iterdir()
                if path.name not in _OWN_NAMES and not path.is_dir()
            )

    async def create(self, name: str, content: Sequence[BytesLike]) -> RealFile:
        """Create a file that holds `content`; under its name it exists whole or not at all."""
        path = self._directory / name
        if path.exists():
            raise BookieStorageError(f"cannot create {path}: it exists")
        with _device_errors("create", path):
            await self.write_in_thread(self._place, path, content)
        return self.open(name)

    def open(self, name: str) -> RealFile:
        """Open an existing file for reading and appending."""
        path = self._directory / name
        with _device_errors("open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            size = os.fstat(descriptor).st_size
        file = RealFile(self, path, descriptor, size)
        self._files.add(file)
        return file

    async def delete(self, names: Sequence[str]) -> None:
        """Delete files durably; one that does not exist is no error."""
        with _device_errors("delete files in", self._directory):
            await self.write_in_thread(self._delete, names)

    async def read_file(self, name: str) -> bytes | None:
        """Return a small file's content; None if it does not exist."""
        path = self._directory / name
        with _device_errors("read", path):
            return await self.read_in_thread(_read_if_exists, path)

    async def write_file(self, name: str, data: bytes) -> None:
        """Set a small file's content atomically and durably."""
        path = self._directory / name
        with _device_errors("write", path):
            await self.write_in_thread(self._place, path, [data])

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run long work in a thread."""
        return await self.read_in_thread(function, *args, **kwargs)

    async def aclose(self) -> None:
        """Close every file, end the threads and unlock the directory."""
        if self._is_closed:
            return
        self._is_closed = True
        for file in list(self._files):
            file.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._stop_threads)
        os.close(self._lock)

    async def write_in_thread(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `function` after all writes before it; it is not interrupted when the caller is."""
        return await self._run(self._writer, functools.partial(function, *args, **kwargs))

    async def read_in_thread(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `function` beside others."""
        return await self._run(self._readers, functools.partial(function, *args, **kwargs))

    def forget(self, file: RealFile) -> None:
        """Drop a closed file from the list of open ones."""
        self._files.discard(file)

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self._is_closed:
            raise BookieStorageError(f"{self._directory} is closed")
        future = asyncio.get_running_loop().run_in_executor(executor, work)
        try:
            return await asyncio.shield(future)
        finally:
            # A cancelled caller waits too: the thread still uses the descriptor and the buffers.
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            future.exception()

    def _place(self, path: Path, content: Sequence[BytesLike]) -> None:
        temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write_all(descriptor, content, 0)
            _sync(os.fsync, descriptor)
            temporary.rename(path)
        except OSError:
            temporary.unlink()  # what it took of a full disk is needed
            raise
        finally:
            os.close(descriptor)
        _sync_directory(self._directory)

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            (self._directory / name).unlink(missing_ok=True)
        _sync_directory(self._directory)

    def _stop_threads(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()


def _lock_directory(directory: Path) -> int:
    try:
        if not directory.exists():
            directory.mkdir(parents=True)
            _sync_directory(directory.parent)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigurationError(
            f"data directory {directory} cannot be used: {error.strerror}"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigurationError(
            f"data directory {directory} is in use by another process; every bookie needs its own"
        ) from error
    return descriptor


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(os.fsync, descriptor)
    finally:
        os.close(descriptor)


def _read_if_exists(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _allocated_bytes(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return min(status.st_size, status.st_blocks * _BLOCK_BYTES)


def _hold(path: Path, size: int) -> int:
    """Let the file take `size` bytes of the device; return how many it has."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        held = os.fstat(descriptor).st_size
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.ftruncate(descriptor, held)
            if error.errno in _CANNOT_ALLOCATE:
                return held
            raise
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
    return size
