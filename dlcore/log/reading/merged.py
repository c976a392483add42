"""A reader over many logs: their records as one sequence, by transaction id."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, NamedTuple

from dlcore.closing import AsyncClosing
from dlcore.errors import ConfigurationError, EndOfStreamError

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Collection,
        Mapping,
        Sequence,
    )
    from typing import Self

    from dlcore.ids import DLSN
    from dlcore.log.reading.reader import AsyncLogReader
    from dlcore.records import LogRecordWithDLSN

_RECORDS_AT_ONCE = 1_000
"""So many of each log are here at most, beside what its reader keeps fetched ahead."""


class MergedRecord(NamedTuple):
    """A record, and the log that it is of."""

    log: str
    record: LogRecordWithDLSN


@dataclass(slots=True)
class _Source:
    """One of the logs."""

    name: str
    reader: AsyncLogReader
    records: deque[LogRecordWithDLSN] = field(default_factory=deque)
    has_ended: bool = False


class AsyncMergedReader(AsyncClosing):
    """Reads many logs as one; use `Namespace.open_merged_reader`.

    Records come by transaction id, of equal ones those of the log that was named first; those of
    one log keep their order.  `async for merged in reader` yields all that is readable.
    """

    def __init__(self, readers: Mapping[str, AsyncLogReader]) -> None:
        self._sources = [_Source(name, reader) for name, reader in readers.items()]
        self._ready: deque[MergedRecord] = deque()  # merged, for who iterates
        self._turn = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        names: Sequence[str],
        positioned: Collection[str],
        open_reader: Callable[[str], Awaitable[AsyncLogReader]],
    ) -> Self:
        """Open a reader of each log; `positioned` are those of which a position was given.

        Raises:
            ConfigurationError: a log is named twice, or not at all.
            What `open_reader` raises; nothing stays open then.
        """
        if len(set(names)) != len(names) or not names or set(positioned) - set(names):
            raise ConfigurationError(
                f"names={list(names)!r}, positions of {sorted(positioned)!r}: expected each log "
                "once"
            )
        readers: dict[str, AsyncLogReader] = {}
        async with AsyncExitStack() as opened:
            for name in names:
                readers[name] = await opened.enter_async_context(await open_reader(name))
            opened.pop_all()
        return cls(readers)

    def __repr__(self) -> str:
        return f"<AsyncMergedReader of {len(self._sources)} logs>"

    @property
    def positions(self) -> dict[str, DLSN]:
        """Where it reads on in each log."""
        found = {
            source.name: source.records[0].dlsn if source.records else source.reader.position
            for source in self._sources
        }
        return found | {log: record.dlsn for log, record in reversed(self._ready)}

    async def read_bulk(
        self, count: int, *, follow: bool = False, patience_s: float | None = None
    ) -> list[MergedRecord]:
        """Return up to `count` records, none when all that were readable have been returned.

        With `follow` wait for more: the order is kept over all time, so that a log without records
        holds the others back, unless it is sealed, or has had none for `patience_s`.  None then
        means that all logs are sealed.

        Raises:
            ConfigurationError: `count` is below 1.
            DLError: of one of the logs' readers, which see; what was read of the others stays.
        """
        if count < 1:
            raise ConfigurationError(f"count={count}: expected a number > 0")
        async with self._turn:
            if self._ready:
                return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]
            caught_up: set[int] = set()
            while True:
                await self._fill(caught_up, follow=follow, patience_s=patience_s)
                merged = self._merge(count, caught_up)
                if merged or not follow or all(s.has_ended for s in self._sources):
                    return merged
                caught_up.clear()

    async def _fill(self, caught_up: set[int], *, follow: bool, patience_s: float | None) -> None:
        """Fetch records of each log that has none here; note those that give none."""

        async def fill(index: int, source: _Source) -> None:
            try:
                async with asyncio.timeout(patience_s if follow else None):
                    source.records.extend(
                        await source.reader.read_bulk(_RECORDS_AT_ONCE, until_caught_up=not follow)
                    )
            except TimeoutError:
                pass
            except EndOfStreamError:
                source.has_ended = True
            if not source.records:
                caught_up.add(index)

        empty = [
            (index, source)
            for index, source in enumerate(self._sources)
            if not source.records and not source.has_ended
        ]
        results = await asyncio.gather(
            *(fill(index, source) for index, source in empty), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _merge(self, count: int, caught_up: set[int]) -> list[MergedRecord]:
        """Take records in order, until one of a log might come first that is not here yet."""
        heap = [(s.records[0].txid, index) for index, s in enumerate(self._sources) if s.records]
        heapify(heap)
        merged: list[MergedRecord] = []
        while heap and len(merged) < count:
            _, index = heap[0]
            source = self._sources[index]
            merged.append(MergedRecord(source.name, source.records.popleft()))
            if source.records:
                heapreplace(heap, (source.records[0].txid, index))
            elif index in caught_up or source.has_ended:
                heappop(heap)
            else:
                break
        return merged

    async def records(
        self, *, follow: bool = False, patience_s: float | None = None
    ) -> AsyncGenerator[MergedRecord, None]:
        """Yield records until every readable one was returned; with `follow` as `read_bulk`.

        Each record that comes out is read: who leaves the loop reads on behind it.

        Raises: as `read_bulk`.
        """
        while merged := await self.read_bulk(
            _RECORDS_AT_ONCE, follow=follow, patience_s=patience_s
        ):
            self._ready.extendleft(reversed(merged))
            while self._ready:
                yield self._ready.popleft()

    def __aiter__(self) -> AsyncIterator[MergedRecord]:
        return self.records()

    async def aclose(self) -> None:
        """Close the readers; harmless when they are closed."""
        for source in self._sources:
            await source.reader.aclose()
