"""The blocking face of `dlcore.remote`: the same names, over one background event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.base.config import FLUSH_INTERVAL_S
from dlcore.base.records import LogRecord
from dlcore.log.writing.transmit import checked_payload, parts_of
from dlcore.remote import log as async_log, namespace as async_namespace, writing
from dlcore.remote.namespace import PATIENCE_S
from dlcore.remote.outbox import MESSAGE_BYTES
from dlcore.remote.planning import LogInfo
from dlcore.remote.reader import RemoteRecord, RemoteRows
from dlcore.remote.writing import counted
from dlcore.sync.buffering import BUFFERED_RECORD_BYTES, BufferingWriter, WritersNamespace
from dlcore.sync.log_range import Framed
from dlcore.sync.merged import MergedReader
from dlcore.sync.portal import Portal, shared_portal
from dlcore.sync.reader import RowsTwin
from dlcore.sync.staging import StagedAppend, StagingWriter
from dlcore.sync.stream import AppendOnlyStreamReader, AppendOnlyStreamWriter
from dlcore.sync.twin import Blocking, iterate

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from dlcore.base.config import LogSettings
    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.base.tls import TlsFiles
    from dlcore.log.metadata.commits import AppendRun, SharedStaging
    from dlcore.log.reading.ranges import Bound
    from dlcore.log.reading.scan import LogSnapshot, ScanBatch, ScanRange

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
    """Open the logs that proxies serve.  Arguments and errors: `dlcore.remote.open_namespace`."""
    portal = shared_portal()
    opening = async_namespace.open_namespace(endpoint, patience_s=patience_s, tls=tls)
    return RemoteNamespace(portal, portal.call(opening))


class RemoteNamespace(WritersNamespace):
    """A collection of logs."""

    def __init__(self, portal: Portal, namespace: async_namespace.RemoteNamespace) -> None:
        super().__init__(portal, namespace)
        self._namespace = namespace

    def __repr__(self) -> str:
        return repr(self._namespace)

    def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all logs, or of those that start with `prefix`.

        Raises: ProxyUnavailableError, MetadataError.
        """
        return self._call(self._namespace.get_logs(prefix))

    def get_snapshots(
        self,
        names: Sequence[str],
        *,
        fresh: bool = True,  # which they always are
    ) -> dict[str, LogSnapshot | None]:
        """Return what each log holds now; None for those that are not there.

        Raises: LedgerReadError, MetadataError, ProxyUnavailableError.
        """
        return self._call(self._namespace.get_snapshots(names, fresh=fresh))

    def get_schemas(self, names: Sequence[str]) -> dict[str, pa.Schema | None]:
        """Return each existing log's schema, None if of bytes.  Raises: as `get_snapshots`."""
        return self._call(self._namespace.get_schemas(names))

    def find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        """Return the place of each first record that is wanted, in its snapshot.

        Raises: LogNotFoundError: a log is gone; and as `get_snapshots`.
        """
        return self._call(self._namespace.find_places(wanted))

    def scan(self, part: ScanRange) -> Iterator[ScanBatch]:
        """Yield the records of a range of a snapshot.

        Raises: AlreadyTruncatedError, LogNotFoundError; and as `get_snapshots`.
        """
        return iterate(self._portal, self._namespace.scan(part))

    def create_log(
        self, name: str, *, settings: LogSettings | None = None, schema: pa.Schema | None = None
    ) -> None:
        """Create a log of bytes, or with a schema a typed one.  Raises: as the async twin."""
        self._call(self._namespace.create_log(name, settings=settings, schema=schema))

    def delete_log(self, name: str) -> None:
        """Delete a log and its data.  Raises: as the async twin."""
        self._call(self._namespace.delete_log(name))

    def rename_log(self, name: str, new_name: str) -> None:
        """Give a log another name, at once for everybody.  Raises: as the async twin."""
        self._call(self._namespace.rename_log(name, new_name))

    def log_exists(self, name: str) -> bool:
        """Return whether the log exists.  Raises: MetadataError, ProxyUnavailableError."""
        return self._call(self._namespace.log_exists(name))

    def merge_schema(self, name: str, schema: pa.Schema) -> None:
        """Add columns to a typed log, or widen them.  Raises: as the async twin."""
        self._call(self._namespace.merge_schema(name, schema))

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
        """Begin an atomic append.  Arguments and errors: the async twin's."""
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

    def open_staging_writer(self, *, identity: str, shared: bool = False) -> StagingWriter:
        """Open a writer whose records enter logs when an append commits them."""
        opening = self._namespace.open_staging_writer(identity=identity, shared=shared)
        return StagingWriter(self._portal, self._call(opening))

    def open_log(self, name: str, *, create_if_missing: bool = False) -> RemoteLog:
        """Open a log, with `create_if_missing` one of bytes that is made if there is none.

        Raises: LogNotFoundError, InvalidLogNameError, ProxyUnavailableError.
        """
        opening = self._namespace.open_log(name, create_if_missing=create_if_missing)
        return RemoteLog(self._portal, self._call(opening), self._writers)

    def open_merged_reader(
        self,
        names: Sequence[str],
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        positions: Mapping[str, DLSN] | None = None,
    ) -> MergedReader[RemoteRecord]:
        """Open a reader over several logs.  Arguments and errors: the async twin's."""
        opening = self._namespace.open_merged_reader(
            names, txid=txid, timestamp_ms=timestamp_ms, positions=positions
        )
        return MergedReader(self._portal, self._call(opening))


