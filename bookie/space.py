"""How full the disk may get, for whom the last of it is kept, and when the cluster is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bookie.config import SpaceConfig


class SpaceGuard:
    """Read-only with hysteresis; pure, the free space is passed in."""

    def __init__(self, config: SpaceConfig, *, free_bytes: int) -> None:
        self._config = config
        self._free_bytes = free_bytes
        self.is_read_only = free_bytes < config.read_only_below_bytes

    def observe(self, free_bytes: int) -> None:
        """Take note of the free space, after everything written so far."""
        self._free_bytes = free_bytes
        if free_bytes < self._config.read_only_below_bytes:
            self.is_read_only = True
        elif free_bytes >= self._config.writable_above_bytes:
            self.is_read_only = False

    def allows(self, size: int, *, pending_bytes: int, is_recovery: bool) -> bool:
        """Return whether `size` more bytes may be written while `pending_bytes` wait."""
        if self.is_read_only and not is_recovery:
            return False
        return self._free_bytes - pending_bytes - size >= self._config.minimum_bytes


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
