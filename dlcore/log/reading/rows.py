"""Rows on their way to a reader's caller, in order, as records or as a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from copy import copy
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.errors import SchemaMismatchError
from dlcore.base.ids import DLSN
from dlcore.log.entries.batches import numbers_of, read_batch, records_of, typed_read_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import pyarrow as pa

    from dlcore.base.records import EntryPlace, LogRecordWithDLSN
    from dlcore.log.entries.body import PlainRecords


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


class StoredRows(NamedTuple):
    """Rows of one entry, with the columns that are stored, the first at `first_slot`."""

    batch: pa.RecordBatch
    place: EntryPlace
    first_slot: int

    @property
    def position(self) -> DLSN:
        """The position of the first of them."""
        return DLSN(self.place.lssn, self.place.entry_id, self.first_slot)

    @property
    def txids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The transaction ids of them."""
        return numbers_of(self.batch.column(0))

    def typed(self) -> pa.RecordBatch:
        """Return them as batches of a typed log are read, with the columns of metadata."""
        return typed_read_batch(self.batch, self.place, first_slot=self.first_slot)

    def slice(self, first_row: int, count: int) -> StoredRows:
        """Return at most `count` of them, from `first_row` on."""
        rows = self.batch.slice(first_row, count)
        return StoredRows(rows, self.place, self.first_slot + first_row)


class EntryRows(Rows):
    """The rows that are left of an entry."""

    __slots__ = ("_batch", "_plain", "place")

    def __init__(
        self, batch: pa.RecordBatch, place: EntryPlace, first_row: int, *, size_bytes: int
    ) -> None:
        # The size is passed, because a batch takes long to compute its own.
        super().__init__(int(batch.num_rows), first_row, size_bytes=size_bytes)
        self._batch: pa.RecordBatch | Callable[[], pa.RecordBatch] = batch
        self._plain: PlainRecords | None = None
        self.place = place

    @classmethod
    def plain(
        cls,
        records: PlainRecords,
        place: EntryPlace,
        first_row: int,
        *,
        decode: Callable[[], pa.RecordBatch],
        size_bytes: int,
    ) -> EntryRows:
        """Return the rows of an entry; Arrow is used only if a batch is wanted."""
        rows = cls.__new__(cls)
        Rows.__init__(rows, len(records.txids), first_row, size_bytes=size_bytes)
        rows._batch, rows._plain, rows.place = decode, records, place
        return rows

    @property
    def position(self) -> DLSN:
        """The position of the next row, or of the next entry if none is left."""
        place, left = self.place, self.rows_left
        if not left:
            return place.end
        return DLSN(place.lssn, place.entry_id, self._row_count - left)

    def _make_records(self, first_row: int) -> list[LogRecordWithDLSN]:
        place = self.place
        if self._plain is not None:
            return self._plain.records(place, first_row)
        return records_of(self._slice(first_row), place, first_slot=first_row)

    def take_batch(self, log: str) -> pa.RecordBatch:
        """Take all rows that are left, with the columns of batches of the log `log`."""
        first_row = self._row_count - self.rows_left
        batch = self._read(self._slice(first_row), first_row, log)
        self.drop()
        return batch

    def take_stored(self) -> StoredRows:
        """Take all rows that are left, with the columns of the entry."""
        first_row = self._row_count - self.rows_left
        stored = StoredRows(self._slice(first_row), self.place, first_row)
        self.drop()
        return stored

    def _read(self, rows: pa.RecordBatch, first_slot: int, log: str) -> pa.RecordBatch:
        return read_batch(rows, self.place, first_slot=first_slot, log=log)

    def _slice(self, first_row: int) -> pa.RecordBatch:
        if callable(self._batch):
            self._batch = self._batch()
        return self._batch.slice(first_row)


class TypedEntryRows(EntryRows):
    """The rows that are left of an entry of a typed log, which has batches only."""

    __slots__ = ()

    def _read(self, rows: pa.RecordBatch, first_slot: int, log: str) -> pa.RecordBatch:
        return typed_read_batch(rows, self.place, first_slot=first_slot)

    def records(self) -> Iterator[LogRecordWithDLSN]:
        """Refuse to make records.

        Raises:
            SchemaMismatchError: read the log by batches.
        """
        raise no_records()


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
