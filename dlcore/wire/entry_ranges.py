"""Many ranges of entries, compact: 16 bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from dlcore.wire.port import EntryRange

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class EntryRanges(Sequence[EntryRange]):
    """Ascending ranges, which become values when they are accessed."""

    def __init__(self, ranges: Iterable[EntryRange] = ()) -> None:
        self._bounds = array("q")
        for each in ranges:
            self.add(each.first_entry_id, each.last_entry_id)

    def add(self, first_entry_id: int, last_entry_id: int) -> None:
        """Append a range."""
        self._bounds.append(first_entry_id)
        self._bounds.append(last_entry_id)

    def extend(self, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> None:
        """Append ranges."""
        self._bounds.frombytes(np.column_stack((firsts, lasts)).tobytes())

    def __len__(self) -> int:
        return len(self._bounds) // 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list

    @overload
    def __getitem__(self, index: int) -> EntryRange: ...

    @overload
    def __getitem__(self, index: slice) -> list[EntryRange]: ...

    def __getitem__(self, index: int | slice) -> EntryRange | list[EntryRange]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index] * 2
        return EntryRange(first_entry_id=self._bounds[place], last_entry_id=self._bounds[place + 1])

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first and the last entries."""
        bounds = np.frombuffer(self._bounds, np.int64).reshape(-1, 2)
        return bounds[:, 0], bounds[:, 1]
