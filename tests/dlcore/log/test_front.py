"""Goal: a segment that stays loses exactly the extents at its front that no reader may read now.

Method: each case says where the log is truncated and which extents go, of three with three entries
each; `test_changes.py` does the same by chance, over chunks and the ends of segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from dlcore.log.metadata.values import Chunk, LogHead, OpenSegment, SegmentEnd, Totals, pack
from dlcore.log.upkeep.retention import Front
from tests.fixtures.log_states import final

if TYPE_CHECKING:
    from dlcore.log.metadata.changes import Piece

EXTENTS = tuple(replace(final(number), last_timestamp_ms=10 * number) for number in (1, 2, 3))
CHUNK = Chunk(first_entry_id=6, first_sequence_id=120, packed=pack(EXTENTS))
BEFORE = Totals(entries=6, records=20, size_bytes=200)
END = SegmentEnd(
    created_ms=1,
    completed_ms=2,
    start_sequence_id=100,
    chunk_count=4,
    chunked=BEFORE,
    packed=pack(EXTENTS),
)


def head(first_active: tuple[int, int, int], **changes: object) -> LogHead:
    """Return the head of a log that begins with segment 5, and has another one."""
    return replace(LogHead(first_lssn=5, max_lssn=6), first_active=first_active, **changes)


def count(piece: Piece | None) -> int:
    """Return how many extents go, which are the first ones."""
    if piece is None:
        return 0
    assert piece.extents == EXTENTS[: len(piece.extents)]
    assert piece.lssn == 5
    return len(piece.extents)


@pytest.mark.parametrize(
    ("first_active", "gone"),
    [
        ((5, 0, 0), 0),
        ((5, 8, 9), 0),  # the first extent has a record that stays
        ((5, 9, 0), 1),
        ((5, 9, 3), 1),
        ((5, 11, 0), 1),
        ((5, 12, 0), 2),
        ((5, 14, 0), 2),
        ((5, 15, 0), 2),  # all is truncated: the segment goes as a whole, once it may
        ((6, 1, 0), 2),
    ],
)
def test_extents_before_the_first_position_go(
    first_active: tuple[int, int, int], gone: int
) -> None:
    """Out of the end of a segment, or of a chunk; what is left says what was before it."""
    front = Front(head(first_active), END, kept_from_ms=None)
    piece = front.of_end(END)
    assert count(piece) == gone
    if piece is not None:
        assert piece.chunk is None
        rest, sums = EXTENTS[gone:], BEFORE.plus(EXTENTS[:gone])
        assert piece.left == replace(END, chunked=sums, packed=pack(rest))
    piece = front.of_chunk(3, CHUNK)
    assert count(piece) == gone
    if piece is not None:
        assert (piece.chunk, piece.covers) == (3, 1)
        assert piece.left == Chunk(
            first_entry_id=6 + 3 * gone,
            first_sequence_id=120 + 10 * gone,
            packed=pack(EXTENTS[gone:]),
        )


def test_a_chunk_goes_as_a_whole() -> None:
    """With all numbers that it covers; the node of the segment stays."""
    end = replace(END, chunked=BEFORE.plus(EXTENTS))
    front = Front(head((5, 15, 0)), end, kept_from_ms=None)
    piece = front.of_chunk(2, replace(CHUNK, covers=7))
    assert count(piece) == 3
    assert piece is not None
    assert (piece.chunk, piece.covers, piece.left) == (2, 7, None)


@pytest.mark.parametrize(("kept_from_ms", "gone"), [(10, 0), (11, 1), (20, 1), (21, 2), (1_000, 2)])
def test_truncated_extents_that_are_kept_for_a_time_stay(kept_from_ms: int, gone: int) -> None:
    """And all after them."""
    front = Front(head((6, 0, 0)), END, kept_from_ms=kept_from_ms)
    assert count(front.of_end(END)) == gone
    assert count(front.of_chunk(0, CHUNK)) == gone


def test_the_segment_with_the_last_stamps_stays_whole() -> None:
    """A new owner reads them from an entry on that only the last one names."""
    front = Front(head((5, 12, 0), producers_lssn=5), END, kept_from_ms=None)
    assert count(front.of_end(END)) == count(front.of_chunk(0, CHUNK)) == 0
    front = Front(head((5, 12, 0), producers_lssn=6), END, kept_from_ms=None)
    assert count(front.of_end(END)) == 2


@pytest.mark.parametrize(("entries", "gone"), [(14, 2), (15, 2), (18, 3), (9, 0), (10, 1)])
def test_the_last_chunked_extent_of_the_segment_in_progress_stays(entries: int, gone: int) -> None:
    """Its tail is in the head, for the next change of a writer."""
    segment = OpenSegment(
        created_ms=1, start_sequence_id=100, chunk_count=9, chunked=Totals(entries=entries)
    )
    front = Front(head((5, 99, 0), max_lssn=5, segment=segment), None, kept_from_ms=None)
    assert front.limit == entries - 1
    assert count(front.of_chunk(0, CHUNK)) == gone


def test_a_log_without_segments_has_nothing_to_give() -> None:
    """Its next segment is not begun."""
    assert Front(head((5, 0, 0), max_lssn=4), None, kept_from_ms=None).limit < 0
