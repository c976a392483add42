"""System calls of the real disk, its threads and spare space.

The calls are complete writes, preallocation and durable file names.  Some of the calls exist only
on Linux.  If one is missing, a POSIX call replaces it: `pwrite` and `pread` take one buffer at a
time, a file grows as it is written, zeros are written to reserve space, and every write goes
through the page cache.  On macOS `fsync` leaves bytes in the cache of the device; therefore a sync
is `F_FULLFSYNC` there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bookie.disks.port import DiskFullError
from bookie.disks.recent_bytes import BLOCK_BYTES
from dlcore.base.background import outcome_of
from dlcore.base.errors import BookieStorageError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path


P = ParamSpec("P")
logger = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None, use_errno=True)
_WOULD_BLOCK = (errno.EAGAIN, errno.EOPNOTSUPP)
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_NO_FULL_SYNC = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
LOCK_NAME = "lock"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_STATUS_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""
# The suffix is the one of temporary files: the next start deletes a probe that a crash left.
_PROBE_NAME = "probe.tmp"
_ZEROS = bytes(1024 * 1024)


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


def fallocate(descriptor: int, offset: int, size: int) -> None:
    """Allocate blocks, and extend the file over them.

    This is not `os.posix_fallocate`: on a file system that cannot allocate, that function writes
    to every block.
    """
    if not hasattr(_LIBC, "fallocate"):
        raise OSError(errno.ENOSYS, "the C library has no fallocate")
    start, length = ctypes.c_longlong(offset), ctypes.c_longlong(size)
    if _LIBC.fallocate(descriptor, 0, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def capabilities(directory: Path) -> tuple[bool, bool] | None:
    """Return whether the file system can preallocate, and whether direct writes are coherent.

    A direct write is coherent if a read through the page cache returns it.  Both are tried on a
    temporary file.  None: the file system is full, and nothing can be tried now.
    """
    path = directory / _PROBE_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    except OSError as error:
        logger.warning(
            "cannot test what the file system supports: %s; to do: see that the bookie may write "
            "in its data folder; until its next start it writes more slowly",
            error,
        )
        return None if error.errno in NO_ROOM else (False, False)
    try:
        can_allocate = _is_possible(lambda: fallocate(descriptor, 0, 2 * BLOCK_BYTES))
        is_direct = can_allocate and _is_possible(lambda: _try_direct(path, descriptor))
    except OSError as error:
        logger.warning(
            "cannot test what the file system supports now, trying later: %s; to do: nothing, "
            "but free some space if the disk is full",
            error,
        )
        return None
    finally:
        path.unlink()
        os.close(descriptor)
    logger.info("directory=%s can_allocate=%s is_direct=%s", directory, can_allocate, is_direct)
    return can_allocate, is_direct


def _is_possible(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        logger.info("not supported by this file system: %s", error)
        return False
    return True


def _try_direct(path: Path, descriptor: int) -> None:
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "RWF_DSYNC"):
        raise OSError(errno.ENOSYS, "this system has no direct writes that sync")
    direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            # The first round puts the block into the page cache; the second must replace it there.
            for filling in (b"1", b"2"):
                block[:] = filling * BLOCK_BYTES
                os.pwritev(direct, [block], BLOCK_BYTES, os.RWF_DSYNC)
                if os.pread(descriptor, BLOCK_BYTES, BLOCK_BYTES) != block[:]:
                    raise OSError(errno.EIO, "a read did not return the bytes of a direct write")
    finally:
        os.close(direct)


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to the start of a file, durably; bytes behind it stay."""
    # No O_TRUNC: a spare keeps its blocks.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, [memoryview(data)], 0)
        sync_file(path, descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(directory, descriptor)
    finally:
        os.close(descriptor)


def make_folder(directory: Path) -> None:
    """Make a folder and its missing parents; each name is durable before the next is made in it.

    The name of a folder that exists is synced as well: a process may have made the folder and been
    killed before it synced the name.
    """
    if not directory.exists():
        make_folder(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)
        return
    try:
        sync_directory(directory.parent)
    except (OSError, BookieStorageError) as error:  # we may have no right to read the parent
        logger.warning(
            "cannot sync the name of %s: %s; to do: let the bookie read the parent folder, or "
            "sync it once by hand: a power loss may undo a folder that is new",
            directory,
            error,
        )


def allocated_bytes(path: Path) -> int:
    """Return the bytes that a file occupies on the device, at most its size."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return min(status.st_size, status.st_blocks * _STATUS_BLOCK_BYTES)


def hold(path: Path, size: int) -> int:
    """Make the file occupy `size` bytes on the device; return how many it occupies.

    The result is smaller than `size` if the file system cannot allocate.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        held = os.fstat(descriptor).st_size
        try:
            _occupy(descriptor, held, size)
        except OSError as error:
            # A failed allocation may have taken some blocks; a full disk needs them back.
            os.ftruncate(descriptor, held)
            if error.errno in _CANNOT_ALLOCATE:
                return held
            raise
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
    return size


def _occupy(descriptor: int, start: int, end: int) -> None:
    """Allocate the blocks of a file up to `end`; those up to `start` are allocated already."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, end)
        return
    for offset in range(start, end, len(_ZEROS)):
        write_all(descriptor, [memoryview(_ZEROS)[: end - offset]], offset)


def read_if_exists(path: Path) -> bytes | None:
    """Return the content of a file, None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def lock_directory(directory: Path) -> int:
    """Make a folder if it is missing, and lock it; return the descriptor of the lock.

    Raises:
        ConfigurationError: it cannot be made, or another process has it.
    """
    try:
        if not (directory / LOCK_NAME).exists():
            make_folder(directory)
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


SPARE_SUFFIX = ".spare"
_SPARES_MAX = 2
"""Most spares; each is as large as an entry log file."""
_SHARE_OF_FREE = 1 / 16
"""Most bytes of all spares: other users of the file system need the free space as well."""


class Spares:
    """The spares of one directory; those that are there are taken over.

    The disk calls these methods in its thread for writes, and syncs the directory after `keep` and
    `give`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sizes = {path: path.stat().st_size for path in directory.glob(f"*{SPARE_SUFFIX}")}
        self.allowed = True
        """Whether new ones are kept."""

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all spares."""
        return sum(list(self._sizes.values()))  # copied: another thread may change them

    def keep(self, path: Path, *, free_bytes: int) -> bool:
        """Make a file a spare; False: there is no room for one more among the free bytes."""
        size = path.stat().st_size
        is_kept = (
            self.allowed
            and len(self._sizes) < _SPARES_MAX
            and size + self.size_bytes <= free_bytes * _SHARE_OF_FREE
        )
        if is_kept:
            self._sizes[path.rename(path.with_name(path.name + SPARE_SUFFIX))] = size
        return is_kept

    def unused(self, in_use: Collection[int]) -> Path | None:
        """Return a spare that no open handle reads, which a rewrite would change; None: no such.

        Args:
            in_use: the inodes of open files.
        """
        return next((path for path in self._sizes if path.stat().st_ino not in in_use), None)

    def give(self, spare: Path, path: Path) -> None:
        """Let a spare, which was written over, be the file with this path."""
        spare.rename(path)
        self._sizes.pop(spare, None)

    def delete(self) -> None:
        """Delete all spares durably."""
        for path in list(self._sizes):
            path.unlink(missing_ok=True)
            self._sizes.pop(path, None)
        sync_directory(self._directory)


T = TypeVar("T")

_READ_THREADS = 4


class DiskThreads:
    """Runs blocking calls of one disk; `name` is for the error after the end."""

    def __init__(self, name: object) -> None:
        self._name = name
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
