"""The plan of faults: the seed alone decides it, and no kind is left out."""

from __future__ import annotations

from tests.chaos_spark.plan import KILLS, KINDS, make_plan


def test_a_seed_is_a_plan() -> None:
    """In order of time, within the time; another seed is another plan."""
    plan = make_plan(7, seconds=480, kinds=KINDS)
    assert plan == make_plan(7, seconds=480, kinds=KINDS)
    assert plan != make_plan(8, seconds=480, kinds=KINDS)
    times = [fault.at_s for fault in plan]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 480
    assert {fault.kind for fault in plan} == set(KINDS)


def test_a_long_plan_kills_often() -> None:
    """At least 70 times in five minutes, of every kind, whatever the seed."""
    for seed in range(50):
        kills = [f.kind for f in make_plan(seed, seconds=280, kinds=KINDS) if f.kind in KILLS]
        assert len(kills) >= 70
        assert set(kills) == set(KILLS)


def test_the_first_faults_are_of_all_kinds() -> None:
    """A short run therefore has each of them."""
    plan = make_plan(3, seconds=60, kinds=KILLS)
    assert {fault.kind for fault in plan[: len(KILLS)]} == set(KILLS)
