"""The conduct of bookies, judged from their answers alone."""

from __future__ import annotations

import random

import pytest

from dlcore.config import QuarantineConfig
from dlcore.errors import ConfigurationError
from dlcore.ledger.placing.quarantine import REST_S, BookieConduct, Quarantine
from tests.fixtures.ledgers import bookie

A, B = bookie("A"), bookie("B")
CONFIG = QuarantineConfig(window_s=60, failures_min=3, failure_share=0.5, period_s=100)


def quarantine_of(seed: int = 0) -> Quarantine:
    """Return an empty one."""
    return Quarantine(CONFIG, rng=random.Random(seed))


def end_of(quarantine: Quarantine, now: float) -> float:
    """Return when A's quarantine ends, to a tenth of a second."""
    while quarantine.is_quarantined(A, now):
        now += 0.1
    return now


def test_a_row_of_failures_quarantines_whatever_came_before() -> None:
    """A bookie that stops all at once has its good minute on record."""
    quarantine = quarantine_of()
    for _ in range(1000):
        quarantine.note_success(A, 0)
    assert not quarantine.note_failure(A, 1)
    assert not quarantine.note_failure(A, 2)
    assert not quarantine.is_quarantined(A, 2)
    assert quarantine.note_failure(A, 3)
    assert quarantine.is_quarantined(A, 3)
    assert not quarantine.note_failure(A, 4)  # it is quarantined already
    assert not quarantine.is_quarantined(B, 4)


def test_a_share_of_failures_quarantines() -> None:
    """Half of the answers, where the row is broken again and again; less is forgiven."""
    quarantine = quarantine_of()
    begun = []
    for now in range(3):
        begun.append(quarantine.note_failure(A, now))
        quarantine.note_success(A, now)
    assert begun == [False, False, True]
    for now in range(3, 8):
        quarantine.note_success(A, now)
    assert not quarantine.note_failure(A, 8)


def test_a_success_releases_at_once() -> None:
    """It works: no reason to wait for the end of the period."""
    quarantine = quarantine_of()
    for _ in range(3):
        quarantine.note_failure(A, 0)
    assert quarantine.is_resting(A, 1)
    quarantine.note_success(A, 1)
    assert not quarantine.is_quarantined(A, 1)
    assert not quarantine.is_resting(A, 1)


def test_another_process_starts_with_a_clean_record() -> None:
    """Failures of the one before do not count."""
    quarantine = quarantine_of()
    for _ in range(3):
        quarantine.note_failure(A, 0)
    quarantine.release(A)
    quarantine.release(B)
    assert not quarantine.is_quarantined(A, 0)
    assert not quarantine.is_resting(A, 0)
    assert not quarantine.note_failure(A, 0)


def test_a_single_failure_gives_a_rest() -> None:
    """Nobody takes it at once again; after a while it is as good as any."""
    quarantine = quarantine_of()
    quarantine.note_failure(A, 5)
    assert quarantine.is_resting(A, 5 + REST_S - 1)
    assert not quarantine.is_resting(A, 5 + REST_S)
    assert not quarantine.is_quarantined(A, 5)


def test_old_answers_do_not_count() -> None:
    """Two windows back at most; then a bookie starts anew."""
    quarantine = quarantine_of()
    quarantine.note_failure(A, 0)
    quarantine.note_failure(A, 59)
    assert quarantine.note_failure(A, 61)
    other = quarantine_of()
    other.note_failure(A, 0)
    other.note_failure(A, 59)
    assert not other.note_failure(A, 125)


def test_periods_differ_between_clients_and_lie_in_bounds() -> None:
    """No two clients come back at the same moment."""
    ends = []
    for seed in range(20):
        quarantine = quarantine_of(seed)
        for _ in range(3):
            quarantine.note_failure(A, 0)
        ends.append(end_of(quarantine, 0))
    assert len(set(ends)) == len(ends)
    assert min(ends) >= 50
    assert max(ends) <= 150.1


def test_a_bookie_that_fails_again_after_its_time_is_quarantined_again() -> None:
    """The end of a period is a trial, not a pardon."""
    quarantine = quarantine_of()
    for _ in range(3):
        quarantine.note_failure(A, 0)
    end = end_of(quarantine, 0)
    begun = [quarantine.note_failure(A, end + i) for i in range(3)]
    assert True in begun
    assert quarantine.is_quarantined(A, end + 3)


def test_adds_and_reads_are_judged_apart() -> None:
    """Either makes a bookie suspect for reads; a release is for both."""
    conduct = BookieConduct(quarantine_of(), quarantine_of())
    assert not conduct.is_suspect(A, 0)
    conduct.adds.note_failure(A, 0)
    conduct.reads.note_failure(B, 0)
    assert conduct.is_suspect(A, 1)
    assert conduct.is_suspect(B, 1)
    conduct.reads.note_success(A, 1)
    assert conduct.is_suspect(A, 1)
    conduct.adds.note_failure(B, 1)
    conduct.release(B)
    assert not conduct.is_suspect(B, 1)
    for _ in range(3):
        conduct.reads.note_failure(B, 0)
    assert conduct.is_suspect(B, REST_S + 1)


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
