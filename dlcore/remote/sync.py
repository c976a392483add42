"""The blocking API of `dlcore.remote`: the same names, over one background event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.base.config import FLUSH_INTERVAL_S
from dlcore.base.records import LogRecord
from dlcore.flight.replies import LogInfo
from dlcore.log.writing.transmit import checked_payload, parts_of
from dlcore.remote import log as async_log, namespace as async_namespace, writing
from dlcore.remote.namespace import PATIENCE_S
from dlcore.remote.outbox import MESSAGE_BYTES
from dlcore.remote.reader import RemoteRecord, RemoteRows
from dlcore.remote.sync_calls import RemoteLogCalls, RemoteNamespaceCalls
from dlcore.remote.writing import counted
from dlcore.sync.buffering import BUFFERED_RECORD_BYTES, BufferingWriter
from dlcore.sync.log_range import Framed
from dlcore.sync.portal import Portal, shared_portal
from dlcore.sync.reader import RowsTwin
from dlcore.sync.stream import AppendOnlyStreamWriter
from dlcore.sync.twin import iterate

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from dlcore.base.ids import DLSN
    from dlcore.base.tls import TlsFiles
    from dlcore.log.reading.ranges import Bound

__all__ = [
    "LogInfo",
    "RemoteLog",
    "RemoteNamespace",
    "RemoteRange",
    "RemoteReader",
    "RemoteRecord",
    "RemoteWriter",
    "open_namespace",
]


def open_namespace(
    endpoint: str, *, patience_s: float = PATIENCE_S, tls: TlsFiles | None = None
) -> RemoteNamespace:
    """Open the namespace that proxies serve; see `dlcore.remote.open_namespace`."""
    portal = shared_portal()
    opening = async_namespace.open_namespace(endpoint, patience_s=patience_s, tls=tls)
    return RemoteNamespace(portal, portal.call(opening))


class RemoteNamespace(RemoteNamespaceCalls):
    """A collection of logs."""

    def __init__(self, portal: Portal, namespace: async_namespace.RemoteNamespace) -> None:
        super().__init__(portal, namespace)
        self._namespace = namespace

    def open_log(self, name: str, *, create_if_missing: bool = False) -> RemoteLog:
        """Open a log; with `create_if_missing` a missing log is created as a byte log.

        Raises: LogNotFoundError, InvalidLogNameError, ProxyUnavailableError.
        """
        opening = self._namespace.open_log(name, create_if_missing=create_if_missing)
        return RemoteLog(self._portal, self._call(opening), self._writers)


class RemoteLog(RemoteLogCalls):
    """One log.  Each method behaves as in the async twin, with the same errors."""

    def __init__(
        self, portal: Portal, log: async_log.RemoteLog, writers: dict[BufferingWriter, None]
    ) -> None:
        super().__init__(portal, log.aclose)
        self._log = log
        self._writers = writers

    def read(
        self,
        start: Bound | None = None,
        end: Bound | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> RemoteRange:
        """Return the records in [start, end), to be read at once.

        Raises: ConfigurationError: a time has no time zone.
        """
        found = self._call(self._log.read(start, end, columns=columns))
        return RemoteRange(self._portal, found)

    def open_writer(
        self, *, producer: str | None = None, flush_interval_s: float = FLUSH_INTERVAL_S
    ) -> RemoteWriter:
        """Return a writer that a proxy has accepted.  Arguments and errors: the async twin's.

        In the background it hands over records that it has held for `flush_interval_s` seconds; 0:
        it hands records over only when its buffer is full or flushed.
        """
        writer = self._call(self._log.open_writer(producer=producer))
        return RemoteWriter(self._portal, writer, self._writers, flush_interval_s=flush_interval_s)

    def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        subscriber: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> RemoteReader:
        """Open a reader at a position; at the first readable record if none is given.

        Raises: as the async twin.
        """
        opening = self._log.open_reader(
            dlsn=dlsn,
            txid=txid,
            timestamp_ms=timestamp_ms,
            subscriber=subscriber,
            columns=columns,
        )
        return RemoteReader(self._portal, self._call(opening))

    def open_stream_writer(self) -> AppendOnlyStreamWriter:
        """Open a binary file that appends to the log's bytes; it fences an earlier one.

        Raises: as the async twin.
        """
        writer, position = self._call(self._log.begin_stream())
        twin = RemoteWriter(self._portal, writer, self._writers)
        return AppendOnlyStreamWriter(twin, position)


class RemoteWriter(BufferingWriter):
    """Appends to one log, beside other writers; each record is in the log once.  Not thread-safe.

    `write` buffers in the calling thread.  `flush`, `commit`, `close` or a full buffer hand records
    over; records that have waited for `flush_interval_s` are handed over in the background.  If
    records that were handed over fail, the next call raises their error and takes no record.

    A writer that is open when its namespace closes, or at exit, is closed then.  If records cannot
    be written at exit within 10 s, this is logged as an error, and the exit status is 120.
    """

    _writer: writing.RemoteWriter

    def __init__(
        self,
        portal: Portal,
        writer: writing.RemoteWriter,
        opened: dict[BufferingWriter, None],
        *,
        flush_interval_s: float = FLUSH_INTERVAL_S,
    ) -> None:
        super().__init__(
            portal, writer, opened, buffer_bytes=MESSAGE_BYTES, flush_interval_s=flush_interval_s
        )
        self._last_txid = -1

    def __repr__(self) -> str:
        return repr(self._writer)

    @property
    def log_name(self) -> str:
        """The log's name."""
        return self._writer.log_name

    @property
    def producer(self) -> str:
        """The name under which the writer numbers its records."""
        return self._writer.producer

    @property
    def next_sequence(self) -> int:
        """The sequence number of the producer's next record in this log, from 0."""
        with self._taking:
            return self._writer.next_sequence + self._waiting

    @property
    def _waiting(self) -> int:
        return len(self._records) + sum(int(each.num_rows) for each in self._outbox)

    def write(self, record: LogRecord) -> None:
        """Buffer a record; raise at once if its transaction id or size is not acceptable."""
        self._require_usable()
        self._tell_failure()
        txid, payload = parts_of(record)
        payload = checked_payload(txid, payload, last_txid=self._last_txid)
        self._last_txid = txid
        self._records.append(LogRecord(txid, payload))
        self._buffered_bytes += len(payload) + BUFFERED_RECORD_BYTES
        if self._buffered_bytes >= self._look_from_bytes:
            self._look_around()

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch; the async twin describes its columns."""
        self._require_usable()
        self._tell_failure()
        self._buffer_to_outbox()
        if batch.num_rows:
            self._outbox.append(batch)
        self._hand_over()

    def _accept(self, waiting: Any) -> asyncio.Future[DLSN | None]:
        return self._writer.write_batch(waiting)

    def _unwritten(self) -> str | None:
        count = self._writer.lost + self._waiting
        return counted(count) if count else None


class RemoteReader(RowsTwin[RemoteRows, RemoteRecord]):
    """Reads one log in order, each record once.  Not thread-safe.

    `for record in reader` yields every readable record, and ends there; `records` and `batches` can
    also follow the log.
    """

    @property
    def schema(self) -> pa.Schema | None:
        """The columns; None before the first answer."""
        return self._reader.schema


class RemoteRange(Framed):
    """The records of a log in [start, end).  Each use reads again."""

    def __init__(self, portal: Portal, found: async_log.RemoteRange) -> None:
        self._portal = portal
        self._range = found

    def __repr__(self) -> str:
        return repr(self._range)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return iterate(self._portal, self._range.__aiter__())

    def to_arrow(self) -> pa.Table:
        """Return all records as a table.  Raises: as iteration."""
        return self._portal.call(self._range.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow as pa

        messages = iterate(self._portal, self._range.messages())
        schema = next(messages).schema
        batches = (message.batch for message in messages if message.batch is not None)
        reader = pa.RecordBatchReader.from_batches(schema, batches)
        return reader.__arrow_c_stream__(requested_schema)
