"""The status of a storage: writable, read-only, failed or closed.

It is read-only while the disk is full, failed after a write or sync has failed, and closed in the
end.  A read-only storage still accepts recovery adds, LACs and fences.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from bookie.space.room import LOOK_DELAY_S, Room
from dlcore.base.errors import BookieReadOnlyError, BookieStorageError, BookieUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie.config import StorageConfig
    from bookie.space.budget import Claim
    from bookie.storage.storage_core import StorageCore
    from dlcore.base.errors import BookieError


class Timers:
    """Timers of one event loop, one per action."""

    def __init__(self) -> None:
        self._handles: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._is_closed = False

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` once after `delay_s`, unless it is scheduled or `close` was called."""
        if action in self._handles or self._is_closed:
            return

        def run() -> None:
            del self._handles[action]
            action()

        self._handles[action] = asyncio.get_running_loop().call_later(delay_s, run)

    def close(self) -> None:
        """Cancel all timers, and schedule no more."""
        self._is_closed = True
        for handle in self._handles.values():
            handle.cancel()


logger = logging.getLogger(__name__)


class StorageState(Enum):
    """The kinds of requests that the storage accepts."""

    WRITABLE = "writable"
    READ_ONLY = "read-only"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """A snapshot of the storage, for operators and for the info request of the control service."""

    ledger_count: int
    stored_bytes: int
    disk_free_bytes: int
    disk_total_bytes: int
    is_read_only: bool
    failed: bool
    damaged_entry_count: int
    """Entries that are known to be damaged, and not repaired yet."""
    repaired_entry_count: int
    """Entries repaired since the start."""
    overloaded_count: int
    """Writes refused because too many bytes were in flight."""
    full_count: int
    """Writes refused for want of space."""


class StorageStatus:
    """The state of one storage, and the callbacks for its changes."""

    def __init__(self, core: StorageCore, config: StorageConfig, timers: Timers) -> None:
        self._core = core
        self._check_interval_s = config.space.check_interval_s
        self._timers = timers
        self._room = Room(core.disk, core.log, config)
        self._callbacks: list[Callable[[StorageState], None]] = []
        self._has_failed = False
        self.is_closed = False
        """Whether the storage is closing or closed."""
        self._state = self._current_state()
        self._tell_shortage()

    @property
    def state(self) -> StorageState:
        """The current state."""
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether nothing is accepted any more, whatever happens to the disk."""
        return self._has_failed or self.is_closed

    @property
    def is_read_only(self) -> bool:
        """Whether the disk is too full for ordinary adds."""
        return self._room.is_read_only

    @property
    def shortage(self) -> str:
        """Where space lacks, how much there is, and how much ends this."""
        return self._room.shortage

    def on_state(self, callback: Callable[[StorageState], None]) -> None:
        """Call `callback` at each change of `state`."""
        self._callbacks.append(callback)

    def stats(self) -> StorageStats:
        """Return counts and space."""
        core = self._core
        space = core.disk.space()
        return StorageStats(
            ledger_count=len(core.ledgers),
            stored_bytes=core.files.stored_bytes + core.log.unsealed.written_bytes,
            disk_free_bytes=space.free_bytes,
            disk_total_bytes=space.total_bytes,
            is_read_only=self.is_read_only,
            failed=self._has_failed,
            damaged_entry_count=core.damage.entry_count,
            repaired_entry_count=core.damage.repaired_count,
            overloaded_count=self._room.overloaded_count,
            full_count=self._room.full_count,
        )

    def check_open(self) -> None:
        """Raise `BookieUnavailableError` if the storage is closing or closed."""
        if self.is_closed:
            raise BookieUnavailableError("the bookie's storage is closed")

    def check_room(self, size: int, claim: Claim) -> None:
        """Refuse a write of `size` bytes (0 for a LAC or a fence) if there is no space for it.

        Raises:
            BookieReadOnlyError, BookieOverloadedError: there is no space, or too many bytes are in
                flight.
        """
        try:
            self._room.check(size, claim)
        except BookieReadOnlyError:
            self.look()
            raise

    def look(self) -> None:
        """Check the disk, and check again and again while it is full or does not answer."""
        if self.is_closed:
            return
        try:
            self._room.look()
        except BookieStorageError as error:
            logger.warning(
                "cannot determine the free space of the disk: %s; to do: see that the data folder "
                "is mounted; until then the last figure counts",
                error,
            )
            self._timers.call_later(self._check_interval_s, self.look)
        if self.is_read_only:
            self._timers.call_later(self._check_interval_s, self.look)
        self._update_state()

    def note_written(self) -> None:
        """Schedule a check of the disk, because something was written."""
        if self._room.is_due:
            self.look()
        else:
            self._timers.call_later(LOOK_DELAY_S, self.look)

    def note_stalled(self, is_stalled: bool) -> None:
        """Note that a write waits for space, or that the log continues."""
        self._room.note_stalled(is_stalled=is_stalled)
        self.look()

    def note_failed(self, error: BookieError) -> None:
        """Note that nothing will be written any more."""
        if self.is_closed:
            return
        self._has_failed = True
        logger.error(
            "the entry log failed, nothing will be written any more: %s; to do: replace the disk "
            "if it is broken, and start the bookie again",
            error,
        )
        self._update_state()

    async def aclose(self) -> None:
        """Begin to close: from now on every request is refused, and the disk is not checked."""
        self.is_closed = True
        await self._room.aclose()

    def _current_state(self) -> StorageState:
        if self._has_failed:
            return StorageState.FAILED
        return StorageState.READ_ONLY if self.is_read_only else StorageState.WRITABLE

    def _tell_shortage(self) -> None:
        if self._state is StorageState.READ_ONLY:
            logger.warning(
                "the bookie is read-only: %s; to do: free space, make the disk larger, or add "
                "bookies",
                self.shortage,
            )

    def _update_state(self) -> None:
        state = self._current_state()
        if state is not self._state:
            logger.info("storage is %s now, it was %s", state.value, self._state.value)
            self._state = state
            self._tell_shortage()
            for callback in self._callbacks:
                callback(state)
