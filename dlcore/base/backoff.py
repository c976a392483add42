"""Pauses between attempts after failures, each twice as long as the one before.

It also has the rule when a long wait is reported.
"""

from __future__ import annotations

import math

_EARLY_S = 0.001
"""Timers of an event loop may fire this much too early."""
REPORTED_AFTER_S = 5.0
"""A wait is reported after this time."""


class Backoff:
    """The time of the next attempt: after `first_s`, then later and later, up to `max_s`.

    Failures before the next attempt is due belong to the same outage, and count once.  Times come
    from any clock that does not go back, in seconds.
    """

    __slots__ = ("_first_s", "_max_s", "due_s", "pause_s")

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self.pause_s = 0.0
        """The pause after the last failure; 0 if nothing failed."""
        self.due_s = 0.0
        """Time of the next attempt; it may be set, to try sooner or later."""

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
    """A wait that began at `begun_s`; it is reported once, after a while.

    Times are as in `Backoff`.
    """

    __slots__ = ("begun_s", "due_s")

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.due_s = begun_s + REPORTED_AFTER_S
        """Time of the report; never again after that."""

    def is_due(self, now: float) -> bool:
        """Return whether to report the wait now; True only once."""
        if now < self.due_s - _EARLY_S:
            return False
        self.due_s = math.inf
        return True
