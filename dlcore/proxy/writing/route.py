"""The route of a forwarded call to the owner of its log: a pure machine, without I/O and clock.

Theory of operation.  A proxy that does not own a log finds by its list of live proxies the one that
should own it, and gives the call to that one.  The other proxy may redirect the call to the proxy
that holds the lock, which is asked next.  Each proxy is asked once in a round.  If a proxy
redirects to one that was asked already, or to this one, the lists of the proxies differ for a
moment.  Then this proxy decides again after a pause, which begins the next round.  A proxy that is
not reached is passed over from then on, as if the client had reported it as unreachable.

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
"""Most answers of proxies for one call: four rounds of two, with 0.3 s of pauses in all."""
_FIRST_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Sent:
    """Event: the asked proxy redirects to this location."""

    location: str


@dataclass(frozen=True, slots=True)
class Unreached:
    """Event: the proxy at this location was not reached, and has accepted no message."""

    location: str


@dataclass(frozen=True, slots=True)
class GiveTo:
    """Effect: give the call to the proxy at this location."""

    location: str


@dataclass(frozen=True, slots=True)
class AskHere:
    """Effect: decide here again after a pause, without the proxies that are `unreachable`."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Effect: tell the client that `location` does not serve the log now."""

    location: str


Event: TypeAlias = Sent | Unreached
Effect: TypeAlias = GiveTo | AskHere | GiveUp


class Route:
    """The route of one call that a client made to the proxy at `here`."""

    def __init__(self, here: str, unreachable: Iterable[str] = ()) -> None:
        self._here = here
        self._asked: set[str] = set()  # in this round
        self._steps = 0
        self._pause_s = _FIRST_PAUSE_S
        self.unreachable = tuple(unreachable)
        """Locations that were not reached, by the client or from here."""

    def handle(self, event: Event) -> Effect:
        """Return the next effect."""
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
