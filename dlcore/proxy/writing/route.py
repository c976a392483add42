"""The route of a forwarded call to the owner of its log, over the proxies that may own it.

Theory of operation.  A proxy that does not own a log finds by its list of live proxies the one that
should own it, and gives the call to that one.  The other proxy may redirect the call to the proxy
that holds the lock, which is asked next.  Each proxy is asked once in a round.  If a proxy
redirects to one that was asked already, or to this one, the lists of the proxies differ for a
moment.  Then this proxy decides again after a pause, which begins the next round.  A proxy that is
not reached is passed over from then on, as if the client had reported it as unreachable.

Invariants: the call is given to no proxy twice in a round, and never to this one; after
`ASKED_MAX` answers it is given up.

The driver is `dlcore.proxy.writing.forwarding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.machines import Machine, State, Transitions
from dlcore.flight.put import UNREACHABLE_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

ASKED_MAX = 8
"""Most answers of proxies for one call: four rounds of two, with 0.3 s of pauses in all."""
_FIRST_PAUSE_S = 0.02


class RouteState(State):
    """The state of the machine; GIVEN_UP is final."""

    HERE = "this proxy decides which proxy should own the log"
    ASKING = "another proxy has the call"
    GIVEN_UP = "too many proxies were asked"


_S = RouteState
_GIVEN_UP = {_S.GIVEN_UP: "too many answers"}
TRANSITIONS = Transitions(
    _S.HERE,
    {
        _S.HERE: {
            _S.ASKING: "another proxy should own it",
            _S.HERE: "it names itself, or a proxy that is not reached",
            **_GIVEN_UP,
        },
        _S.ASKING: {
            _S.ASKING: "it names a further proxy",
            _S.HERE: "it names one that was asked in this round, or is not reached",
            **_GIVEN_UP,
        },
        _S.GIVEN_UP: {},
    },
)


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


class Route(Machine[RouteState]):
    """The route of one call that a client made to the proxy at `here`."""

    transitions = TRANSITIONS

    def __init__(self, here: str, unreachable: Iterable[str] = ()) -> None:
        self.state = RouteState.HERE
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
            self._become(RouteState.GIVEN_UP)
            return GiveUp(event.location)
        match event:
            case Sent(location):
                return self._sent(location)
            case Unreached(location):
                others = [each for each in self.unreachable if each != location]
                self.unreachable = (*others[1 - UNREACHABLE_MAX :], location)
                return self._begin_round(0.0)
            case _:
                assert_never(event)

    def _sent(self, location: str) -> Effect:
        if location == self._here or location in self._asked:
            pause_s, self._pause_s = self._pause_s, 2 * self._pause_s
            return self._begin_round(pause_s)
        self._become(RouteState.ASKING)
        self._asked.add(location)
        return GiveTo(location)

    def _begin_round(self, pause_s: float) -> AskHere:
        self._become(RouteState.HERE)
        self._asked.clear()
        return AskHere(pause_s)

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self._here not in self._asked
        assert self.state is RouteState.GIVEN_UP or self._steps <= ASKED_MAX
        if self.state is not RouteState.GIVEN_UP:
            assert bool(self._asked) == (self.state is RouteState.ASKING)
