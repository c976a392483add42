"""A ledger counts as deleted after two sightings with time between, and never en masse."""

from __future__ import annotations

from bookie.config import GarbageConfig
from bookie.garbage import GarbageJudge

CONFIG = GarbageConfig(age_ms=1000, brake_count=3, brake_share=0.5)


def judge(garbage: GarbageJudge, deleted: set[int], now_ms: int, *, total: int = 100) -> set[int]:
    """Take one pass that must not be refused."""
    verdict = garbage.judge(seen=range(total), looks_deleted=deleted, now_ms=now_ms)
    assert not verdict.refused
    return set(verdict.deleted)


def test_two_sightings_with_the_age_between_are_needed() -> None:
    """Goal: neither one sighting nor two quick ones are enough."""
    one = GarbageJudge(CONFIG)
    assert judge(one, {1}, 0) == set()
    assert judge(one, {1}, 999) == set()
    assert judge(one, {1, 2}, 1000) == {1}
    assert judge(one, {2}, 1999) == set()
    assert judge(one, {2}, 2000) == {2}


def test_an_age_of_zero_still_needs_two_sightings() -> None:
    """Goal: a mis-set age does not switch the second look off."""
    one = GarbageJudge(GarbageConfig(age_ms=0))
    assert judge(one, {1}, 5) == set()
    assert judge(one, {1}, 5) == {1}


def test_a_ledger_seen_alive_starts_anew() -> None:
    """Goal: a store that was wrong once is not believed half."""
    one = GarbageJudge(CONFIG)
    judge(one, {1}, 0)
    judge(one, set(), 500)
    assert judge(one, {1}, 5000) == set()
    assert judge(one, {1}, 6000) == {1}


def test_a_clock_that_goes_backwards_confirms_nothing() -> None:
    """Goal: the age is counted again from the earlier time."""
    one = GarbageJudge(CONFIG)
    judge(one, {1}, 10_000)
    assert judge(one, {1}, 500) == set()
    assert judge(one, {1}, 1400) == set()
    assert judge(one, {1}, 1500) == {1}


def test_the_brake_refuses_the_whole_pass() -> None:
    """Goal: a store that lost its data deletes nothing here, however often it is asked."""
    one = GarbageJudge(CONFIG)
    judge(one, {1}, 0, total=10)
    for now_ms in (2000, 4000, 6000):
        verdict = one.judge(seen=range(10), looks_deleted=range(6), now_ms=now_ms)
        assert verdict.deleted == frozenset()
        assert "6 of 10 ledgers look deleted" in verdict.refused
    assert judge(one, {1}, 8000, total=10) == {1}


def test_few_ledgers_may_all_be_deleted() -> None:
    """Goal: the brake needs more than a small number, and more than the share."""
    one = GarbageJudge(CONFIG)
    assert judge(one, {0, 1, 2}, 0, total=3) == set()
    assert judge(one, {0, 1, 2}, 1000, total=3) == {0, 1, 2}
    assert judge(one, set(range(5)), 2000, total=10) == set()
    assert judge(one, set(range(5)), 3000, total=10) == set(range(5))