class RemoteLog(Blocking):
    """One log.  Each method is that of the async twin, with its errors."""

    def __init__(
        self, portal: Portal, log: async_log.RemoteLog, writers: dict[BufferingWriter, None]
    ) -> None:
        super().__init__(portal, log.aclose)
        self._log = log
        self._writers = writers

    def __repr__(self) -> str:
        return repr(self._log)

    @property
    def name(self) -> str:
        """The log's name."""
        return self._log.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._log.log_id

    def get_info(self) -> LogInfo:
        """Return what the log holds now.  Raises: LogNotFoundError, ProxyUnavailableError."""
        return self._call(self._log.get_info())

    def get_schema(self) -> pa.Schema:
        """Return the columns of its rows.  Raises: as `get_info`."""
        return self._call(self._log.get_schema())

    def get_snapshot(self) -> LogSnapshot:
        """Return what is readable now, with all that scans need.  Raises: as `get_info`."""
        return self._call(self._log.get_snapshot())

    def get_log_record_count(self, start: DLSN | None = None, end: DLSN | None = None) -> int:
        """Return the exact number of readable records, or of those in [start, end).

        Raises: as `get_info`.
        """
        return self._call(self._log.get_log_record_count(start, end))

    def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end of the log.

        Raises: as `get_info`.
        """
        return self._call(self._log.get_dlsn_not_less_than_txid(txid))

    def get_dlsn_not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end.

        Raises: as `get_info`.
        """
        return self._call(self._log.get_dlsn_not_less_than_timestamp(timestamp_ms))

    def get_first_record(self) -> RemoteRecord:
        """Return the first record, or raise `LogEmptyError`.  Raises: as the async twin."""
        return self._call(self._log.get_first_record())

    def get_last_record(self) -> RemoteRecord:
        """Return the last readable record, or raise `LogEmptyError`.  Raises: as the async twin."""
        return self._call(self._log.get_last_record())

    def get_first_txid(self) -> int:
        """Return the transaction id of the first record.  Raises: as the async twin."""
        return self._call(self._log.get_first_txid())

    def get_last_txid(self) -> int:
        """Return the transaction id of the last readable record.  Raises: as the async twin."""
        return self._call(self._log.get_last_txid())

    def purge_logs_older_than(self, txid: int) -> bool:
        """Drop the segments that lie wholly below a transaction id.  Raises: as the async twin."""
        return self._call(self._log.purge_logs_older_than(txid))

    def get_first_dlsn(self) -> DLSN:
        """Return the position of the first record.  Raises: LogEmptyError, and as `get_info`."""
        return self._call(self._log.get_first_dlsn())

    def get_last_dlsn(self) -> DLSN:
        """Return the position of the last record.  Raises: LogEmptyError, and as `get_info`."""
        return self._call(self._log.get_last_dlsn())

    def is_end_of_stream_marked(self) -> bool:
        """Return whether the log is sealed.  Raises: as `get_info`."""
        return self._call(self._log.is_end_of_stream_marked())

    def truncate(
        self,
        dlsn: DLSN | None = None,
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> bool:
        """Drop the records below a position, a transaction id or a time.

        Returns: whether anything was dropped that was not before.  Raises: as the async twin.
        """
        return self._call(self._log.truncate(dlsn, txid=txid, timestamp_ms=timestamp_ms))

    def get_settings(self) -> LogSettings:
        """Return what is stored with the log for whoever writes it.  Raises: as the async twin."""
        return self._call(self._log.get_settings())

    def update_settings(self, /, **changes: object) -> LogSettings:
        """Change settings of the log, by name; return all.  Raises: as the async twin."""
        return self._call(self._log.update_settings(**changes))

    def delete(self) -> None:
        """Delete the log and its data, harmless when it is gone.  Raises: as the async twin."""
        self._call(self._log.delete())

    def rename(self, name: str) -> None:
        """Give the log another name, at once for everybody.  Raises: as the async twin."""
        self._call(self._log.rename(name))

    def mark_end_of_stream(self) -> None:
        """Seal the log: no record can follow, readers learn that they are done.

        Raises: as the async twin.
        """
        self._call(self._log.mark_end_of_stream())

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
        """Return a writer, which a proxy has accepted.  Arguments and errors: the async twin's.

        It hands over in the background what it has held for `flush_interval_s`; 0: not before it
        is full or flushed.
        """
        writer = self._call(self._log.open_writer(producer=producer))
        return RemoteWriter(self._portal, writer, self._writers, flush_interval_s=flush_interval_s)

    def append(
        self, records: Sequence[LogRecord] | pa.RecordBatch, *, expected: DLSN | None
    ) -> DLSN | None:
        """Append records, all or none, if the log's last record is the one at `expected`.

        Raises: ConditionFailedError: it is not; else as the async twin.
        """
        return self._call(self._log.append(records, expected=expected))

    def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        subscriber: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> RemoteReader:
        """Open a reader; at the first record that is not truncated, unless one of these is given.

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

    def get_subscriptions(self) -> dict[str, DLSN]:
        """Return the positions that are stored for subscribers.  Raises: as the async twin."""
        return self._call(self._log.get_subscriptions())

    def move_subscription(
        self,
        subscriber: str,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> DLSN:
        """Store where a subscriber goes on, forward or back, and return it.

        Raises: as the async twin.
        """
        moving = self._log.move_subscription(
            subscriber, dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms
        )
        return self._call(moving)

    def delete_subscription(self, subscriber: str) -> bool:
        """Forget a subscriber; return whether there was one.  Raises: as the async twin."""
        return self._call(self._log.delete_subscription(subscriber))

    def open_stream_writer(self) -> AppendOnlyStreamWriter:
        """Open a writer of the log's bytes, as a file is; it is the only one.

        Raises: as the async twin.
        """
        writer, position = self._call(self._log.begin_stream())
        twin = RemoteWriter(self._portal, writer, self._writers)
        return AppendOnlyStreamWriter(twin, position)

    def open_stream_reader(self, position: int | None = None) -> AppendOnlyStreamReader:
        """Open a reader of the log's bytes, as a file is.  Raises: as the async twin."""
        reader = self._call(self._log.open_stream_reader(position))
        return AppendOnlyStreamReader(self._portal, reader)


class RemoteWriter(BufferingWriter):
    """Appends to one log, together with others; each record is in the log once.  Not thread-safe.

    `write` buffers in the calling thread; `flush`, `commit`, `close` or a full buffer hand records
    over, and what has waited for `flush_interval_s` is handed over in the background.  The next
    call, also a `write`, raises the error of records handed over, and takes nothing then.

    One that is open when its namespace closes, or at exit, is closed then.  What cannot be written
    at exit within 10 s is logged as an error, and the exit status is 120.
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
        """The name under which it numbers its records."""
        return self._writer.producer

    @property
    def next_sequence(self) -> int:
        """The number of the next record, among all that its producer wrote to the log, from 0."""
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
        """Write the rows of a batch; the async twin says which columns it has."""
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

    `for record in reader` yields every record that is readable, and ends there; `records` and
    `batches` can also follow the log.
    """

    @property
    def schema(self) -> pa.Schema | None:
        """The columns, once the first answer came."""
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
        """Return all of it as a table.  Raises: as iterating."""
        return self._portal.call(self._range.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow as pa

        messages = iterate(self._portal, self._range.messages())
        schema = next(messages).schema
        batches = (message.batch for message in messages if message.batch is not None)
        reader = pa.RecordBatchReader.from_batches(schema, batches)
        return reader.__arrow_c_stream__(requested_schema)
