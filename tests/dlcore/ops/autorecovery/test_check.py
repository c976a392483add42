"""Goal: expectation and answer are compared entry by entry, striped or not."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import given, strategies as st

from dlcore.base.config import QuorumConfig
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.values import Ensemble, LedgerState, write_set
from dlcore.ops.autorecovery.check import (
    Fragment,
    Held,
    Unknown,
    check_ledger,
    expected_ranges,
    fragments_of,
    missing_ranges,
)
from dlcore.wire.port import EntryRange, EntryRanges
from tests.fixtures.ledgers import bookie, metadata_of, quorum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

QUORUMS = [(1, 1), (3, 3), (3, 2), (5, 2), (4, 3), (6, 1)]


def ranges_of(*entries: int) -> list[EntryRange]:
    """Return the ranges of entries, joined where they touch."""
    ranges: list[EntryRange] = []
    for entry_id in sorted(entries):
        first = entry_id
        if ranges and ranges[-1].last_entry_id == entry_id - 1:
            first = ranges.pop().first_entry_id
        ranges.append(EntryRange(first_entry_id=first, last_entry_id=entry_id))
    return ranges


def entries_of(ranges: Sequence[EntryRange]) -> list[int]:
    """Return the entries of ranges, in their order."""
    return [e for each in ranges for e in range(each.first_entry_id, each.last_entry_id + 1)]


@given(
    shape=st.sampled_from(QUORUMS),
    first=st.integers(0, 20),
    count=st.integers(0, 40),
    held=st.sets(st.integers(0, 70)),
)
def test_missing_is_what_the_write_sets_say_less_what_is_held(
    shape: tuple[int, int], first: int, count: int, held: set[int]
) -> None:
    """Against the definition of striping, for every position."""
    size, width = shape
    quorum = quorum_of(size, width, 1)
    names = "ABCDEF"[:size]
    metadata = metadata_of(
        *([(0, names)] if first == 0 else [(0, names[::-1]), (first, names)]),
        quorum=quorum,
        state=LedgerState.CLOSED,
        last_entry_id=first + count - 1,
    )
    fragment = fragments_of(metadata)[-1]
    for position in range(size):
        expected = [e for e in range(first, first + count) if position in write_set(quorum, e)]
        listed = expected_ranges(
            quorum, position=position, first_entry_id=first, last_entry_id=first + count - 1
        )
        assert entries_of(list(listed)) == expected
        missing = missing_ranges(quorum, fragment, position, ranges_of(*held))
        assert entries_of(missing) == [e for e in expected if e not in held]
        assert all(each.first_entry_id <= each.last_entry_id for each in missing)


def test_fragments_end_where_the_state_says() -> None:
    """CLOSED: at the last entry; else completed ensembles whole, and the last up to the LAC."""
    ensembles = ((0, "ABC"), (5, "ABD"), (9, "ABE"))
    closed = metadata_of(*ensembles, state=LedgerState.CLOSED, last_entry_id=6)
    assert [(f.first_entry_id, f.last_entry_id, f.is_final) for f in fragments_of(closed)] == [
        (0, 4, True),
        (5, 6, True),
        (9, 8, True),
    ]
    is_open = metadata_of(*ensembles)
    assert [(f.last_entry_id, f.is_final) for f in fragments_of(is_open)] == [
        (4, True),
        (8, True),
        (8, False),
    ]
    known = fragments_of(is_open, last_add_confirmed=11)
    assert [f.last_entry_id for f in known] == [4, 8, 11]


def test_an_empty_closed_ledger_expects_nothing() -> None:
    """And yet has a fragment: its bookies can be lost."""
    (fragment,) = fragments_of(metadata_of((0, "ABC"), state=LedgerState.CLOSED))
    assert (fragment.first_entry_id, fragment.last_entry_id) == (0, -1)
    assert missing_ranges(quorum_of(3, 3, 2), fragment, 0, []) == ()


def test_no_answer_is_unknown_and_never_missing() -> None:
    """Each bookie by its own answer."""
    metadata = metadata_of((0, "ABC"), state=LedgerState.CLOSED, last_entry_id=9)
    answers = {
        bookie("A"): Held(ranges_of(*range(10))),
        bookie("B"): Held(ranges_of(0, 1, 2, 5)),
    }
    a, b, c = check_ledger(metadata, answers)
    assert a.is_complete
    assert entries_of(b.missing) == [3, 4, 6, 7, 8, 9]
    assert not b.is_complete
    assert (c.missing, c.unknown) == ((), "it was not asked")
    assert not c.is_complete
    answers_of_c = {bookie("C"): Unknown("no route")}
    assert check_ledger(metadata, answers_of_c)[2].unknown == "no route"


def test_entries_of_a_bookie_behind_a_fragment_do_not_count() -> None:
    """It may be of a later ensemble of the same ledger."""
    quorum = quorum_of(3, 3, 2)
    ensemble = metadata_of((0, "ABC"), state=LedgerState.CLOSED, last_entry_id=9)
    (fragment,) = fragments_of(ensemble)
    assert missing_ranges(quorum, fragment, 0, ranges_of(0, 1, 2, 12, 13)) == (
        EntryRange(first_entry_id=3, last_entry_id=9),
    )
    assert missing_ranges(quorum, fragment, 0, ranges_of(*range(10), 40)) == ()


@given(
    st.sampled_from([(2, 1, 1), (3, 2, 2), (4, 3, 2), (5, 2, 1)]),
    st.integers(0, 30),
    st.integers(0, 60),
    st.lists(st.integers(0, 90), unique=True),
    st.data(),
)
def test_many_runs_at_once_are_compared_as_one_by_one(
    shape: tuple[int, int, int], first: int, length: int, held: list[int], data: st.DataObject
) -> None:
    """The compact list of a transport, and a plain one: the same is missing, to the entry."""
    size, width, acks = shape
    quorum = QuorumConfig(ensemble_size=size, write_quorum_size=width, ack_quorum_size=acks)
    position = data.draw(st.integers(0, size - 1))
    members = tuple(BookieId(str(each), str(each) * 32) for each in range(size))
    fragment = Fragment(
        ensemble=Ensemble(first, members), last_entry_id=first + length - 1, is_final=True
    )
    ranges = [EntryRange(first_entry_id=each, last_entry_id=each) for each in sorted(held)]
    plain = missing_ranges(quorum, fragment, position, ranges)
    with patch("dlcore.ops.autorecovery.check._RUNS_AT_ONCE", 3):
        assert entries_of(
            missing_ranges(quorum, fragment, position, EntryRanges(ranges))
        ) == entries_of(plain)


def test_a_million_missing_ranges_take_little_memory() -> None:
    """Goal: a bookie that replaces one of a long striped ledger lacks as many as there are runs."""
    quorum = QuorumConfig(ensemble_size=4, write_quorum_size=3, ack_quorum_size=2)
    members = tuple(BookieId(str(each), str(each) * 32) for each in range(4))
    fragment = Fragment(
        ensemble=Ensemble(0, members), last_entry_id=4 * 1_000_000 - 1, is_final=True
    )
    tracemalloc.start()
    try:
        missing = missing_ranges(quorum, fragment, 3, ())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(missing) == 1_000_000
    assert missing[-1] == EntryRange(first_entry_id=3_999_997, last_entry_id=3_999_999)
    assert peak_bytes < 50 * 1_000_000


def test_compact_ranges_are_a_sequence() -> None:
    """Like the list that they stand for."""
    ranges = [EntryRange(first_entry_id=each, last_entry_id=each + 1) for each in (0, 5, 9)]
    compact = EntryRanges(ranges)
    assert compact == ranges
    assert compact != ranges[:2]
    assert compact[-1] == ranges[2]
    assert compact[1:] == ranges[1:]
    assert len(compact) == 3
    with pytest.raises(IndexError):
        compact[3]
