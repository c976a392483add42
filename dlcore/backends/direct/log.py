"""One log over a metadata store and bookies."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dlcore.api.log import DistributedLogManager
from dlcore.backends.direct.contents import DirectContents
from dlcore.backends.direct.definition import DirectDefinition
from dlcore.backends.direct.subscriptions import DirectSubscriptions
from dlcore.base.errors import LogNotFoundError, LogRenamedError
from dlcore.base.ids import validate_log_name
from dlcore.log.metadata.changes import require_unsealed
from dlcore.log.reading.inspecting import SegmentWatch, take_status
from dlcore.log.reading.snapshot import take_last
from dlcore.log.recovery import recover_log
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
    from collections.abc import Mapping

    from dlcore.base.ids import DLSN
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.reading.reader import DirectReader
    from dlcore.log.reading.status import LogStatus
    from dlcore.log.writing.producers import Producers
    from dlcore.log.writing.writer import DirectWriter

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
        producers: Producers[Any] | None = None,  # of a proxy, which the writer fills
    ) -> DirectWriter:
        if producer is not None:
            raise self._only_over_proxies(f"producer={producer!r}")
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
    async def truncate(
        self,
        dlsn: DLSN | None = None,
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> bool:
        self._require_open()
        dlsn = await first_to_keep(self._context, self.get_snapshot, dlsn, txid, timestamp_ms)
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
            raise
        except LogNotFoundError:
            logger.info("log=%s is deleted", self.name)
        finally:
            await lock.release()
        await remove_deleted(self._context, self._log)
