"""The blocking face: the same names as the async one, over one background event loop.

Nothing here decides anything: each method runs its async twin on the portal.  Only this is added:
`LogWriter.write` buffers records in the calling thread and hands them over in bulk.

What is open when the process exits is closed once all threads that are no daemons have ended, but
not after `os._exit` or a signal's default action.  For SIGTERM,
``signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))`` makes an exit of it.  In a forked child
the use of what its parent opened is a `ConfigurationError`, and closing it does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from dlcore._portal import Portal, close_at_exit, fail_exit, forget, shared_portal
from dlcore._prefetch import scan
from dlcore.errors import DLError, EndOfStreamError
from dlcore.log.metadata.commits import AppendRun, SharedStaging
from dlcore.log.reading.scan import (
    CommitResult,
    ExtentView,
    LogSnapshot,
    ScanBatch,
    ScanRange,
    SegmentView,
    StagedExtent,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from types import TracebackType

    import pyarrow as pa

    from dlcore import namespace as aio
    from dlcore.config import LedgerClientConfig, LogConfig
    from dlcore.ids import DLSN
    from dlcore.ledger.metadata.registry import BookieInfo
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.manager import DistributedLogManager as AsyncManager
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.reading.reader import AsyncLogReader
    from dlcore.log.staging.append import StagedAppend as AsyncStagedAppend
    from dlcore.log.staging.writer import StagingWriter as AsyncStaging
    from dlcore.log.writing.writer import AsyncLogWriter
    from dlcore.records import LogRecord, LogRecordWithDLSN
    from dlcore.tls import TlsFiles

__all__ = [
    "AppendRun",
    "CommitResult",
    "DistributedLogManager",
    "ExtentView",
    "LogReader",
    "LogSnapshot",
    "LogWriter",
    "Namespace",
    "ScanBatch",
    "ScanRange",
    "SegmentView",
    "SharedStaging",
    "StagedAppend",
    "StagedExtent",
    "StagingWriter",
    "open_namespace",
    "scan",
]

logger = logging.getLogger(__name__)

_Self = TypeVar("_Self", bound="_Blocking")
_Result = TypeVar("_Result")
_BUFFER_BYTES = 1024 * 1024
"""`LogWriter.write` hands records over when this much is buffered."""
_BUFFERED_RECORD_BYTES = 64
"""What a buffered record costs beyond its payload."""
_EXIT_FLUSH_S = _EXIT_CLOSE_S = 10.0
"""How long at exit a writer may take, and then its namespace."""


class _Blocking:
    """Something with an async twin: runs coroutines on the portal, closes once, also at exit."""

    def __init__(self, portal: Portal, aclose: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._portal = portal
        self._aclose = aclose
        self._closed = False

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return self._portal.call(coroutine)

    def close(self) -> None:
        """Close it; harmless when it is closed."""
        if self._closed:
            return
        self._closed = True
        if not self._portal.is_inherited:  # else the process that opened it closes it
            self._call(self._aclose())

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_namespace(
    uri: str,
    *,
    config: LogConfig | None = None,
    client_config: LedgerClientConfig | None = None,
    create: bool = False,
    client_id: str | None = None,
    tls: TlsFiles | None = None,
) -> Namespace:
    """Open the namespace at `uri`, ``distributedlog://zk1:2181,zk2:2181/path``.

    Arguments and errors are those of `dlcore.open_namespace`.
    """
    from dlcore.namespace import open_namespace as open_async  # loads kazoo

    opening = open_async(
        uri, config=config, client_config=client_config, create=create, client_id=client_id, tls=tls
    )
    portal = shared_portal()
    return Namespace(portal, portal.call(opening))


class Namespace(_Blocking):
    """A collection of logs."""

    def __init__(self, portal: Portal, namespace: aio.Namespace) -> None:
        super().__init__(portal, namespace.aclose)
        self._namespace = namespace
        self._writers: dict[LogWriter, None] = {}  # those that are open, in order
        close_at_exit(self, self._finish)

    def close(self) -> None:
        """Close the writers that are still open, and every connection; readers stop working."""
        forget(self)
        with contextlib.ExitStack() as steps:  # from the last to the first, whichever of them fails
            steps.callback(super().close)
            for writer in reversed(self._writers):
                steps.callback(writer.close)

    async def _finish(self) -> None:
        """Close it, since the process ends and nobody else will."""
        await asyncio.gather(*(writer._finish() for writer in list(self._writers)))
        async with asyncio.timeout(_EXIT_CLOSE_S):
            await self._namespace.aclose()

    @property
    def uri(self) -> str:
        """The URI it was opened with."""
        return self._namespace.uri

    def create_log(self, name: str, *, config: LogConfig | None = None) -> None:
        """Create a log; the quorums of `config` are stored with it."""
        self._call(self._namespace.create_log(name, config=config))

    def delete_log(self, name: str) -> None:
        """Delete a log and its data, unless a writer owns it."""
        self._call(self._namespace.delete_log(name))

    def log_exists(self, name: str) -> bool:
        """Return whether the log exists."""
        return self._call(self._namespace.log_exists(name))

    def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all logs, or of those that start with `prefix`."""
        return self._call(self._namespace.get_logs(prefix))

    def open_log(self, name: str, *, config: LogConfig | None = None) -> DistributedLogManager:
        """Open a log that exists, or raise `LogNotFoundError`."""
        manager = self._call(self._namespace.open_log(name, config=config))
        return DistributedLogManager(self._portal, manager, self._writers)

    def begin_append(
        self,
        identity: str,
        version: int,
        *,
        shared: SharedStaging | None = None,
        run: AppendRun | None = None,
        lock_timeout_s: float | None = None,
        keep_record: bool = True,
        strict: bool = False,
    ) -> StagedAppend:
        """Begin an atomic append to any number of logs; (identity, version) commits once.

        It commits what was staged under its own identity, or is `shared` with others.  With a
        `run`, each of its appends of the version commits once.  Without `keep_record`, for an
        identity of one append only, nothing of it is kept.  A `strict` one is refused, not skipped,
        if the version is not the latest, or was committed to other logs only.
        """
        append = self._call(
            self._namespace.begin_append(
                identity,
                version,
                shared=shared,
                run=run,
                lock_timeout_s=lock_timeout_s,
                keep_record=keep_record,
                strict=strict,
            )
        )
        return StagedAppend(self._portal, append)

    def open_staging_writer(self, *, identity: str) -> StagingWriter:
        """Open a writer whose records enter logs when an append that finds them there commits."""
        return StagingWriter(
            self._portal, self._call(self._namespace.open_staging_writer(identity=identity))
        )

    def get_snapshots(
        self, names: Sequence[str], *, fresh: bool = False
    ) -> dict[str, LogSnapshot | None]:
        """Return what each log holds now; `fresh` as in the async method, None for no log."""
        return self._call(self._namespace.get_snapshots(names, fresh=fresh))

    def get_bookies(self) -> list[BookieInfo]:
        """Return the bookies that are registered now."""
        return self._call(self._namespace.get_bookies())

    def get_ledger(self, ledger_id: int) -> LedgerMetadata:
        """Return the metadata of a ledger."""
        return self._call(self._namespace.get_ledger(ledger_id))


