"""Segments: what their extents add up to, and which lists of extents no writer makes."""

from __future__ import annotations

import pytest

from dlcore.base.errors import CorruptMetadataError
from dlcore.base.ids import DLSN
from dlcore.log.metadata.segment import Extent, LogSegment, SegmentState, adjacent
from tests.fixtures.log_states import final


def open_over(ledger_id: int) -> Extent:
    """Return an extent that a writer fills."""
    return Extent(
        ledger_id=ledger_id,
        first_entry_id=0,
        last_entry_id=None,
        record_count=0,
        size_bytes=0,
        first_txid=0,
        last_txid=0,
    )


def segment(*extents: Extent, state: SegmentState = SegmentState.IN_PROGRESS) -> LogSegment:
    """Return segment 3 with these extents."""
    return LogSegment(lssn=3, state=state, created_ms=1, start_sequence_id=40, extents=extents)


def test_only_final_extents_count() -> None:
    """Only its bookies know what the open one holds."""
    found = segment(final(1), final(2, entries=2, records=4), open_over(3))
    assert found.start == DLSN(3, 0, 0)
    assert found.has_open_extent
    assert found.closed_entry_count == 5
    assert found.closed_record_count == 14
    assert found.closed_size_bytes == 200
    assert found.find(4) == (found.extents[1], 3, 50)
    assert found.find(5) == (found.extents[2], 5, 54)
    assert segment().find(0) is None
    assert segment().closed_size_bytes == 0


def test_an_open_extent_is_the_last_one_of_a_segment_in_progress() -> None:
    """Anything else is damage, which is named."""
    with pytest.raises(CorruptMetadataError, match="segment 3: an open extent before the last"):
        segment(open_over(1), final(2))
    with pytest.raises(CorruptMetadataError, match="segment 3: completed, but its last extent is"):
        segment(final(1), open_over(2), state=SegmentState.COMPLETED)


@pytest.mark.parametrize(
    ("extents", "sizes"),
    [
        ([], []),
        ([(1, 0, 4)], [1]),
        ([(1, 0, 4), (1, 5, 5), (1, 6, 9)], [3]),
        ([(1, 0, 4), (1, 6, 9)], [1, 1]),  # entries between them are another log's
        ([(1, 0, 4), (2, 5, 9), (2, 10, 10), (1, 5, 9)], [1, 2, 1]),
        ([(1, 0, 4), (1, 0, 4)], [1, 1]),
    ],
)
def test_extents_that_follow_in_one_ledger_are_read_at_once(
    extents: list[tuple[int, int, int]], sizes: list[int]
) -> None:
    """In the order of the log, none left out."""
    given = [
        Extent(ledger_id=ledger, first_entry_id=first, last_entry_id=last)
        for ledger, first, last in extents
    ]
    groups = list(adjacent(given))
    assert [len(group) for group in groups] == sizes
    assert [extent for group in groups for extent in group] == given
