"""Goal: no interleaving breaks fencing and recovery.  Method: visit all of them, within a scope.

``make model`` searches the larger scopes; docs/proof.md says what is covered and what is not.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.lengths import sample
from tests.model.mutants import MUTANTS
from tests.model.scopes import SMALL
from tests.model.search import search
from tests.model.system import Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

STATES_MAX = 1_000_000
LONG = dict.fromkeys(
    (
        "fences_are_not_logged",
        "negative_answers_before_the_fence_is_durable",
        "the_writer_ignores_fences",
    ),
    pytest.mark.prove,
)
"""They take longer than all others together."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Drivers log every ensemble change, and there are many here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", sample(SMALL, 1))
def test_no_interleaving_breaks_a_promise(name: str) -> None:
    """Every state of the scope is visited, and in each one every promise holds."""
    result = search(Protocol(SMALL[name]), states_max=STATES_MAX)
    assert not result.violation, str(result)
    assert result.is_complete, str(result)


@pytest.mark.parametrize("name", [pytest.param(each, marks=LONG.get(each, ())) for each in MUTANTS])
def test_known_bugs_are_found(name: str) -> None:
    """A model in which a known bug breaks nothing proves nothing."""
    mutant, scope = MUTANTS[name]
    with mutant():
        result = search(Protocol(scope), states_max=STATES_MAX)
    assert result.violation, str(result)


def test_a_counterexample_is_a_list_of_steps() -> None:
    """A person needs the broken promise and the way there, nothing else."""
    mutant, scope = MUTANTS["one_no_ends_the_ledger"]
    with mutant():
        result = search(Protocol(scope), states_max=STATES_MAX)
    assert "AllAckedEntriesAreReadable" in result.violation
    assert result.trace == [
        "the writer: append",
        "bookie-1 gets 'add 0' of the writer",
        "bookie-2 gets 'add 0' of the writer",
    ]
    assert result.trace[-1] in str(result)
