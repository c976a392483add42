"""The budget of a disk's last space: its order of priority, and when it is reported to the cluster.

Writes have an order of priority.  Each kind must leave the space that is reserved for the kinds
after it:

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

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bookie.config import SpaceConfig


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


class SpaceReport:
    """Decides when the registered disk space is too old; pure.

    A report is due when the free space changed by `_MOVED_SHARE` of the disk, or by any amount
    after `_AGE_S_MAX`.  Therefore a busy bookie writes to the metadata store only a few times until
    its disk is full, and an idle one never.
    """

    _MOVED_SHARE = 0.02
    _AGE_S_MAX = 600.0

    def __init__(self) -> None:
        self._reported: tuple[int, int] | None = None
        self._reported_at = 0.0

    def is_due(self, *, free_bytes: int, total_bytes: int, now: float) -> bool:
        """Return whether this space is to be reported now; after True it counts as reported."""
        space = (free_bytes, total_bytes)
        if self._reported is not None:
            has_moved = abs(free_bytes - self._reported[0]) >= self._MOVED_SHARE * total_bytes
            is_old = now >= self._reported_at + self._AGE_S_MAX
            if space == self._reported or not (has_moved or is_old):
                return False
        self._reported = space
        self._reported_at = now
        return True
