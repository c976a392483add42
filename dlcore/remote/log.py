"""The async API of a log and its ranges over an endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence  # noqa: TC003  # for `get_type_hints`
from contextlib import aclosing
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore.base.errors import (
    ConfigurationError,
    LogEmptyError,
    LogNotFoundError,
    SchemaMismatchError,
)
from dlcore.base.ids import DLSN, validate_log_name
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import NotLessThan, RecordField
from dlcore.flight import actions
from dlcore.flight.requests import (
    ChangeRequest,
    RenameRequest,
    SettingsRequest,
    StreamRequest,
    TruncateRequest,
)
from dlcore.flight.tickets import Place, Ticket
from dlcore.log.entries.batches import batch_of
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.log_range import AsyncFramed
from dlcore.log.reading.queries import LogQueries
from dlcore.log.reading.ranges import timestamp_ms_of
from dlcore.log.reading.rows_reader import ReadStart
from dlcore.log.streams import AsyncAppendOnlyStreamReader, AsyncAppendOnlyStreamWriter
from dlcore.remote import planning, subscriptions
from dlcore.remote.planning import Received, received
from dlcore.remote.reader import RemoteReader, RemoteRecord
from dlcore.remote.subscriptions import RemoteHold
from dlcore.remote.writing import RemoteWriter, append_if

if TYPE_CHECKING:
    from dlcore.base.config import LogSettings
    from dlcore.base.records import LogRecord, RecordPlace
    from dlcore.flight.replies import LogInfo
    from dlcore.log.reading.ranges import Bound
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.remote.endpoint import Endpoint

_STREAM_PRODUCER = "dlog-byte-stream"
"""The producer of all writers of bytes: a new incarnation fences the earlier writer."""


class RemoteLog(LogQueries[RemoteRecord]):
    """One log.  Use `RemoteNamespace.open_log`."""

    def __init__(self, calls: Endpoint, log: LogKey) -> None:
        self._calls = calls
        self._log = log

    def __repr__(self) -> str:
        return f"<RemoteLog {self.name!r}>"

    @property
    def name(self) -> str:
        """The log's name."""
        return self._log.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._log.log_id

    async def get_info(self) -> LogInfo:
        """Return facts about the log now.  Raises: LogNotFoundError, ProxyUnavailableError."""
        return await planning.get_info(self._calls, self.name, self.log_id)

    async def get_schema(self) -> pa.Schema:
        """Return the columns of the log's rows.  Raises: as `get_info`."""
        asked = planning.asked_by(Ticket(log=self.name, log_id=self.log_id))
        answer = await self._calls.ask("GetSchema", asked, pb.SchemaResult)
        return pa.ipc.read_schema(pa.py_buffer(answer.schema))

    async def get_snapshot(self) -> LogSnapshot:
        """Return the log's readable state, with all that scans need.  Raises: as `get_info`."""
        found = (await planning.RemoteSnapshots(self._calls).take([self.name]))[self.name]
        if found is None or found.log_id != self.log_id:
            raise LogNotFoundError(
                f"log {self.name!r} with the id {self.log_id} is gone, or has another name"
            )
        return found

    async def find_place(self, wanted: DLSN | NotLessThan) -> RecordPlace:
        """Return the place of the first readable record that is not below `wanted`, or of the end.

        Raises: as `get_info`.
        """
        return (await self._places(await self.get_snapshot(), wanted))[0]

    async def _places(
        self, snapshot: LogSnapshot, *wanted: DLSN | NotLessThan
    ) -> list[RecordPlace]:
        return await planning.find_places(self._calls, [(snapshot, each) for each in wanted])

    async def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end of the log.

        Raises: as `get_info`.
        """
        return (await self.find_place(NotLessThan(RecordField.TXID, txid))).dlsn

    async def get_dlsn_not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end.

        Raises: as `get_info`.
        """
        return (await self.find_place(NotLessThan(RecordField.TIMESTAMP_MS, timestamp_ms))).dlsn

    async def get_log_record_count(self, start: DLSN | None = None, end: DLSN | None = None) -> int:
        """Return the exact number of readable records, or of those in [start, end).

        Raises: as `get_info`.
        """
        if start is None and end is None:
            return (await self.get_info()).records
        snapshot = await self.get_snapshot()
        low = snapshot.first if start is None else max(start, snapshot.first)
        high = snapshot.end if end is None else min(end, snapshot.end)
        if low >= high:
            return 0
        before, after = await self._places(snapshot, low, high)
        return after.sequence_id - before.sequence_id

    async def get_last_txid(self) -> int:
        """Return the transaction id of the last readable record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `get_info`.
        """
        segments = (await self.get_snapshot()).segments
        ends = [segment.extents[-1].last_txid for segment in segments if segment.extents]
        if not ends:
            raise LogEmptyError(f"log {self.name!r} holds no record")
        return ends[-1]

    async def get_first_dlsn(self) -> DLSN:
        """Return the position of the first record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `get_info`.
        """
        return self._position((await self.get_info()).first)

    async def get_last_dlsn(self) -> DLSN:
        """Return the position of the last readable record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `get_info`.
        """
        return self._position((await self.get_info()).last)

    def _position(self, text: str | None) -> DLSN:
        if text is None:
            raise LogEmptyError(f"log {self.name!r} holds no record")
        return DLSN.parse(text)

    async def is_end_of_stream_marked(self) -> bool:
        """Return whether the log is sealed.  Raises: as `get_info`."""
        return (await self.get_info()).sealed

    async def truncate(
        self,
        dlsn: DLSN | None = None,
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> bool:
        """Drop records; a live writer goes on.  Arguments, result and errors: those of `dlcore`.

        Raises: ProxyUnavailableError: the records may be dropped, or not.
        """
        first = None if dlsn is None else str(dlsn)
        request = TruncateRequest(
            log=self.name, log_id=self.log_id, dlsn=first, txid=txid, timestamp_ms=timestamp_ms
        )
        return (await planning.act(self._calls, actions.TRUNCATE, request)).truncated

    async def get_settings(self) -> LogSettings:
        """Return the settings that are stored with the log for its writers.

        Raises: LogNotFoundError, MetadataError, ProxyUnavailableError.
        """
        return await self.update_settings()

    async def update_settings(self, /, **changes: object) -> LogSettings:
        """Change settings that are stored with the log, by name (`LogSettings`); return all.

        None unsets one.  Running writers apply the change within moments.

        Raises:
            ConfigurationError: a setting does not exist, or cannot have this value.
            LogNotFoundError, MetadataError, ProxyUnavailableError.
        """
        request = SettingsRequest(log=self.name, log_id=self.log_id, changes=changes)
        return (await planning.act(self._calls, actions.SETTINGS, request)).settings

    async def delete(self) -> None:
        """Delete the log and its data, after its owner has released it; harmless if it is gone.

        Raises:
            OwnershipAcquireFailedError: a writer that is no proxy owns the log.
            LogRenamedError: the log was renamed since it was opened.
            MetadataError; ProxyUnavailableError: the log may be deleted, or not.
        """
        request = ChangeRequest(log=self.name, log_id=self.log_id)
        await planning.act(self._calls, actions.DELETE, request)

    async def rename(self, name: str) -> None:
        """Give the log another name, at once for all clients; this object goes on under it.

        Raises: LogExistsError: there is a log of that name; LogNotFoundError; else as `delete`.
        """
        name = validate_log_name(name)
        request = RenameRequest(log=self.name, log_id=self.log_id, new_name=name)
        await planning.act(self._calls, actions.RENAME, request)
        self._log = LogKey(name=name, log_id=self.log_id)

    async def mark_end_of_stream(self) -> None:
        """Seal the log: no record can follow, and readers get the end of stream.

        The proxy that owns the log first makes all accepted records durable, and releases it.

        Raises:
            EndOfStreamError: the log is sealed already.
            OwnershipAcquireFailedError: a writer that is no proxy owns the log.
            LogNotFoundError, MetadataError; ProxyUnavailableError: it may be sealed, or not.
        """
        await planning.seal(self._calls, self._log)

    async def read(
        self,
        start: Bound | None = None,
        end: Bound | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> RemoteRange:
        """Return the records from `start` up to but not including `end`, to be read at once.

        Args:
            start: a position, a transaction id (int) or a time (datetime with a time zone); None:
                the first record that is not truncated.
            end: as `start`; None: the end of the readable records at the time of the read.
            columns: names of the wanted columns.

        Raises: ConfigurationError: a time has no time zone.
        """
        first = None if start == DLSN.INITIAL else _place_of(start)
        return RemoteRange(self._calls, self._log, first, _place_of(end), columns)

    async def open_writer(self, *, producer: str | None = None) -> RemoteWriter:
        """Return a writer that a proxy has accepted; other writers may write at the same time.

        Args:
            producer: the name under which the writer numbers its records, so that each is in the
                log once.  An earlier writer of this name is fenced.  `next_sequence` of the writer
                is the number of records of this name, so that a restarted program knows where to go
                on.  Without a name the writer makes one for itself.

        Raises:
            LogNotFoundError, EndOfStreamError, LogModeError, ConfigurationError: it is refused.
            ProxyUnavailableError: no proxy answered for as long as the namespace waits.
        """
        writer = RemoteWriter(self._calls, self._log, producer, self._calls.patience_s)
        await writer.open()
        return writer

    async def append(
        self, records: Sequence[LogRecord] | pa.RecordBatch, *, expected: DLSN | None
    ) -> DLSN | None:
        """Append records, all or none, if the log's last record is the one at `expected`.

        Args:
            records: at most 1 MiB of records; they become a part of one entry.
            expected: the position of the last record; None: the log holds no record.

        Returns: the position of the last appended record; None if it is not known any more.

        Raises:
            ConditionFailedError: another record is the last one; nothing is written.
            ProxyUnavailableError: no proxy answered; the records may be in the log or not.
            ConfigurationError, TransactionIdOutOfOrderError, EndOfStreamError: the records are
                refused.
        """
        if not isinstance(records, pa.RecordBatch):
            txids, payloads = [each.txid for each in records], [each.payload for each in records]
            records = batch_of(txids, payloads)
        if not records.num_rows:
            raise ConfigurationError("an append has no records: expected one at least")
        return await append_if(self._calls, self._log, records, expected, self._calls.patience_s)

    async def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        subscriber: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> RemoteReader:
        """Open a reader; at the first record that is not truncated, unless one of these is given.

        Args:
            dlsn: the position of the first record wanted; one beyond the end waits for its record.
            txid: the first record with this transaction id or a higher one.
            timestamp_ms: the first record written at that time or later, in epoch milliseconds.
            subscriber: the name for which it reads.  It starts at the stored position of the
                subscriber, unless another is given, and stores positions with `commit`.  An earlier
                reader of the subscriber over an endpoint gets an error at its next `commit`.  For
                an earlier reader of `dlcore` this one waits, and a warning soon names that reader.
            columns: names of the wanted columns.

        Raises:
            ConfigurationError: several positions are given.
            AlreadyTruncatedError: `dlsn`, the stored position, or a record that `txid` names was
                truncated away.
            OwnershipAcquireFailedError: the subscriber had a reader of `dlcore` for the proxy's
                `lock_timeout_s`.
            OverCapacityError: the log keeps as many positions as it may.
            LogNotFoundError, ProxyUnavailableError.
        """
        start, hold = ReadStart(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms), None
        if subscriber is not None:
            hold = RemoteHold(self._calls, self._log, subscriber)
            await hold.take(waits=True)
            dlsn = hold.position if start == ReadStart() else dlsn
        reader = RemoteReader(self._calls, self._log, columns, hold)
        await reader.seek(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        return reader

    async def get_subscriptions(self) -> dict[str, DLSN]:
        """Return the stored positions of subscribers: the next record that each one reads.

        Raises: LogNotFoundError, MetadataError, ProxyUnavailableError.
        """
        found = await subscriptions.show(self._calls, self._log)
        return {subscriber: DLSN.parse(seen.dlsn) for subscriber, seen in found.items()}

    async def move_subscription(
        self,
        subscriber: str,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> DLSN:
        """Store the position of a subscriber, forward or back, and return it.

        If the subscriber has a reader over an endpoint, this reader's next `commit` fails.

        Raises:
            OwnershipAcquireFailedError: the subscriber has a reader of `dlcore`.
            OverCapacityError, LogNotFoundError, MetadataError, ProxyUnavailableError.
        """
        start = ReadStart(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        position = start.dlsn or DLSN.INITIAL
        if start.txid is not None:
            position = await self.get_dlsn_not_less_than_txid(start.txid)
        elif start.timestamp_ms is not None:
            position = await self.get_dlsn_not_less_than_timestamp(start.timestamp_ms)
        await RemoteHold(self._calls, self._log, subscriber).take(position, waits=False)
        return position

    async def delete_subscription(self, subscriber: str) -> bool:
        """Forget a subscriber; return whether there was one.

        Raises:
            OwnershipAcquireFailedError: the subscriber has a reader of `dlcore`.
            SubscriptionMovedError: a client of proxies moved the subscription meanwhile.
            LogNotFoundError, MetadataError, ProxyUnavailableError.
        """
        return await subscriptions.forget(self._calls, self._log, subscriber)

    async def open_stream_writer(self) -> AsyncAppendOnlyStreamWriter:
        """Open a writer of the log's bytes, which begins where the log's bytes end.

        It fences an earlier writer of bytes.  It does not prevent other writers of the log, which
        write records, from writing at the same time.

        Raises: as `open_writer`.  The writer raises ProducerFencedError if another one was opened.
        """
        return AsyncAppendOnlyStreamWriter(*await self.begin_stream())

    async def begin_stream(self) -> tuple[RemoteWriter, int]:
        """Return a writer for bytes, and the end of the bytes.  Raises: as `open_stream_writer`."""
        # The writer first: it fences the earlier one, whose bytes would move the end otherwise.
        writer = await self.open_writer(producer=_STREAM_PRODUCER)
        try:
            return writer, (await self.get_stream_end(flush=True))[0]
        except BaseException:
            await writer.abort()
            raise

    async def open_stream_reader(self, position: int | None = None) -> AsyncAppendOnlyStreamReader:
        """Open a reader of the log's bytes, at `position` or at the first readable byte.

        Raises: as `open_reader`, and as `AsyncAppendOnlyStreamReader.seek`.
        """
        reader = RemoteReader(self._calls, self._log, ["dlsn", "txid", "value"])
        await reader.seek()
        if reader.is_typed:
            raise SchemaMismatchError(f"log {self.name!r} is typed: expected a log of bytes")
        return await AsyncAppendOnlyStreamReader.open(reader, self.get_stream_end, position)

    async def get_stream_end(self, *, flush: bool = False) -> tuple[int, bool]:
        """Return where the readable bytes of a stream end, and whether the stream is sealed.

        With `flush` the log's owner first makes all accepted bytes readable.

        Raises: SchemaMismatchError: the log is typed; else as `get_info`.
        """
        request = StreamRequest(log=self.name, log_id=self.log_id, flush=flush)
        answer = await planning.act(self._calls, actions.STREAM_END, request)
        return answer.position, answer.sealed

    async def aclose(self) -> None:
        """Do nothing: the log holds no resources; readers and writers go on."""


class RemoteRange(AsyncFramed):
    """The records of a log in [start, end); use `RemoteLog.read`."""

    def __init__(self, calls: Endpoint, log: LogKey, *asked: Any) -> None:
        self._calls = calls
        start, end, columns = asked
        columns = None if columns is None else list(columns)
        self._ticket = Ticket(
            log=log.name,
            log_id=log.log_id,
            start=start,
            end=end,
            columns=columns,
        )

    def __repr__(self) -> str:
        return f"<RemoteRange of {self._ticket.log!r}>"

    def messages(self) -> AsyncGenerator[Received, None]:
        """Yield messages of proxies: the first one has the columns, the others have rows."""
        return received(self._calls, self._ticket)

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        async with aclosing(self.messages()) as messages:
            async for message in messages:
                if message.batch is not None:
                    yield message.batch

    async def to_arrow(self) -> pa.Table:
        """Return all records as a table.  Raises: as iteration."""
        messages = [message async for message in self.messages()]
        batches = [message.batch for message in messages if message.batch is not None]
        return pa.Table.from_batches(batches, messages[-1].schema)


def _place_of(bound: Bound | None) -> Place | None:
    if bound is None:
        return None
    if isinstance(bound, DLSN):
        return Place(dlsn=str(bound))
    if isinstance(bound, datetime):
        timestamp_ms_of(bound)  # raises if it has no time zone
        return Place(time=bound)
    return Place(txid=bound)
