"""One log over a metadata store and bookies."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from dlcore.api.contents import LogContents, OpenedLog
from dlcore.api.log import DistributedLogManager, LogDefinition, Subscriptions
from dlcore.base.config import LogConfig, require_kind
from dlcore.base.errors import LogNotFoundError, LogRenamedError, UnsupportedError
from dlcore.base.ids import require_identity, validate_log_name
from dlcore.base.records import NotLessThan, RecordField
from dlcore.log.metadata.changes import require_unsealed
from dlcore.log.reading.cursor import TruncationRule
from dlcore.log.reading.inspecting import SegmentWatch, take_status
from dlcore.log.reading.opening import ReaderOpener
from dlcore.log.reading.rows_reader import ReadStart
from dlcore.log.reading.schemas import KnownSchemas
from dlcore.log.reading.snapshot import Finder, take_last
from dlcore.log.reading.subscriptions import (
    delete_subscription,
    list_subscriptions,
    move_subscription,
)
from dlcore.log.recovery import recover_log
from dlcore.log.typed.arrow import schema_of
from dlcore.log.upkeep.removal import remove_deleted, remove_truncated
from dlcore.log.writing.changing import (
    delete_log,
    first_to_keep,
    rename_log,
    seal_log,
    truncate_log,
)
from dlcore.log.writing.lock import WriterLock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    import pyarrow.compute as pc

    from dlcore.base.config import LogSettings
    from dlcore.base.ids import DLSN
    from dlcore.base.records import RecordPlace
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.log.reading.log_range import LogRange
    from dlcore.log.reading.ranges import Bound
    from dlcore.log.reading.reader import DirectReader
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.log.reading.snapshot import LogFollower
    from dlcore.log.reading.status import LogStatus
    from dlcore.log.typed.schema import Column, LogSchema
    from dlcore.log.writing.port import WriterExtension
    from dlcore.log.writing.writer import DirectWriter


class DirectOpenedLog(OpenedLog):
    """The adapters and the stored metadata of one log, on which all its parts rest."""

    _log: LogMetadata

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
        self.readers = ReaderOpener(context, log, config, known)
        """Opens readers, also those of parts, for proxies."""

    @override
    def _require_open(self) -> None:
        self._context.lifetime.require_open()
        super()._require_open()

    async def _read(self) -> VersionedHead:
        self._require_open()
        return await self._context.logs.read(self._log)

    def _require_typed(self, *, typed: bool = True) -> None:
        if self._log.typed is not typed:
            raise self._of_another_kind(typed=not typed)

    def _only_over_proxies(self, argument: str) -> UnsupportedError:
        return UnsupportedError(
            f"log {self.name!r}: {argument} is for clients of proxies; open the namespace by "
            "grpc://…, or leave the argument out"
        )


class DirectContents(DirectOpenedLog, LogContents):
    """The readable records of one log; a search reads no more entries than it needs."""

    @override
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
    ) -> DirectReader:
        if columns is not None:
            raise self._only_over_proxies(f"columns={columns!r}")
        start = ReadStart(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        if subscriber is not None:
            require_identity("subscriber", subscriber)
        self._require_open()
        return await self.readers.open_reader(
            start,
            subscriber=subscriber,
            skip_broken_entries=skip_broken_entries,
            truncated=TruncationRule.IGNORE if ignore_truncation else None,
        )

    @override
    async def _open_range(
        self,
        start: Bound | None,
        end: Bound | None,
        columns: Sequence[str] | None,
        where: pc.Expression | None,
    ) -> LogRange:
        self._require_open()
        return await self.readers.open_range(start, end, columns, where)

    @override
    async def get_snapshot(self) -> LogSnapshot:
        self._require_open()
        return await self.readers.follower.take()

    @override
    async def _places(
        self, snapshot: LogSnapshot, *wanted: DLSN | NotLessThan
    ) -> list[RecordPlace]:
        finder = Finder(self._context, snapshot)
        return [await finder.place(each) for each in wanted]

    @override
    async def get_last_dlsn(self) -> DLSN:
        self._require_open()
        snapshot = await take_last(self._context, self._log)
        self._require_records(snapshot)
        last = await Finder(self._context, snapshot).last_dlsn()
        assert last is not None
        return last

    @override
    async def get_last_txid(self) -> int:
        self._require_open()
        return self._last_txid(await take_last(self._context, self._log))

    @override
    async def _dlsn_of(self, wanted: NotLessThan) -> DLSN:
        finder = Finder(self._context, await self.get_snapshot())
        if wanted.field is RecordField.TXID:
            return await finder.not_less_than_txid(wanted.value)
        return await finder.not_less_than_timestamp(wanted.value)


class DirectSubscriptions(DirectOpenedLog, Subscriptions):
    """The subscribers of one log."""

    @override
    async def get_subscriptions(self) -> dict[str, DLSN]:
        self._require_open()
        found = await list_subscriptions(self._context, self._log)
        return {subscriber: seen.position for subscriber, seen in found.items()}

    @override
    async def _move_subscription(self, subscriber: str, start: ReadStart) -> DLSN:
        self._require_open()
        position = await self.readers.position_of(start)
        await move_subscription(self._context, self._log, subscriber, position)
        return position

    @override
    async def _delete_subscription(self, subscriber: str) -> bool:
        self._require_open()
        return await delete_subscription(self._context, self._log, subscriber)


class DirectDefinition(DirectOpenedLog, LogDefinition):
    """The definition of one log."""

    @override
    async def get_settings(self) -> LogSettings:
        self._require_open()
        _, settings = await self._context.logs.open(self._log)  # raises if the log is gone
        return settings

    @override
    async def _update_settings(self, changes: Mapping[str, object]) -> LogSettings:
        self._require_open()
        return await self._context.logs.update_settings(self._log, changes)

    @override
    async def get_schema(self) -> pa.Schema | None:
        self._require_open()
        schemas = await KnownSchemas.read(self._context.logs, self._log)
        if schemas is None:
            await self._read()  # raises if the log is gone
            return None
        return schemas.entries.columns

    @override
    async def _update_schema(self, columns: tuple[Column, ...], *, merge: bool) -> pa.Schema:
        self._require_open()
        self._require_typed()
        name = self.name

        def change(known: LogSchema) -> LogSchema:
            return known.merged(name, columns) if merge else known.evolved(name, columns)

        return schema_of((await self._context.logs.change_schema(self._log, change)).latest)


logger = logging.getLogger(__name__)


class DirectLog(DirectContents, DirectSubscriptions, DirectDefinition, DistributedLogManager):
    """One log.  Use `Namespace.open_log`."""

    # Writers

    @override
    async def open_writer(
        self,
        *,
        producer: str | None = None,
        ledger_metadata: Mapping[str, str] | None = None,
        extension: WriterExtension | None = None,  # of a proxy
    ) -> DirectWriter:
        if producer is not None:
            raise self._only_over_proxies(f"producer={producer!r}")
        # Imported here, since most commands of `dlog` write nothing.
        from dlcore.log.writing.opening import checked_metadata, open_locked

        custom = checked_metadata(ledger_metadata or {})
        self._require_open()
        at, settings = await self._context.logs.open(self._log)
        require_unsealed(at)
        settings.require_mode(self.name, proxied=(turns := extension is not None))
        lock = None
        if self._config.lock_enabled:
            lock = await self._acquire(turns=turns, asks=not turns)
        try:
            # The namespace may have been closed during the wait for the lock.
            self._require_open()
            config = self._config
            return await open_locked(self._context, self._log, lock, config, custom, extension)
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

    # The stream of bytes

    @override
    async def _begin_stream(self) -> tuple[DirectWriter, int]:
        self._require_typed(typed=False)
        writer = await self.open_writer()
        return writer, max(writer.last_txid, 0)

    @override
    async def _open_bytes_reader(self) -> DirectReader:
        self._require_typed(typed=False)
        return await self.open_reader()

    @override
    async def _stream_end(self) -> tuple[int, bool]:
        return await self.find_stream_end()

    async def find_stream_end(self) -> tuple[int, bool]:
        """Return where the readable bytes of a stream end, and whether the stream is sealed.

        Raises: SchemaMismatchError: the log is typed.
        """
        self._require_open()
        self._require_typed(typed=False)
        snapshot = await take_last(self._context, self._log)
        ends = [segment.extents[-1].last_txid for segment in snapshot.segments if segment.extents]
        if not ends:  # the log is empty, or truncated to its end
            ends = [max(0, (await self._read()).head.max_txid)]
        return ends[-1], snapshot.sealed

    # State

    @override
    async def status(self) -> LogStatus:
        return await take_status(self._context, self._log, await self.get_snapshot())

    @override
    def watch_segments(self) -> SegmentWatch:
        self._require_open()
        return SegmentWatch(self._context, self._log)

    @override
    async def get_log_segments(self) -> list[LogSegment]:
        self._require_open()
        return list((await self.readers.follower.state()).segments)

    @override
    async def get_first_active_dlsn(self) -> DLSN:
        return (await self._read()).head.first_active_dlsn

    @override
    async def is_end_of_stream_marked(self) -> bool:
        return (await self._read()).head.sealed

    # Changes

    @override
    async def recover(self) -> None:
        lock = await self._acquire()
        try:
            await recover_log(self._context, await self._read())
        finally:
            await lock.release()

    @override
    async def _truncate(self, start: ReadStart) -> bool:
        self._require_open()
        dlsn = await first_to_keep(self._context, self.get_snapshot, start)
        changed, at = await truncate_log(self._context, await self._read(), dlsn)
        await remove_truncated(self._context, at)
        return changed

    @override
    async def rename(self, name: str) -> None:
        name = validate_log_name(name)
        self._require_open()
        lock = await self._acquire(timeout_s=0)
        try:
            self._log = await rename_log(self._context, lock, self._log, name)
        finally:
            await lock.release()

    @override
    async def mark_end_of_stream(self) -> None:
        lock = await self._acquire()
        try:
            await seal_log(self._context, lock, self._log)
        finally:
            await lock.release()

    @override
    async def delete(self) -> None:
        try:
            await self._read()
            lock = await self._acquire(0)
        except LogNotFoundError:
            return
        try:
            read_head = partial(self._context.logs.read, self._log)
            await delete_log(self._context, lock, self._log, read_head)
        except LogRenamedError:
            # A `LogNotFoundError` as well, but the log exists under another name.
            raise
        except LogNotFoundError:
            logger.info("log=%s is deleted", self.name)
        finally:
            await lock.release()
        await remove_deleted(self._context, self._log)
