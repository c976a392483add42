"""Goal: ensembles and replacements are different, allowed bookies, chosen by the seed alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from dlcore.errors import NotEnoughBookiesError
from dlcore.ledger.placement import choose_ensemble, choose_replacements
from tests.fixtures.ledgers import bookies


def test_the_order_of_candidates_does_not_matter() -> None:
    """The same seed chooses the same bookies."""
    one = choose_ensemble(bookies("ABCDE"), size=3, rng=random.Random(3))
    other = choose_ensemble(reversed(bookies("ABCDE")), size=3, rng=random.Random(3))
    assert one == other
    assert len(set(one)) == 3


def test_every_bookie_is_chosen_some_time() -> None:
    """Load spreads."""
    rng = random.Random(0)
    seen = {each for _ in range(200) for each in choose_ensemble(bookies("ABCDE"), size=2, rng=rng)}
    assert seen == set(bookies("ABCDE"))


def test_too_few_bookies_say_which_there_are() -> None:
    """A person can act on the message."""
    with pytest.raises(NotEnoughBookiesError, match=r"needs 3 .* registered are 2: A/.*, B/"):
        choose_ensemble(bookies("AB"), size=3, rng=random.Random(0))
    with pytest.raises(NotEnoughBookiesError, match="registered are 0: none"):
        choose_ensemble((), size=1, rng=random.Random(0))


@given(
    candidates=st.text("ABCDEFGH"),
    exclude=st.text("ABCDEFGH"),
    count_max=st.integers(0, 8),
    seed=st.integers(0, 100),
)
def test_replacements_are_as_many_as_there_are(
    candidates: str, exclude: str, count_max: int, seed: int
) -> None:
    """Never an excluded one, never one twice."""
    chosen = choose_replacements(
        bookies(candidates),
        exclude=bookies(exclude),
        count_max=count_max,
        rng=random.Random(seed),
    )
    allowed = set(candidates) - set(exclude)
    assert {each.name for each in chosen} <= allowed
    assert len(chosen) == len(set(chosen)) == min(count_max, len(allowed))
