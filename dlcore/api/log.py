"""One log: one class for its users, whatever reaches it.

`DirectLog` talks to the metadata store and the bookies, `FlightLog` to proxies.  Each operation is
declared once, with its promise, in `DistributedLogManager` or in one of the classes that it
inherits: each is one part of what a log offers.  An operation that follows from others is there,
too.  One that a back end does not have raises UnsupportedError.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dlcore.api.contents import LogContents, OpenedLog
from dlcore.base.config import LogSettings, check_values, require_kind
from dlcore.base.errors import UnsupportedError
from dlcore.base.ids import DLSN, require_identity
from dlcore.log.reading.rows_reader import ReadStart
from dlcore.log.streams import AsyncAppendOnlyStreamReader, AsyncAppendOnlyStreamWriter
from dlcore.log.typed.arrow import columns_of, schema_from

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from dlcore.base.records import LogRecord
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.reading.inspecting import SegmentWatch
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.log.reading.status import LogStatus
    from dlcore.log.typed.schema import Column
    from dlcore.log.writing.records_writer import AsyncLogWriter


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
        if position is not None:
            require_kind("position", position, int)
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
            ConfigurationError: `subscriber` cannot be a name, or several positions are given.
        """
        start = ReadStart(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        return await self._move_subscription(require_identity("subscriber", subscriber), start)

    @abstractmethod
    async def _move_subscription(self, subscriber: str, start: ReadStart) -> DLSN:
        """Store the position of a subscriber, and return it."""

    async def delete_subscription(self, subscriber: str) -> bool:
        """Forget a subscriber that has no reader; return whether there was one.

        Raises:
            OwnershipAcquireFailedError: it has a direct reader.
            SubscriptionMovedError: a client of proxies moved the subscription meanwhile.
            ConfigurationError: `subscriber` cannot be a name.
        """
        return await self._delete_subscription(require_identity("subscriber", subscriber))

    @abstractmethod
    async def _delete_subscription(self, subscriber: str) -> bool:
        """Forget a subscriber that has no reader; return whether there was one."""


class LogDefinition(OpenedLog):
    """The settings and the schema that are stored with one log; running writers follow a change."""

    async def get_settings(self) -> LogSettings:
        """Return the settings that are stored with the log for its writers.

        Raises: LogNotFoundError, MetadataError.
        """
        return await self.update_settings()

    async def update_settings(self, /, **changes: object) -> LogSettings:
        """Change settings that are stored with the log, by name (`LogSettings`); return all.

        None unsets a setting.  Running writers use the change within moments.

        Raises:
            ConfigurationError: there is no such setting, or it cannot have that value.
        """
        check_values(LogSettings, {key: each for key, each in changes.items() if each is not None})
        return await self._update_settings(changes)

    @abstractmethod
    async def _update_settings(self, changes: Mapping[str, object]) -> LogSettings:
        """Change settings of the right kinds, by name; return all."""

    @abstractmethod
    async def get_schema(self) -> pa.Schema | None:
        """Return the columns of a typed log; None for a byte log.

        Raises: LogNotFoundError, MetadataError.
        """

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
        return await self._update_schema(columns_of(schema_from(schema)), merge=merge)

    @abstractmethod
    async def _update_schema(self, columns: tuple[Column, ...], *, merge: bool) -> pa.Schema:
        """Change the columns of a typed log; return all columns after the change."""


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
        return await self._truncate(ReadStart.given(dlsn, txid, timestamp_ms))

    @abstractmethod
    async def _truncate(self, start: ReadStart) -> bool:
        """Drop the records below `start`; return whether there were any."""

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

        Readers and managers that others have opened go on too, by the log's id.  A writer through
        proxies gets a LogRenamedError: it opens the log by its new name.

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
