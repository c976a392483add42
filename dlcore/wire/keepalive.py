"""Keepalive: when a quiet connection is asked for a sign of life, and counts as dead."""

from __future__ import annotations

from dlcore.errors import BookieUnavailableError
from dlcore.wire.messages import Ping

LEAST_S = 0.001
"""Times are rounded: what is due again at once would be so for ever where no time passes."""


class Keepalive:
    """One end's patience with the other: after `silence_s` without a byte it is given up.

    Whoever hears nothing for half of that sends a PING.  The other side answers at once, whatever
    else it does, so silence means that it is frozen, gone, or out of reach.
    """

    def __init__(self, silence_s: float, *, now_s: float) -> None:
        self._silence_s = silence_s
        self._heard_s = now_s
        self._pings = 0
        self._is_waiting = False

    def heard(self, now_s: float) -> None:
        """Take note of received bytes."""
        self._heard_s = now_s
        self._is_waiting = False

    def quiet_s(self, now_s: float) -> float:
        """Return for how long nothing was heard."""
        return now_s - self._heard_s

    def check(self, now_s: float) -> Ping | None:
        """Return the PING to send now, if any; to be called when it is due.

        Raises:
            BookieUnavailableError: the other side is silent.
        """
        quiet_s = self.quiet_s(now_s)
        if quiet_s >= self._silence_s:
            raise BookieUnavailableError(
                f"not a byte for {quiet_s:.1f} s: the other side is silent"
            )
        if quiet_s < self._silence_s / 2 or self._is_waiting:
            return None
        self._is_waiting = True
        self._pings += 1
        return Ping(self._pings)

    def due_s(self, now_s: float) -> float:
        """Return when to call `check` next: half the patience, or all of it, after a byte."""
        half_s = self._silence_s / 2
        due_s = self._heard_s + half_s * (self.quiet_s(now_s) // half_s + 1)
        return max(due_s, now_s + LEAST_S)
