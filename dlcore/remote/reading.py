"""Namespaces, logs, ranges and readers over an endpoint: async."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence  # noqa: TC003  # for those who ask at run time
from contextlib import aclosing
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from dlcore.closing import AsyncClosing
from dlcore.config import require_positive
from dlcore.errors import ConfigurationError, LogEmptyError
from dlcore.ids import DLSN, validate_log_name
from dlcore.log.reading.ranges import timestamp_ms_of
from dlcore.proto import flight_pb2 as pb
from dlcore.proxy.flight.sending import Passed
from dlcore.proxy.reading.tickets import Place, Ticket
from dlcore.remote.endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.log.reading.ranges import Bound

PATIENCE_S = 60.0
_PREFIX = struct.Struct("<iI")
"""Of an Arrow message: a marker, and the length of its header."""


class RemoteRecord(msgspec.Struct, frozen=True, gc=False):
    """A record as read: where it is, its number in the log (from 0, no gaps), and when written."""

    dlsn: DLSN
    txid: int
    sequence_id: int
    timestamp_ms: int
    payload: bytes


class LogInfo(msgspec.Struct, frozen=True):
    """What a proxy tells of a log; see `dlcore.proxy.reading.serving.InfoMetadata`."""

    log_id: str
    end: str
    records: int
    sealed: bool
    first: str | None = None
    last: str | None = None


async def open_namespace(endpoint: str, *, patience_s: float = PATIENCE_S) -> RemoteNamespace:
    """Open the logs that the proxies at ``grpc://host:port,host:port`` serve.

    An outage of them all is an error after `patience_s`.

    Raises: ConfigurationError: it is no such endpoint.
    """
    return RemoteNamespace(endpoint, patience_s=patience_s)


class RemoteNamespace(AsyncClosing):
    """A collection of logs; used on one event loop.  Use `open_namespace`."""

    def __init__(self, endpoint: str, *, patience_s: float) -> None:
        self.patience_s = patience_s
        require_positive(self, "patience_s")
        self.endpoint = endpoint
        self._calls = Endpoint(endpoint, patience_s=patience_s)

    def __repr__(self) -> str:
        return f"<RemoteNamespace {self.endpoint}>"

    async def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all logs, or of those that start with `prefix`.

        Raises: ProxyUnavailableError, MetadataError.
        """
        found: dict[str, None] = {}  # a stream that is made again tells what it told before
        criteria = pb.Criteria(expression=(prefix or "").encode())
        async with self._calls.stream("ListFlights", lambda: criteria) as messages:
            async for data in messages:
                found["/".join(pb.FlightInfo.FromString(data).flight_descriptor.path)] = None
        return sorted(found)

    async def open_log(self, name: str) -> RemoteLog:
        """Open a log.  Raises: LogNotFoundError, InvalidLogNameError, ProxyUnavailableError."""
        log = RemoteLog(self._calls, validate_log_name(name))
        await log.get_info()
        return log

    async def aclose(self) -> None:
        """Close the connections; its readers stop working."""
        await self._calls.aclose()


