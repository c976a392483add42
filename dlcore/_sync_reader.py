"""The blocking reader of a log."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dlcore._blocking import Blocking
from dlcore.errors import EndOfStreamError

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore._portal import Portal
    from dlcore.log.reading.reader import AsyncLogReader
    from dlcore.records import LogRecordWithDLSN


class LogReader(Blocking):
    """A reader at a position of the log.  Not thread-safe."""

    def __init__(self, portal: Portal, reader: AsyncLogReader) -> None:
        super().__init__(portal, reader.aclose)
        self._reader = reader
        self._batches: deque[pa.RecordBatch] = deque()  # taken over from the reader in bulk
        self._records: deque[LogRecordWithDLSN] = deque()  # of the batch before these

    def read_next(self, *, non_blocking: bool = False) -> LogRecordWithDLSN | None:
        """Return the next record, or None when every readable record has been returned.

        With `non_blocking`, return at once, and None also while the next record is being fetched.

        Raises:
            EndOfStreamError: the log is sealed, and all of it was read.
        """
        if not self._records:
            self._refill(non_blocking=non_blocking)
        return self._records.popleft() if self._records else None

    def read_bulk(self, count: int) -> list[LogRecordWithDLSN]:
        """Return up to `count` records, fewer only when every readable record has been returned."""
        records: list[LogRecordWithDLSN] = []
        while len(records) < count:
            if not self._records:
                self._refill_unless_ended(ended_is_error=not records)
            if not self._records:
                break
            while self._records and len(records) < count:
                records.append(self._records.popleft())
        return records

    def read_batch(self) -> pa.RecordBatch | None:
        """Return the rest of the current entry as Arrow, or None when caught up."""
        if self._records:
            from dlcore.log.entries.batches import read_batch_of

            records = list(self._records)
            self._records.clear()
            return read_batch_of(records)
        if not self._batches:
            self._take(non_blocking=False)
        return self._batches.popleft() if self._batches else None

    def _take(self, *, non_blocking: bool) -> None:
        self._batches.extend(self._call(self._reader.take_batches(non_blocking=non_blocking)))

    def _refill(self, *, non_blocking: bool) -> None:
        from dlcore.log.entries.batches import records_of_read

        if not self._batches:
            self._take(non_blocking=non_blocking)
        if self._batches:
            self._records.extend(records_of_read(self._batches.popleft()))

    def _refill_unless_ended(self, *, ended_is_error: bool) -> None:
        try:
            self._refill(non_blocking=False)
        except EndOfStreamError:
            if ended_is_error:
                raise
