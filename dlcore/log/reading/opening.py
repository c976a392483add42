"""Opens readers of one log: from a start to a fetcher at a position."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField
from dlcore.log.metadata.history import LogHistory
from dlcore.log.reading.broken_entries import BrokenEntries
from dlcore.log.reading.cursor import ReadCursor, TruncationRule
from dlcore.log.reading.log_range import LogRange
from dlcore.log.reading.ranges import RangeExtent, RangeView, position_of
from dlcore.log.reading.reader import DirectReader, Fetching
from dlcore.log.reading.rows_reader import ReadStart
from dlcore.log.reading.schemas import KnownSchemas
from dlcore.log.reading.snapshot import Finder, LogFollower
from dlcore.log.reading.subscriptions import SubscriptionHold
from dlcore.log.reading.tail_driver import Fetcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow.compute as pc

    from dlcore.base.config import LogConfig
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.reading.ranges import Bound


class ReaderOpener:
    """Opens readers of a log, and moves them."""

    def __init__(
        self,
        context: LogContext,
        log: LogMetadata,
        config: LogConfig,
        known: LogFollower | None = None,
    ) -> None:
        self._context = context
        self._log = log
        self._config = config
        self.follower = LogFollower(context, log)
        self._known = known or self.follower

    async def open_reader(
        self,
        start: ReadStart,
        *,
        subscriber: str | None = None,
        skip_broken_entries: bool = False,
        truncated: TruncationRule | None = None,
        end: DLSN | None = None,
    ) -> DirectReader:
        """Open a reader; for a subscriber at its stored position, unless another is given.

        With an `end` the stream ends with the entry that contains it, or the one before it, and
        nothing after that is fetched.

        Without `truncated`, a truncated position that the caller names is refused.  `DLSN.INITIAL`
        does not count as such: it means the first remaining record.
        """
        schemas = await KnownSchemas.read(self._context.logs, self._log)
        broken = BrokenEntries(self._log.name, skip=skip_broken_entries)
        fetch_from = partial(self._fetch_from, broken=broken, truncated=truncated, end=end)
        hold = None
        if subscriber is not None:
            hold = SubscriptionHold(self._context, self._log, subscriber)
            await hold.take(timeout_s=self._config.lock_timeout_s)
            start = ReadStart(dlsn=hold.position) if start == ReadStart() else start
        try:
            fetching = await fetch_from(start)
        except BaseException:
            if hold is not None:
                await hold.release()
            raise
        log = self._log
        return DirectReader(
            self._context,
            log.name,
            log.log_id,
            fetch_from,
            start,
            fetching,
            broken,
            hold,
            schemas,
        )

    async def position_of(self, start: ReadStart, *, keeps_truncated: bool = False) -> DLSN:
        """Return the present position of a start.

        Raises: AlreadyTruncatedError: it names a transaction id that was truncated away.
        """
        if start.txid is not None:
            finder = await self.finder()
            position = await finder.not_less_than_txid(start.txid)
            if not keeps_truncated:
                await finder.require_left(NotLessThan(RecordField.TXID, start.txid))
            return position
        if start.timestamp_ms is not None:
            return await (await self.finder()).not_less_than_timestamp(start.timestamp_ms)
        return start.dlsn or DLSN.INITIAL

    async def open_range(
        self,
        start: Bound | None,
        end: Bound | None,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
    ) -> LogRange:
        """Return the readable records in [start, end)."""
        finder = await self.finder()
        snapshot = finder.snapshot
        first = snapshot.first if start is None else await position_of(finder, start)
        if isinstance(start, int):
            await finder.require_left(NotLessThan(RecordField.TXID, start))
        elif isinstance(start, DLSN):
            await finder.require_left(start)
        last = snapshot.end if end is None else await position_of(finder, end)
        scans = snapshot.scans(first, last)
        extent = RangeExtent(
            log=self._log.name,
            start=first,
            end=last,
            record_count_estimate=sum(each.record_count_estimate for each in scans),
            size_bytes_estimate=sum(each.size_bytes_estimate for each in scans),
        )
        view = RangeView(self._log.name, snapshot.columns, columns, where)
        return LogRange(extent, partial(self.open_part, first, last), view)

    async def open_part(self, start: DLSN, end: DLSN) -> DirectReader:
        """Open a reader whose stream ends with the entry that contains `end`, or the one before it.

        In complete parts it fetches nothing after that, as another reader would.  Records that are
        truncated before they are read are an `AlreadyTruncatedError`.

        Raises: AlreadyTruncatedError, LogNotFoundError, MetadataError.
        """
        at = ReadStart(dlsn=start)
        return await self.open_reader(at, truncated=TruncationRule.REFUSE, end=end)

    async def finder(self) -> Finder:
        """Return a finder of positions in the present log."""
        return Finder(self._context, await self.follower.take())

    async def _fetch_from(
        self,
        start: ReadStart,
        *,
        broken: BrokenEntries,
        truncated: TruncationRule | None,
        end: DLSN | None,
    ) -> Fetching:
        is_explicit = start.dlsn is not None and start.dlsn > DLSN.INITIAL
        rule = truncated or (TruncationRule.REFUSE if is_explicit else TruncationRule.SKIP)
        keeps = rule is TruncationRule.IGNORE
        position = await self.position_of(start, keeps_truncated=keeps)
        cursor = ReadCursor(self._log.name, position, truncated=rule, end=end)
        history = LogHistory(self._context.logs, self._log, keeps_truncated=keeps)
        # The state that is known lacks truncated segments.
        state = None if keeps else self._known.known_state()
        if state is None:
            state = await history.read_ahead(cursor.position.lssn)
        beginning = cursor.copy()
        beginning.plan(state)  # raises if the position was truncated
        fetcher = Fetcher(self._context, history, state, cursor, self._config, broken)
        return Fetching(fetcher, beginning.position)
