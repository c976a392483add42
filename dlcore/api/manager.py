"""One log: opens its writers and readers, and answers questions about it."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from dlcore.base.config import LogConfig, require_kind
from dlcore.base.errors import (
    AlreadyClosedError,
    LogEmptyError,
    LogNotFoundError,
    LogRenamedError,
    SchemaMismatchError,
)
from dlcore.base.ids import DLSN, validate_log_name
from dlcore.base.records import LogRecordWithDLSN
from dlcore.log.metadata.changes import require_unsealed
from dlcore.log.reading.cursor import TruncationRule
from dlcore.log.reading.inspecting import SegmentWatch, take_status
from dlcore.log.reading.opening import ReaderOpener
from dlcore.log.reading.queries import LogQueries
from dlcore.log.reading.rows_reader import ReadStart
from dlcore.log.reading.schemas import KnownSchemas
from dlcore.log.reading.snapshot import Finder, take_last
from dlcore.log.reading.subscriptions import (
    delete_subscription,
    list_subscriptions,
    move_subscription,
)
from dlcore.log.recovery import recover_log
from dlcore.log.streams import AsyncAppendOnlyStreamReader, AsyncAppendOnlyStreamWriter
from dlcore.log.typed.arrow import columns_of, schema_from, schema_of
from dlcore.log.upkeep.removal import remove_deleted, remove_truncated
from dlcore.log.writing.ending import delete_log, seal_log
from dlcore.log.writing.lock import WriterLock
from dlcore.log.writing.renaming import rename_log
from dlcore.log.writing.truncation import first_to_keep, truncate_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    import pyarrow.compute as pc

    from dlcore.base.config import LogSettings
    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.log.reading.log_range import LogRange
    from dlcore.log.reading.ranges import Bound
    from dlcore.log.reading.reader import AsyncLogReader
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.log.reading.snapshot import LogFollower
    from dlcore.log.reading.status import LogStatus
    from dlcore.log.typed.schema import LogSchema
    from dlcore.log.writing.producers import Producers
    from dlcore.log.writing.writer import AsyncLogWriter

logger = logging.getLogger(__name__)


class DistributedLogManager(LogQueries[LogRecordWithDLSN]):
    """One log.  Use `Namespace.open_log`."""

    def __init__(
        self,
        context: LogContext,
        log: LogMetadata,
        config: LogConfig,
        known: LogFollower | None = None,
    ) -> None:
        """Open a log; readers take its metadata from `known`, if given, instead of reading it."""
        require_kind("config", config, LogConfig)
        self._context = context
        self._config = config
        self._log = log
        self._readers = ReaderOpener(context, log, config, known)
        self._closed = False

    def __repr__(self) -> str:
        return f"<DistributedLogManager {self.name!r}>"

    @property
    def name(self) -> str:
        """The log's name."""
        return self._log.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._log.log_id

    def _require_open(self) -> None:
        self._context.lifetime.require_open()
        if self._closed:
            raise AlreadyClosedError(f"the manager of log {self.name!r} is closed")

    async def _read(self) -> VersionedHead:
        self._require_open()
        return await self._context.logs.read(self._log)

    # Writers and readers

    async def open_writer(
        self,
        *,
        ledger_metadata: Mapping[str, str] | None = None,
        producers: Producers[Any] | None = None,
    ) -> AsyncLogWriter:
        """Take the writer lock, recover a dead writer's segment, and return the writer.

        `ledger_metadata` is stored with its ledgers.  A proxy passes `producers`, which is filled.
        Any other writer that waits for the lock asks a proxy that holds it to release it.

        Raises:
            ConfigurationError: `ledger_metadata` has keys that dlog itself uses, or over 4 KiB.
            EndOfStreamError: the log is sealed: no record can follow.
            LogModeError: the log's mode does not allow this writer, or allows only proxies.
            OwnershipAcquireFailedError: another writer owned the log during `lock_timeout_s`.
            LedgerRecoveryError: too few bookies answer to recover a dead writer's segment.
        """
        # Imported here, since most commands of `dlog` write nothing.
        from dlcore.log.writing.opening import checked_metadata, open_locked

        custom = checked_metadata(ledger_metadata or {})
        self._require_open()
        at, settings = await self._context.logs.open(self._log)
        require_unsealed(at)
        settings.require_mode(self.name, proxied=(turns := producers is not None))
        lock = None
        if self._config.lock_enabled:
            lock = await self._acquire(turns=turns, asks=not turns)
        try:
            self._require_open()
            config = self._config
            return await open_locked(self._context, self._log, lock, config, custom, producers)
        except BaseException:
            if lock is not None:
                await lock.release()
            raise

    async def _acquire(
        self, timeout_s: float | None = None, *, turns: bool = False, asks: bool = False
    ) -> WriterLock:
        self._require_open()
        context, who = self._context, self._context.client_id
        lock = WriterLock(
            context.logs, self._log, client_id=who, clock=context.clock, turns=turns, asks=asks
        )
        if timeout_s is None:
            timeout_s = self._config.lock_timeout_s
        await lock.acquire(timeout_s=timeout_s)
        return lock

    async def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        subscriber: str | None = None,
        skip_broken_entries: bool = False,
        ignore_truncation: bool = False,
    ) -> AsyncLogReader:
        """Open a reader.

        Args:
            dlsn: the position of the first record wanted; `DLSN.INITIAL`, the default, means the
                first one that is not truncated.  A position beyond the end waits for its record.
            txid: the first record with this transaction id or a higher one; 0 means the first one.
            timestamp_ms: the first remaining record that was written at that time or later, in
                epoch milliseconds.
            subscriber: the name for which it reads.  It starts at the stored position of the
                subscriber, unless another is given, stores positions with `commit`, and is the
                only reader of the subscriber.
            skip_broken_entries: leave out entries of which no replica is undamaged, and count them
                in `broken_entries`; otherwise they are an error.
            ignore_truncation: read also truncated records, as long as their segment is stored.

        Raises:
            AlreadyTruncatedError: `dlsn`, or the stored position, was truncated away, or a record
                with `txid` or a higher one was.
            ConfigurationError: more than one position is given.
            OwnershipAcquireFailedError: the subscriber had another reader for `lock_timeout_s`.
        """
        start = ReadStart(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        self._require_open()
        return await self._readers.open_reader(
            start,
            subscriber=subscriber,
            skip_broken_entries=skip_broken_entries,
            truncated=TruncationRule.IGNORE if ignore_truncation else None,
        )

    async def open_part(self, start: DLSN, end: DLSN) -> AsyncLogReader:
        """Open a reader whose stream ends with the entry that contains `end`, or the one before it.

        In complete parts it fetches nothing after that, as another reader would.  Records that are
        truncated before they are read are an `AlreadyTruncatedError`.

        Raises: AlreadyTruncatedError, LogNotFoundError, MetadataError.
        """
        self._require_open()
        return await self._readers.open_part(start, end)

    async def get_subscriptions(self) -> dict[str, DLSN]:
        """Return the stored positions of subscribers: the next record that each one reads.

        Raises: LogNotFoundError, MetadataError.
        """
        self._require_open()
        found = await list_subscriptions(self._context, self._log)
        return {subscriber: seen.position for subscriber, seen in found.items()}

    async def move_subscription(
        self,
        subscriber: str,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> DLSN:
        """Store the position of a subscriber without a reader, forward or back, and return it.

        Raises:
            OwnershipAcquireFailedError: the subscriber has a reader, which can `seek` and `commit`.
        """
        self._require_open()
        start = ReadStart(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        position = await self._readers.position_of(start)
        await move_subscription(self._context, self._log, subscriber, position)
        return position

    async def delete_subscription(self, subscriber: str) -> bool:
        """Forget a subscriber that has no reader; return whether there was one.

        Raises: OwnershipAcquireFailedError: it has a reader; LogNotFoundError, MetadataError.
        """
        self._require_open()
        return await delete_subscription(self._context, self._log, subscriber)

    async def read(
        self,
        start: Bound | None = None,
        end: Bound | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
    ) -> LogRange:
        """Return the records from `start` up to but not including `end`, to be read at once.

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
        """
        self._require_open()
        found = await self._readers.open_range(start, end, columns, where)
        if found.view.old_names:
            from dlcore.log.entries.old_names import (
                warn_of_old_names,
            )  # imported here: it loads Arrow

            warn_of_old_names(found.view.old_names)
        return found

    async def get_schema(self) -> pa.Schema | None:
        """Return the columns of a typed log; None for a byte log.

        Raises: LogNotFoundError, MetadataError.
        """
        self._require_open()
        schemas = await KnownSchemas.read(self._context.logs, self._log)
        return None if schemas is None else schemas.entries.columns

    async def update_schema(self, schema: Any, *, merge: bool = False) -> pa.Schema:
        """Change the columns of a typed log; return all columns after the change.

        Columns may be added, which are null in older records, and types may get wider; see
        `dlcore.log.typed.schema`.  Readers and writers learn of the change when they meet it.

        Args:
            schema: all columns, as an Arrow schema.
            merge: keep columns of the log that are missing here, and types that are wider.

        Raises:
            SchemaMismatchError: the change is not of this kind; the message shows both schemas.
            ConfigurationError: a log cannot have these columns.
        """
        self._require_open()
        self._require_typed()
        columns = columns_of(schema_from(schema))
        name = self.name

        def change(known: LogSchema) -> LogSchema:
            return known.merged(name, columns) if merge else known.evolved(name, columns)

        return schema_of((await self._context.logs.change_schema(self._log, change)).latest)

    def _require_typed(self, *, typed: bool = True) -> None:
        if self._log.typed is not typed:
            raise SchemaMismatchError(
                f"log {self.name!r} was created {'without' if typed else 'with'} a schema, which "
                f"makes it a log of {'bytes' if typed else 'typed columns'} for good"
            )

    async def open_stream_writer(self) -> AsyncAppendOnlyStreamWriter:
        """Open the log's writer as a stream of bytes, which begins where the log's bytes end.

        Raises: SchemaMismatchError: the log is typed; and as `open_writer`.
        """
        return AsyncAppendOnlyStreamWriter(*await self.begin_stream())

    async def begin_stream(self) -> tuple[AsyncLogWriter, int]:
        """Return a writer for bytes, and where they end.  Raises: as `open_stream_writer`."""
        self._require_typed(typed=False)
        writer = await self.open_writer()
        return writer, max(writer.last_txid, 0)

    async def open_stream_reader(self, position: int | None = None) -> AsyncAppendOnlyStreamReader:
        """Open a reader of the log's bytes.

        Args:
            position: the first byte wanted, perhaps past the end; None: the first one that is not
                truncated.

        Raises: as `open_reader`, and as `AsyncAppendOnlyStreamReader.seek`.
        """
        self._require_typed(typed=False)
        reader = await self.open_reader()
        return await AsyncAppendOnlyStreamReader.open(reader, self.get_stream_end, position)

    async def get_stream_end(self) -> tuple[int, bool]:
        """Return where the readable bytes of a stream end, and whether the stream is sealed.

        Raises: SchemaMismatchError: the log is typed; LogNotFoundError, LedgerReadError,
            MetadataError.
        """
        self._require_open()
        self._require_typed(typed=False)
        snapshot = await take_last(self._context, self._log)
        ends = [segment.extents[-1].last_txid for segment in snapshot.segments if segment.extents]
        if not ends:  # the log is empty, or truncated to its end
            ends = [max(0, (await self._read()).head.max_txid)]
        return ends[-1], snapshot.sealed

    # Questions

    async def get_snapshot(self) -> LogSnapshot:
        """Return the readable state of the log, with everything that scans need.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        self._require_open()
        return await self._readers.follower.take()

    async def _finder(self) -> tuple[LogSnapshot, Finder]:
        snapshot = await self.get_snapshot()
        return snapshot, Finder(self._context, snapshot)

    def _require_records(self, snapshot: LogSnapshot) -> None:
        if snapshot.is_empty:
            raise LogEmptyError(f"log {self.name!r} holds no record")

    async def get_first_dlsn(self) -> DLSN:
        """Return the position of the first record that is not truncated.

        Raises:
            LogEmptyError: there is none.
        """
        snapshot = await self.get_snapshot()
        self._require_records(snapshot)
        return snapshot.first

    async def get_last_dlsn(self) -> DLSN:
        """Return the position of the last readable record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `get_snapshot`.
        """
        self._require_open()
        snapshot = await take_last(self._context, self._log)
        self._require_records(snapshot)
        last = await Finder(self._context, snapshot).last_dlsn()
        assert last is not None
        return last

    async def get_last_txid(self) -> int:
        """Return the transaction id of the last readable record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `get_snapshot`.
        """
        self._require_open()
        snapshot = await take_last(self._context, self._log)
        self._require_records(snapshot)
        return next(s.extents[-1].last_txid for s in reversed(snapshot.segments) if s.extents)

    async def status(self) -> LogStatus:
        """Return the contents of the log, how they are stored, and who writes it.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return await take_status(self._context, self._log, await self.get_snapshot())

    def watch_segments(self) -> SegmentWatch:
        """Return an async iterator over the log's segments: the present ones, then each change."""
        self._require_open()
        return SegmentWatch(self._context, self._log)

    async def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end of the log.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        _, finder = await self._finder()
        return await finder.not_less_than_txid(txid)

    async def get_dlsn_not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        _, finder = await self._finder()
        return await finder.not_less_than_timestamp(timestamp_ms)

    async def find_place(self, wanted: DLSN | NotLessThan) -> RecordPlace:
        """Return the place of the first readable record that is not below `wanted`, or of the end.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        _, finder = await self._finder()
        return await finder.place(wanted)

    async def get_log_record_count(self, start: DLSN | None = None, end: DLSN | None = None) -> int:
        """Return the exact number of readable records, or of those in [start, end).

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        snapshot, finder = await self._finder()
        low = snapshot.first if start is None else max(start, snapshot.first)
        high = snapshot.end if end is None else min(end, snapshot.end)
        if low >= high:
            return 0
        after, before = await finder.place(high), await finder.place(low)
        return after.sequence_id - before.sequence_id

    async def get_log_segments(self) -> list[LogSegment]:
        """Return the segments that are not wholly truncated, in order.

        Raises: LogNotFoundError, MetadataError.
        """
        self._require_open()
        return list((await self._readers.follower.state()).segments)

    async def get_first_active_dlsn(self) -> DLSN:
        """Return the position below which everything is truncated.

        Raises: LogNotFoundError, MetadataError.
        """
        return (await self._read()).head.first_active_dlsn

    async def is_end_of_stream_marked(self) -> bool:
        """Return whether the log is sealed.  Raises: LogNotFoundError, MetadataError."""
        return (await self._read()).head.sealed

    async def get_settings(self) -> LogSettings:
        """Return the settings that are stored with the log for its writers.

        Raises: LogNotFoundError, MetadataError.
        """
        self._require_open()
        return await self._context.logs.read_settings(self._log)

    # Changes

    async def update_settings(self, /, **changes: object) -> LogSettings:
        """Change settings that are stored with the log, by name (`LogSettings`); return all.

        None unsets a setting.  Running writers use the change within moments.

        Raises:
            ConfigurationError: there is no such setting, or it cannot have that value.
        """
        self._require_open()
        return await self._context.logs.update_settings(self._log, changes)

    async def recover(self) -> None:
        """Fence and complete the segment of a dead writer.

        Raises:
            OwnershipAcquireFailedError: a writer owns the log.
        """
        lock = await self._acquire()
        try:
            await recover_log(self._context, await self._read())
        finally:
            await lock.release()

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
        self._require_open()
        dlsn = await first_to_keep(self._context, self.get_snapshot, dlsn, txid, timestamp_ms)
        changed, at = await truncate_log(self._context, await self._read(), dlsn)
        await remove_truncated(self._context, at)
        return changed

    async def rename(self, name: str) -> None:
        """Give the log another name, at once for all clients; this manager goes on under it.

        Writers and readers that others have opened go on too, by the log's id.

        Raises:
            InvalidLogNameError: a log cannot have that name.
            LogExistsError: there is a log of that name.
            OwnershipAcquireFailedError: a writer owns the log.
            LogRenamedError: it was renamed since this manager was opened.
        """
        name = validate_log_name(name)
        self._require_open()
        lock = await self._acquire(timeout_s=0)
        try:
            self._log = await rename_log(self._context, lock, self._log, name)
        finally:
            await lock.release()

    async def mark_end_of_stream(self) -> None:
        """Seal a log that has no writer: no record can follow, and readers get the end of stream.

        Raises:
            EndOfStreamError: it is sealed already.
            OwnershipAcquireFailedError: a writer owned the log during `lock_timeout_s`; it can seal
                the log itself.
        """
        lock = await self._acquire()
        try:
            await seal_log(self._context, lock, self._log)
        finally:
            await lock.release()

    async def delete(self) -> None:
        """Delete the log and its data; a log that is gone is no error.

        Raises:
            OwnershipAcquireFailedError: a writer owns the log.
            LogRenamedError: it was renamed since this manager was opened.
        """
        try:
            await self._read()
            lock = await self._acquire(0)
        except LogNotFoundError:
            return
        try:
            read_head = partial(self._context.logs.read, self._log)
            await delete_log(self._context, lock, self._log, read_head)
        except LogRenamedError:
            raise
        except LogNotFoundError:
            logger.info("log=%s is deleted", self.name)
        finally:
            await lock.release()
        await remove_deleted(self._context, self._log)

    async def aclose(self) -> None:
        """Stop using the log; its writers and readers must be closed by themselves."""
        self._closed = True
