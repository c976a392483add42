"""A forwarded call finds its way, whatever other proxies say; and how a client asks for it."""

from __future__ import annotations

import random

import pytest

from dlcore.base.access.rights import ANONYMOUS, Caller, Principal, Proof
from dlcore.base.errors import ConfigurationError
from dlcore.flight.forwards import Forwarder, Wish, wish_of
from dlcore.flight.put import UNREACHABLE_MAX
from dlcore.proxy.writing.route import (
    ASKED_MAX,
    TRANSITIONS,
    AskHere,
    Effect,
    Event,
    GiveTo,
    GiveUp,
    Route,
    RouteState,
    Sent,
    Unreached,
)
from tests.fixtures.lengths import for_each


class Checked(Route):
    """A route that is validated after each event."""

    def handle(self, event: Event) -> Effect:
        """Take an event."""
        effect = super().handle(event)
        self.validate()
        return effect


def test_the_owner_that_another_proxy_names_is_asked_next() -> None:
    """The one that should own a log tells who holds its lock."""
    route = Checked("here")
    assert route.handle(Sent("preferred")) == GiveTo("preferred")
    assert route.handle(Sent("owner")) == GiveTo("owner")


@pytest.mark.parametrize("named", ["here", "other"])
def test_proxies_that_disagree_pass_nothing_to_and_fro(named: str) -> None:
    """After a pause, longer each time, this one is asked anew; at last the call is given up."""
    route = Checked("here")
    pauses = []
    effect: Effect = GiveTo("other")
    for _ in range(ASKED_MAX // 2):
        assert route.handle(Sent("other")) == GiveTo("other")
        effect = route.handle(Sent(named))
        assert isinstance(effect, AskHere)
        pauses.append(effect.pause_s)
    assert pauses == sorted(set(pauses))
    assert pauses[0] > 0
    assert sum(pauses) < 1
    assert route.handle(Sent("other")) == GiveUp("other")


def test_one_that_is_not_reached_is_passed_over() -> None:
    """Beside those that the client did not reach, of which the oldest are forgotten."""
    given = [f"gone-{number}" for number in range(UNREACHABLE_MAX)]
    route = Checked("here", given)
    assert route.handle(Sent("dead")) == GiveTo("dead")
    assert route.handle(Unreached("dead")) == AskHere(0.0)
    assert route.unreachable == (*given[1:], "dead")
    assert route.handle(Sent("owner")) == GiveTo("owner")


@for_each(range(100))
def test_no_order_of_answers_is_a_loop(seed: int) -> None:
    """The call comes to no proxy twice in a round, never to this one, and to an end."""
    rng = random.Random(seed)
    route, asked = Checked("a"), set[str]()
    for _ in range(ASKED_MAX):
        kind = rng.choice((Sent, Unreached))
        effect = route.handle(kind(rng.choice("abcd")))
        match effect:
            case GiveTo(location):
                assert location not in asked | {"a"}
                asked.add(location)
            case AskHere():
                asked.clear()
            case GiveUp():
                raise AssertionError("it was given up early")
    assert isinstance(route.handle(Sent("b")), GiveUp)


def test_the_table_has_every_transition_that_there_is() -> None:
    """Each is made by some order of answers, and none leaves the end."""
    made = set[tuple[RouteState, RouteState]]()
    for seed in range(200):
        rng = random.Random(seed)
        route = Checked("a")
        while route.state is not RouteState.GIVEN_UP:
            before, kind = route.state, rng.choice((Sent, Unreached))
            route.handle(kind(rng.choice("abcd")))
            made.add((before, route.state))
    assert made == {
        (before, after) for before, afters in TRANSITIONS.causes.items() for after in afters
    }


def test_a_call_says_how_it_wants_to_be_served() -> None:
    """Nothing, that it may be forwarded, or that it was: then it is not forwarded again."""
    assert wish_of([]) == wish_of([("dlog-forward", "false"), ("other", b"\xff")]) == Wish()
    assert wish_of([("dlog-forward", "True")]) == Wish(forward=True)
    zoe = Caller(Principal(Proof.TOKEN, "Zoë"), "10.0.0.1")
    forwarder = Forwarder("grpc://a:1", "session", zoe)
    given = [*forwarder.metadata(), ("dlog-forward", "true")]
    assert wish_of(given) == Wish(forward=False, forwarder=forwarder)
    anonymous = Caller(ANONYMOUS, "x")
    assert wish_of([("dlog-forwarded-by", "x")]).forwarder == Forwarder("x", "", anonymous)
    with pytest.raises(ConfigurationError, match="'Zoë': expected user:NAME"):
        wish_of([("dlog-forwarded-by", "x"), ("dlog-forwarded-for-bin", "Zoë".encode())])
    with pytest.raises(ConfigurationError, match=r"dlog-forward='yes': expected true or false"):
        wish_of([("dlog-forward", "yes")])
