"""The readable records of a log, from bookies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from dlcore.api.contents import LogContents
from dlcore.backends.direct.opened_log import DirectOpenedLog
from dlcore.log.reading.cursor import TruncationRule
from dlcore.log.reading.rows_reader import ReadStart
from dlcore.log.reading.snapshot import Finder, take_last

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow.compute as pc

    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.log.reading.log_range import LogRange
    from dlcore.log.reading.ranges import Bound
    from dlcore.log.reading.reader import DirectReader
    from dlcore.log.reading.scan import LogSnapshot


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
        self._require_open()
        return await self.readers.open_reader(
            start,
            subscriber=subscriber,
            skip_broken_entries=skip_broken_entries,
            truncated=TruncationRule.IGNORE if ignore_truncation else None,
        )

    @override
    async def read(
        self,
        start: Bound | None = None,
        end: Bound | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
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
    async def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        finder = Finder(self._context, await self.get_snapshot())
        return await finder.not_less_than_txid(txid)

    @override
    async def get_dlsn_not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        finder = Finder(self._context, await self.get_snapshot())
        return await finder.not_less_than_timestamp(timestamp_ms)
