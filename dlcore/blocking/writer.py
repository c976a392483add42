"""The blocking writer of a log: `write` buffers in the calling thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from dlcore.blocking.buffering import BUFFERED_RECORD_BYTES, BufferingWriter
from dlcore.config import RECORD_SIZE_BYTES_MAX
from dlcore.errors import DLError, LogNotReadyError, SchemaMismatchError
from dlcore.ids import TXID_MAX

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.blocking.portal import Portal
    from dlcore.ids import DLSN
    from dlcore.log.writing.transmit import Unwritten
    from dlcore.log.writing.typed import AsyncTypedLogWriter
    from dlcore.log.writing.writer import AsyncLogWriter
    from dlcore.records import LogRecord

logger = logging.getLogger(__name__)


def _as_typed(writer: AsyncLogWriter) -> AsyncTypedLogWriter | None:
    from dlcore.log.writing.typed import AsyncTypedLogWriter

    return writer if isinstance(writer, AsyncTypedLogWriter) else None


class LogWriter(BufferingWriter):
    """The log's writer.  Not thread-safe.

    `write` buffers in the calling thread; `flush`, `commit`, `close` or a full buffer hand records
    over. An error of a record already handed over is raised by the next call that hands over.
    Where the log's writer takes none at the moment (`fail_while_rolling`), what was taken waits for
    the next call, which hands it over first or takes nothing: LogNotReadyError.

    One that is open when its namespace closes, or at exit, is closed then.  What cannot be written
    at exit within 10 s is logged as an error, and the exit status is 120.
    """

    _writer: AsyncLogWriter

    def __init__(
        self, portal: Portal, writer: AsyncLogWriter, opened: dict[BufferingWriter, None]
    ) -> None:
        super().__init__(portal, writer, opened)
        self._buffer_bytes = writer.config.buffer_bytes
        self._last_txid = writer.last_txid
        self._typed = _as_typed(writer)
        self._lowest_txid = self._next_lowest_txid()  # that may follow; too high: look closer
        _opened_here.add(self)

    def __repr__(self) -> str:
        state = "CLOSED" if self._closed else "OPEN"
        return f"<LogWriter {self._writer.log_name!r} last_txid={self._last_txid} {state}>"

    @property
    def log_name(self) -> str:
        """The log's name."""
        return self._writer.log_name

    @property
    def log_id(self) -> str:
        """The log's identity."""
        return self._writer.log_id

    @property
    def last_txid(self) -> int:
        """The highest transaction id written, -1 if there is none."""
        return self._last_txid

    def write(self, record: LogRecord) -> None:
        """Buffer a record; raise at once if its transaction id or size is not acceptable.

        Raises: as the async `write`.
        """
        try:
            txid, payload = record.txid, record.payload
        except AttributeError as error:
            from dlcore.log.writing.transmit import no_record

            raise no_record(record) from error
        # In this order each step may be taken; nearly every record passes all of them.
        if (
            type(txid) is not int
            or not self._lowest_txid <= txid <= TXID_MAX
            or type(payload) is not bytes
            or len(payload) > RECORD_SIZE_BYTES_MAX
        ):
            payload = self._checked(record)
        self._last_txid = self._lowest_txid = txid
        self._txids.append(txid)
        self._payloads.append(payload)
        self._buffered_bytes += len(payload) + BUFFERED_RECORD_BYTES
        if self._buffered_bytes >= self._buffer_bytes:
            self._hand_over_taken()

    def _next_lowest_txid(self) -> int:
        looks_closer = self._typed is not None or self._outbox or self._closed
        return TXID_MAX + 1 if looks_closer else max(0, self._last_txid)

    def _hand_over_taken(self) -> None:
        """Hand over what this call took; what is refused at the moment waits for the next one."""
        try:
            self._hand_over()
        except LogNotReadyError:
            self._lowest_txid = self._next_lowest_txid()

    def _hand_over_left(self) -> None:
        """Hand over what earlier calls took: unless it is accepted, this one takes nothing."""
        if self._outbox:
            self._hand_over()
            self._last_txid = max(self._last_txid, self._writer.last_txid)

    def _checked(self, record: LogRecord) -> bytes:
        from dlcore.log.writing.transmit import checked_payload

        self._require_usable()
        if self._typed is not None:
            raise self._typed.refusal()
        self._hand_over_left()
        return checked_payload(record.txid, record.payload, last_txid=self._last_txid)

    def _look_closer(self) -> None:
        """In a forked child no record is taken: `_checked` says why."""
        self._lowest_txid = TXID_MAX + 1

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write the rows of `batch`, which has the columns txid (int64) and payload (binary).

        For a typed log it has columns of the log's schema, and `_txid` where rows have their own;
        else they get the present time in epoch milliseconds, or the one before, if that is higher.
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

    def truncate(
        self,
        dlsn: DLSN | None = None,
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> bool:
        """Drop the records below a position, id or time; return whether that changed anything.

        Raises: as `DistributedLogManager.truncate`, and as `flush`.
        """
        truncating = self._writer.truncate(dlsn, txid=txid, timestamp_ms=timestamp_ms)
        return self._call(truncating)

    def abort(self) -> None:
        """Give up without flushing, as a crash would; what was acknowledged stays."""
        super().abort()
        self._lowest_txid = self._next_lowest_txid()

    def close(self) -> None:
        """Flush, complete the segment, release the lock; harmless when it is closed.

        Raises: as `flush`: records failed; what was acknowledged is durable.
        """
        try:
            super().close()
        finally:
            self._lowest_txid = self._next_lowest_txid()

    async def finish(self) -> None:
        """Flush and close at exit; say what could not be written."""
        self._lowest_txid = TXID_MAX + 1  # what is written from now on, nobody would hand over
        await super().finish()

    def _accept(self, waiting: Any) -> None:
        self._writer.write_fitted(waiting)

    def _unwritten(self) -> Unwritten | None:
        from dlcore.log.writing.transmit import Unwritten

        waiting = [Unwritten.of(getattr(each, "batch", each)) for each in self._outbox]
        return Unwritten.joined([self._writer.lost, *waiting])


class TimedLogWriter(LogWriter):
    """A writer that hands over what it holds also from time to time (`flush_interval_s`)."""

    def __init__(
        self, portal: Portal, writer: AsyncLogWriter, opened: dict[BufferingWriter, None]
    ) -> None:
        super().__init__(portal, writer, opened)
        self._lock = threading.RLock()  # of the buffer: the caller's thread, or the event loop's
        self._clock = portal.submit(self._hand_over_now_and_then())

    async def _hand_over_now_and_then(self) -> None:
        refused = None
        while True:
            await asyncio.sleep(self._writer.config.flush_interval_s)
            if not self._lock.acquire(blocking=False):
                continue  # a call is at work, perhaps waiting for this event loop
            try:
                if not self._outbox:  # else what waits comes first
                    self._buffer_to_outbox()
            finally:
                self._lock.release()
            refused = await self._hand_over_in_background(refused)

    async def _hand_over_in_background(self, refused: Any) -> Any:
        """Hand over what is there, unless it begins with what was refused; return what is."""
        if not self._outbox or self._outbox[0] is refused:
            return refused
        try:
            await self._empty_outbox(in_background=True)
        except LogNotReadyError:
            return None
        except DLError as error:
            logger.warning(
                "log %r: records are refused, as the next call will tell: %s",
                self._writer.log_name,
                error,
            )
            return self._outbox[0] if self._outbox else None
        return None

    def write(self, record: LogRecord) -> None:
        """Buffer a record, as `LogWriter.write`."""
        with self._lock:
            super().write(record)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write a batch, as `LogWriter.write_batch`."""
        with self._lock:
            super().write_batch(batch)

    def _hand_over(self, *, waits: bool = False) -> None:
        with self._lock:
            super()._hand_over(waits=waits)

    def _look_closer(self) -> None:
        super()._look_closer()
        self._lock = threading.RLock()  # whoever held it is not in this process

    def abort(self) -> None:
        """Give up without flushing, as a crash would; what was acknowledged stays."""
        self._clock.cancel()
        with self._lock:
            super().abort()

    def close(self) -> None:
        """Flush, complete the segment, release the lock."""
        if not self._portal.is_inherited:
            self._clock.cancel()
        super().close()

    async def finish(self) -> None:
        """Flush and close at exit; say what could not be written."""
        self._clock.cancel()
        await super().finish()


_opened_here: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _spoil() -> None:
    for writer in _opened_here:
        writer._look_closer()


os.register_at_fork(after_in_child=_spoil)
