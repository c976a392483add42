"""The blocking API of one log: its writers, its readers, and its metadata."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import AlreadyClosedError
from dlcore.sync.log_range import LogRange
from dlcore.sync.reader import LogReader
from dlcore.sync.stream import AppendOnlyStreamReader, AppendOnlyStreamWriter
from dlcore.sync.twin import Blocking
from dlcore.sync.writer import LogWriter

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import pyarrow as pa
    import pyarrow.compute as pc

    from dlcore.api.manager import DistributedLogManager as AsyncManager
    from dlcore.base.config import LogSettings
    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.reading.inspecting import SegmentWatch
    from dlcore.log.reading.ranges import Bound
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.log.reading.status import LogStatus
    from dlcore.log.writing.writer import AsyncLogWriter
    from dlcore.sync.buffering import BufferingWriter
    from dlcore.sync.portal import Portal


class DistributedLogManager(Blocking):
    """One log: its writers, its readers, and its metadata."""

    def __init__(
        self, portal: Portal, manager: AsyncManager, writers: dict[BufferingWriter, None]
    ) -> None:
        super().__init__(portal, manager.aclose)
        self._manager = manager
        self._writers = writers

    def __repr__(self) -> str:
        return repr(self._manager)

    @property
    def name(self) -> str:
        """The log's name."""
        return self._manager.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._manager.log_id

    def open_writer(self, *, ledger_metadata: Mapping[str, str] | None = None) -> LogWriter:
        """Take the writer lock, recover the segment of a dead writer, and return the writer.

        `ledger_metadata` is stored with each ledger that the writer creates.

        Raises: ConfigurationError, EndOfStreamError, OwnershipAcquireFailedError,
            LedgerRecoveryError, LogNotFoundError, MetadataError.
        """
        return self._twin_of(self._call(self._manager.open_writer(ledger_metadata=ledger_metadata)))

    def _twin_of(self, opened: AsyncLogWriter) -> LogWriter:
        return LogWriter(self._portal, opened, self._writers)

    def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        subscriber: str | None = None,
        skip_broken_entries: bool = False,
        ignore_truncation: bool = False,
    ) -> LogReader:
        """Open a reader at a position; at the first readable record if none is given.

        For a `subscriber` it starts at the subscriber's stored position, and is the subscriber's
        only reader.  With `skip_broken_entries` it skips and counts entries without an intact
        replica.  With `ignore_truncation` it also reads truncated records that are still stored.

        Raises: AlreadyTruncatedError, ConfigurationError, OwnershipAcquireFailedError,
            LogNotFoundError, MetadataError.
        """
        reader = self._call(
            self._manager.open_reader(
                dlsn=dlsn,
                txid=txid,
                timestamp_ms=timestamp_ms,
                subscriber=subscriber,
                skip_broken_entries=skip_broken_entries,
                ignore_truncation=ignore_truncation,
            )
        )
        return LogReader(self._portal, reader)

    def get_subscriptions(self) -> dict[str, DLSN]:
        """Return the stored positions of subscribers: of the next record that each will read.

        Raises: LogNotFoundError, MetadataError.
        """
        return self._call(self._manager.get_subscriptions())

    def move_subscription(
        self,
        subscriber: str,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> DLSN:
        """Move a subscriber without a reader to another position, forward or back, and return it.

        Raises: OwnershipAcquireFailedError: the subscriber has a reader; LogNotFoundError,
            MetadataError.
        """
        return self._call(
            self._manager.move_subscription(
                subscriber, dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms
            )
        )

    def delete_subscription(self, subscriber: str) -> bool:
        """Forget a subscriber without a reader; return whether it existed.

        Raises: OwnershipAcquireFailedError: the subscriber has a reader; LogNotFoundError,
            MetadataError.
        """
        return self._call(self._manager.delete_subscription(subscriber))

    def read(
        self,
        start: Bound | None = None,
        end: Bound | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
    ) -> LogRange:
        """Return the records in [start, end), as batches, tables, frames, or an Arrow stream.

        A bound is a position, a transaction id (int) or a time (datetime with a time zone).  The
        defaults are the first record that is not truncated, and the current end of the readable
        records.  `columns` are the wanted columns, `where` is a condition on rows.

        Raises: AlreadyTruncatedError, ConfigurationError, LogNotFoundError, LedgerReadError,
            MetadataError.
        """
        reading = self._manager.read(start, end, columns=columns, where=where)
        found = self._call(reading)
        if found.view.old_names:  # a warning on the loop would not show the caller
            from dlcore.log.entries.old_names import warn_of_old_names

            warn_of_old_names(found.view.old_names)
        return LogRange(self._portal, found)

    def get_schema(self) -> pa.Schema | None:
        """Return the columns of a typed log; None for a byte log.

        Raises: LogNotFoundError, MetadataError.
        """
        return self._call(self._manager.get_schema())

    def update_schema(self, schema: Any, *, merge: bool = False) -> pa.Schema:
        """Add columns to a typed log, or widen their types; return all its columns after that.

        `schema` has all columns; with `merge` the log also keeps columns that are not in `schema`.

        Raises: SchemaMismatchError: it is another kind of change; ConfigurationError,
            LogNotFoundError, MetadataError.
        """
        return self._call(self._manager.update_schema(schema, merge=merge))

    def open_stream_writer(self) -> AppendOnlyStreamWriter:
        """Open the log's writer as a binary file, positioned at the end of the log's bytes.

        Raises: SchemaMismatchError: the log is typed; and as `open_writer`.
        """
        opened, position = self._call(self._manager.begin_stream())
        return AppendOnlyStreamWriter(self._twin_of(opened), position)

    def open_stream_reader(self, position: int | None = None) -> AppendOnlyStreamReader:
        """Open the log's bytes as a binary file, at `position` or at the first readable byte.

        Raises: as `open_reader`, and as `AppendOnlyStreamReader.seek`.
        """
        reader = self._call(self._manager.open_stream_reader(position))
        return AppendOnlyStreamReader(self._portal, reader)

    def get_first_dlsn(self) -> DLSN:
        """Return the position of the first record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `get_snapshot`.
        """
        return self._call(self._manager.get_first_dlsn())

    def get_last_dlsn(self) -> DLSN:
        """Return the position of the last readable record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `get_snapshot`.
        """
        return self._call(self._manager.get_last_dlsn())

    def get_last_txid(self) -> int:
        """Return the transaction id of the last readable record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `get_snapshot`.
        """
        return self._call(self._manager.get_last_txid())

    def get_first_record(self) -> LogRecordWithDLSN:
        """Return the first record that is not truncated, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `LogReader.read_next`.
        """
        return self._call(self._manager.get_first_record())

    def get_last_record(self) -> LogRecordWithDLSN:
        """Return the last readable record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `LogReader.read_next`.
        """
        return self._call(self._manager.get_last_record())

    def get_first_txid(self) -> int:
        """Return the transaction id of the first record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `LogReader.read_next`.
        """
        return self._call(self._manager.get_first_txid())

    def status(self) -> LogStatus:
        """Return the log's contents, storage and writer.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return self._call(self._manager.status())

    def watch_segments(self) -> Generator[list[LogSegment], None, None]:
        """Yield the log's segments now, and again after each change.

        It waits for changes.  Raises: LogNotFoundError: the log is deleted; MetadataError.
        """

        async def watch() -> SegmentWatch:
            return self._manager.watch_segments()

        watching = self._call(watch())
        try:
            while True:
                yield self._call(anext(watching))
        finally:
            # At the end of the process, by the garbage collector.
            with suppress(AlreadyClosedError):
                self._call(watching.aclose())

    def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end of the log.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return self._call(self._manager.get_dlsn_not_less_than_txid(txid))

    def get_dlsn_not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return self._call(self._manager.get_dlsn_not_less_than_timestamp(timestamp_ms))

    def get_log_record_count(self, start: DLSN | None = None, end: DLSN | None = None) -> int:
        """Return the exact number of readable records, or of those in [start, end).

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return self._call(self._manager.get_log_record_count(start, end))

    def get_log_segments(self) -> list[LogSegment]:
        """Return the segments, in order.  Raises: LogNotFoundError, MetadataError."""
        return self._call(self._manager.get_log_segments())

    def get_snapshot(self) -> LogSnapshot:
        """Return a snapshot of the readable records, with all that scans need.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return self._call(self._manager.get_snapshot())

    def get_first_active_dlsn(self) -> DLSN:
        """Return the position below which everything is truncated.

        Raises: LogNotFoundError, MetadataError.
        """
        return self._call(self._manager.get_first_active_dlsn())

    def is_end_of_stream_marked(self) -> bool:
        """Return whether the log is sealed.  Raises: LogNotFoundError, MetadataError."""
        return self._call(self._manager.is_end_of_stream_marked())

    def get_settings(self) -> LogSettings:
        """Return the settings stored with the log, which every writer of it uses.

        Raises: LogNotFoundError, MetadataError.
        """
        return self._call(self._manager.get_settings())

    def update_settings(self, /, **changes: object) -> LogSettings:
        """Change settings that are stored with the log, by name; None unsets one.  Return all.

        Raises: ConfigurationError: there is no such setting, or it cannot have that value;
            LogNotFoundError, MetadataError.
        """
        return self._call(self._manager.update_settings(**changes))

    def recover(self) -> None:
        """Fence and complete the segment of a dead writer.

        Raises: OwnershipAcquireFailedError: a writer owns the log; LedgerRecoveryError,
            LogNotFoundError, MetadataError.
        """
        self._call(self._manager.recover())

    def rename(self, name: str) -> None:
        """Give the log another name, at once for all clients, unless a writer owns it.

        Raises: InvalidLogNameError, LogExistsError, OwnershipAcquireFailedError, LogRenamedError,
            LogNotFoundError, MetadataError.
        """
        self._call(self._manager.rename(name))

    def delete(self) -> None:
        """Delete the log and its data; harmless if it is deleted already.

        Raises: OwnershipAcquireFailedError: a writer owns the log; LogRenamedError, MetadataError.
        """
        self._call(self._manager.delete())

    def truncate(
        self,
        dlsn: DLSN | None = None,
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> bool:
        """Truncate the records below a position, id or time; return whether this changed anything.

        Raises: ConfigurationError: the position is past the end, or not one is given;
            LogNotFoundError, LedgerReadError, MetadataError.
        """
        truncating = self._manager.truncate(dlsn, txid=txid, timestamp_ms=timestamp_ms)
        return self._call(truncating)

    def purge_logs_older_than(self, txid: int) -> bool:
        """Truncate the segments that lie wholly below a transaction id, except the last one.

        Raises: as `get_snapshot` and `truncate`.
        """
        return self._call(self._manager.purge_logs_older_than(txid))

    def mark_end_of_stream(self) -> None:
        """Seal a log without a writer: no record can follow.

        Raises: EndOfStreamError, OwnershipAcquireFailedError, LedgerRecoveryError,
            LogNotFoundError, MetadataError.
        """
        self._call(self._manager.mark_end_of_stream())
