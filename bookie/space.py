"""How full the disk may get, and for whom the last of it is kept."""

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
