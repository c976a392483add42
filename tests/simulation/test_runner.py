"""Goal: a search says what it did and what it missed.  Method: run small ones, some that fail."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

import pytest

from dlcore.ledger.writing.appender import LedgerAppender
from tests.fixtures.lengths import amount
from tests.simulation import coverage, mutants_run, workload
from tests.simulation.mutants import MUTANTS, focused
from tests.simulation.runner import run_many, run_some
from tests.simulation.tiers import TIER_ROLES
from tests.simulation.workload import run_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.workload import Run

SEEDS = amount(12, sampled=2)


class _World:
    """Refers to itself, as the objects of a run do."""

    def __init__(self) -> None:
        self.itself = self


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


def test_a_seed_runs_the_same_way_again() -> None:
    """No part of it is real: a socket or clock that is would answer sooner or later."""
    with focused("lived logs"):
        assert run_seed(4).steps == run_seed(4).steps


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


def test_a_search_keeps_no_world_of_an_earlier_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand worlds of ten megabytes would fill the memory."""
    worlds: list[weakref.ref[_World]] = []
    kept: list[int] = []

    async def live(seed: int, result: Run) -> None:
        kept.append(sum(world() is not None for world in worlds))
        worlds.append(weakref.ref(_World()))

    monkeypatch.setattr(workload, "_main", live)
    assert not any(run_seed(seed).failure for seed in range(3))
    assert kept == [0, 0, 0]


def test_a_search_ends_soon_with_a_mutant_that_does_not_fit_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is broken itself, so that no seed shows anything."""

    def raise_at_once(seed: int) -> Run:
        raise AttributeError(seed)

    monkeypatch.setattr(mutants_run, "run_seed", raise_at_once)
    finding = mutants_run.find("write_sets_are_shifted", range(1000))
    assert finding.seed is None
    assert finding.invariant == "BROKEN AttributeError"
    assert finding.tried < 100
