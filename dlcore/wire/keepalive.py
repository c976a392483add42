"""Keepalive: when to ask a quiet connection for an answer, and when it counts as dead."""

from __future__ import annotations

from dlcore.base.errors import BookieUnavailableError
from dlcore.wire.messages import Ping

LEAST_S = 0.001
"""The shortest delay: times are rounded, and without it a check could stay due for ever."""


class Keepalive:
    """One end's patience with the other: after `silence_s` without a byte the other is given up.

    An end that receives nothing for half of that time sends a PING, and waits as long again.  The
    other side answers at once, whatever else it does.  Silence therefore means that it is frozen,
    gone, or out of reach.  If this end asks late, because its own process stood still, the other
    side gets the same time for its answer.
    """

    def __init__(self, silence_s: float, *, now_s: float) -> None:
        self._half_s = silence_s / 2
        self._heard_s = now_s
        self._asked_s: float | None = None  # time of a PING after which nothing came
        self._pings = 0

    def heard(self, now_s: float) -> None:
        """Note that bytes were received."""
        self._heard_s = now_s
        self._asked_s = None

    def quiet_s(self, now_s: float) -> float:
        """Return for how long nothing was received."""
        return now_s - self._heard_s

    def check(self, now_s: float) -> Ping | None:
        """Return the PING to send now, if any; call this when it is due.

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
