"""One log: one class for its users, whatever reaches it.

`DirectLog` talks to the metadata store and the bookies, `FlightLog` to proxies.  Each operation is
declared once, with its promise, in `DistributedLogManager` or in one of the classes that it
inherits: each is one part of what a log offers.  An operation that follows from others is there,
too.  One that a back end does not have raises UnsupportedError.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import (
    AlreadyClosedError,
    EndOfStreamError,
    LogEmptyError,
    SchemaMismatchError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField
from dlcore.log.streams import AsyncAppendOnlyStreamReader, AsyncAppendOnlyStreamWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    import pyarrow as pa
    import pyarrow.compute as pc

    from dlcore.base.config import LogSettings
    from dlcore.base.records import LogRecord, LogRecordWithDLSN, RecordPlace
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.metadata.values import LogKey
    from dlcore.log.reading.inspecting import SegmentWatch
    from dlcore.log.reading.log_range import LogRange
    from dlcore.log.reading.ranges import Bound
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.log.reading.status import LogStatus
    from dlcore.log.writing.records_writer import AsyncLogWriter


class OpenedLog(AsyncClosing):
    """The base of all that a log offers; a back end sets `_log`."""

    _log: LogKey
    _closed = False

    @property
    def name(self) -> str:
        """The log's name."""
        return self._log.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._log.log_id

    def _require_open(self) -> None:
        if self._closed:
            raise AlreadyClosedError(f"the manager of log {self.name!r} is closed")

    def _unsupported(self, operation: str) -> NoReturn:
        raise UnsupportedError(
            f"log {self.name!r}: proxies do not offer `{operation}`; open the namespace directly, "
            "as distributedlog://…"
        )

    def _of_another_kind(self, *, typed: bool) -> SchemaMismatchError:
        """Return the error for a use of a log that is `typed`, or is not, as the other kind."""
        return SchemaMismatchError(
            f"log {self.name!r} was created {'with' if typed else 'without'} a schema, which "
            f"makes it a log of {'typed columns' if typed else 'bytes'} for good"
        )

    async def aclose(self) -> None:
        """Stop using the log; its writers and readers must be closed by themselves."""
        self._closed = True


