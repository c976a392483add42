"""The ranges of entries that a bookie holds of a ledger: compact, made to values when read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from dlcore.ledger.port import EntryRange

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ListedRanges(Sequence[EntryRange]):
    """Ranges, ascending; a striped ledger may have a million of them.

    Args:
        firsts: their first entries.
        lasts: their last entries.
    """

    def __init__(self, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> None:
        self._firsts = firsts
        self._lasts = lasts

    def __len__(self) -> int:
        return len(self._firsts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of any list

    @overload
    def __getitem__(self, index: int) -> EntryRange: ...

    @overload
    def __getitem__(self, index: slice) -> ListedRanges: ...

    def __getitem__(self, index: int | slice) -> EntryRange | ListedRanges:
        if isinstance(index, slice):
            return ListedRanges(self._firsts[index], self._lasts[index])
        return EntryRange(
            first_entry_id=int(self._firsts[index]), last_entry_id=int(self._lasts[index])
        )
