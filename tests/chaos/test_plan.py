"""The plan of faults: the same seed, the same plan, and every kind in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.plan import (
    ABRUPT,
    ADD_TIMEOUT_S,
    ALL_LOSE_POWER,
    BOOKIE_SESSION_S,
    CHANGE_RELEASE,
    CLIENT_SESSION_S,
    FINALIZE,
    FORGERY,
    KINDS,
    LINK_KINDS,
    MIXED_KINDS,
    Fault,
    make_plan,
)
from tests.fixtures.lengths import for_each

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BOOKIES = ["b1", "b2", "b3", "b4"]
CLIENTS = ["c1", "c2"]


def plan_of(seed: int, seconds: float = 30.0, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Return a plan for a small cluster."""
    return make_plan(
        seed,
        seconds=seconds,
        bookies=BOOKIES,
        clients=CLIENTS,
        small_disks=BOOKIES[:1],
        kinds=kinds,
    )


def test_the_seed_alone_decides() -> None:
    """Replaying a seed gives the same faults at the same times."""
    assert plan_of(7) == plan_of(7)
    assert plan_of(7) != plan_of(8)


@for_each(range(20))
def test_every_kind_comes_once_at_least(seed: int) -> None:
    """Also in a short run; times rise, targets exist."""
    plan = plan_of(seed)
    assert {fault.kind for fault in plan} == set(KINDS)
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
    assert len(plan_of(seed, 600.0)) > 100
    for fault in plan:
        ends = {*fault.sources, *fault.endpoints} if fault.kind in LINK_KINDS else {fault.target}
        assert ends
        assert ends <= {*BOOKIES, *CLIENTS, "zookeeper", "proxies", "bookies"}
        assert fault.kind != "fill disk" or fault.target == BOOKIES[0]


def test_one_bookie_alone_is_lied_to() -> None:
    """More would be an ack quorum, whose word counts."""
    for seed in range(20):
        lied_to = {fault.target for fault in plan_of(seed, 300.0) if fault.kind == FORGERY}
        assert len(lied_to) == 1


def test_releases_change_in_rounds_until_the_features_are_finalized() -> None:
    """Each process goes forwards and back at least; the other faults of the seed are the same."""
    plan = plan_of(7, 300.0, MIXED_KINDS)
    changes = [fault for fault in plan if fault.kind == CHANGE_RELEASE]
    assert [each for each in plan if each.kind not in (CHANGE_RELEASE, FINALIZE)] == plan_of(7, 300)
    (end,) = (fault for fault in plan if fault.kind == FINALIZE)
    assert max(fault.at_s for fault in changes) < end.at_s < 300
    members = {*BOOKIES, *CLIENTS}
    for first in (0, len(members)):
        assert {each.target for each in changes[first : first + len(members)]} == members
    assert {fault.strength > ABRUPT for fault in changes} == {True, False}


def test_nothing_but_changes_of_the_release() -> None:
    """As `--only` asks for them."""
    plan = plan_of(7, 20.0, (CHANGE_RELEASE, FINALIZE))
    assert {fault.kind for fault in plan} == {CHANGE_RELEASE, FINALIZE}
    assert plan[-1].kind == FINALIZE


def test_a_mount_is_not_put_aside() -> None:
    """A folder that is one cannot be renamed."""
    faults = [
        fault for seed in range(20) for fault in plan_of(seed) if fault.kind == "stale folder"
    ]
    assert {fault.target for fault in faults} == {*BOOKIES[1:]}


def test_power_is_lost_by_one_bookie_and_by_all() -> None:
    """Both come soon in a longer run."""
    faults = [fault for fault in plan_of(1, 600.0) if fault.kind == "lose power"]
    assert {fault.strength < ALL_LOSE_POWER for fault in faults} == {True, False}


@pytest.mark.parametrize(
    ("kind", "is_long"),
    [
        ("pause bookie", lambda s: s >= ADD_TIMEOUT_S + BOOKIE_SESSION_S),
        ("pause client", lambda s: s > CLIENT_SESSION_S),
    ],
)
def test_pauses_outlast_every_time_out(kind: str, is_long: Callable[[float], bool]) -> None:
    """All others have given up a process that wakes up."""
    pauses = [fault for seed in range(10) for fault in plan_of(seed, 300.0) if fault.kind == kind]
    assert pauses
    assert all(is_long(fault.lasts_s) for fault in pauses)
