"""The reader of a log over an endpoint; it returns rows as the reader of `dlcore` does.

The reader has one stream of a proxy at a time.  A call that waits for new records needs a stream
that follows the log; a call that stops at the end needs a stream that ends there.  If the open
stream is of the other kind, or has ended, a new one is opened at the reader's position.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlcore.backends.flight.endpoint import Retries
from dlcore.backends.flight.planning import look, place_of, received
from dlcore.base.background import BackgroundTasks, end_tasks, reported_to_callers
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    EndOfStreamError,
    LedgerReadError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace, LogRecordWithDLSN, NotLessThan, RecordField
from dlcore.flight.tickets import Place, Ticket
from dlcore.log.entries.batches import numbers_of, typed_read_fields
from dlcore.log.reading.rows import Rows, no_records
from dlcore.log.reading.rows_reader import AsyncLogReader, ReadStart

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import pyarrow as pa

    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.backends.flight.planning import Received
    from dlcore.backends.flight.subscriptions import FlightHold
    from dlcore.flight.replies import LogInfo
    from dlcore.log.metadata.values import LogKey
    from dlcore.log.reading.ranges import RangeExtent, RangeView

_DLSN_COLUMNS = ("dlsn", "_dlsn")
_RECORD_COLUMNS = {"dlsn", "txid", "sequence_id", "timestamp", "value"}


def records_of(batch: pa.RecordBatch) -> list[LogRecordWithDLSN]:
    """Return the rows of a byte log as records.

    Raises:
        ConfigurationError: the rows are of a typed log, or columns of a record are missing.
    """
    if not set(batch.schema.names) >= _RECORD_COLUMNS:
        needed, found = ", ".join(sorted(_RECORD_COLUMNS)), ", ".join(batch.schema.names)
        raise ConfigurationError(
            f"records need the columns {needed} of a log of bytes, there are {found}: read batches"
        )
    times = numbers_of(batch.column("timestamp")) // 1000
    records: list[LogRecordWithDLSN] = []
    place: EntryPlace | None = None
    for lssn, entry_id, slot_id, txid, sequence_id, timestamp_ms, payload in zip(
        *(part.to_pylist() for part in batch.column("dlsn").flatten()),
        batch.column("txid").to_pylist(),
        batch.column("sequence_id").to_pylist(),
        times.tolist(),
        batch.column("value").to_pylist(),
        strict=True,
    ):
        if place is None or place.entry_id != entry_id or place.lssn != lssn:
            first = sequence_id - slot_id
            place = EntryPlace(lssn, entry_id, first, None, timestamp_ms)
        records.append(LogRecordWithDLSN(txid, payload, slot_id, place))
    return records


class FlightRows(Rows):
    """The rest of the rows of a message; `end` is the position behind all of them.

    The position of a row is known if the reader requested the column of positions.  Otherwise the
    rows count as one unit at `start`, which is taken as a whole.
    """

    __slots__ = ("_batch", "_end", "_is_typed", "_start")

    def __init__(self, batch: pa.RecordBatch, start: DLSN, end: DLSN, *, is_typed: bool) -> None:
        super().__init__(int(batch.num_rows), 0, size_bytes=int(batch.nbytes))
        self._batch, self._start, self._end, self._is_typed = batch, start, end, is_typed

    @property
    def position(self) -> DLSN:
        """The position of the next row; if no row is left, the position behind all of them."""
        left = self.rows_left
        if not left:
            return self._end
        names = [name for name in _DLSN_COLUMNS if name in self._batch.schema.names]
        if not names:
            return self._start
        return DLSN(*self._batch.column(names[0])[self._row_count - left].as_py().values())

    def _make_records(self, first_row: int) -> list[LogRecordWithDLSN]:
        if self._is_typed:
            raise no_records()
        return records_of(self._batch.slice(first_row))

    def take_batch(self, log: str) -> pa.RecordBatch:
        """Take all rows that are left, with the requested columns."""
        first_row = self._row_count - self.rows_left
        self.drop()
        return self._batch.slice(first_row)


class _Feed:
    """A stream of a proxy; it receives one message at a time."""

    def __init__(self, messages: AsyncGenerator[Received, None], *, follows: bool) -> None:
        self.follows = follows
        self._messages = messages
        self._tasks = BackgroundTasks(reported_to_callers)
        self._next: asyncio.Task[Received | None] | None = None

    @property
    def is_here(self) -> bool:
        """Whether the next message has arrived; if no receive is in progress, one is started."""
        if self._next is None:
            self._next = self._tasks.start(self._receive(), name="reading from a proxy")
        return self._next.done()

    async def _receive(self) -> Received | None:
        return await anext(self._messages, None)

    async def take(self) -> Received | None:
        """Wait for a message; None at the end.  A cancelled call leaves the message to the next."""
        if not self.is_here:
            assert self._next is not None
            # Unlike `await`, this does not cancel the task if the caller is cancelled.
            await asyncio.wait([self._next])
        assert self._next is not None
        done, self._next = self._next, None
        if done.cancelled():
            raise AlreadyClosedError("the reader was closed")
        return done.result()

    async def aclose(self) -> None:
        """Stop reading; the stream is closed even if the caller is cancelled."""
        try:
            await end_tasks(*self._tasks)
        finally:
            await self._messages.aclose()


class _Wanted:
    """The rows of one log that a reader wants, and how it asks proxies for them.

    Args:
        calls: the proxies.
        log: the log.
        columns: the wanted columns; None: all that a direct reader returns.
        end: the log ends there for this reader; None: where it really ends.
    """

    def __init__(
        self, calls: Endpoint, log: LogKey, columns: Sequence[str] | None, end: DLSN | None
    ) -> None:
        self.end = end
        self.is_typed = False
        self._calls = calls
        self._log = log
        self._columns = None if columns is None else list(columns)

    async def look(self, start: Place | None) -> LogInfo:
        """Return facts about the log from `start` on, and set whether the log is typed."""
        ticket = Ticket(log=self._log.name, log_id=self._log.log_id, start=start)
        info, own = await look(self._calls, ticket)
        self.is_typed = own is not None
        if self._columns is None and own is not None:  # those of a direct reader's batches
            self._columns = [*(field.name for field in typed_read_fields()), *own.names]
        return info

    def stream(self, start: Place | None, *, follow: bool) -> _Feed:
        """Open a stream of the rows from `start` on."""
        ticket = Ticket(
            log=self._log.name,
            log_id=self._log.log_id,
            start=start,
            follow=follow,
            columns=self._columns,
            end=None if self.end is None else Place(dlsn=str(self.end)),
        )
        return _Feed(received(self._calls, ticket), follows=follow)


class FlightReader(AsyncLogReader):
    """Reads one log through proxies; use `FlightLog.open_reader`.

    A batch has the rows of one message of the proxy.  With an `end` the log ends there for this
    reader.  The records before it were readable when it was found; a proxy that does not know this
    yet is asked again.
    """

    def __init__(
        self,
        calls: Endpoint,
        log: LogKey,
        columns: Sequence[str] | None,
        hold: FlightHold | None = None,
        *,
        end: DLSN | None = None,
    ) -> None:
        super().__init__(DLSN.INITIAL)
        self.log_name = log.name
        self._hold = hold
        self._wanted = _Wanted(calls, log, columns, end)
        self._late = Retries(calls.patience_s)
        self._place: Place | None = None  # start of the next stream
        self._feed: _Feed | None = None
        self._has_ended = self._closed = False

    def __repr__(self) -> str:
        state = "CLOSED" if self._closed else "OPEN"
        return f"<AsyncLogReader {self.log_name!r} at {self.position} {state}>"

    async def _move(self, start: ReadStart) -> None:
        await self._require_usable()
        place = place_of_start(start)
        found = await self._wanted.look(place)
        await self._leave()
        self._drop_rows()
        self._has_ended = False
        if found.first is not None:
            self._position = DLSN.parse(found.first)
            place = None if place is None else Place(dlsn=found.first)
        else:  # no record yet has this position, transaction id or time, or a higher one
            self._position = max(start.dlsn or DLSN.INITIAL, DLSN.parse(found.end))
            # The start may be behind the last record of its entry, which a proxy had to read first.
            if place is not None and start.dlsn is not None:
                place = Place(dlsn=str(self._position))
        self._place = place

    @property
    def is_typed(self) -> bool:
        """Whether the log is typed: it then has batches, and no records."""
        return self._wanted.is_typed

    async def _require_usable(self) -> None:
        if self._closed:
            raise AlreadyClosedError(f"the reader of log {self.log_name!r} is closed")

    async def _add(self, *, non_blocking: bool, until_caught_up: bool) -> FlightRows | None:
        while True:
            await self._require_usable()
            if self._has_ended:
                raise EndOfStreamError(f"log {self.log_name!r} is sealed and was read to its end")
            feed = await self._fed(follow=not until_caught_up, any_will_do=non_blocking)
            if non_blocking and not feed.is_here:
                return None
            try:
                message = await feed.take()
            except Exception:
                await self._leave()  # the next call opens a stream at the same position
                raise
            if message is None:
                await self._leave()
                if self._wanted.end is not None:
                    await self._end_part(self._wanted.end)
                    continue
                self._has_ended = feed.follows or await self._is_sealed_here()
                if until_caught_up and not self._has_ended:
                    return None
            elif (rows := self._take_up(message)) is not None:
                return rows

    async def _end_part(self, end: DLSN) -> None:
        """End at the end of the part; wait if proxies return fewer records than were readable."""
        self._has_ended = self._position >= end
        if not self._has_ended:
            error = LedgerReadError(
                f"log {self.log_name!r}: records up to {end} were readable when the read was "
                f"planned, but proxies returned none after {self._position}"
            )
            await asyncio.sleep(self._late.failed(error, None, again=True))

    async def _fed(self, *, follow: bool, any_will_do: bool) -> _Feed:
        feed, follow = self._feed, follow and self._wanted.end is None
        if feed is None or not (any_will_do or feed.follows == follow):
            await self._leave()
            await self._require_usable()  # the reader may have been closed during the wait
            feed = self._feed = self._wanted.stream(self._place, follow=follow)
        return feed

    def _take_up(self, message: Received) -> FlightRows | None:
        """Add the rows of a message, if it has any, and return them."""
        if not message.batch.num_rows:
            return None
        self._late.succeeded()
        rows = FlightRows(message.batch, self._position, message.end, is_typed=self.is_typed)
        self._rows.append(rows)  # before the position, see there
        self._position, self._place = message.end, Place(dlsn=str(message.end))
        return rows

    async def _is_sealed_here(self) -> bool:
        found = await self._wanted.look(self._place)
        return found.sealed and not found.records

    async def _leave(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.aclose()

    async def aclose(self) -> None:
        """Stop reading; harmless if it is closed already.  Waiting calls raise an error."""
        self._closed = True
        self._position = self.position
        self._drop_rows()
        await self._leave()


async def open_part(
    calls: Endpoint, log: LogKey, extent: RangeExtent, view: RangeView
) -> FlightReader:
    """Open a reader of a range, whose start was looked up already."""
    reader = FlightReader(calls, log, view.columns_read, end=extent.end)
    reader._position, reader._place = extent.start, Place(dlsn=str(extent.start))
    reader._wanted.is_typed = view.is_typed
    return reader


def place_of_start(start: ReadStart) -> Place | None:
    """Return the place in a ticket where a reader starts; None: at the first record."""
    if start.dlsn is not None and start.dlsn > DLSN.INITIAL:
        return place_of(start.dlsn)
    if start.txid is not None:
        return place_of(NotLessThan(RecordField.TXID, start.txid))
    if start.timestamp_ms is not None:
        return place_of(NotLessThan(RecordField.TIMESTAMP_MS, start.timestamp_ms))
    return None
