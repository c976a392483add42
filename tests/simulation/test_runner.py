"""Goal: a search says what it did and what it missed.  Method: run small ones, some that fail."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from dlcore.ledger.writing.appender import LedgerAppender
from tests.fixtures.lengths import amount
from tests.simulation import coverage
from tests.simulation.mutants import MUTANTS
from tests.simulation.runner import run_many, run_some
from tests.simulation.tiers import TIER_ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEDS = amount(12, sampled=3)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_search_runs_in_other_processes_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds, faults and coverage of all processes are in one report, and the result is 0."""
    assert run_many(range(SEEDS), jobs=2, keep_going=False) == 0
    text = capsys.readouterr().out
    assert f"{SEEDS} seeds in" in text
    assert "seeds a second" in text
    assert "client pauses" in text
    assert "LedgerAppender" in text


def test_processes_of_a_focus_die_often() -> None:
    """Those that tier and keep tables, at many different requests."""
    tally = run_some(range(1), "dying tables")
    assert not tally.failures
    dying = {point: n for point, n in tally.deaths.items() if point[0].startswith(TIER_ROLES)}
    assert sum(dying.values()) > 20
    assert len(dying) > 5


def test_a_failed_seed_is_kept_with_its_story() -> None:
    """The checker's name, how to replay it, and the history of the ledger that went wrong."""
    with MUTANTS["write_sets_are_shifted"]():
        tally = run_some(range(SEEDS))
    assert tally.seeds == SEEDS
    assert tally.failures
    failure = tally.failures[0]
    assert failure.invariant in failure.explanation
    assert f"--seed {failure.seed}" in failure.explanation
    assert "VIOLATED" in failure.explanation


def test_coverage_watches_only_while_it_is_open() -> None:
    """Machines are as they were afterwards, and what is known but was not seen is listed."""
    method = LedgerAppender.handle
    seen = run_some(range(1)).transitions
    assert LedgerAppender.handle is method
    assert any(each.event == "Append" for each in seen)
    missed = coverage.Transition("LedgerAppender", "never", "seen", "before")
    lines = coverage.report(seen, {*seen, missed})
    assert f"  {missed}" in lines
