"""The log's reader: records in order, each once, from a position on, up to and along the tail."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.errors import AlreadyClosedError, ConfigurationError, DLError, EndOfStreamError
from dlcore.ids import DLSN
from dlcore.log.entries.batches import RowsPlace, first_row_not_less, read_batch, records_of
from dlcore.log.entries.body import ENTRY_HEADER_BYTES, decode_entry_batch, with_txid
from dlcore.log.entries.lone_record import LONE_RECORD_FORMAT
from dlcore.records import LogRecordWithDLSN

if TYPE_CHECKING:
    from types import TracebackType

    import pyarrow as pa

    from dlcore.log.context import LogContext
    from dlcore.log.reading.fetch import FetchedEntry, Fetcher

logger = logging.getLogger(__name__)

_TAKEN_BYTES = 4 * 1024 * 1024
"""How much the blocking reader takes over at once, to spare a thread switch per entry."""


@dataclass(slots=True)
class _Rows:
    """The entry being handed out, decoded, and the next of its rows."""

    entry: FetchedEntry
    batch: pa.RecordBatch
    next_row: int

    @property
    def rows_left(self) -> int:
        return max(0, int(self.batch.num_rows) - self.next_row)

    def take_records(self, count: int) -> list[LogRecordWithDLSN]:
        part, place = self._take(count)
        return records_of(part, place)

    def take_batch(self) -> pa.RecordBatch:
        part, place = self._take(self.rows_left)
        return read_batch(part, place)

    def _take(self, count: int) -> tuple[pa.RecordBatch, RowsPlace]:
        entry, first = self.entry, self.next_row
        part = self.batch.slice(first, count)
        self.next_row += part.num_rows
        return part, RowsPlace(
            lssn=entry.lssn,
            entry_id=entry.entry_id,
            first_slot=first,
            sequence_id=entry.sequence_id + first,
            timestamp_ms=entry.timestamp_ms,
        )


@dataclass(slots=True)
class _LoneRow:
    """The only row of an entry, which Arrow had no part in; like `_Rows`."""

    entry: FetchedEntry
    txid: int
    payload: bytes
    rows_left: int = 1

    @classmethod
    def of(cls, entry: FetchedEntry) -> _LoneRow | None:
        """Return the entry's row; None if it has others, or Arrow is to be asked."""
        header = entry.header
        if header.record_count > 1 or entry.first_slot or LONE_RECORD_FORMAT is None:
            return None
        found = LONE_RECORD_FORMAT.parse(entry.body[ENTRY_HEADER_BYTES:])
        if found is None:
            return None
        txid, payload = found
        if entry.assigned_txid is not None:
            txid = entry.assigned_txid
        elif header.txid_assigned:
            txid = header.first_txid
        return cls(entry, txid, payload)

    def take_records(self, _count: int) -> list[LogRecordWithDLSN]:
        self.rows_left = 0
        entry = self.entry
        return [
            LogRecordWithDLSN(
                dlsn=DLSN(entry.lssn, entry.entry_id, 0),
                txid=self.txid,
                sequence_id=entry.sequence_id,
                timestamp_ms=entry.timestamp_ms,
                payload=self.payload,
            )
        ]

    def take_batch(self) -> pa.RecordBatch:
        self.rows_left = 0
        return _Rows(self.entry, _batch_of(self.entry), 0).take_batch()


def _batch_of(entry: FetchedEntry) -> pa.RecordBatch:
    """Return all rows of an entry, decoded."""
    batch = decode_entry_batch(entry.body, entry.header)
    return batch if entry.assigned_txid is None else with_txid(batch, entry.assigned_txid)


@dataclass(frozen=True, slots=True)
class StartAt:
    """Which records a reader leaves out at its start, beyond what its position says."""

    txid: int | None = None
    timestamp_ms: int | None = None