class LogContents(OpenedLog):
    """The readable records of one log.

    A back end reads them: `open_reader`, `read`, `get_snapshot`, `get_last_dlsn` and `_places`.
    All other answers follow from these, and are the same over every back end.
    """

    @abstractmethod
    async def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        subscriber: str | None = None,
        columns: Sequence[str] | None = None,
        skip_broken_entries: bool = False,
        ignore_truncation: bool = False,
    ) -> AsyncLogReader:
        """Open a reader; at the first record that is not truncated, unless a start is given.

        Args:
            dlsn: the position of the first record wanted; `DLSN.INITIAL`, the default, means the
                first one that is not truncated.  A position beyond the end waits for its record.
            txid: the first record with this transaction id or a higher one; 0 means the first one.
            timestamp_ms: the first remaining record that was written at that time or later, in
                epoch milliseconds.
            subscriber: the name for which it reads.  It starts at the stored position of the
                subscriber, unless another is given, stores positions with `commit`, and is the
                only reader of the subscriber.  Through proxies a later reader takes the
                subscription over, and the earlier one gets an error at its next `commit`.
            columns: names of the columns that proxies send, to spare the others their way; only
                through proxies.  Records need all columns.
            skip_broken_entries: leave out entries that have no undamaged replica, and count them
                in `broken_entries`; otherwise they are an error.  Not over proxies.
            ignore_truncation: read also truncated records, as long as their segment is stored.  Not
                over proxies.

        Raises:
            AlreadyTruncatedError: `dlsn`, or the stored position, was truncated away, or a record
                with `txid` or a higher one was.
            ConfigurationError: more than one position is given.
            OwnershipAcquireFailedError: the subscriber had another direct reader for
                `lock_timeout_s`, of this client or of the proxy.
            OverCapacityError: the log keeps as many positions as it may.
            UnsupportedError: this back end does not offer an argument.
        """

    @abstractmethod
    async def read(
        self,
        start: Bound | None = None,
        end: Bound | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
    ) -> LogRange:
        """Return the records from `start` up to but not including `end`, as Arrow, or as a frame.

        Args:
            start: a position, a transaction id (int) or a time (datetime with a time zone): the
                first record that is not below it; None: the first one that is not truncated.
            end: the same kinds of value; None: the present end of the readable records.
            columns: the names of the columns; by default all of a byte log (docs/python.md).  A
                typed log also has `_log`, `_dlsn`, `_txid`, `_sequence_id` and `_timestamp`, which
                are returned only on request.
            where: a filter of rows, such as ``pc.field("fare") > 20``.

        Raises:
            SchemaMismatchError: the log has no such column.
            AlreadyTruncatedError: `start` is a position or transaction id that was truncated away;
                the first position and 0 mean the beginning.
            ConfigurationError: a time has no time zone.
            LogNotFoundError, LedgerReadError, MetadataError.
        """

    @abstractmethod
    async def get_snapshot(self) -> LogSnapshot:
        """Return the readable state of the log, with everything that scans need.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """

    @abstractmethod
    async def _places(
        self, snapshot: LogSnapshot, *wanted: DLSN | NotLessThan
    ) -> list[RecordPlace]:
        """Return, in the snapshot, the place of the first record of each search, or the end."""

    async def get_first_dlsn(self) -> DLSN:
        """Return the position of the first record that is not truncated.  Raises: LogEmptyError."""
        snapshot = await self.get_snapshot()
        self._require_records(snapshot)
        return snapshot.first

    @abstractmethod
    async def get_last_dlsn(self) -> DLSN:
        """Return the position of the last readable record.  Raises: LogEmptyError."""

    async def get_last_txid(self) -> int:
        """Return the transaction id of the last readable record.  Raises: LogEmptyError."""
        return self._last_txid(await self.get_snapshot())

    def _last_txid(self, snapshot: LogSnapshot) -> int:
        self._require_records(snapshot)
        return next(s.extents[-1].last_txid for s in reversed(snapshot.segments) if s.extents)

    def _require_records(self, snapshot: LogSnapshot) -> None:
        if snapshot.is_empty:
            raise self._no_record()

    def _no_record(self) -> LogEmptyError:
        return LogEmptyError(f"log {self.name!r} holds no record")

    async def find_place(self, wanted: DLSN | NotLessThan) -> RecordPlace:
        """Return the place of the first readable record that is not below `wanted`, or the end.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        (place,) = await self._places(await self.get_snapshot(), wanted)
        return place

    async def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end of the log.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return (await self.find_place(NotLessThan(RecordField.TXID, txid))).dlsn

    async def get_dlsn_not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return (await self.find_place(NotLessThan(RecordField.TIMESTAMP_MS, timestamp_ms))).dlsn

    async def get_log_record_count(self, start: DLSN | None = None, end: DLSN | None = None) -> int:
        """Return the exact number of readable records, or of those in [start, end).

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        snapshot = await self.get_snapshot()
        low = snapshot.first if start is None else max(start, snapshot.first)
        high = snapshot.end if end is None else min(end, snapshot.end)
        if low >= high:
            return 0
        before, after = await self._places(snapshot, low, high)
        return after.sequence_id - before.sequence_id

    async def get_first_record(self) -> LogRecordWithDLSN:
        """Return the first record that is not truncated.

        Raises: LogEmptyError, and as `AsyncLogReader.read_next`.
        """
        return await self._record_at(None)

    async def get_last_record(self) -> LogRecordWithDLSN:
        """Return the last readable record.

        Raises: LogEmptyError, and as `AsyncLogReader.read_next`.
        """
        return await self._record_at(await self.get_last_dlsn())

    async def _record_at(self, dlsn: DLSN | None) -> LogRecordWithDLSN:
        record: LogRecordWithDLSN | None = None
        async with await self.open_reader(dlsn=dlsn) as reader:
            with contextlib.suppress(EndOfStreamError):
                record = await reader.read_next(until_caught_up=True)
        if record is None:
            raise self._no_record()
        return record

    async def get_first_txid(self) -> int:
        """Return the transaction id of the first record.

        Raises: LogEmptyError, and as `AsyncLogReader.read_next`.
        """
        return (await self.get_first_record()).txid


class ByteStream(OpenedLog):
    """The bytes of one log, each of which has a position.

    A back end opens a writer and a reader of records for them, and knows where they end.
    """

    async def open_stream_writer(self) -> AsyncAppendOnlyStreamWriter:
        """Open a writer of the log's bytes, which begins where the log's bytes end.

        Through proxies it fences an earlier writer of bytes, and does not prevent writers of
        records.

        Raises: SchemaMismatchError: the log is typed; and as `open_writer`.
        """
        return AsyncAppendOnlyStreamWriter(*await self._begin_stream())

    async def open_stream_reader(self, position: int | None = None) -> AsyncAppendOnlyStreamReader:
        """Open a reader of the log's bytes.

        Args:
            position: the first byte wanted, perhaps past the end; None: the first one that is not
                truncated.

        Raises: SchemaMismatchError: the log is typed; as `open_reader`; and as
            `AsyncAppendOnlyStreamReader.seek`.
        """
        reader = await self._open_bytes_reader()
        return await AsyncAppendOnlyStreamReader.open(reader, self._stream_end, position)

    @abstractmethod
    async def _begin_stream(self) -> tuple[AsyncLogWriter, int]:
        """Return a writer for bytes, and where they end.  Raises: as `open_stream_writer`."""

    @abstractmethod
    async def _open_bytes_reader(self) -> AsyncLogReader:
        """Open a reader of the records of bytes.  Raises: SchemaMismatchError: it is typed."""

    @abstractmethod
    async def _stream_end(self) -> tuple[int, bool]:
        """Return where the readable bytes of a stream end, and whether the stream is sealed.

        Raises: SchemaMismatchError: the log is typed.
        """


