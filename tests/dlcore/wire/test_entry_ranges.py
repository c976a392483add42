"""Many ranges of entries as one value: they read as a list of ranges."""

from __future__ import annotations

import pytest

from dlcore.wire.port import EntryRange, EntryRanges

EXPECTED = [
    EntryRange(first_entry_id=first, last_entry_id=last)
    for first, last in ((0, 3), (5, 5), (9, 2**62))
]


def test_they_are_read_as_a_list_is() -> None:
    """By position, from behind, as a slice, compared."""
    ranges = EntryRanges(EXPECTED)
    assert len(ranges) == 3
    assert list(ranges) == EXPECTED
    assert ranges == EXPECTED
    assert ranges != EXPECTED[:2]
    assert ranges != "ranges"
    assert ranges[-1] == EXPECTED[-1]
    assert ranges[1:] == EXPECTED[1:]
    with pytest.raises(IndexError):
        ranges[3]


def test_they_grow_at_the_end() -> None:
    """And give their edges as columns."""
    ranges = EntryRanges()
    assert not ranges
    ranges.add(4, 7)
    ranges.add(9, 9)
    firsts, lasts = ranges.columns()
    assert (firsts.tolist(), lasts.tolist()) == ([4, 9], [7, 9])
