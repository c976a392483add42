"""Rows on their way to a reader's caller, in order, as records or as a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from copy import copy
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING

from dlcore.base.errors import SchemaMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN


class Rows:
    """The rest of rows that came together; records are made when the first one is requested.

    Iterating over `records` takes each record that is yielded; a batch takes the rest.
    """

    __slots__ = ("_next_row", "_records", "_row_count", "size_bytes")

    def __init__(self, row_count: int, first_row: int, *, size_bytes: int) -> None:
        self._row_count = row_count
        self._next_row = min(first_row, row_count)
        self._records: Iterator[LogRecordWithDLSN] | None = None  # without those that were taken
        self.size_bytes = size_bytes

    @property
    def rows_left(self) -> int:
        """How many rows were not taken."""
        if self._records is not None:
            return length_hint(self._records)
        return self._row_count - self._next_row

    @property
    @abstractmethod
    def position(self) -> DLSN:
        """The position of the next row; the one after all of them if none is left."""

    @abstractmethod
    def _make_records(self, first_row: int) -> list[LogRecordWithDLSN]:
        """Return the records from this row on."""

    @abstractmethod
    def take_batch(self, log: str) -> pa.RecordBatch:
        """Take all rows that are left, with the columns of batches of the log `log`."""

    def records(self) -> Iterator[LogRecordWithDLSN]:
        """Return the one iterator over the records that are left."""
        if self._records is None:
            self._records = iter(self._make_records(self._next_row))
        return self._records

    def peek_records(self, count: int) -> list[LogRecordWithDLSN]:
        """Return up to `count` of the next records without taking them."""
        return list(islice(copy(self.records()), count))

    def skip(self, count: int) -> None:
        """Take `count` records, also from running iterations."""
        deque(islice(self.records(), count), maxlen=0)

    def drop(self) -> None:
        """Drop all rows, also from running iterations."""
        self._next_row = self._row_count
        for _ in self._records or ():
            pass


def take_records(rows: deque[Rows], count: int) -> list[LogRecordWithDLSN]:
    """Take up to `count` records from the first rows; nothing is taken before all are decoded.

    Therefore a caller that is interrupted meanwhile, by a signal, gets them with the next call.
    """
    records: list[LogRecordWithDLSN] = []
    for each in rows:
        if len(records) == count:
            break
        records += each.peek_records(count - len(records))
    left = len(records)
    while left:
        taken = min(left, rows[0].rows_left)
        rows[0].skip(taken)
        left -= taken
        drop_taken(rows)
    return records


def drop_taken(rows: deque[Rows]) -> None:
    """Remove the first rows that have none left."""
    while rows and not rows[0].rows_left:
        rows.popleft()


def no_records() -> SchemaMismatchError:
    """Return the error for a caller that wants records of a typed log."""
    return SchemaMismatchError(
        "the log is typed, it has rows and no records of bytes: use read_batch() or batches() of "
        "a reader, or read() of the log, which returns tables and frames"
    )
