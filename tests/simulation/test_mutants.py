"""Goal: the simulation would notice.  Method: put known bugs back, one at a time, and be caught.

``make mutants`` searches from the first seed on, prints which checker caught what, and keeps the
seeds, with which the search begins here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.simulation.mutants import FOCUSES, MUTANTS, focused
from tests.simulation.mutants_run import find, known_seeds
from tests.simulation.workload import run_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

FOCUSED_SEEDS = 5
SEEDS_MAX = 1000
"""Far more than any mutant needs, so that no change of the product makes one be missed by luck."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A run logs every fault it makes; the trace tells them better."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(1800)  # a search of all seeds takes minutes; most end at the first one
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_known_bugs_are_found(name: str) -> None:
    """A simulation that lets a known bug pass proves nothing about unknown ones."""
    hint = known_seeds().get(name, 0)
    finding = find(name, (hint, *range(SEEDS_MAX)))
    assert finding.seed is not None, f"{name} was not found in {finding.tried} seeds"


@pytest.mark.parametrize("focus", sorted(FOCUSES))
def test_every_focus_passes_without_a_mutant(focus: str) -> None:
    """What catches a mutant must be the mutant."""
    with focused(focus):
        for seed in range(FOCUSED_SEEDS):
            result = run_seed(seed)
            assert result.failure is None, result.explain()


def test_a_failed_seed_says_how_to_replay_it() -> None:
    """What a person needs is in one text."""
    with MUTANTS["acks_before_earlier_entries"]():
        failed = next(each for each in map(run_seed, range(50)) if each.failure is not None)
    text = failed.explain()
    assert f"--seed {failed.seed}" in text
    assert "created" in text
    assert type(failed.failure).__name__ in text
