"""Waits for future records of a followed log, by transaction id, sequence id or time: pure.

Waiters are sorted by the value that they wait for.  Therefore the cost of a new entry depends on
the waiters that it serves, and not on the number of all waiters.
"""

from __future__ import annotations

from bisect import insort
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from dlcore.base.records import RecordField

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan
    from dlcore.log.reading.entry_rows import StoredRows

_W = TypeVar("_W")


def first_not_less(rows: StoredRows, wanted: NotLessThan) -> DLSN | None:
    """Return the position of an entry's first row that is not below `wanted`, None without one.

    The field of `wanted` never decreases from one row to the next.
    """
    count_ = rows.batch.num_rows
    match wanted.field:
        case RecordField.TXID:
            row = int(np.searchsorted(rows.txids, wanted.value))
        case RecordField.SEQUENCE_ID:
            row = max(0, wanted.value - rows.place.sequence_id - rows.first_slot)
        case _:  # all records of an entry have the entry's time
            row = 0 if wanted.value <= rows.place.timestamp_ms else count_
    return rows.slice(row, 0).position if row < count_ else None


class Awaited(Generic[_W]):
    """The waiters of one log, each for one record."""

    def __init__(self) -> None:
        self._waiting: dict[RecordField, list[tuple[int, int, NotLessThan, _W]]] = {
            field: [] for field in RecordField
        }
        self._numbers = count()  # makes tuples differ before `insort` compares their waiters

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, wanted: NotLessThan, waiter: _W) -> None:
        """Add a waiter for the first record that is not below `wanted`."""
        insort(self._waiting[wanted.field], (wanted.value, next(self._numbers), wanted, waiter))

    def leave(self, waiter: _W) -> None:
        """Remove a waiter, if it still waits."""
        for waiting in self._waiting.values():
            waiting[:] = [each for each in waiting if each[-1] is not waiter]

    def came(self, rows: StoredRows) -> Iterator[tuple[_W, DLSN]]:
        """Take the log's next rows; yield each waiter of one of them, with the row's position."""
        for waiting in self._waiting.values():
            while waiting:
                *_, wanted, waiter = waiting[0]
                position = first_not_less(rows, wanted)
                if position is None:
                    break
                del waiting[0]
                yield waiter, position

    def give_up(self) -> Iterator[_W]:
        """Yield and remove all waiters, because no record can follow."""
        for waiting in self._waiting.values():
            while waiting:
                yield waiting.pop()[-1]
