"""The way of a forwarded call to the owner of its log: a pure machine, without I/O and clock.

Theory of operation.  A proxy that does not own a log knows who should, by its list of live proxies,
and gives the call to that one.  The other may know better: it names the proxy that holds the lock,
which is asked next.  Each is asked once in a round.  One that names who was asked already, or this
proxy itself, has another list, for a moment: after a pause this proxy is asked anew, which begins
the next round.  One that is not reached is passed over from then on, as for a client that says so.

Invariants: the call is given to no proxy twice in a round, and never to this one; after
`ASKED_MAX` answers it is given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dlcore.flight.put import UNREACHABLE_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

ASKED_MAX = 8
"""Answers of proxies that are heard: four rounds of two, whose pauses are 0.3 s together."""
_FIRST_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Sent:
    """Event: the proxy that was asked names this location."""

    location: str


@dataclass(frozen=True, slots=True)
class Unreached:
    """Event: the proxy at this location was not reached, and has accepted nothing."""

    location: str


@dataclass(frozen=True, slots=True)
class GiveTo:
    """Effect: give the call to the proxy at this location."""

    location: str


@dataclass(frozen=True, slots=True)
class AskHere:
    """Effect: ask this proxy anew after a pause, with those that are `unreachable`."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Effect: tell the client that `location` does not serve the log now."""

    location: str


Event: TypeAlias = Sent | Unreached
Effect: TypeAlias = GiveTo | AskHere | GiveUp


class Route:
    """The way of one call that came to the proxy at `here`."""

    def __init__(self, here: str, unreachable: Iterable[str] = ()) -> None:
        self._here = here
        self._asked: set[str] = set()  # in this round
        self._steps = 0
        self._pause_s = _FIRST_PAUSE_S
        self.unreachable = tuple(unreachable)
        """Locations that were not reached, by the client or from here."""

    def handle(self, event: Event) -> Effect:
        """Return what to do next."""
        self._steps += 1
        if self._steps > ASKED_MAX:
            return GiveUp(event.location)
        if isinstance(event, Unreached):
            others = [each for each in self.unreachable if each != event.location]
            self.unreachable = (*others[1 - UNREACHABLE_MAX :], event.location)
            return self._begin_round(0.0)
        if event.location == self._here or event.location in self._asked:
            pause_s, self._pause_s = self._pause_s, 2 * self._pause_s
            return self._begin_round(pause_s)
        self._asked.add(event.location)
        return GiveTo(event.location)

    def _begin_round(self, pause_s: float) -> AskHere:
        self._asked.clear()
        return AskHere(pause_s)
