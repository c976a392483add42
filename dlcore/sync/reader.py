"""The blocking reader: rows are taken in bulk, so that few calls cross threads."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Unpack

from dlcore.base.config import require_count
from dlcore.base.errors import DLError, EndOfStreamError
from dlcore.log.reading.rows import drop_taken, no_records, take_records
from dlcore.sync.reader_calls import ReaderCalls

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.reading.rows import Rows
    from dlcore.log.reading.rows_reader import AsyncLogReader, RowsWanted
    from dlcore.sync.portal import Portal


class LogReader(ReaderCalls):
    """A reader at a position of the log.  Not thread-safe.

    `for record in reader` yields all readable records, and then ends.  `records` and `batches` can
    also follow the log.
    """

    def __init__(self, portal: Portal, reader: AsyncLogReader) -> None:
        super().__init__(portal, reader.aclose)
        self._reader = reader
        self._rows: deque[Rows] = deque()  # taken from the reader in bulk

    def __repr__(self) -> str:
        state = "CLOSED" if self._closed else "OPEN"
        return f"<LogReader {self.log_name!r} at {self.position} {state}>"

    @property
    def log_name(self) -> str:
        """The log's name."""
        return self._reader.log_name

    @property
    def position(self) -> DLSN:
        """The next position: every record below was returned, was truncated, or is not wanted."""
        return self._rows[0].position if self._rows else self._reader.position

    def commit(self, position: DLSN | None = None) -> DLSN:
        """Store the subscriber's position, by default the reader's position; return it.

        Raises:
            SubscriptionMovedError: another reader took over the subscription.
            ConfigurationError: the reader was opened without a subscriber.
        """
        if position is None:
            position = self.position
        return self._call(self._reader.commit(position))

    def seek(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Continue at another position, forward or back; the arguments are those of `open_reader`.

        Raises: as `DistributedLogManager.open_reader`.
        """
        self._call(self._reader.seek(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms))
        while self._rows:
            self._rows.popleft().drop()

    def records(self, *, follow: bool = False) -> Iterator[LogRecordWithDLSN]:
        """Yield records until every readable one was returned, or the log's end.

        With `follow` it waits for more records, until the log is sealed.  A yielded record counts
        as read: after a loop that ends early, reading continues behind it.

        Raises: as `read_next`, except EndOfStreamError.
        """
        while (rows := self._next_rows(follow=follow)) is not None:
            yield from rows.records()

    def batches(self, *, follow: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield Arrow batches as `read_batch` returns them; ends as `records` does.

        With `follow` it waits without a limit; `read_batch(timeout_s=…)` has a deadline.

        Raises: as `read_next`, except EndOfStreamError.
        """
        while (rows := self._next_rows(follow=follow)) is not None:
            yield rows.take_batch(self.log_name)

    def __iter__(self) -> Iterator[LogRecordWithDLSN]:
        return self.records()

    def read_next(self, *, non_blocking: bool = False) -> LogRecordWithDLSN | None:
        """Return the next record, or None when every readable record has been returned.

        With `non_blocking` it returns at once, and also returns None while the next record is
        fetched.

        Raises:
            EndOfStreamError: the log is sealed, and all of it was read.
            AlreadyTruncatedError, SubscriptionMovedError, LedgerReadError …: as the async method.
        """
        rows = self._fill(non_blocking=non_blocking, until_caught_up=not non_blocking)
        return None if rows is None else next(rows.records())

    def read_bulk(self, count: int, *, timeout_s: float | None = None) -> list[LogRecordWithDLSN]:
        """Return up to `count` records, fewer only when every readable record has been returned.

        With `timeout_s` it waits for more, and returns fewer only after this time.

        Raises:
            ConfigurationError: `count` is below 1.
            SchemaMismatchError: the log is typed; else as `read_next`.
        """
        require_count(count)
        if self._reader.is_typed:
            raise no_records()
        missing = count - sum(rows.rows_left for rows in self._rows)
        if missing > 0:
            try:
                self._take(
                    until_caught_up=timeout_s is None, records_min=missing, timeout_s=timeout_s
                )
            except DLError:  # the next call raises it again
                if missing == count:
                    raise
        return take_records(self._rows, count)

    def read_batch(self, *, timeout_s: float | None = None) -> pa.RecordBatch | None:
        """Return the rest of the current entry as Arrow, or None when caught up.

        With `timeout_s` it waits for an entry, and returns None only after this time.

        Raises: as `read_next`.
        """
        rows = self._fill(until_caught_up=timeout_s is None, timeout_s=timeout_s)
        return None if rows is None else rows.take_batch(self.log_name)

    def _next_rows(self, *, follow: bool) -> Rows | None:
        try:
            return self._fill(until_caught_up=not follow)
        except EndOfStreamError:
            return None

    def _fill(self, **wanted: Unpack[RowsWanted]) -> Rows | None:
        """Return rows with at least one left, None if there are none."""
        drop_taken(self._rows)
        if not self._rows:
            self._take(**wanted)
        return self._rows[0] if self._rows else None

    def _take(self, **wanted: Unpack[RowsWanted]) -> None:
        # In two steps, because an interrupt may come after rows were gathered and before the result
        # is known.
        self._call(self._reader._gather_rows(**wanted))
        self._rows.extend(self._reader._take_gathered())
