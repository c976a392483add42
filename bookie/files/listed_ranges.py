"""The ranges of entries that a bookie holds of a ledger, looked up page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dlcore.wire.port import EntryRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


class RangePage(NamedTuple):
    """Ranges found in one step; further ranges are looked up with the next page."""

    firsts: list[int]
    lasts: list[int]
    next_entry_id: int | None
    """First entry of the next step; None: there are no more ranges."""


class ListedRanges:
    """Ascending ranges; a striped ledger may have a million of them.

    Args:
        look: returns the page that begins at an entry.
    """

    def __init__(self, look: Callable[[int], RangePage]) -> None:
        self._look = look

    def pages(self) -> Iterator[list[tuple[int, int]]]:
        """Yield lists of (first, last); each list is the result of one bounded step, or empty."""
        next_entry_id: int | None = 0
        # Last range of the page before, which may continue in the next page.
        last: tuple[int, int] | None = None
        while next_entry_id is not None:
            firsts, lasts, next_entry_id = self._look(next_entry_id)
            page = list(zip(firsts, lasts, strict=True))
            if last is not None and page and page[0][0] == last[1] + 1:
                page[0] = last[0], page[0][1]
            elif last is not None:
                page.insert(0, last)
            last = page.pop() if page else None
            yield page
        yield [] if last is None else [last]

    def __iter__(self) -> Iterator[EntryRange]:
        for page in self.pages():
            for first, last in page:
                yield EntryRange(first_entry_id=first, last_entry_id=last)


def joined_ranges(
    firsts: NDArray[np.int64], lasts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ascending ranges, after joining those that overlap or touch."""
    if not len(firsts):
        return firsts, lasts
    reach = np.maximum.accumulate(lasts)
    starts = firsts[1:] - 1 > reach[:-1]
    return firsts[np.r_[True, starts]], reach[np.r_[starts, True]]
