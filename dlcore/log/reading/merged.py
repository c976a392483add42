"""A reader over many logs: their records as one sequence, by transaction id."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.background import side_tasks
from dlcore.base.closing import AsyncClosing
from dlcore.base.config import MIB, require_count
from dlcore.base.errors import ConfigurationError, EndOfStreamError, SchemaMismatchError
from dlcore.base.ids import DLSN, validate_log_names

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Mapping,
        Sequence,
    )
    from typing import Self

    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.reading.rows import Rows
    from dlcore.log.reading.rows_reader import AsyncLogReader

_RECORDS_AT_ONCE = 1_000
_HERE_BYTES = 32 * MIB
"""Bytes of entries kept of all logs together, about, and at least one entry of each.  The logs'
readers fetch further entries ahead."""


class MergedRecord(NamedTuple):
    """A record, and the name of its log."""

    log: str
    record: LogRecordWithDLSN


@dataclass(slots=True)
class _Source:
    """One of the logs."""

    name: str
    reader: Any  # a reader of records that have `txid` and `dlsn`
    rows: deque[Rows] = field(default_factory=deque)
    has_ended: bool = False
    _next: Any = None

    @property
    def next(self) -> Any:
        """The next record, if there is one."""
        while self._next is None and self.rows:
            self._next = next(self.rows[0].records(), None)
            if self._next is None:
                self.rows.popleft()
        return self._next

    @property
    def position(self) -> DLSN:
        """The position of the next record."""
        record = self.next
        found: DLSN = self.reader.position if record is None else record.dlsn
        return found

    def take(self) -> Any:
        """Take the next record; return the one after it."""
        self._next = None
        return self.next


class AsyncMergedReader(AsyncClosing):
    """Reads many logs as one; use `Namespace.open_merged_reader`.

    Records are ordered by transaction id.  At equal ids the order of the named logs decides.
    Records of one log keep their order.  `async for merged in reader` yields all readable records.
    A read that is cancelled, or fails, takes nothing.

    About 32 MB of entries of all logs together are kept in memory, at least one of each, beside the
    `read_ahead_bytes` that the reader of each log fetches ahead.
    """

    def __init__(self, readers: Mapping[str, AsyncLogReader]) -> None:
        self._sources = [_Source(name, reader) for name, reader in readers.items()]
        self._ready: deque[MergedRecord] = deque()  # merged, but not taken
        self._turn = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        open_log: Callable[[str], Awaitable[Any]],
        names: Sequence[str],
        positions: Mapping[str, DLSN] | None,
        **start: int | None,
    ) -> Self:
        """Open a reader of each log, at its position if there is one, else at `start`.

        Raises:
            ConfigurationError: a log is named twice, or not at all.
            SchemaMismatchError: a log is typed: its rows are no records of bytes.
            DLError: an error of opening a log or a reader; nothing stays open then.
        """
        validate_log_names(names)
        known = dict(positions or {})
        if len(set(names)) != len(names) or not names or set(known) - set(names):
            raise ConfigurationError(
                f"names={list(names)!r}, positions of {sorted(known)!r}: expected each log once"
            )
        readers: dict[str, AsyncLogReader] = {}
        async with AsyncExitStack() as opened:
            for name in names:
                log = await open_log(name)
                opening = log.open_reader(**({"dlsn": known[name]} if name in known else start))
                reader = await opened.enter_async_context(await opening)
                if reader.is_typed:
                    raise SchemaMismatchError(
                        f"log {name!r} is typed, and a merged reader returns records of bytes: "
                        "read its batches with a reader of its own"
                    )
                readers[name] = reader
            opened.pop_all()
        return cls(readers)

    def __repr__(self) -> str:
        return f"<AsyncMergedReader of {len(self._sources)} logs>"

    @property
    def positions(self) -> dict[str, DLSN]:
        """The next position in each log; with the positions, keep the ids of the logs too."""
        found = {source.name: source.position for source in self._sources}
        # From the last record to the first one, so that the first one of each log counts.
        return found | {log: record.dlsn for log, record in reversed(self._ready)}

    async def read_bulk(
        self, count: int, *, follow: bool = False, patience_s: float | None = None
    ) -> list[MergedRecord]:
        """Return up to `count` records, none if all readable ones were returned.

        With `follow` it waits for more.  The order is kept over all time, so a log without records
        holds the others back, unless it is sealed, or has had none for `patience_s`.  An empty
        result then means that all logs are sealed.

        Raises:
            ConfigurationError: `count` is below 1.
            DLError: the error of a log's reader; records read from other logs are kept.
        """
        await self.gather(count, follow=follow, patience_s=patience_s)
        return self._take_gathered(count)

    async def gather(self, count: int, *, follow: bool, patience_s: float | None) -> None:
        """Wait for the records of `read_bulk`, and leave them to `_take_gathered`.

        For callers that may not get a result though it was there, as one in another thread that is
        interrupted.  Raises: as `read_bulk`.
        """
        require_count(count)
        async with self._turn:
            caught_up: set[int] = set()
            while not self._ready:
                await self._fill(caught_up, follow=follow, patience_s=patience_s)
                self._ready.extend(self._merge(count, caught_up))
                if not follow or all(s.has_ended for s in self._sources):
                    return
                caught_up.clear()

    @property
    def gathered(self) -> deque[MergedRecord]:
        """The gathered records; iterating takes from it."""
        return self._ready

    def _take_gathered(self, count: int) -> list[MergedRecord]:
        """Return up to `count` of the gathered records."""
        taken = list(islice(self._ready, count))
        self._ready = deque(islice(self._ready, count, None))
        return taken

    async def _fill(self, caught_up: set[int], *, follow: bool, patience_s: float | None) -> None:
        """Fetch entries of each log without a kept record; note the logs that have none."""
        bytes_max = _HERE_BYTES // len(self._sources)

        async def fill(index: int, source: _Source) -> None:
            try:
                await source.reader._gather_rows(
                    until_caught_up=not follow,
                    timeout_s=patience_s if follow else None,
                    bytes_max=max(bytes_max, 1),
                )
                source.rows.extend(source.reader._take_gathered())
            except EndOfStreamError:
                source.has_ended = True
            if source.next is None:
                caught_up.add(index)

        async with side_tasks() as tasks:  # the entries that cancelled ones wait for are not lost
            fills = [
                tasks.start(fill(index, source))
                for index, source in enumerate(self._sources)
                if source.next is None and not source.has_ended
            ]
            if fills:
                await asyncio.wait(fills, return_when=asyncio.FIRST_EXCEPTION)
        for each in fills:
            if not each.cancelled():
                each.result()

    def _merge(self, count: int, caught_up: set[int]) -> list[MergedRecord]:
        """Take records in order, until the next record could be one that was not fetched yet."""
        heap = [
            (record.txid, index, record)
            for index, source in enumerate(self._sources)
            if (record := source.next) is not None
        ]
        heapify(heap)
        merged: list[MergedRecord] = []
        while heap and len(merged) < count:
            _, index, record = heap[0]
            source = self._sources[index]
            merged.append(MergedRecord(source.name, record))
            following = source.take()
            if following is not None:
                heapreplace(heap, (following.txid, index, following))
            elif index in caught_up or source.has_ended:
                heappop(heap)
            else:
                break  # its next record is not fetched yet, and may come before all others
        return merged

    async def records(
        self, *, follow: bool = False, patience_s: float | None = None
    ) -> AsyncGenerator[MergedRecord, None]:
        """Yield records until every readable one was returned; with `follow` as `read_bulk`.

        A yielded record is read: after a break the next read begins after it.

        Raises: as `read_bulk`.
        """
        while True:
            await self.gather(_RECORDS_AT_ONCE, follow=follow, patience_s=patience_s)
            if not self._ready:
                return
            while self._ready:
                yield self._ready.popleft()

    def __aiter__(self) -> AsyncIterator[MergedRecord]:
        return self.records()

    async def aclose(self) -> None:
        """Close the readers; a second call does nothing."""
        async with AsyncExitStack() as ends:  # closes each one, also if this is cancelled
            for source in self._sources:
                ends.push_async_callback(source.reader.aclose)
