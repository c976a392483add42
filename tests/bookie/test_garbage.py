"""A ledger counts as deleted after two sightings with time between, and never en masse."""

from __future__ import annotations

from bookie.config import GarbageConfig
from bookie.upkeep.garbage import GarbageJudge

CONFIG = GarbageConfig(age_ms=1000, brake_count=3, brake_share=0.5, brake_age_ms=10_000)


def judge(garbage: GarbageJudge, deleted: set[int], now_ms: int, *, total: int = 100) -> set[int]:
    """Take one pass in which nothing must be held back."""
    verdict = garbage.judge(seen=range(total), looks_deleted=deleted, now_ms=now_ms)
    assert not verdict.held
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


def test_the_brake_holds_back_what_looks_deleted_at_once() -> None:
    """Goal: a store that lost its data deletes nothing for long; what it has again is alive."""
    one = GarbageJudge(CONFIG)
    for now_ms in (0, 2000, 4000, 9999):
        verdict = one.judge(seen=range(10), looks_deleted=range(6), now_ms=now_ms)
        assert verdict.deleted == frozenset()
        assert "6 of 10 ledgers looked deleted at once" in verdict.held
    assert judge(one, set(), 20_000, total=10) == set()
    assert judge(one, {1}, 30_000, total=10) == set()
    assert judge(one, {1}, 31_000, total=10) == {1}


def test_the_brake_lets_go_of_what_looks_deleted_for_long() -> None:
    """Goal: 500 of 520 ledgers deleted on purpose are collected in the end, each after its time."""
    one = GarbageJudge(CONFIG)
    gone = set(range(500))
    for now_ms in range(0, 10_000, 1000):
        looks_deleted = gone if now_ms else gone - {7}
        verdict = one.judge(seen=range(520), looks_deleted=looks_deleted, now_ms=now_ms)
        assert not verdict.deleted
    assert "for 1 s more" in verdict.held
    verdict = one.judge(seen=range(520), looks_deleted=gone, now_ms=10_000)
    assert verdict.deleted == gone - {7}
    verdict = one.judge(seen={7, *range(500, 520)}, looks_deleted={7}, now_ms=10_999)
    assert not verdict.deleted
    assert "1 of 21" in verdict.held
    verdict = one.judge(seen={7, *range(500, 520)}, looks_deleted={7}, now_ms=11_000)
    assert verdict.deleted == {7}
    assert not verdict.held


def test_many_new_ledgers_do_not_thin_the_brake_out() -> None:
    """Goal: what was held back once has to wait, though its share is small by now."""
    one = GarbageJudge(CONFIG)
    one.judge(seen=range(10), looks_deleted=range(6), now_ms=0)
    for now_ms in (1000, 5000):
        verdict = one.judge(seen=range(1000), looks_deleted=range(6), now_ms=now_ms)
        assert not verdict.deleted
        assert verdict.held
    assert judge(one, set(range(6)), 10_000, total=1000) == set(range(6))


def test_an_operator_releases_the_brake() -> None:
    """Goal: what is released needs two looks and the usual age, and nothing more."""
    one = GarbageJudge(CONFIG)
    for now_ms, expected in ((0, set()), (999, set()), (1000, set(range(6)))):
        verdict = one.judge(seen=range(10), looks_deleted=range(6), now_ms=now_ms, is_released=True)
        assert verdict.deleted == expected
        assert bool(verdict.held) is not bool(expected)


def test_few_ledgers_may_all_be_deleted() -> None:
    """Goal: the brake needs more than a small number, and more than the share."""
    one = GarbageJudge(CONFIG)
    assert judge(one, {0, 1, 2}, 0, total=3) == set()
    assert judge(one, {0, 1, 2}, 1000, total=3) == {0, 1, 2}
    assert judge(one, set(range(5)), 2000, total=10) == set()
    assert judge(one, set(range(5)), 3000, total=10) == set(range(5))
