"""Calls of the kernel for the real disk: whole writes, space ahead, durable names.

Some of them only Linux has.  Where one is missing, a call that POSIX promises does its work:
`pwrite` and `pread` take one buffer at a time, a file grows as it is written, zeros are written to
hold space back, and no write goes past the page cache.  On macOS `fsync` leaves bytes in the cache
of the device, so a sync is `F_FULLFSYNC` there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
from typing import TYPE_CHECKING, ParamSpec

from bookie.disks.port import DiskFullError
from bookie.disks.recent_bytes import BLOCK_BYTES
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

P = ParamSpec("P")
logger = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None, use_errno=True)
_WOULD_BLOCK = (errno.EAGAIN, errno.EOPNOTSUPP)
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_NO_FULL_SYNC = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_STATUS_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""
_PROBE_NAME = "probe.tmp"
_ZEROS = bytes(1024 * 1024)


@contextlib.contextmanager
def device_errors(action: str, path: Path) -> Iterator[None]:
    """Turn errors of the device into those of the port, which name the file."""
    try:
        yield
    except OSError as error:
        raise device_error(action, path, error) from error


def device_error(action: str, path: Path, error: OSError) -> BookieStorageError:
    """Return an error of the device as one of the port."""
    kind = DiskFullError if error.errno in NO_ROOM else BookieStorageError
    return kind(f"cannot {action} {path}: {error.strerror}")


def sync_data(descriptor: int) -> None:
    """Make the bytes of a file durable, and what is needed to find them."""
    if _FULL_SYNC is not None or not hasattr(os, "fdatasync"):
        sync_file(descriptor)
    else:
        sync(os.fdatasync, descriptor)


def sync_file(descriptor: int) -> None:
    """Make the bytes of a file or the names of a folder durable, with all that describes them."""
    if _FULL_SYNC is None:
        sync(os.fsync, descriptor)
    else:
        sync(_sync_fully, descriptor, _FULL_SYNC)


def _sync_fully(descriptor: int, command: int) -> None:
    """Sync on macOS; a file system that is not on a device of its own offers `fsync` only."""
    try:
        fcntl.fcntl(descriptor, command)
    except OSError as error:
        if error.errno not in _NO_FULL_SYNC:
            raise
        os.fsync(descriptor)


def sync(call: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Sync; whatever fails, what was written is unknown from then on, also for want of room."""
    try:
        call(*args, **kwargs)
    except OSError as error:
        raise BookieStorageError(f"cannot sync: {error.strerror}") from error


def write_all(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> None:
    """Write every byte of `buffers` from `offset` on.

    A short write goes on where it ended.  Within a block a direct one cannot, and the kernel
    refuses it: then the log has failed.
    """
    while buffers:
        if hasattr(os, "pwritev"):
            count = os.pwritev(descriptor, buffers, offset, flags)
        else:
            count = os.pwrite(descriptor, buffers[0], offset)
        offset += count
        buffers = without_first(buffers, count)


def read_some(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill buffers from `offset` on, one or more of them; return the count of bytes, 0 at the end.

    None of the buffers is empty.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, offset)
    data = os.pread(descriptor, len(buffers[0]), offset)
    buffers[0][: len(data)] = data
    return len(data)


def read_cached(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill buffers with what needs no wait for the device; return the count of bytes."""
    if not hasattr(os, "RWF_NOWAIT"):
        return 0
    try:
        return os.preadv(descriptor, buffers, offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _WOULD_BLOCK:
            return 0
        raise


def without_first(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the buffers behind the first `count` bytes, without empty ones."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if count < len(buffer):
            rest.append(buffer[count:])
        count = max(0, count - len(buffer))
    return rest


def fallocate(descriptor: int, offset: int, size: int) -> None:
    """Allocate blocks, and let the file grow over them.

    Not `os.posix_fallocate`: where the file system cannot, that writes to every block.
    """
    if not hasattr(_LIBC, "fallocate"):
        raise OSError(errno.ENOSYS, "the C library has no fallocate")
    start, length = ctypes.c_longlong(offset), ctypes.c_longlong(size)
    if _LIBC.fallocate(descriptor, 0, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def capabilities(directory: Path) -> tuple[bool, bool] | None:
    """Return whether the file system can allocate ahead, and write directly, seen by every reader.

    Tried on a file: an overwritten block that is in the page cache must be read back as written.
    None: it is full, so that nothing can be tried now.
    """
    path = directory / _PROBE_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    except OSError as error:
        logger.warning("cannot try out what the file system can do: %s", error)
        return None if error.errno in NO_ROOM else (False, False)
    try:
        can_allocate = _is_possible(lambda: fallocate(descriptor, 0, 2 * BLOCK_BYTES))
        is_direct = can_allocate and _is_possible(lambda: _try_direct(path, descriptor))
    except OSError as error:
        logger.warning("what the file system can do is tried out later: %s", error)
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
        logger.info("not on this file system: %s", error)
        return False
    return True


def _try_direct(path: Path, descriptor: int) -> None:
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "RWF_DSYNC"):
        raise OSError(errno.ENOSYS, "this system has no direct writes that sync")
    direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            for filling in (b"1", b"2"):
                block[:] = filling * BLOCK_BYTES
                os.pwritev(direct, [block], BLOCK_BYTES, os.RWF_DSYNC)
                if os.pread(descriptor, BLOCK_BYTES, BLOCK_BYTES) != block[:]:
                    raise OSError(errno.EIO, "a direct write was not seen by a reader")
    finally:
        os.close(direct)


def write_file(path: Path, data: bytes) -> None:
    """Make a file begin with `data`, durably."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, [memoryview(data)], 0)
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def make_folder(directory: Path) -> None:
    """Make a folder and those it is in, each one's name durable before anything is made in it.

    One that exists may be that of a process that was killed before the sync.
    """
    if not directory.exists():
        make_folder(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)
        return
    try:
        sync_directory(directory.parent)
    except (OSError, BookieStorageError) as error:  # it may be a folder that we must not read
        logger.warning("cannot sync the name of %s: %s", directory, error)


def allocated_bytes(path: Path) -> int:
    """Return the bytes that a file takes of the device, as far as it says so."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return min(status.st_size, status.st_blocks * _STATUS_BLOCK_BYTES)


def hold(path: Path, size: int) -> int:
    """Let the file take `size` bytes of the device; return how many it has."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        held = os.fstat(descriptor).st_size
        try:
            _occupy(descriptor, held, size)
        except OSError as error:
            os.ftruncate(descriptor, held)
            if error.errno in _CANNOT_ALLOCATE:
                return held
            raise
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
    return size


def _occupy(descriptor: int, start: int, end: int) -> None:
    """Let a file have blocks of its own up to `end`; up to `start` it has them."""
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
