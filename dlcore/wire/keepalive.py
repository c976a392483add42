"""Keepalive: when a quiet connection is asked for a sign of life, and counts as dead."""

from __future__ import annotations

from dlcore.errors import BookieUnavailableError
from dlcore.wire.messages import Ping

LEAST_S = 0.001
"""Times are rounded: what is due again at once would be so for ever where no time passes."""


class Keepalive:
    """One end's patience with the other: after `silence_s` without a byte it is given up.

    Whoever hears nothing for half of that sends a PING, and waits as long again.  The other side
    answers at once, whatever else it does, so silence means that it is frozen, gone, or out of
    reach.  Who comes late to ask, because its own process stood still, gives the same time for the
    answer.
    """

    def __init__(self, silence_s: float, *, now_s: float) -> None:
        self._half_s = silence_s / 2
        self._heard_s = now_s
        self._asked_s: float | None = None  # by a PING, and nothing heard since
        self._pings = 0

    def heard(self, now_s: float) -> None:
        """Take note of received bytes."""
        self._heard_s = now_s
        self._asked_s = None

    def quiet_s(self, now_s: float) -> float:
        """Return for how long nothing was heard."""
        return now_s - self._heard_s

    def check(self, now_s: float) -> Ping | None:
        """Return the PING to send now, if any; to be called when it is due.

        Raises:
            BookieUnavailableError: the other side is silent.
        """
        if now_s < self._patient_until_s:
            return None
        if self._asked_s is not None:
            quiet_s = self.quiet_s(now_s)
            raise BookieUnavailableError(
                f"not a byte for {quiet_s:.1f} s: the other side is silent"
            )
        self._asked_s = now_s
        self._pings += 1
        return Ping(self._pings)

    def due_s(self, now_s: float) -> float:
        """Return when to call `check` next, after `now_s`."""
        return max(self._patient_until_s, now_s + LEAST_S)

    @property
    def _patient_until_s(self) -> float:
        return (self._heard_s if self._asked_s is None else self._asked_s) + self._half_s
