"""The conduct of bookies, judged from their answers alone."""

from __future__ import annotations

import random
from functools import partial

import pytest

from dlcore.base.config import QuarantineConfig
from dlcore.base.errors import ConfigurationError
from dlcore.ledger.placing.health import (
    REST_S,
    TRIAL_S,
    TRIAL_S_MAX,
    BookieHealth,
    Conduct,
    ReplacementSearch,
)
from tests.fixtures.ledgers import bookie

A, B, C = bookie("A"), bookie("B"), bookie("C")
CONFIG = QuarantineConfig(window_s=60, failures_min=3, failure_share=0.5, period_s=100)


def conduct_of(seed: int = 0) -> Conduct:
    """Return an empty one."""
    return Conduct(CONFIG, conduct_s=8, rng=random.Random(seed))


def end_of(conduct: Conduct, now: float) -> float:
    """Return when A's quarantine ends, to a tenth of a second."""
    while conduct.is_quarantined(A, now):
        now += 0.1
    return now


def test_a_row_of_failures_quarantines_whatever_came_before() -> None:
    """A bookie that stops all at once has its good minute on record."""
    conduct = conduct_of()
    for _ in range(1000):
        conduct.note_success(A, 0)
    assert not conduct.note_failure(A, 1)
    assert not conduct.note_failure(A, 2)
    assert not conduct.is_quarantined(A, 2)
    assert conduct.note_failure(A, 3)
    assert conduct.is_quarantined(A, 3)
    assert not conduct.note_failure(A, 4)  # it is quarantined already
    assert not conduct.is_quarantined(B, 4)


def test_a_share_of_failures_quarantines() -> None:
    """Half of the answers, where the row is broken again and again; less is forgiven."""
    conduct = conduct_of()
    begun = []
    for now in range(3):
        begun.append(conduct.note_failure(A, now))
        conduct.note_success(A, now)
    assert begun == [False, False, True]
    for now in range(3, 8):
        conduct.note_success(A, now)
    assert not conduct.note_failure(A, 8)


def test_a_success_releases_at_once() -> None:
    """It works: no reason to wait for the end of the period."""
    conduct = conduct_of()
    for _ in range(3):
        conduct.note_failure(A, 0)
    assert conduct.is_resting(A, 1)
    conduct.note_success(A, 1)
    assert not conduct.is_quarantined(A, 1)
    assert not conduct.is_resting(A, 1)


def test_another_process_starts_with_a_clean_record() -> None:
    """Failures of the one before do not count."""
    conduct = conduct_of()
    for _ in range(3):
        conduct.note_failure(A, 0)
    conduct.release(A)
    conduct.release(B)
    assert not conduct.is_quarantined(A, 0)
    assert not conduct.is_resting(A, 0)
    assert not conduct.note_failure(A, 0)


def test_a_single_failure_gives_a_rest() -> None:
    """No writer takes it at once again; after a while it is as good as any."""
    conduct = conduct_of()
    conduct.note_failure(A, 5)
    assert conduct.is_resting(A, 5 + REST_S - 1)
    assert not conduct.is_resting(A, 5 + REST_S)
    assert not conduct.is_quarantined(A, 5)


def test_old_answers_do_not_count() -> None:
    """Two windows back at most; then a bookie starts anew."""
    conduct = conduct_of()
    conduct.note_failure(A, 0)
    conduct.note_failure(A, 59)
    assert conduct.note_failure(A, 61)
    other = conduct_of()
    other.note_failure(A, 0)
    other.note_failure(A, 59)
    assert not other.note_failure(A, 125)


def test_periods_differ_between_clients_and_lie_in_bounds() -> None:
    """No two clients come back at the same moment."""
    ends = []
    for seed in range(20):
        conduct = conduct_of(seed)
        for _ in range(3):
            conduct.note_failure(A, 0)
        ends.append(end_of(conduct, 0))
    assert len(set(ends)) == len(ends)
    assert min(ends) >= 50
    assert max(ends) <= 150.1


def test_a_bookie_that_fails_again_after_its_time_is_quarantined_again() -> None:
    """The end of a period is a trial, not a pardon."""
    conduct = conduct_of()
    for _ in range(3):
        conduct.note_failure(A, 0)
    end = end_of(conduct, 0)
    begun = [conduct.note_failure(A, end + i) for i in range(3)]
    assert True in begun
    assert conduct.is_quarantined(A, end + 3)


def test_adds_and_reads_are_judged_apart() -> None:
    """Either makes a bookie suspect for reads; a release is for both."""
    health = BookieHealth(conduct_of(), conduct_of())
    assert not health.is_suspect(A, 0)
    health.adds.note_failure(A, 0)
    health.reads.note_failure(B, 0)
    assert health.is_suspect(A, 1)
    assert health.is_suspect(B, 1)
    health.reads.note_success(A, 1)
    assert health.is_suspect(A, 1)
    health.adds.note_failure(B, 1)
    health.release(B)
    assert not health.is_suspect(B, 1)
    for _ in range(3):
        health.reads.note_failure(B, 0)
    assert health.is_suspect(B, REST_S + 1)


