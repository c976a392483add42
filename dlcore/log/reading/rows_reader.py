"""Rows for callers: as records or batches, waiting or not, each of them once, in order.

This is the common part of readers from bookies and readers from proxies, which differ in the source
of their rows.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack

from dlcore.base.closing import AsyncClosing
from dlcore.base.config import require, require_count, require_kind
from dlcore.base.errors import ConfigurationError, DLError, EndOfStreamError
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.log.reading.rows import drop_taken, no_records, take_records

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    import pyarrow as pa

    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.reading.rows import Rows

_TAKEN_BYTES = 4 * 1024 * 1024
"""Bytes that the blocking reader takes over at once, to spare a thread switch for each entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStart:
    """The start of a reader: a position, a transaction id or a time; else the first record."""

    dlsn: DLSN | None = None
    txid: int | None = None
    timestamp_ms: int | None = None

    def __post_init__(self) -> None:
        given = (self.dlsn, self.txid, self.timestamp_ms)
        if sum(value is not None for value in given) > 1:
            raise ConfigurationError(
                f"dlsn={self.dlsn} txid={self.txid} timestamp_ms={self.timestamp_ms}: "
                "expected one of dlsn, txid and timestamp_ms, not several"
            )
        for field, kind in (("dlsn", DLSN), ("txid", int), ("timestamp_ms", int)):
            if (value := getattr(self, field)) is not None:
                require_kind(field, value, kind)
        if self.txid is not None:
            rule = f"expected at most {TXID_MAX}, the highest transaction id"
            require(condition=self.txid <= TXID_MAX, key="txid", value=self.txid, rule=rule)

    @classmethod
    def given(cls, dlsn: DLSN | None, txid: int | None, timestamp_ms: int | None) -> ReadStart:
        """Return a start that is named.  Raises: ConfigurationError: none is, or several are."""
        if dlsn is None and txid is None and timestamp_ms is None:
            raise ConfigurationError("expected one of dlsn, txid and timestamp_ms, not none")
        return cls(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)


class RowsWanted(TypedDict, total=False):
    """Arguments that say which rows are wanted: see `AsyncLogReader._gather_rows`."""

    non_blocking: bool
    until_caught_up: bool
    records_min: int
    bytes_max: int
    timeout_s: float | None


class PositionHold(Protocol):
    """The position that a log keeps for a subscriber, which this reader may move."""

    @property
    def position(self) -> DLSN:
        """The stored position."""

    async def commit(self, position: DLSN) -> None:
        """Store another one."""


