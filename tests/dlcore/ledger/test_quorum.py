"""Goal: quorum arithmetic is right.  Method: a second implementation, from the definition."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from dlcore.ledger.metadata.values import first_followed, is_covered, write_set
from tests.fixtures.ledgers import quorum_of

if TYPE_CHECKING:
    from dlcore.base.config import QuorumConfig


@st.composite
def quorums(draw: st.DrawFn) -> QuorumConfig:
    """Any quorum of up to six bookies."""
    ensemble = draw(st.integers(1, 6))
    write = draw(st.integers(1, ensemble))
    return quorum_of(ensemble, write, draw(st.integers(1, write)))


def can_be_acked_without(quorum: QuorumConfig, known: frozenset[int], entry_id: int) -> bool:
    """Try every ack quorum of an entry: is there one that holds none of `known`?"""
    positions = [entry_id % quorum.ensemble_size]
    while len(positions) < quorum.write_quorum_size:
        positions.append((positions[-1] + 1) % quorum.ensemble_size)
    return any(known.isdisjoint(acks) for acks in combinations(positions, quorum.ack_quorum_size))


@given(quorum=quorums(), known=st.frozensets(st.integers(0, 5)), offset=st.integers(0, 2**40))
def test_covered_means_that_no_entry_can_be_acked_unseen(
    quorum: QuorumConfig, known: frozenset[int], offset: int
) -> None:
    """Against the definition, for every quorum of six."""
    entries = range(offset, offset + quorum.ensemble_size)
    expected = not any(can_be_acked_without(quorum, known, entry) for entry in entries)
    assert is_covered(quorum, known) is expected


@pytest.mark.parametrize(
    ("quorum", "entry_id", "positions"),
    [
        ((3, 3, 2), 0, (0, 1, 2)),
        ((3, 3, 2), 4, (1, 2, 0)),
        ((5, 3, 2), 3, (3, 4, 0)),
        ((5, 3, 2), 2**33 + 1, ((2**33 + 1) % 5, (2**33 + 2) % 5, (2**33 + 3) % 5)),
        ((4, 1, 1), 7, (3,)),
    ],
)
def test_write_set(quorum: tuple[int, int, int], entry_id: int, positions: tuple[int, ...]) -> None:
    """Also beyond 32 bits, where BookKeeper overflowed."""
    assert write_set(quorum_of(*quorum), entry_id) == positions


def test_where_all_store_all_coverage_is_a_count() -> None:
    """Qw - Qa + 1 answers."""
    quorum = quorum_of(5, 5, 3)
    assert not is_covered(quorum, {0, 1})
    assert is_covered(quorum, {0, 1, 4})


def test_followers_of_different_ledgers_begin_at_different_bookies() -> None:
    """Each position of an ensemble hears first of its share of ledgers."""
    assert [first_followed(ledger_id, 3) for ledger_id in range(5)] == [0, 1, 2, 0, 1]
    assert first_followed(2**62, 5) == 2**62 % 5
