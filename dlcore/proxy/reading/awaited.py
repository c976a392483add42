"""Records of a followed log that are yet to come, told by what they will hold: a pure machine.

Whoever waits for one is in order of the value it waits for, so that an entry costs what it finds
and not what is waited for.
"""

from __future__ import annotations

from bisect import insort
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from dlcore.base.records import RecordField
from dlcore.log.entries.batches import numbers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan
    from dlcore.log.reading.rows import StoredRows

_W = TypeVar("_W")


def first_not_less(rows: StoredRows, wanted: NotLessThan) -> DLSN | None:
    """Return the position of the first of an entry's rows that is not below; None: there is none.

    What `wanted` names never decreases from one row to the next.
    """
    count_ = rows.batch.num_rows
    match wanted.field:
        case RecordField.TXID:
            row = int(np.searchsorted(numbers_of(rows.batch.column(0)), wanted.value))
        case RecordField.SEQUENCE_ID:
            row = max(0, wanted.value - rows.place.sequence_id - rows.first_slot)
        case _:  # a time is the entry's, of all its records
            row = 0 if wanted.value <= rows.place.timestamp_ms else count_
    return rows.slice(row, 0).position if row < count_ else None


class Awaited(Generic[_W]):
    """Who waits for which records."""

    def __init__(self) -> None:
        self._waiting: dict[RecordField, list[tuple[int, int, NotLessThan, _W]]] = {
            field: [] for field in RecordField
        }
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, wanted: NotLessThan, waiter: _W) -> None:
        """Let a waiter wait for the first record that is not below."""
        insort(self._waiting[wanted.field], (wanted.value, next(self._numbers), wanted, waiter))

    def leave(self, waiter: _W) -> None:
        """Let one wait no more, if it still does."""
        for waiting in self._waiting.values():
            waiting[:] = [each for each in waiting if each[-1] is not waiter]

    def came(self, rows: StoredRows) -> Iterator[tuple[_W, DLSN]]:
        """Take the log's next rows; yield who waits for one of them, and where that is."""
        for waiting in self._waiting.values():
            while waiting:
                *_, wanted, waiter = waiting[0]
                position = first_not_less(rows, wanted)
                if position is None:
                    break
                del waiting[0]
                yield waiter, position

    def give_up(self) -> Iterator[_W]:
        """Yield all who wait: nothing more comes."""
        for waiting in self._waiting.values():
            while waiting:
                yield waiting.pop()[-1]
