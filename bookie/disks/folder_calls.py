"""System calls on the folder of a real disk: durable names, preallocation, and spare space.

Some of the calls exist only on Linux.  If one is missing, a file grows as it is written, and zeros
are written to reserve space.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from typing import TYPE_CHECKING

from bookie.disks.real_file import BLOCK_BYTES, NO_ROOM, sync_file, write_all
from dlcore.base.errors import BookieStorageError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path


logger = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None, use_errno=True)
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
LOCK_NAME = "lock"
_STATUS_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""
# The suffix is the one of temporary files: the next start deletes a probe that a crash left.
_PROBE_NAME = "probe.tmp"
_ZEROS = bytes(1024 * 1024)


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
        # Tried and not looked up by name: it also depends on the mount and the kernel.
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
        # The lock was made after the folder's name was durable.
        if not (directory / LOCK_NAME).exists():
            make_folder(directory)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigurationError(
            f"data directory {directory} cannot be used: {error.strerror}"
        ) from error
    try:
        # The kernel releases it with the process, so a crash leaves no lock behind.
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

    def with_room(self, write: Callable[[], None]) -> None:
        """Call `write`; if the file system is full, delete the spares and call it again."""
        try:
            write()
        except OSError as error:
            if error.errno not in NO_ROOM or not self._sizes:
                raise
            self.delete()
            # Spares are only for speed, so a write that needs their space comes first.
            write()

    def delete(self) -> None:
        """Delete all spares durably."""
        for path in list(self._sizes):
            path.unlink(missing_ok=True)
            self._sizes.pop(path, None)
        sync_directory(self._directory)
