"""Information about a log: its status, and its segments as they change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlcore.base.background import together
from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import AlreadyClosedError
from dlcore.log.metadata.history import LogHistory
from dlcore.log.reading.snapshot import Finder
from dlcore.log.reading.status import LogStatus
from dlcore.metadata.one_node import persistently

if TYPE_CHECKING:
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.reading.scan import LogSnapshot

_PATHS_AT_ONCE = 500


async def take_status(context: LogContext, log: LogMetadata, snapshot: LogSnapshot) -> LogStatus:
    """Return the status of a log whose `snapshot` was just taken."""
    finder = Finder(context, snapshot)
    ledger_ids = sorted({e.ledger_id for s in snapshot.segments for e in s.extents})
    at, holder, last, under_replicated = await together(
        context.logs.read(log),
        context.logs.locks.holder_of(log),
        finder.last_dlsn(),
        _count_under_replicated(context, ledger_ids),
    )
    records = 0
    if not snapshot.is_empty:
        before, after = await finder.place(snapshot.first), await finder.place(snapshot.end)
        records = after.sequence_id - before.sequence_id
    extents = [e for s in snapshot.segments for e in s.extents]
    return LogStatus(
        name=log.name,
        log_id=log.log_id,
        first=None if last is None else snapshot.first,
        last=last,
        last_txid=None if last is None else extents[-1].last_txid,
        record_count=records,
        size_bytes=sum(p.size_bytes_estimate for p in snapshot.scans(snapshot.first, snapshot.end)),
        segment_count=len(snapshot.segments),
        ledger_count=len(ledger_ids),
        under_replicated_ledgers=under_replicated,
        quorum=log.quorum,
        sealed=snapshot.sealed,
        writer=None if holder is None else holder.owner,
        created_ms=log.created_ms,
        forked_from=None if log.origin is None else f"{log.origin.name} at {log.origin.at}",
        last_timestamp_ms=max(
            [at.head.last_timestamp_ms, *(extent.last_timestamp_ms for extent in extents[-1:])]
        ),
        now_ms=context.clock.now_ms(),
    )


async def _count_under_replicated(context: LogContext, ledger_ids: list[int]) -> int:
    count = 0
    for first in range(0, len(ledger_ids), _PATHS_AT_ONCE):
        part = ledger_ids[first : first + _PATHS_AT_ONCE]
        paths = [context.paths.under_replicated_ledger(ledger_id) for ledger_id in part]
        nodes = await persistently(lambda paths=paths: context.store.get_many(paths))  # type: ignore[misc]
        count += sum(node is not None for node in nodes)
    return count


class SegmentWatch(AsyncClosing):
    """Yields a log's segments: as they are now, and again after each change, until it is deleted.

    It yields states, not steps: of several fast changes only the last state is yielded.  After
    deletion it raises `LogNotFoundError`.
    """

    def __init__(self, context: LogContext, log: LogMetadata) -> None:
        self._context = context
        self._log = log
        self._history = LogHistory(context.logs, log)
        self._changed = asyncio.Event()
        self._changed.set()
        self._returned: tuple[LogSegment, ...] | None = None
        self._closed = False
        path = context.logs.paths_of(log).head
        self._unwatch = context.store.watch(path, self._changed.set, children=False)
        context.open_objects.add(self)

    def __repr__(self) -> str:
        return f"<SegmentWatch {self._log.name!r} {'CLOSED' if self._closed else 'OPEN'}>"

    def __aiter__(self) -> SegmentWatch:
        return self

    async def __anext__(self) -> list[LogSegment]:
        while True:
            await self._changed.wait()
            if self._closed:
                raise AlreadyClosedError(f"the watch of log {self._log.name!r} is closed")
            self._changed.clear()
            try:
                segments = (await self._history.read()).segments
            except BaseException:
                self._changed.set()  # the next call reads again
                raise
            if segments != self._returned:
                self._returned = segments
                return list(segments)

    async def aclose(self) -> None:
        """Stop watching; a second call does nothing."""
        self._closed = True
        self._unwatch()
        self._context.open_objects.discard(self)
        self._changed.set()

    async def abandon(self, reason: str) -> None:  # nothing is lost
        """Stop watching."""
        await self.aclose()