def test_the_pause_before_a_trial_grows_with_each_failure_and_is_forgiven() -> None:
    """Failures of one outage count once; a long good conduct clears the record."""
    conduct = conduct_of()
    now, pauses = 0.0, []
    assert conduct.may_return(A, now)
    assert conduct.is_last_hope(A, now)
    for _ in range(10):
        conduct.note_failure(A, now)
        since = now
        while not conduct.may_return(A, now):
            assert conduct.is_last_hope(A, now) == (now >= since + TRIAL_S)
            now += 0.25
        pauses.append(now - since)
        now += 2
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 120, 120, 120]
    conduct.note_failure(A, now)
    conduct.note_failure(A, now + 5)  # by another ledger, and still the same outage
    assert not conduct.is_last_hope(A, now + 5 + TRIAL_S / 2)
    assert conduct.may_return(A, now + TRIAL_S_MAX)
    now += 2 * TRIAL_S_MAX + 10
    conduct.note_failure(A, now)
    assert conduct.may_return(A, now + TRIAL_S)


def test_a_refusal_that_is_no_fault_only_defers_the_next_trial() -> None:
    """The bookie is in good order; the entry would be refused again."""
    conduct = conduct_of()
    conduct.note_refusal(A, 0)
    assert not conduct.is_resting(A, 0.5)
    assert not conduct.may_return(A, 0.5)
    assert not conduct.is_last_hope(A, 0.5)
    assert conduct.may_return(A, TRIAL_S)


def test_failed_members_come_back_only_at_a_later_look_or_as_the_last_hope() -> None:
    """And then only after the pause that their failures ask for."""
    conduct = conduct_of()
    search = ReplacementSearch(conduct, patience_s=20)
    members = (A, B)
    conduct.note_failure(A, 0)
    choose = partial(search.choose, [A, B, C], members=members, stuck_entry=None)
    assert choose(now=2)[:2] == ([B, C], [])
    assert [search.look_later(now) for now in (0, 1, 3, 7, 12)] == [1, 2, 4, 5, 5]
    search.look_again()
    assert choose(now=0.5)[:2] == ([B, C], [B, C])
    search.look_again()
    assert choose(now=2)[:2] == ([B, C], [A, B, C])
    assert choose(now=2)[:2] == ([B, C], [])  # not a later look any more
    assert choose(stuck_entry=7, now=0.5)[:2] == ([B, C], [B, C])
    assert choose(stuck_entry=7, now=2)[:2] == ([B, C], [A, B, C])
    assert choose(now=2)[:2] == ([B, C], [])
    search.replaced()
    assert search.look_later(20) == 1


def test_bookies_that_failed_lately_are_tried_for_a_while_where_no_other_is_left() -> None:
    """At growing intervals; no pause where only members are left."""
    conduct = conduct_of()
    search = ReplacementSearch(conduct, patience_s=20)
    choose = partial(search.choose, members=(A, B))
    conduct.note_failure(C, 0)
    assert choose([A, B], stuck_entry=7, now=1) == ([A, B], [A, B], 0, True)
    now, pauses = 1.0, []
    while True:
        conduct.note_failure(C, now)
        choice = choose([A, B, C], stuck_entry=7, now=now)
        if C not in choice.candidates:
            break
        pauses.append(choice.pause_s)
        now += choice.pause_s
    assert pauses[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert now == pytest.approx(21, abs=2)
    free = choose([A, B, C], stuck_entry=7, now=now + REST_S)
    assert free.candidates == [A, B, C]
    conduct.note_failure(C, now + REST_S)
    again = choose([A, B, C], stuck_entry=8, now=now + REST_S)
    assert again[:2] == ([A, B, C], [A, B])
    assert again.pause_s == pytest.approx(0.1)
    assert again.may_wait


def test_an_entry_waits_for_bookies_as_long_as_configured() -> None:
    """Trials of members are no progress; the next entry that cannot reach Qa waits as long again.

    Meanwhile the ledger looks again soon, not at the long pauses of one that can do without.
    """
    search = ReplacementSearch(conduct_of(), patience_s=5)
    choose = partial(search.choose, [A], members=(A, B))
    now, pauses = 1.0, []
    while choose(stuck_entry=7, now=now).may_wait:
        assert choose(stuck_entry=None, now=now).readmitted == []  # A is tried: nothing is stuck
        assert choose(stuck_entry=7, now=now).may_wait
        pauses.append(search.look_later(now))
        now += pauses[-1]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert choose(stuck_entry=8, now=now).may_wait
    assert (
        not ReplacementSearch(conduct_of(), patience_s=0)
        .choose([A], members=(A, B), stuck_entry=7, now=1)
        .may_wait
    )


@pytest.mark.parametrize(
    "values",
    [{"window_s": 0}, {"period_s": -1}, {"failures_min": 0}, {"failure_share": 0}],
    ids=str,
)
def test_bad_settings_are_refused(values: dict[str, float]) -> None:
    """The error names the setting."""
    (key,) = values
    with pytest.raises(ConfigurationError, match=key):
        QuarantineConfig(**values)  # type: ignore[arg-type]
