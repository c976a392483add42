"""Pauses between attempts at what failed: bookies, repairs, requests; each twice the one before."""

from __future__ import annotations

_EARLY_S = 0.001
"""Timers of an event loop may fire so much too early."""


class Backoff:
    """When one thing is tried again: after `first_s`, then later and later, up to `max_s`.

    What fails before the next attempt is due belongs to the same outage, and counts once.  Times
    are of any clock that does not go back, in seconds.
    """

    __slots__ = ("_first_s", "_max_s", "due_s", "pause_s")

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self.pause_s = 0.0
        """The pause after the last failure; 0 if nothing failed."""
        self.due_s = 0.0
        """When the next attempt is due; it may be set, to try sooner or later."""

    def failed(self, now: float) -> float:
        """Note a failure; return the seconds until the next attempt is due."""
        if now >= self.due_s - _EARLY_S:
            self.pause_s = min(max(2 * self.pause_s, self._first_s), self._max_s)
            self.due_s = now + self.pause_s
        return max(0.0, self.due_s - now)

    def succeeded(self) -> None:
        """Forget all failures."""
        self.pause_s = self.due_s = 0.0
