"""The status of a storage: writable, read-only, failed or closed; and the room for its writes.

It is read-only while the disk is full, failed after a write or sync has failed, and closed in the
end.  A read-only storage still accepts recovery adds, LACs and fences.  `Room` admits writes by
disk space and by bytes in flight, and holds some space back.

Writes have an order of priority for the last space.  Each kind must leave the space that is
reserved for the kinds after it:

    adds, while the disk is not read-only         leave `minimum_bytes`
    recovery adds, repairs, LACs                  leave `minimum_bytes`
    copies of compaction                          leave `compact.floor_bytes`
    fences                                        leave `fence_floor_bytes`
    marks, garbage records, footers, new files    the rest

The last kind frees space, or follows from records that were accepted before.  Its bytes are never
counted as free (`EntryLog.claimed_bytes`).  Other programs on the same file system do not keep this
order.  Therefore some of the rest is held back on the disk.  If a log finds no space in spite of
this, it waits for space.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from bookie.files.compaction_choice import LEDGER_BYTES_MAX
from bookie.files.format import RECORD_HEADER_BYTES
from bookie.files.index import ENTRY_FOOTER_BYTES, LEDGER_FOOTER_BYTES
from dlcore.base.background import BackgroundTasks
from dlcore.base.config import MIB
from dlcore.base.errors import (
    BookieOverloadedError,
    BookieReadOnlyError,
    BookieStorageError,
    BookieUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie.config import SpaceConfig, StorageConfig
    from bookie.disks.port import Disk
    from bookie.files.entry_log import EntryLog
    from bookie.storage.storage_core import StorageCore
    from dlcore.base.errors import BookieError
    from dlcore.wire.frames import FrameRun


logger = logging.getLogger(__name__)

_EXTRA_BYTES = LEDGER_BYTES_MAX + RECORD_HEADER_BYTES + ENTRY_FOOTER_BYTES + LEDGER_FOOTER_BYTES
"""Bytes that a request may take on the disk beside its frame: headers, its part of a footer, and
the records of a ledger that is in use again."""
LOOK_DELAY_S = 0.1
"""The disk is checked at the latest this long after a write: other programs may have filled it."""
_LOOK_BYTES = MIB
"""The disk is checked again after this many written bytes, and earlier if it is nearly full."""
_FENCES_SHARE = 8
"""Fences may exceed the limit of bytes in flight by this fraction (one part in 8)."""


class Claim(Enum):
    """The purpose of a write."""

    ADD = "an ordinary add"
    RECOVERY = "a recovery add, a repair or a LAC"
    FENCE = "a fence"


class SpaceGuard:
    """Decides on writes, read-only with hysteresis; pure, the free space is a parameter."""

    def __init__(self, config: SpaceConfig, *, free_bytes: int, claimed_bytes: int) -> None:
        self._config = config
        self.free_bytes = free_bytes
        """As last observed."""
        # Without the upper limit, because at a start there is no earlier state to keep.
        self._is_low = free_bytes - claimed_bytes < config.read_only_below_bytes
        self.is_stalled = False
        """Whether a write found no space and waits for it, whatever the reported free space is."""

    @property
    def is_read_only(self) -> bool:
        """Whether ordinary adds are refused."""
        return self._is_low or self.is_stalled

    def observe(self, free_bytes: int, *, claimed_bytes: int) -> None:
        """Note the free space; `claimed_bytes` of it wait to be written or are reserved."""
        self.free_bytes = free_bytes
        left_bytes = free_bytes - claimed_bytes
        if left_bytes < self._config.read_only_below_bytes:
            self._is_low = True
        elif left_bytes >= self._config.writable_above_bytes:
            self._is_low = False

    def writable_bytes(self, *, claimed_bytes: int) -> int:
        """Return how many bytes may be written until the disk is low; 0 if it is low now."""
        if self._is_low:
            return 0
        return max(0, self.free_bytes - claimed_bytes - self._config.read_only_below_bytes)

    def allows(self, size: int, *, claimed_bytes: int, claim: Claim) -> bool:
        """Return whether `size` more bytes may be written, beside `claimed_bytes`."""
        if self.is_stalled or (self._is_low and claim is Claim.ADD):
            return False
        is_fence = claim is Claim.FENCE
        floor = self._config.fence_floor_bytes if is_fence else self._config.minimum_bytes
        return self.free_bytes - claimed_bytes - size >= floor

    def missing_reserve(self, *, held_bytes: int, claimed_bytes: int) -> bool:
        """Return whether the held-back space is too small, and the disk has space for the rest."""
        wanted = self._config.held_bytes
        room_bytes = self.free_bytes - claimed_bytes - wanted
        return held_bytes < wanted and room_bytes >= self._config.minimum_bytes


class Room:
    """Admission of writes to one storage.

    Between two checks of the disk, written bytes count as used.  Therefore the result is as strict
    as a check after each write, which would cost as much as a small write.
    """

    def __init__(self, disk: Disk, log: EntryLog, config: StorageConfig) -> None:
        self._disk = disk
        self._log = log
        self._config = config
        self._guard = SpaceGuard(
            config.space,
            free_bytes=disk.space().free_bytes,
            claimed_bytes=log.claimed_bytes,
        )
        self._holding = BackgroundTasks()
        self._seen_bytes = log.commits.queue.durable_bytes
        self._due_bytes = 0
        self.overloaded_count = 0
        """Writes refused because too many bytes were in flight."""
        self.full_count = 0
        """Writes refused for want of space."""

    @property
    def is_due(self) -> bool:
        """Whether enough bytes were written since the last check of the disk for another one."""
        return self._log.commits.queue.durable_bytes >= self._due_bytes

    @property
    def is_read_only(self) -> bool:
        """Whether ordinary adds are refused."""
        return self._guard.is_read_only

    @property
    def shortage(self) -> str:
        """Where space lacks, how much there is, and how much ends this."""
        wanted_bytes = self._config.space.writable_above_bytes
        return (
            f"{self._disk.place} has {self._guard.free_bytes} free bytes, and takes ordinary adds "
            f"again from {wanted_bytes} on (space_writable_above_bytes)"
        )

    def check(self, size: int, claim: Claim) -> None:
        """Refuse a write of `size` bytes (0 for a LAC or a fence) if there is no space for it.

        Raises:
            BookieReadOnlyError, BookieOverloadedError: there is no space, or too many bytes are in
                flight.
        """
        log = self._log
        pending = log.commits.queue.pending_bytes
        claimed = log.claimed_bytes + log.commits.queue.durable_bytes - self._seen_bytes
        if not self._guard.allows(size + _EXTRA_BYTES, claimed_bytes=claimed, claim=claim):
            self.full_count += 1
            raise BookieReadOnlyError(f"the bookie's disk is full: no space for {claim.value}")
        limit = self._config.in_flight_bytes_max
        if claim is Claim.FENCE:
            limit += limit // _FENCES_SHARE  # many adds must not prevent fences
        # A write larger than the limit is accepted when nothing else is in flight.
        if pending and pending + size > limit:
            self.overloaded_count += 1
            raise BookieOverloadedError(
                f"{pending} bytes are not durable yet, the limit is {limit}"
            )

    def note_stalled(self, *, is_stalled: bool) -> None:
        """Note that a write waits for space, or that the log continues."""
        if is_stalled:
            logger.error(
                "the disk of %s is full: accepted entries wait for space; to do: free space, or "
                "add bookies; writers wait until then",
                self._disk.place,
            )
        self._guard.is_stalled = is_stalled

    def look(self) -> None:
        """Check the disk's free space, and complete the held-back space if there is enough."""
        held, claimed = self._disk.held_bytes, self._log.claimed_bytes
        self._guard.observe(self._disk.space().free_bytes, claimed_bytes=claimed)
        self._seen_bytes = self._log.commits.queue.durable_bytes
        writable_bytes = self._guard.writable_bytes(claimed_bytes=claimed)
        # Half of what is left, so that checks come closer together as the limit comes closer.
        self._due_bytes = self._seen_bytes + min(_LOOK_BYTES, writable_bytes // 2)
        is_missing = self._guard.missing_reserve(held_bytes=held, claimed_bytes=claimed)
        # Not a second time while one is under way, which `held_bytes` does not show yet.
        if is_missing and not self._holding:
            self._holding.start(self._hold(), name="holding back space")

    async def aclose(self) -> None:
        """Return when no hold is in progress; `look` must not be called any more."""
        await self._holding.finish()

    async def _hold(self) -> None:
        try:
            await self._disk.hold(self._config.space.held_bytes)
        except BookieStorageError as error:
            logger.warning(
                "cannot reserve space: %s; to do: see to the disk; the bookie keeps less in "
                "reserve until then",
                error,
            )


def run_room_bytes(run: FrameRun) -> int:
    """Return the bytes of frames that are added together, for one check of the room."""
    return len(run.payload) + (len(run) - 1) * _EXTRA_BYTES


class Timers:
    """Timers of one event loop, one per action."""

    def __init__(self) -> None:
        self._handles: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._is_closed = False

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` once after `delay_s`, unless it is scheduled or `close` was called."""
        # A bound method is equal to itself when it is taken again, so each action has one timer.
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
            # Space may have come since the last check, and the next write finds the new figure.
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
            # Space that others free makes no event here.
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
