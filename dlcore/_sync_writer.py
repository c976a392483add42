"""The blocking writer of a log: `write` buffers in the calling thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from dlcore._blocking import Blocking
from dlcore._portal import fail_exit
from dlcore.config import RECORD_SIZE_BYTES_MAX
from dlcore.errors import DLError, SchemaMismatchError
from dlcore.ids import TXID_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from dlcore._portal import Portal
    from dlcore.ids import DLSN
    from dlcore.log.writing.typed import AsyncTypedLogWriter
    from dlcore.log.writing.writer import AsyncLogWriter
    from dlcore.records import LogRecord

logger = logging.getLogger(__name__)

_BUFFERED_RECORD_BYTES = 64
"""What a buffered record costs beyond its payload."""
_EXIT_FLUSH_S = 10.0
"""How long at exit a writer may take."""


def _as_typed(writer: AsyncLogWriter) -> AsyncTypedLogWriter | None:
    from dlcore.log.writing.typed import AsyncTypedLogWriter

    return writer if isinstance(writer, AsyncTypedLogWriter) else None


class LogWriter(Blocking):
    """The log's writer.  Not thread-safe.

    `write` buffers in the calling thread; `flush`, `commit`, `close` or a full buffer hand records
    over. An error of a record already handed over is raised by the next call that hands over.

    One that is open when its namespace closes, or at exit, is closed then.  What cannot be written
    at exit within 10 s is logged as an error, and the exit status is 120.
    """

    def __init__(
        self, portal: Portal, writer: AsyncLogWriter, opened: dict[LogWriter, None]
    ) -> None:
        super().__init__(portal, writer.aclose)
        self._writer = writer
        self._opened = opened
        self._buffer_bytes = writer.config.buffer_bytes
        self._accepting = asyncio.Lock()
        self._outbox: deque[Any] = deque()  # batches or rows handed over, not yet accepted
        self._last_txid = writer.last_txid
        self._typed = _as_typed(writer)
        self._lowest_txid = self._next_lowest_txid()  # that may follow; too high: look closer
        self._txids: list[int] = []
        self._payloads: list[bytes] = []
        self._buffered_bytes = 0
        _opened_here.add(self)

    def __repr__(self) -> str:
        state = "CLOSED" if self._closed else "OPEN"
        return f"<LogWriter {self._writer.log_name!r} last_txid={self._last_txid} {state}>"

    @property
    def last_txid(self) -> int:
        """The highest transaction id written, -1 if there is none."""
        return self._last_txid

    def write(self, record: LogRecord) -> None:
        """Buffer a record; raise at once if its transaction id or size is not acceptable."""
        txid, payload = record.txid, record.payload
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
        self._buffered_bytes += len(payload) + _BUFFERED_RECORD_BYTES
        if self._buffered_bytes >= self._buffer_bytes:
            self._hand_over()

    def _next_lowest_txid(self) -> int:
        return max(0, self._last_txid) if self._typed is None else TXID_MAX + 1

    def _checked(self, record: LogRecord) -> bytes:
        from dlcore.log.writing.transmit import checked_payload

        self._portal.check_process()
        if self._typed is not None:
            raise self._typed.refusal()
        return checked_payload(record.txid, record.payload, last_txid=self._last_txid)

    def _look_closer(self) -> None:
        """In a forked child no record is taken: `_checked` says why."""
        self._lowest_txid = TXID_MAX + 1

    def write_bulk(self, records: Iterable[LogRecord]) -> int:
        """Write each of `records`; return how many.  Raises: as `write`."""
        count = 0
        for record in records:
            self.write(record)
            count += 1
        return count

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write the rows of `batch`, which has the columns txid (int64) and payload (binary).

        For a typed log it has columns of the log's schema, and `_txid` where rows have their own;
        else they get the present time in epoch milliseconds, or the one before, if that is higher.
        """
        self._portal.check_process()
        self._buffer_to_outbox()
        if batch.num_rows:
            self._outbox.append(self._fitted(batch))
        self._hand_over()
        self._last_txid = max(self._last_txid, self._writer.last_txid)
        self._lowest_txid = self._next_lowest_txid()

    def _fitted(self, batch: pa.RecordBatch) -> Any:
        try:
            return self._writer.fitted(batch, last_txid=self._last_txid)
        except SchemaMismatchError:
            if self._typed is None:
                raise
            return self._call(self._typed.fitted_latest(batch, last_txid=self._last_txid))

    def write_table(self, table: Any) -> None:
        """Write, as `write_batch`, what is in an Arrow table, a frame, or an Arrow stream."""
        from dlcore.log.entries.batches import batches_from

        for batch in batches_from(table):
            self.write_batch(batch)

    def flush(self) -> None:
        """Transmit what is buffered and wait until it is durable.

        Raises: WriteError, EndOfStreamError, AlreadyClosedError.
        """
        self._hand_over()
        self._call(self._writer.flush())

    def commit(self) -> DLSN | None:
        """Flush and make all of it visible; return the log's last position, if it has records.

        Raises: as `flush`; LogNotFoundError, LedgerReadError, MetadataError.
        """
        self._hand_over()
        return self._call(self._writer.commit())

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

    def mark_end_of_stream(self) -> None:
        """Flush and seal the log: no record can follow.  Raises: as `flush`."""
        self._hand_over()
        self._call(self._writer.mark_end_of_stream())

    def abort(self) -> None:
        """Give up without flushing, as a crash would; what was acknowledged stays."""
        self._drop_buffer()
        self._outbox.clear()
        self._closed = True
        self._opened.pop(self, None)
        self._call(self._writer.abort())

    def close(self) -> None:
        """Flush, complete the segment, release the lock.

        Raises: WriteError: records failed; what was acknowledged is durable.
        """
        if self._closed:
            return
        self._opened.pop(self, None)
        try:
            if not self._portal.is_inherited:
                self._hand_over()
        finally:
            super().close()

    def _hand_over(self) -> None:
        self._buffer_to_outbox()
        if self._outbox:
            self._call(self._empty_outbox())

    def _buffer_to_outbox(self) -> None:
        if not self._txids:
            return
        from dlcore.log.entries.batches import batch_of

        self._outbox.append(batch_of(self._txids, self._payloads))
        self._drop_buffer()

    def _drop_buffer(self) -> None:
        self._txids, self._payloads, self._buffered_bytes = [], [], 0

    async def _empty_outbox(self) -> None:
        """Let the writer accept what is there; when interrupted, no batch is lost or doubled."""
        async with self._accepting:
            while self._outbox:
                await self._writer.wait_for_capacity()
                try:
                    self._writer.write_fitted(self._outbox[0])
                finally:
                    self._outbox.popleft()

    async def finish(self) -> None:
        """Flush and close at exit; say what could not be written."""
        self._closed = True
        reason = f"it took more than {_EXIT_FLUSH_S:g} s"
        try:
            async with asyncio.timeout(_EXIT_FLUSH_S):
                self._buffer_to_outbox()
                await self._empty_outbox()
                await self._writer.aclose()
        except DLError as error:
            reason = f"{type(error).__name__}: {error}"
        except TimeoutError:
            logger.warning("log %r: its writer was not closed: %s", self._writer.log_name, reason)
        self._report_unwritten(reason)
        await self._writer.abort()

    def _report_unwritten(self, reason: str) -> None:
        from dlcore.log.writing.transmit import Unwritten

        waiting = [Unwritten.of(getattr(each, "batch", each)) for each in self._outbox]
        unwritten = Unwritten.joined([self._writer.lost, *waiting])
        if unwritten is None:
            return
        logger.error(
            "log %r: not written: %s: the process ended with the writer open: %s",
            self._writer.log_name,
            unwritten,
            reason,
        )
        fail_exit()


class TimedLogWriter(LogWriter):
    """A writer that hands over what it holds also from time to time (`flush_interval_s`)."""

    def __init__(
        self, portal: Portal, writer: AsyncLogWriter, opened: dict[LogWriter, None]
    ) -> None:
        super().__init__(portal, writer, opened)
        self._lock = threading.RLock()  # of the buffer: the caller's thread, or the event loop's
        self._clock = portal.submit(self._hand_over_now_and_then())

    async def _hand_over_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._writer.config.flush_interval_s)
            if not self._lock.acquire(blocking=False):
                continue  # a call is at work, perhaps waiting for this event loop
            try:
                self._buffer_to_outbox()
            finally:
                self._lock.release()
            try:
                await self._empty_outbox()
            except DLError as error:
                logger.warning("log %r: its writer takes no more: %s", self._writer.log_name, error)
                return  # the next call tells

    def write(self, record: LogRecord) -> None:
        """Buffer a record, as `LogWriter.write`."""
        with self._lock:
            super().write(record)

    def _hand_over(self) -> None:
        with self._lock:
            super()._hand_over()

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
