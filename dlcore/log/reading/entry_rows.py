"""Rows of one entry on their way to a reader's caller, in order, as records or as a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.ids import DLSN
from dlcore.log.entries.batches import numbers_of, read_batch, records_of, typed_read_batch
from dlcore.log.reading.rows import Rows, no_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import pyarrow as pa

    from dlcore.base.records import EntryPlace, LogRecordWithDLSN
    from dlcore.log.entries.body import PlainRecords


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