class AsyncLogReader(AsyncClosing):
    """A reader at a position.  Requests are served in order.

    A read that is cancelled, or fails, takes nothing: the next one returns it.
    """

    _hold: PositionHold | None = None
    log_name: str
    """The log's name."""

    def __init__(self, position: DLSN) -> None:
        self._position = position  # after the buffered rows
        self._rows: deque[Rows] = deque()  # decoded, but not taken yet
        self._turn = asyncio.Lock()

    @property
    def position(self) -> DLSN:
        """The next position: each record below was returned, was truncated, or is not wanted."""
        position, rows = self._position, self._rows  # in this order: `_add` may run meanwhile
        return rows[0].position if rows else position

    @property
    @abstractmethod
    def is_typed(self) -> bool:
        """Whether the log is typed: it has batches then, and no records."""

    @property
    def broken_entries(self) -> int:
        """How many broken entries were skipped, if that was requested."""
        return 0

    @property
    def committed(self) -> DLSN | None:
        """The position stored for its subscriber; None if it reads for none."""
        return None if self._hold is None else self._hold.position

    async def commit(self, position: DLSN | None = None) -> DLSN:
        """Store the position of its subscriber, by default the reader's own, and return it.

        Raises:
            SubscriptionMovedError: another reader took the subscription over.
            ConfigurationError: it was opened without a subscriber.
        """
        if position is None:
            position = self.position
        require_kind("position", position, DLSN)
        await self._require_usable()
        if self._hold is None:
            raise ConfigurationError(
                f"the reader of log {self.log_name!r} has no subscriber: open_reader(subscriber=…)"
            )
        await self._hold.commit(position)
        return position

    async def seek(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Go to another position, forward or back; arguments are those of `open_reader`.

        It waits for reads that were called before.  A reader that failed is usable again.

        Raises: as `open_reader` of the log.
        """
        start = ReadStart(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        async with self._turn:
            await self._move(start)

    @abstractmethod
    async def _move(self, start: ReadStart) -> None:
        """Go there, and drop the rows of the old position."""

    @abstractmethod
    async def _require_usable(self) -> None:
        """Raise if nothing can be read now."""

    @abstractmethod
    async def _add(self, *, non_blocking: bool, until_caught_up: bool) -> Rows | None:
        """Add the next rows, and return them; None: see `_fill`."""

    async def records(self, *, follow: bool = False) -> AsyncGenerator[LogRecordWithDLSN, None]:
        """Yield records until every readable one was returned, or the log's end.

        With `follow` it waits for more, until the log is sealed.  A yielded record is read: after
        a break the next read begins after it.

        Raises: as `read_next`, except EndOfStreamError.
        """
        while (rows := await self._next_rows(follow=follow)) is not None:
            for record in rows.records():
                yield record

    async def batches(self, *, follow: bool = False) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield Arrow batches as `read_batch` returns them; ends as `records` does.

        Raises: as `read_next`, except EndOfStreamError.
        """
        while (rows := await self._next_rows(follow=follow)) is not None:
            yield rows.take_batch(self.log_name)

    def __aiter__(self) -> AsyncIterator[LogRecordWithDLSN]:
        return self.records()

    async def _next_rows(self, *, follow: bool) -> Rows | None:
        async with self._turn:
            try:
                return await self._fill(non_blocking=False, until_caught_up=not follow)
            except EndOfStreamError:
                return None

    async def read_next(
        self, *, non_blocking: bool = False, until_caught_up: bool = False
    ) -> LogRecordWithDLSN | None:
        """Return the next record; wait until there is one.

        Args:
            non_blocking: return None at once if no record is buffered.
            until_caught_up: return None once every readable record was returned.

        Raises:
            EndOfStreamError: the log is sealed, and all of it was read.
            AlreadyTruncatedError: the position was truncated away.
            LogNotFoundError: the log was deleted.
            OwnershipAcquireFailedError, SubscriptionMovedError: its subscriber has another reader.
            MetadataConnectionError, BookieUnavailableError: ZooKeeper or all bookies were gone
                for `read_unavailable_timeout_s` of waiting; it can be called again.
            ReaderIdleError: no record came for `reader_idle_error_s`; it can be called again.
            LedgerReadError, InvalidEntryError: an entry is missing, or broken.
        """
        async with self._turn:
            rows = await self._fill(non_blocking=non_blocking, until_caught_up=until_caught_up)
            return next(rows.records()) if rows is not None else None

    async def read_bulk(
        self, count: int, *, until_caught_up: bool = False, timeout_s: float | None = None
    ) -> list[LogRecordWithDLSN]:
        """Return up to `count` records: at least one, and then those that are buffered.

        With `until_caught_up` it returns fewer than `count` (or none) only if every readable record
        was returned; with `timeout_s` only if that time is over.  Before an error it may also
        return fewer; the next call raises the error.

        Raises:
            ConfigurationError: `count` is below 1.
            SchemaMismatchError: the log is typed; else as `read_next`.
        """
        require_count(count)
        if self.is_typed:
            raise no_records()
        async with self._turn:
            await self._gather(
                records_min=count if until_caught_up or timeout_s is not None else 1,
                records_max=count,
                until_caught_up=until_caught_up,
                timeout_s=timeout_s,
            )
            return take_records(self._rows, count)

    async def read_batch(self, *, until_caught_up: bool = False) -> pa.RecordBatch | None:
        """Return the rest of the current entry, or the next entry.

        It has `read_schema`'s columns; for a typed log `_dlsn`, `_txid`, `_sequence_id`,
        `_timestamp` and the log's own, by the latest version of its schema that the reader met.

        It waits until there is one; with `until_caught_up` it returns None once all rows were
        returned.

        Raises: as `read_next`.
        """
        async with self._turn:
            rows = await self._fill(non_blocking=False, until_caught_up=until_caught_up)
            return rows.take_batch(self.log_name) if rows is not None else None

    async def _gather_rows(self, **wanted: Unpack[RowsWanted]) -> None:
        """Gather rows, up to a few MB, and leave them to `_take_gathered`.

        It waits for `records_min` records, at most `timeout_s`; with `until_caught_up` only until
        every readable one was returned, with `non_blocking` not at all.  In two steps for callers
        that may not get a result though it was there, as one in another thread that is interrupted.

        Raises: as `read_next`.
        """
        async with self._turn:
            await self._gather(
                records_min=0 if wanted.get("non_blocking") else wanted.get("records_min", 1),
                bytes_max=wanted.get("bytes_max", _TAKEN_BYTES),
                until_caught_up=wanted.get("until_caught_up", False),
                timeout_s=wanted.get("timeout_s"),
            )

    def _take_gathered(self) -> list[Rows]:
        """Return the gathered rows, which belong to the caller then."""
        taken, self._rows = self._rows, deque()
        drop_taken(taken)
        return list(taken)

    async def _gather(
        self,
        *,
        records_min: int,
        records_max: float = math.inf,
        bytes_max: float = math.inf,
        until_caught_up: bool,
        timeout_s: float | None,
    ) -> None:
        """Gather buffered rows, up to `records_max` or `bytes_max`; wait for `records_min`."""
        if timeout_s is not None:
            require_kind("timeout_s", timeout_s, float)
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        await self._require_usable()
        drop_taken(self._rows)
        count = sum(rows.rows_left for rows in self._rows)
        size_bytes = sum(rows.size_bytes for rows in self._rows)
        while count < records_min or (count < records_max and size_bytes < bytes_max):
            rows = await self._more(
                waits=count < records_min, until_caught_up=until_caught_up, deadline=deadline
            )
            if rows is None:
                break
            count += rows.rows_left
            size_bytes += rows.size_bytes

    async def _more(
        self, *, waits: bool, until_caught_up: bool, deadline: float | None
    ) -> Rows | None:
        """Add the next rows, and return them; None if there are none now.

        If there are some already, an error is left to the next call, which gets it again.
        """
        adding = self._add(non_blocking=not waits, until_caught_up=until_caught_up)
        try:
            if deadline is None or not waits:  # nearly every entry in bulk reads
                return await adding
            async with asyncio.timeout_at(deadline):
                return await adding
        except TimeoutError:
            return None
        except DLError:
            # The caller first gets the rows before the error.
            if not self._rows:
                raise
            return None

    async def _fill(self, *, non_blocking: bool, until_caught_up: bool) -> Rows | None:
        """Return rows that have one left; None if there are none and the caller does not wait."""
        await self._require_usable()
        drop_taken(self._rows)
        if self._rows:
            return self._rows[0]
        return await self._add(non_blocking=non_blocking, until_caught_up=until_caught_up)

    def _drop_rows(self) -> None:
        rows, self._rows = self._rows, deque()
        for each in rows:
            each.drop()
