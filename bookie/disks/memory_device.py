"""The device under a disk in memory: its speed, its power, its faults, and its space."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie.disks.memory_folder import SECTOR_BYTES
from bookie.disks.port import DiskFullError
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie.disks.memory_folder import MemoryFolder

DEFAULT_TOTAL_BYTES = 1 << 40
_AHEAD_BYTES = 3 * SECTOR_BYTES
"""Bytes preallocated at a time, behind the end of a file with appends."""
_AHEAD_SHARE_OF_FREE = 1 / 64


class MemoryDevice:
    """Speed, power and faults of a device, which a test sets.

    `write_error`, `sync_error` or `read_error` makes the next such operation fail, and is cleared
    by it.  `latency_s` returns the delay of each step; an append that `is_quick` allows on the
    event loop has none.
    """

    def __init__(self, latency_s: Callable[[], float] | None) -> None:
        self.latency_s = latency_s
        self.is_quick: Callable[[], bool] = lambda: False
        self.write_error: str | None = None
        self.sync_error: str | None = None
        self.read_error: str | None = None
        self.steps = 0
        """Number of writes, syncs and name changes so far."""
        self.crash_at_step: int | None = None
        """Power is lost when `steps` reaches this number."""
        self.on_crash: Callable[[], None] = lambda: None
        """Called after this loss of power; the callee must end every process on the disk."""

    def loses_power(self) -> bool:
        """Count a step; return whether power is lost at it."""
        self.steps += 1
        return self.crash_at_step is not None and self.steps >= self.crash_at_step

    def check_read(self) -> None:
        """Raise `read_error` if it is set."""
        if self.read_error is not None:
            message, self.read_error = self.read_error, None
            raise BookieStorageError(f"cannot read: {message}")

    def take_write_error(self) -> BookieStorageError | None:
        """Return the error of a write that fails now, None if it does not."""
        message, self.write_error = self.write_error, None
        return None if message is None else BookieStorageError(f"cannot write: {message}")

    def take_sync_error(self) -> BookieStorageError | None:
        """Return the error of a sync that fails now, None if it does not."""
        message, self.sync_error = self.sync_error, None
        return None if message is None else BookieStorageError(f"cannot sync: {message}")


class MemoryRoom:
    """The space of a file system in memory, of which a folder, its reserve and others take some."""

    def __init__(self, folder: MemoryFolder, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.held_bytes = 0
        """The reserve; it survives crashes."""
        self.filler_bytes = 0
        """Space that other users of the file system take."""
        self.is_crowded = False
        """Whether other users of the file system take the space that a truncation frees at once."""
        self._folder = folder

    def free_bytes(self) -> int:
        """Return the bytes that any user of the file system may take."""
        used = self._folder.used_bytes() + self.filler_bytes
        return max(0, self.total_bytes - used - self.held_bytes)

    def fill(self, leave_bytes: int = 0) -> None:
        """Let other users take all space except `leave_bytes` and the reserve."""
        self.filler_bytes = max(0, self.filler_bytes + self.free_bytes() - leave_bytes)

    def hold(self, size_bytes: int) -> None:
        """Reserve `size_bytes` in all, or raise `DiskFullError`."""
        if size_bytes - self.held_bytes > self.free_bytes():
            raise DiskFullError("cannot reserve space: no space left on device")
        self.held_bytes = size_bytes

    def release(self, size_bytes: int) -> bool:
        """Release up to `size_bytes` of the reserve; False if it is empty."""
        is_held = self.held_bytes > 0
        self.held_bytes = max(0, self.held_bytes - size_bytes)
        return is_held

    def fits(self, growth: int) -> bool:
        """Return whether `growth` more bytes fit, after the deletion of spares if need be."""
        if growth > self.free_bytes():
            self._folder.remove(self._folder.spares())
        return growth <= self.free_bytes()

    def ahead_bytes(self) -> int:
        """Return how many bytes to preallocate now."""
        return _AHEAD_BYTES if self.free_bytes() * _AHEAD_SHARE_OF_FREE >= _AHEAD_BYTES else 0
