"""Pauses between attempts at what failed: bookies, repairs, requests; each twice the one before.

And waits of which whoever waits is told.
"""

from __future__ import annotations

import math

_EARLY_S = 0.001
"""Timers of an event loop may fire so much too early."""
TOLD_AFTER_S = 5.0
"""Who has waited for so long is told what for."""


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


class Wait:
    """Something that is waited for since `begun_s`; who waits is told of it once, after a while.

    Times are as those of `Backoff`.
    """

    __slots__ = ("begun_s", "due_s")

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.due_s = begun_s + TOLD_AFTER_S
        """When it is to be told; never again, once it was."""

    def is_due(self, now: float) -> bool:
        """Return whether to tell of it now: once only."""
        if now < self.due_s - _EARLY_S:
            return False
        self.due_s = math.inf
        return True