class AsyncLogReader:
    """Reads one log; use `DistributedLogManager.open_reader`.  Requests are served in order."""

    def __init__(self, context: LogContext, name: str, fetcher: Fetcher, start: StartAt) -> None:
        self._context = context
        self._name = name
        self._fetcher = fetcher
        self._start: StartAt | None = start
        self._rows: _Rows | _LoneRow | None = None
        self._turn = asyncio.Lock()
        self._closed = False
        context.open_objects.add(self)

    def __repr__(self) -> str:
        return f"<AsyncLogReader {self._name!r} {'CLOSED' if self._closed else 'OPEN'}>"

    async def read_next(
        self, *, non_blocking: bool = False, until_caught_up: bool = False
    ) -> LogRecordWithDLSN | None:
        """Return the next record; wait until there is one.

        Args:
            non_blocking: return None at once if no record is here.
            until_caught_up: return None once every readable record was returned.

        Raises:
            EndOfStreamError: the log is sealed, and all of it was read.
            AlreadyTruncatedError: the position was truncated away.
            LogNotFoundError: the log was deleted.
            MetadataConnectionError, BookieUnavailableError: for `read_unavailable_timeout_s` it
                waited while ZooKeeper or all bookies were gone; it can be called again.
        """
        async with self._turn:
            rows = await self._fill(non_blocking=non_blocking, until_caught_up=until_caught_up)
            return rows.take_records(1)[0] if rows is not None else None

    async def read_bulk(
        self, count: int, *, until_caught_up: bool = False
    ) -> list[LogRecordWithDLSN]:
        """Return up to `count` records: at least one, and then what is here.

        With `until_caught_up`, return fewer than `count` (or none) only when every readable record
        was returned.
        """
        _require_count(count)
        records: list[LogRecordWithDLSN] = []
        async with self._turn:
            while len(records) < count:
                try:
                    rows = await self._fill(
                        non_blocking=bool(records) and not until_caught_up,
                        until_caught_up=until_caught_up,
                    )
                except EndOfStreamError:
                    if not records:
                        raise
                    break
                if rows is None:
                    break
                records += rows.take_records(count - len(records))
        return records

    async def read_batch(self, *, until_caught_up: bool = False) -> pa.RecordBatch | None:
        """Return what is left of the current entry, or the next one, with `READ_SCHEMA`'s columns.

        Wait until there is one; with `until_caught_up` return None once all was returned.
        """
        async with self._turn:
            rows = await self._fill(non_blocking=False, until_caught_up=until_caught_up)
            return rows.take_batch() if rows is not None else None

    async def take_batches(self, *, non_blocking: bool) -> list[pa.RecordBatch]:
        """Return the batches that are here, of a few MB; wait for one unless `non_blocking`.

        An empty list means caught up, or with `non_blocking` that nothing is here yet.
        """
        batches: list[pa.RecordBatch] = []
        size_bytes = 0
        async with self._turn:
            rows = await self._fill(non_blocking=non_blocking, until_caught_up=not non_blocking)
            while rows is not None:
                batches.append(rows.take_batch())
                size_bytes += rows.entry.body.nbytes  # a batch takes long to tell its own
                if size_bytes >= _TAKEN_BYTES:
                    break
                try:
                    rows = await self._fill(non_blocking=True, until_caught_up=False)
                except DLError:
                    break  # raised when there is nothing before it
        return batches

    async def _fill(self, *, non_blocking: bool, until_caught_up: bool) -> _Rows | _LoneRow | None:
        """Return rows that have one left; None if there are none and the caller does not wait."""
        if self._closed:
            raise AlreadyClosedError(f"the reader of log {self._name!r} is closed")
        while self._rows is None or not self._rows.rows_left:
            entry = self._fetcher.take()
            if entry is not None:
                self._rows = self._decode(entry)
                continue
            if self._fetcher.error is not None:
                raise self._fetcher.error
            if self._fetcher.has_ended:
                raise EndOfStreamError(f"log {self._name!r} is sealed and was read to its end")
            if non_blocking or (until_caught_up and not await self._fetcher.has_more()):
                return None
            await self._fetcher.wait()
            if self._closed:
                raise AlreadyClosedError(f"the reader of log {self._name!r} was closed")
        return self._rows

    def _decode(self, entry: FetchedEntry) -> _Rows | _LoneRow | None:
        start = self._start
        if start is None:
            lone = _LoneRow.of(entry)
            if lone is not None:
                return lone
        else:
            if start.timestamp_ms is not None and entry.timestamp_ms < start.timestamp_ms:
                return None
            if start.txid is not None and entry.last_txid < start.txid:
                return None
        batch = _batch_of(entry)
        first_row = entry.first_slot
        if start is not None and start.txid is not None:
            first_row = max(first_row, first_row_not_less(batch, start.txid))
        self._start = None  # transaction ids and timestamps do not decrease
        return _Rows(entry, batch, first_row)

    async def aclose(self) -> None:
        """Stop reading; harmless when it is closed."""
        if self._closed:
            return
        self._closed = True
        self._context.open_objects.discard(self)
        await self._fetcher.aclose()

    async def abandon(self, reason: str) -> None:
        """Stop reading, by which nothing is lost."""
        logger.debug("reader of log=%s left: %s", self._name, reason)
        await self.aclose()

    async def __aenter__(self) -> AsyncLogReader:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _require_count(count: int) -> None:
    if count < 1:
        raise ConfigurationError(f"count={count}: expected a number > 0")