class Subscriptions(OpenedLog):
    """The subscribers of one log; a reader that has the name of one stores its position."""

    @abstractmethod
    async def get_subscriptions(self) -> dict[str, DLSN]:
        """Return the stored positions of subscribers: the next record that each one reads.

        Raises: LogNotFoundError, MetadataError.
        """

    @abstractmethod
    async def move_subscription(
        self,
        subscriber: str,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> DLSN:
        """Store the position of a subscriber without a reader, forward or back, and return it.

        Through proxies the next `commit` of a reader of the subscriber fails.

        Raises:
            OwnershipAcquireFailedError: the subscriber has a direct reader, which can `seek` and
                `commit`.
            OverCapacityError: the log keeps as many positions as it may.
        """

    @abstractmethod
    async def delete_subscription(self, subscriber: str) -> bool:
        """Forget a subscriber that has no reader; return whether there was one.

        Raises:
            OwnershipAcquireFailedError: it has a direct reader.
            SubscriptionMovedError: a client of proxies moved the subscription meanwhile.
        """


class LogDefinition(OpenedLog):
    """The settings and the schema that are stored with one log; running writers follow a change."""

    async def get_settings(self) -> LogSettings:
        """Return the settings that are stored with the log for its writers.

        Raises: LogNotFoundError, MetadataError.
        """
        return await self.update_settings()

    @abstractmethod
    async def update_settings(self, /, **changes: object) -> LogSettings:
        """Change settings that are stored with the log, by name (`LogSettings`); return all.

        None unsets a setting.  Running writers use the change within moments.

        Raises:
            ConfigurationError: there is no such setting, or it cannot have that value.
        """

    @abstractmethod
    async def get_schema(self) -> pa.Schema | None:
        """Return the columns of a typed log; None for a byte log.

        Raises: LogNotFoundError, MetadataError.
        """

    @abstractmethod
    async def update_schema(self, schema: Any, *, merge: bool = False) -> pa.Schema:
        """Change the columns of a typed log; return all columns after the change.

        Columns may be added, which are null in older records, and types may get wider; see
        `dlcore.log.typed.schema`.  Readers and writers learn of the change when they meet it.

        Args:
            schema: all columns, as an Arrow schema.
            merge: keep columns of the log that are missing here, and types that are wider.  Proxies
                only merge.

        Raises:
            SchemaMismatchError: the change is not of this kind; the message shows both schemas.
            ConfigurationError: a log cannot have these columns.
        """


class DistributedLogManager(LogContents, ByteStream, Subscriptions, LogDefinition):
    """One log.  Use `Namespace.open_log`.

    Each method may raise LogNotFoundError, MetadataError and LedgerReadError; over proxies also
    ProxyUnavailableError, if no proxy answers for as long as the namespace waits.  A change may
    then have happened, or not.
    """

    def __repr__(self) -> str:
        return f"<DistributedLogManager {self.name!r}>"

    # Writers

    @abstractmethod
    async def open_writer(
        self, *, producer: str | None = None, ledger_metadata: Mapping[str, str] | None = None
    ) -> AsyncLogWriter:
        """Open a writer.

        A direct writer is the only one of its log: it takes the writer lock, and recovers a dead
        writer's segment.  A proxy that holds the lock is asked to release it.  Through proxies any
        number of writers share a log, and each record of a producer is in the log once.

        Args:
            producer: through proxies, the name under which the writer numbers its records.  An
                earlier writer of this name is fenced.  `next_sequence` of the writer is the number
                of records of this name, so that a restarted program knows where to go on.  Without
                a name the writer makes one for itself.
            ledger_metadata: of a direct writer, is stored with its ledgers.

        Raises:
            ConfigurationError: `ledger_metadata` has keys that dlog itself uses, or over 4 KiB.
            EndOfStreamError: the log is sealed: no record can follow.
            LogModeError: the log's mode does not allow this kind of writer.
            OwnershipAcquireFailedError: another writer owned the log during `lock_timeout_s`.
            LedgerRecoveryError: too few bookies answer to recover a dead writer's segment.
            UnsupportedError: an argument is of the other kind of writer.
        """

    async def append(
        self, records: Sequence[LogRecord] | pa.RecordBatch, *, expected: DLSN | None
    ) -> DLSN | None:
        """Append records, all or none, if the log's last record is the one at `expected`.

        Only through proxies: a direct writer is alone with its log.

        Args:
            records: at most 1 MiB of records; they become a part of one entry.
            expected: the position of the last record; None: the log holds no record.

        Returns: the position of the last appended record; None if it is not known any more.

        Raises:
            ConditionFailedError: another record is the last one; nothing is written.
            ProxyUnavailableError: no proxy answered; the records may be in the log or not.
            ConfigurationError, TransactionIdOutOfOrderError, EndOfStreamError: the records are
                refused.
            UnsupportedError: the namespace was opened directly.
        """
        raise UnsupportedError(
            f"log {self.name!r}: only proxies offer `append`; open the namespace by grpc://…, or "
            "use `open_writer`, which excludes other writers"
        )

    # State

    @abstractmethod
    async def is_end_of_stream_marked(self) -> bool:
        """Return whether the log is sealed.

        Raises: LogNotFoundError, MetadataError.
        """

    @abstractmethod
    async def status(self) -> LogStatus:
        """Return the contents of the log, how they are stored, and who writes it.

        Over proxies the facts that only ZooKeeper has are None.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """

    async def get_log_segments(self) -> list[LogSegment]:
        """Return the segments that are not wholly truncated, in order.

        Raises: UnsupportedError over proxies; `get_snapshot` has what scans need of them.
        """
        self._unsupported("get_log_segments")

    def watch_segments(self) -> SegmentWatch:
        """Return an async iterator over the log's segments: the present ones, then each change.

        Raises: UnsupportedError over proxies.
        """
        self._unsupported("watch_segments")

    async def get_first_active_dlsn(self) -> DLSN:
        """Return the position below which everything is truncated.

        Raises: UnsupportedError over proxies.
        """
        self._unsupported("get_first_active_dlsn")

    # Changes

    @abstractmethod
    async def truncate(
        self,
        dlsn: DLSN | None = None,
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> bool:
        """Drop the records below a position, a transaction id or a time.

        It works beside a live writer, and inside the segment that is being written.

        Args:
            dlsn: the first position to keep; the position after the last record drops all records.
            txid: the first record with this transaction id or a higher one is kept.
            timestamp_ms: the first record written at that time or later is kept.

        Returns: whether this call dropped anything.

        Raises:
            ConfigurationError: `dlsn` is past the readable end, which the message names; or not
                exactly one of the three is given.
        """

    async def purge_logs_older_than(self, txid: int) -> bool:
        """Drop segments whose records all have transaction ids below `txid`, except the last one.

        Returns: whether this call dropped anything.

        Raises: as `get_snapshot` and `truncate`.
        """
        position = await self.get_dlsn_not_less_than_txid(txid)
        return await self.truncate(DLSN(position.lssn, 0, 0))

    async def recover(self) -> None:
        """Fence and complete the segment of a dead writer.

        Raises:
            OwnershipAcquireFailedError: a writer owns the log.
            UnsupportedError: over proxies, which do this when they open the log.
        """
        self._unsupported("recover")

    @abstractmethod
    async def rename(self, name: str) -> None:
        """Give the log another name, at once for all clients; this manager goes on under it.

        Writers and readers that others have opened go on too, by the log's id.

        Raises:
            InvalidLogNameError: a log cannot have that name.
            LogExistsError: there is a log of that name.
            OwnershipAcquireFailedError: a writer that is no proxy owns the log.
            LogRenamedError: it was renamed since this manager was opened.
        """

    @abstractmethod
    async def mark_end_of_stream(self) -> None:
        """Seal the log: no record can follow, and readers get the end of stream.

        A proxy that owns the log first makes all accepted records durable, and releases it.

        Raises:
            EndOfStreamError: it is sealed already.
            OwnershipAcquireFailedError: a direct writer owned the log during `lock_timeout_s`; it
                can seal the log itself.
        """

    @abstractmethod
    async def delete(self) -> None:
        """Delete the log and its data; a log that is gone is no error.

        Raises:
            OwnershipAcquireFailedError: a writer that is no proxy owns the log.
            LogRenamedError: it was renamed since this manager was opened.
        """