class DistributedLogManager(_Blocking):
    """One log: its writers, its readers, and what is known about it."""

    def __init__(
        self, portal: Portal, manager: AsyncManager, writers: dict[LogWriter, None]
    ) -> None:
        super().__init__(portal, manager.aclose)
        self._manager = manager
        self._writers = writers

    @property
    def name(self) -> str:
        """The log's name."""
        return self._manager.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._manager.log_id

    def open_writer(self) -> LogWriter:
        """Take the writer lock, recover what a dead writer left, and return the writer."""
        writer = LogWriter(self._portal, self._call(self._manager.open_writer()), self._writers)
        self._writers[writer] = None
        return writer

    def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> LogReader:
        """Open a reader at a position; at the first readable record if none is given."""
        reader = self._call(
            self._manager.open_reader(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        )
        return LogReader(self._portal, reader)

    def get_first_dlsn(self) -> DLSN:
        """Return the position of the first record, or raise `LogEmptyError`."""
        return self._call(self._manager.get_first_dlsn())

    def get_last_dlsn(self) -> DLSN:
        """Return the position of the last readable record, or raise `LogEmptyError`."""
        return self._call(self._manager.get_last_dlsn())

    def get_last_txid(self) -> int:
        """Return the transaction id of the last readable record, or raise `LogEmptyError`."""
        return self._call(self._manager.get_last_txid())

    def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end of the log."""
        return self._call(self._manager.get_dlsn_not_less_than_txid(txid))

    def get_dlsn_not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end."""
        return self._call(self._manager.get_dlsn_not_less_than_timestamp(timestamp_ms))

    def get_log_record_count(self, start: DLSN | None = None, end: DLSN | None = None) -> int:
        """Return the exact number of readable records, or of those in [start, end)."""
        return self._call(self._manager.get_log_record_count(start, end))

    def get_log_segments(self) -> list[LogSegment]:
        """Return the segments, in order."""
        return self._call(self._manager.get_log_segments())

    def get_snapshot(self) -> LogSnapshot:
        """Return what is readable now, with all that scans need."""
        return self._call(self._manager.get_snapshot())

    def get_first_active_dlsn(self) -> DLSN:
        """Return the position below which everything is truncated."""
        return self._call(self._manager.get_first_active_dlsn())

    def is_end_of_stream_marked(self) -> bool:
        """Return whether the log is sealed."""
        return self._call(self._manager.is_end_of_stream_marked())

    def recover(self) -> None:
        """Fence and complete what a dead writer left."""
        self._call(self._manager.recover())

    def delete(self) -> None:
        """Delete the log and its data; harmless when it is gone."""
        self._call(self._manager.delete())

    def truncate(self, dlsn: DLSN) -> bool:
        """Drop the records below `dlsn`; return whether that changed anything."""
        return self._call(self._manager.truncate(dlsn))


class LogWriter(_Blocking):
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
        self._outbox: deque[pa.RecordBatch] = deque()  # handed over, not yet accepted
        self._last_txid = writer.last_txid
        self._txids: list[int] = []
        self._payloads: list[bytes] = []
        self._buffered_bytes = 0

    @property
    def last_txid(self) -> int:
        """The highest transaction id written, -1 if there is none."""
        return self._last_txid

    def write(self, record: LogRecord) -> None:
        """Buffer a record; raise at once if its transaction id or size is not acceptable."""
        from dlcore.log.writing.transmit import checked_payload

        self._portal.check_process()
        payload = checked_payload(record.txid, record.payload, last_txid=self._last_txid)
        self._last_txid = record.txid
        self._txids.append(record.txid)
        self._payloads.append(payload)
        self._buffered_bytes += len(payload) + _BUFFERED_RECORD_BYTES
        if self._buffered_bytes >= _BUFFER_BYTES:
            self._hand_over()

    def write_bulk(self, records: Iterable[LogRecord]) -> int:
        """Write each of `records`; return how many."""
        count = 0
        for record in records:
            self.write(record)
            count += 1
        return count

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write the rows of `batch`, which has the columns txid (int64) and payload (binary)."""
        from dlcore.log.entries.batches import byte_log_batch

        self._portal.check_process()
        self._buffer_to_outbox()
        if batch.num_rows:
            self._outbox.append(byte_log_batch(batch))
        self._hand_over()
        self._last_txid = max(self._last_txid, self._writer.last_txid)

    def flush(self) -> None:
        """Transmit what is buffered and wait until it is durable."""
        self._hand_over()
        self._call(self._writer.flush())

    def commit(self) -> DLSN | None:
        """Flush and make all of it visible; return the log's last position, if it has records."""
        self._hand_over()
        return self._call(self._writer.commit())

    def truncate(self, dlsn: DLSN) -> bool:
        """Drop the records below `dlsn`; return whether that changed anything."""
        return self._call(self._writer.truncate(dlsn))

    def mark_end_of_stream(self) -> None:
        """Flush and seal the log: no record can follow."""
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
        """Flush, complete the segment, release the lock."""
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
        while self._outbox:
            await self._writer.wait_for_capacity()
            try:
                self._writer.write_batch(self._outbox[0])
            finally:
                self._outbox.popleft()

    async def _finish(self) -> None:
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

        waiting = [Unwritten.of(batch) for batch in self._outbox]
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


class LogReader(_Blocking):
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


class StagingWriter(_Blocking):
    """Writes durable records that no log holds until an append commits them."""

    def __init__(self, portal: Portal, writer: AsyncStaging) -> None:
        super().__init__(portal, writer.aclose)
        self._writer = writer

    def write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        """Write rows for `log`: payload (binary), and optionally txid (int64)."""
        self._call(self._writer.write_batch(log, batch))

    def write_batches(self, parts: Sequence[tuple[str, pa.RecordBatch]]) -> None:
        """Write rows for several logs."""
        self._call(self._writer.write_batches(parts))

    def stage(self) -> list[StagedExtent]:
        """Wait until everything written since the last call is durable; return it, log by log."""
        return self._call(self._writer.stage())

    def discard(self) -> None:
        """Forget what was written since the last `stage`."""
        self._call(self._writer.discard())

    def close(self, *, delete: bool = False) -> None:
        """Close the ledgers; with `delete` drop them, unless a log holds entries of them."""
        if self._closed:
            return
        self._closed = True
        self._call(self._writer.aclose(delete=delete))


class StagedAppend(_Blocking):
    """One atomic append to any number of logs."""

    def __init__(self, portal: Portal, append: AsyncStagedAppend) -> None:
        super().__init__(portal, append.aclose)
        self._append = append

    def write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        """Stage rows for a log; `commit` without extents takes all of them."""
        self._call(self._append.write_batch(log, batch))

    def commit(self, extents: Sequence[StagedExtent] | None = None) -> CommitResult:
        """Append `extents`, or what was written here, to their logs: all or nothing."""
        return self._call(self._append.commit(extents))

    def abort(self, extents: Sequence[StagedExtent] | None = None) -> None:
        """Drop what was staged."""
        self._call(self._append.abort(extents))
