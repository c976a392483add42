"""The blocking writer of a log: `write` buffers in the calling thread."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import LogNotReadyError, SchemaMismatchError
from dlcore.base.ids import TXID_MAX
from dlcore.base.records import LogRecord
from dlcore.log.entries.batcher import RECORD_OVERHEAD_BYTES, checked_payload, no_record
from dlcore.sync.writer_calls import WriterCalls

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.log.writing.records_writer import AsyncLogWriter
    from dlcore.sync.buffering import BufferingWriter
    from dlcore.sync.portal import Portal


class LogWriter(WriterCalls):
    """The log's writer.  Not thread-safe.

    `write` buffers in the calling thread.  `flush`, `commit`, `close` or a full buffer pass the
    records on to be written.  Records that have waited for `LogConfig.flush_interval_s` are passed
    on in the background.  If a record that was passed on fails, the next call, also a `write`,
    raises the error and accepts nothing.  A `write` at the moment of the failure may still be
    accepted.  If the log's writer refuses records for the moment (`fail_while_rolling`), accepted
    records wait for the next call.  That call passes them on first, or raises LogNotReadyError and
    accepts nothing.

    An open writer is closed with its namespace, or at exit.  If records cannot be written at exit
    within 10 s, an error is logged, and the exit status is 120.
    """

    def __init__(
        self, portal: Portal, writer: AsyncLogWriter, opened: dict[BufferingWriter, None]
    ) -> None:
        super().__init__(
            portal,
            writer,
            opened,
            buffer_bytes=writer.config.buffer_bytes,
            flush_interval_s=writer.config.flush_interval_s,
        )
        self._last_txid = writer.last_txid
        self._typed: Any = writer if writer.is_typed else None
        # Lowest id on the fast path; too high: use the slow path.
        self._lowest_txid = self._next_lowest_txid()
        _opened_here.add(self)

    def __repr__(self) -> str:
        state = "CLOSED" if self._closed else "OPEN"
        return f"<LogWriter {self._writer.log_name!r} last_txid={self._last_txid} {state}>"

    @property
    def last_txid(self) -> int:
        """The highest transaction id written, -1 if there is none."""
        return self._last_txid

    @property
    def next_sequence(self) -> int:
        """The sequence number of the producer's next record in this log, from 0.

        Raises: UnsupportedError: the writer is direct, and numbers no records.
        """
        with self._outbox.taking:
            waiting = len(self._records) + sum(int(each.num_rows) for each in self._outbox)
            return self._writer.next_sequence + waiting

    def write(self, record: LogRecord) -> None:
        """Buffer a record; raise at once if its transaction id or size is not acceptable.

        Raises: as the async `write`.
        """
        try:
            txid, payload = record.txid, record.payload
        except AttributeError as error:
            raise no_record(record) from error
        # The order makes each check safe; nearly every record passes all of them.
        if (
            type(record) is not LogRecord  # another type may change before it is passed on
            or type(txid) is not int
            or not self._lowest_txid <= txid <= TXID_MAX
            or type(payload) is not bytes
            or len(payload) > RECORD_SIZE_BYTES_MAX
        ):
            record = self._checked(record)
            payload = record.payload
        self._last_txid = self._lowest_txid = txid
        self._records.append(record)
        self._buffered_bytes += len(payload) + RECORD_OVERHEAD_BYTES
        if self._buffered_bytes >= self._look_from_bytes:
            self._look_around_taken()

    def _next_lowest_txid(self) -> int:
        looks_closer = self._typed is not None or self._outbox or self._closed or self._has_failed
        return TXID_MAX + 1 if looks_closer else max(0, self._last_txid)

    def _hand_over_taken(self) -> None:
        """Pass on this call's records; those refused for the moment wait for the next call."""
        try:
            self._hand_over()
        except LogNotReadyError:
            self._lowest_txid = self._next_lowest_txid()

    def _look_around_taken(self) -> None:
        """As `_hand_over_taken`, if there are enough records."""
        try:
            self._look_around()
        except LogNotReadyError:
            self._lowest_txid = self._next_lowest_txid()
        if self._has_failed:
            self._lowest_txid = self._next_lowest_txid()

    def _hand_over_left(self) -> None:
        """Pass on the records of earlier calls; if they are refused, this call accepts nothing."""
        self._tell_failure()
        if self._outbox:
            self._hand_over()
            self._last_txid = max(self._last_txid, self._writer.last_txid)

    def _checked(self, record: LogRecord) -> LogRecord:
        self._require_usable()
        if self._typed is not None:
            from dlcore.log.writing.typed import records_refused

            raise records_refused(self.log_name)
        self._hand_over_left()
        payload = checked_payload(record.txid, record.payload, last_txid=self._last_txid)
        return LogRecord(record.txid, payload)

    def _failed(self, error: BaseException) -> None:
        super()._failed(error)
        self._lowest_txid = self._next_lowest_txid()

    def _look_closer(self) -> None:
        """In a forked child accept no record: `_checked` raises the reason."""
        self._lowest_txid = TXID_MAX + 1
        self._outbox.has_forked()

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write the rows of `batch`, which has the columns txid (int64) and value (binary).

        For a typed log it has columns of the log's schema, and `_txid` if rows have their own ids.
        Otherwise each row gets the current time in epoch milliseconds as its id, or the id before
        it, if that is higher.
        """
        self._require_usable()
        self._buffer_to_outbox()
        self._hand_over_left()
        if batch.num_rows:
            self._outbox.append(self._fitted(batch))
        self._hand_over_taken()
        self._last_txid = max(self._last_txid, self._writer.last_txid)
        self._lowest_txid = self._next_lowest_txid()

    def _fitted(self, batch: pa.RecordBatch) -> Any:
        try:
            return self._writer.fitted(batch, last_txid=self._last_txid)
        except SchemaMismatchError:
            if self._typed is None:
                raise
            return self._call(self._typed.fitted_latest(batch, last_txid=self._last_txid))

    def abort(self) -> None:
        """Close without flushing, as a crash would; acknowledged records stay."""
        super().abort()
        self._lowest_txid = self._next_lowest_txid()

    def close(self) -> None:
        """Flush, complete the segment, release the lock; harmless if it is closed already.

        Raises: as `flush`: records failed; acknowledged records are durable.
        """
        try:
            super().close()
        finally:
            self._lowest_txid = self._next_lowest_txid()

    async def finish(self) -> None:
        """Flush and close at exit; log what could not be written."""
        self._lowest_txid = TXID_MAX + 1  # a later record would never be passed on
        await super().finish()


_opened_here: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _spoil() -> None:
    for writer in _opened_here:
        writer._look_closer()


os.register_at_fork(after_in_child=_spoil)
