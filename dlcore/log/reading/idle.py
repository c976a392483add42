"""A reader that gets no record reads the metadata again, and in the end fails.  No I/O, no clock.

Being idle begins when a reader waits, and ends with the next record; waits that callers cut short
add up.  After each `warn_s` of it the reader reads the log's metadata again, in case the
notification of a change was lost.  After `error_s` it fails, and the next wait begins anew.
"""

from __future__ import annotations

import enum
import math


class IdleStep(enum.Enum):
    """The step that is due."""

    NOTHING = 1
    LOOK = 2
    FAIL = 3


class IdleWatch:
    """Measures how long a reader has been idle; times are of one monotonic clock, in s."""

    def __init__(self, *, warn_s: float, error_s: float) -> None:
        self._warn_s = warn_s
        self._error_s = error_s
        self._since: float | None = None
        self._next_look = 0.0

    def waits(self, now: float) -> None:
        """Note that a reader waits from now on, or still."""
        if self._since is None:
            self._since = now
            self._next_look = now + self._warn_s

    def received(self) -> None:
        """Note that a record came."""
        self._since = None

    def idle_s(self, now: float) -> float:
        """Return for how long the reader has been idle."""
        return 0.0 if self._since is None else now - self._since

    @property
    def deadline(self) -> float:
        """When the next step is due."""
        if self._since is None:
            return math.inf
        return min(self._next_look, self._since + self._error_s)

    def due(self, now: float) -> IdleStep:
        """Return the step that is due, once."""
        if now < self.deadline or self._since is None:
            return IdleStep.NOTHING
        if now >= self._since + self._error_s:
            self._since = None
            return IdleStep.FAIL
        self._next_look = now + self._warn_s
        return IdleStep.LOOK
