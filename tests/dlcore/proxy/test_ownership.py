"""Ownership of logs: every state, and two proxies whose lists differ."""

from __future__ import annotations

import random

import pytest

from dlcore.proxy.rendezvous import preferred_owner
from dlcore.proxy.writing.ownership import Elsewhere, Ownership, Verdict

ME, OTHER = "a:1", "b:1"


def log_of(owner: str) -> str:
    """Return a log that one of the two should own."""
    return next(
        name for name in map(str, range(100)) if preferred_owner(name, (ME, OTHER)) == owner
    )


@pytest.fixture
def ownership() -> Ownership:
    """The books of a proxy beside another."""
    return Ownership(ME, logs_max=2)


def test_a_log_goes_through_its_states(ownership: Ownership) -> None:
    """A client that asks meanwhile waits."""
    live = (ME,)
    assert ownership.ask("x", live) is Verdict.ACQUIRE
    assert ownership.ask("x", live) is Verdict.WAIT
    assert ownership.owned() == []
    assert not ownership.release("x"), "it is not owned yet"
    ownership.acquired("x")
    assert ownership.ask("x", live) is Verdict.SERVE
    assert ownership.owned() == ["x"]
    assert ownership.release("x")
    assert not ownership.release("x"), "that is under way"
    assert ownership.ask("x", live) is Verdict.WAIT
    ownership.gone("x")
    ownership.gone("x")
    assert not ownership.release("x")
    assert ownership.ask("x", live) is Verdict.ACQUIRE


def test_the_next_request_tries_a_failed_plan_again(ownership: Ownership) -> None:
    """Nothing is left of it."""
    assert ownership.ask("x", (ME,)) is Verdict.ACQUIRE
    ownership.gone("x")
    assert len(ownership) == 0
    assert ownership.ask("x", (ME,)) is Verdict.ACQUIRE


def test_the_logs_of_others_are_elsewhere(ownership: Ownership) -> None:
    """They are named; without a live proxy none is."""
    assert ownership.ask(log_of(OTHER), (ME, OTHER)) == Elsewhere(OTHER)
    assert ownership.ask(log_of(ME), (ME, OTHER)) is Verdict.ACQUIRE
    assert ownership.ask("x", ()) is Verdict.NO_PROXY


def test_owned_logs_stay_when_proxies_come(ownership: Ownership) -> None:
    """A list that changes moves nothing that is written."""
    log = log_of(OTHER)
    assert ownership.ask(log, (ME,)) is Verdict.ACQUIRE
    ownership.acquired(log)
    assert ownership.ask(log, (ME, OTHER)) is Verdict.SERVE
    assert ownership.ask(log, ()) is Verdict.SERVE
    assert ownership.successor(log, (ME, OTHER)) == Elsewhere(OTHER)
    assert ownership.successor(log, (ME,)) is None
    assert ownership.successor(log, ()) is None


def test_it_owns_no_more_than_it_may(ownership: Ownership) -> None:
    """Those that it has to do with count, whatever their state."""
    assert ownership.ask("x", (ME,)) is Verdict.ACQUIRE
    assert ownership.ask("y", (ME,)) is Verdict.ACQUIRE
    assert ownership.ask("z", (ME,)) is Verdict.FULL
    ownership.gone("x")
    assert ownership.ask("z", (ME,)) is Verdict.ACQUIRE


def test_a_client_is_never_sent_to_whom_it_asks() -> None:
    """Whatever list the proxy has, and whatever it owns."""
    rng = random.Random(7)
    for _ in range(2000):
        ownership = Ownership(ME, logs_max=50)
        for log in map(str, range(20)):
            live = rng.sample([ME, OTHER, "c:1"], rng.randrange(4))
            decision = ownership.ask(log, live)
            assert decision != Elsewhere(ME)
            assert ownership.successor(log, live) != Elsewhere(ME)
            assert (decision is Verdict.ACQUIRE) == (preferred_owner(log, live) == ME)
