"""The budget of a disk's last space: for whom it is kept, and when the cluster is told.

Whatever is written has its place in one order, and none may use what is kept for those after it:

    adds, while the disk is not read-only         leave `minimum_bytes`
    recovery adds, repairs, LACs                  leave `minimum_bytes`
    copies of compaction                          leave `compact.floor_bytes`
    fences                                        leave `fence_floor_bytes`
    marks, garbage records, footers, new files    the rest

The last are what makes room again, or what follows from what was taken already; that is never
counted as free (`EntryLog.claimed_bytes`).  Other programs on the same file system keep no order:
against them some of the rest is held back on the disk.  A log that finds no room all the same waits
for it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bookie.config import SpaceConfig


class Claim(Enum):
    """For what somebody wants to write."""

    ADD = "an ordinary add"
    RECOVERY = "a recovery add, a repair or a LAC"
    FENCE = "a fence"


class SpaceGuard:
    """Read-only with hysteresis; pure, the free space is passed in."""

    def __init__(self, config: SpaceConfig, *, free_bytes: int, claimed_bytes: int) -> None:
        self._config = config
        self._free_bytes = free_bytes
        self._is_low = free_bytes - claimed_bytes < config.read_only_below_bytes
        self.is_stalled = False
        """A write found no room and waits for it, whatever the free space is said to be."""

    @property
    def is_read_only(self) -> bool:
        """Whether ordinary adds are refused."""
        return self._is_low or self.is_stalled

    def observe(self, free_bytes: int, *, claimed_bytes: int) -> None:
        """Take note of the free space; of it `claimed_bytes` wait to be written or are owed."""
        self._free_bytes = free_bytes
        left_bytes = free_bytes - claimed_bytes
        if left_bytes < self._config.read_only_below_bytes:
            self._is_low = True
        elif left_bytes >= self._config.writable_above_bytes:
            self._is_low = False

    def writable_bytes(self, *, claimed_bytes: int) -> int:
        """Return how much may be written before the disk is low; 0 if it is."""
        if self._is_low:
            return 0
        return max(0, self._free_bytes - claimed_bytes - self._config.read_only_below_bytes)

    def allows(self, size: int, *, claimed_bytes: int, claim: Claim) -> bool:
        """Return whether `size` more bytes may be written; `claimed_bytes` wait or are owed."""
        if self.is_stalled or (self._is_low and claim is Claim.ADD):
            return False
        is_fence = claim is Claim.FENCE
        floor = self._config.fence_floor_bytes if is_fence else self._config.minimum_bytes
        return self._free_bytes - claimed_bytes - size >= floor

    def missing_reserve(self, *, held_bytes: int, claimed_bytes: int) -> bool:
        """Return whether less is held back than should be, and the disk has room for the rest."""
        wanted = self._config.held_bytes
        room_bytes = self._free_bytes - claimed_bytes - wanted
        return held_bytes < wanted and room_bytes >= self._config.minimum_bytes


class SpaceReport:
    """Whether the registration still says well enough how much room there is; pure.

    A report is due when the free space moved by `_MOVED_SHARE` of the disk, or by anything at all
    after `_AGE_S_MAX`.  So a busy bookie writes to the metadata store some times per filling of its
    disk, and an idle one never.
    """

    _MOVED_SHARE = 0.02
    _AGE_S_MAX = 600.0

    def __init__(self) -> None:
        self._reported: tuple[int, int] | None = None
        self._reported_at = 0.0

    def is_due(self, *, free_bytes: int, total_bytes: int, now: float) -> bool:
        """Return whether to report this space now; True counts as reported."""
        space = (free_bytes, total_bytes)
        if self._reported is not None:
            has_moved = abs(free_bytes - self._reported[0]) >= self._MOVED_SHARE * total_bytes
            is_old = now >= self._reported_at + self._AGE_S_MAX
            if space == self._reported or not (has_moved or is_old):
                return False
        self._reported = space
        self._reported_at = now
        return True