class RemoteLog:
    """One log.  Use `RemoteNamespace.open_log`."""

    def __init__(self, calls: Endpoint, name: str) -> None:
        self._calls = calls
        self.name = name
        self._descriptor = pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=[name])

    def __repr__(self) -> str:
        return f"<RemoteLog {self.name!r}>"

    async def get_info(self) -> LogInfo:
        """Return what the log holds now.  Raises: LogNotFoundError, ProxyUnavailableError."""
        info = await self._calls.ask("GetFlightInfo", self._descriptor, pb.FlightInfo)
        return msgspec.json.decode(info.app_metadata, type=LogInfo)

    async def get_schema(self) -> pa.Schema:
        """Return the columns of its rows.  Raises: as `get_info`."""
        answer = await self._calls.ask("GetSchema", self._descriptor, pb.SchemaResult)
        return pa.ipc.read_schema(pa.py_buffer(answer.schema))

    async def get_log_record_count(self) -> int:
        """Return the exact number of readable records.  Raises: as `get_info`."""
        return (await self.get_info()).records

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
            end: likewise; None: the end of what is readable when it is read.
            columns: which ones, by name.

        Raises: ConfigurationError: a time has no time zone.
        """
        return RemoteRange(self._calls, self.name, _place_of(start), _place_of(end), columns)

    def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp: datetime | None = None,
        columns: Sequence[str] | None = None,
    ) -> RemoteReader:
        """Open a reader; at the first record that is not truncated, unless one of these is given.

        Raises: ConfigurationError: several are.
        """
        given: list[Bound] = [each for each in (dlsn, txid, timestamp) if each is not None]
        if len(given) > 1:
            raise ConfigurationError("expected one of dlsn, txid and timestamp, not several")
        start = _place_of(given[0]) if given else None
        return RemoteReader(self._calls, self.name, start, columns)


class RemoteReader(AsyncClosing):
    """Reads one log in order, each record once; use `RemoteLog.open_reader`."""

    def __init__(
        self,
        calls: Endpoint,
        name: str,
        start: Place | None,
        columns: Sequence[str] | None,
        end: Place | None = None,
    ) -> None:
        self._calls = calls
        self._place, self._end = start, end
        self._columns = None if columns is None else list(columns)
        self.log_name = name
        self.schema: pa.Schema | None = None
        """The columns, once the first answer came."""

    def __repr__(self) -> str:
        return f"<RemoteReader {self.log_name!r} at {self.position}>"

    @property
    def position(self) -> DLSN | None:
        """Where it reads on; None as long as that is not told by a position."""
        if self._place is None or self._place.dlsn is None:
            return None
        return DLSN.parse(self._place.dlsn)

    async def batches(self, *, follow: bool = False) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield Arrow batches until every readable record was returned.

        With `follow` wait for more, until the log is sealed.  A batch that comes out is read.

        Raises:
            ProxyUnavailableError: no proxy answered for as long as the namespace waits; it may be
                called again.
            LogNotFoundError, AlreadyTruncatedError, SchemaMismatchError: as told by the proxy.
        """
        async with self._calls.stream("DoGet", lambda: self._ticket(follow=follow)) as messages:
            async for data in messages:
                message = pb.FlightData.FromString(data)
                prefix = _PREFIX.pack(-1, len(message.data_header))
                arrow = pa.py_buffer(prefix + message.data_header + message.data_body)
                if not message.app_metadata:
                    self.schema = pa.ipc.read_schema(arrow)
                    continue
                passed = msgspec.json.decode(message.app_metadata, type=Passed)
                self._place = Place(dlsn=passed.next)
                yield pa.ipc.read_record_batch(arrow, self.schema)

    def _ticket(self, *, follow: bool) -> pb.Ticket:
        ticket = Ticket(
            log=self.log_name,
            start=self._place,
            end=self._end,
            follow=follow,
            columns=self._columns,
        )
        return pb.Ticket(ticket=ticket.encode())

    async def records(self, *, follow: bool = False) -> AsyncGenerator[RemoteRecord, None]:
        """Yield records of a log of bytes; ends as `batches` does.

        The records of a message that came are read: who leaves the loop reads on behind them.

        Raises:
            ConfigurationError: the reader has not all columns; else as `batches`.
        """
        async with aclosing(self.batches(follow=follow)) as batches:
            async for batch in batches:
                for record in records_of(batch):
                    yield record

    async def aclose(self) -> None:
        """Nothing is held between calls: an iteration that ends lets go of its stream."""


class RemoteRange:
    """The records of a log in [start, end); use `RemoteLog.read`."""

    def __init__(self, calls: Endpoint, name: str, *asked: Any) -> None:
        self._calls = calls
        self._name = name
        self._start, self._end, self._columns = asked

    def __repr__(self) -> str:
        return f"<RemoteRange of {self._name!r}>"

    def _reader(self) -> RemoteReader:
        return RemoteReader(self._calls, self._name, self._start, self._columns, self._end)

    def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        return self._reader().batches()

    async def to_arrow(self) -> pa.Table:
        """Return all of it as a table.  Raises: as `RemoteReader.batches`."""
        reader = self._reader()
        batches = [batch async for batch in reader.batches()]
        return pa.Table.from_batches(batches, reader.schema)


def _place_of(bound: Bound | None) -> Place | None:
    if bound is None:
        return None
    if isinstance(bound, DLSN):
        return Place(dlsn=str(bound))
    if isinstance(bound, datetime):
        timestamp_ms_of(bound)  # refuses one without a time zone
        return Place(time=bound)
    return Place(txid=bound)


def records_of(batch: pa.RecordBatch) -> list[RemoteRecord]:
    """Return the rows of a log of bytes as records."""
    names = ("dlsn", "txid", "sequence_id", "timestamp", "value")
    if not set(names) <= set(batch.schema.names):
        raise ConfigurationError(
            f"records need the columns {', '.join(names)} of a log of bytes, there are "
            f"{', '.join(batch.schema.names)}: read batches"
        )
    dlsns = zip(*(part.to_pylist() for part in batch.column("dlsn").flatten()), strict=True)
    times = batch.column("timestamp").cast(pa.int64()).to_numpy() // 1000
    return [
        RemoteRecord(DLSN(*dlsn), *row)
        for dlsn, *row in zip(
            dlsns,
            batch.column("txid").to_pylist(),
            batch.column("sequence_id").to_pylist(),
            times.tolist(),
            batch.column("value").to_pylist(),
            strict=True,
        )
    ]
