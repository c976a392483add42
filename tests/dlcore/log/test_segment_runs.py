"""Extents that one range read gets: those that follow one another in one ledger."""

from __future__ import annotations

import pytest

from dlcore.log.metadata.segment import Extent, adjacent


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
def test_what_follows_one_another(extents: list[tuple[int, int, int]], sizes: list[int]) -> None:
    """In the order of the log, none left out."""
    given = [
        Extent(ledger_id=ledger, first_entry_id=first, last_entry_id=last)
        for ledger, first, last in extents
    ]
    groups = list(adjacent(given))
    assert [len(group) for group in groups] == sizes
    assert [extent for group in groups for extent in group] == given
