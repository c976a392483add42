"""Goal: the simulation and the tests would notice.  Method: put known bugs back, and be caught.

``make mutants`` tries all of them, prints what caught which, and keeps the seeds, with which the
search begins here.  Here is a sample: for an invariant those that it catches with few seeds, and a
few of those that a named test catches.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.lengths import amount, for_each, sample
from tests.simulation.checkers import INVARIANTS
from tests.simulation.mutants import FOCUSES, MUTANTS, focused
from tests.simulation.mutants_run import find, is_caught_by_its_test, known
from tests.simulation.mutants_tested import TESTED
from tests.simulation.workload import run_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FOCUSED_SEEDS = amount(3, sampled=1)
SEEDS_MAX = 1000
"""Far more than any mutant needs, so that no change of the product makes one be missed by luck."""
_INVARIANT = re.compile(r'^[A-Z_]+ = "([A-Z]\d+ [A-Z]\w+)"$', re.MULTILINE)
_PER_INVARIANT = amount(2, sampled=1)
_TESTED = (
    "a_closing_writer_undoes_a_swap",
    "late_acks_of_replaced_bookies_count",
    "replies_are_read_back_without_sync",
)


def soonest() -> list[str]:
    """Return the mutants of each invariant that took the fewest seeds."""
    found = known()
    chosen: list[str] = []
    for invariant in INVARIANTS:
        names = (name for name in MUTANTS if name in found and found[name].invariant == invariant)
        chosen += sorted(names, key=lambda name: (found[name].seed, name))[:_PER_INVARIANT]
    return chosen


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A run logs every fault it makes; the trace tells them better."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(1800)  # a search of all seeds takes minutes; most end at the first one
@pytest.mark.parametrize("name", sample(soonest(), 2))
def test_known_bugs_are_found(name: str) -> None:
    """A simulation that lets a known bug pass proves nothing about unknown ones."""
    finding = find(name, (known()[name].seed, *range(SEEDS_MAX)))
    assert finding.seed is not None, f"{name} was not found in {finding.tried} seeds"


def test_every_invariant_catches_a_mutant() -> None:
    """One that catches none is a hole."""
    assert {each.invariant for each in known().values()} >= set(INVARIANTS)


def test_the_catalogue_has_every_invariant() -> None:
    """A mutant that breaks an invariant outside of it does not count as caught."""
    texts = (file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("*.py"))
    named = {name for text in texts for name in _INVARIANT.findall(text)}
    assert named == set(INVARIANTS)


@pytest.mark.parametrize("name", sample(_TESTED, 1))
def test_bugs_that_the_simulation_leaves_out_are_caught_by_a_test(name: str) -> None:
    """The named test fails in a process of its own, and passes in this run."""
    assert is_caught_by_its_test(name)


def test_the_tests_that_catch_mutants_exist() -> None:
    """A test that was renamed would leave its mutants to no one."""
    for name, tested in TESTED.items():
        file, function = tested.test.split("::")
        assert f"def {function.split('[')[0]}(" in (ROOT / file).read_text(), name


def test_the_cases_of_tests_that_catch_mutants_exist() -> None:
    """A case that got another id would leave them, too."""
    cases = sorted({tested.test for tested in TESTED.values() if "[" in tested.test})
    assert cases
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--full", "-n", "0"]
    collected = subprocess.run(
        [*command, "-p", "no:cacheprovider", *cases],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert collected.returncode == 0, collected.stderr


@for_each(sorted([*MUTANTS, *TESTED]))
def test_a_mutant_finds_what_it_changes(name: str) -> None:
    """A name changed in the product is changed here."""
    apply = MUTANTS[name] if name in MUTANTS else TESTED[name].apply
    with apply():
        pass


def test_mutants_have_names_of_their_own() -> None:
    """A bug is in the catalogue once."""
    assert not MUTANTS.keys() & TESTED.keys()


@pytest.mark.parametrize("focus", sample(sorted(FOCUSES), 2))
def test_every_focus_passes_without_a_mutant(focus: str) -> None:
    """The cause of a failure must be the mutant."""
    with focused(focus):
        for seed in range(FOCUSED_SEEDS):
            result = run_seed(seed)
            assert result.failure is None, result.explain()


def test_a_failed_seed_says_how_to_replay_it() -> None:
    """One text has all that a person needs."""
    with MUTANTS["acks_before_earlier_entries"]():
        failed = next(each for each in map(run_seed, range(50)) if each.failure is not None)
    text = failed.explain()
    assert f"--seed {failed.seed}" in text
    assert "created" in text
    assert type(failed.failure).__name__ in text
