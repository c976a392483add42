"""The server of Flight SQL: it answers what tables there are, and runs each query in a process.

It keeps nothing of its callers: a ticket is the statement, a prepared one is its own handle, and
each call has its own token, which is passed on to the proxies.  Therefore any number of servers may
stand behind one address.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from dlcore.base import errors
from dlcore.base.access.entrances import Entrance
from dlcore.base.errors import (
    DLError,
    LogNotFoundError,
    OverCapacityError,
    UnauthenticatedError,
    UnexpectedError,
    UnsupportedError,
)
from dlcore.ops.sql import commands
from dlcore.ops.sql.worker import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.base.access.tls import TlsFiles

_STDERR_BYTES = 64 * 1024
_KEY = "caller"
_BEARER = "bearer"


def _entrance(name: str, right: str, cost: str) -> Entrance:
    return Entrance(
        name=name,
        resource="the logs of the statement, or the names of logs",
        right=right,
        callers="a user whom the proxies know by a token; where they check none, every caller",
        cost=cost,
        logged="as the proxies do",
    )


ENTRANCES = (
    _entrance("GetFlightInfo", "none: it only repeats the statement", "one request"),
    _entrance(
        "DoGet",
        "read on each log of a statement; describe on each that is listed",
        "one process for a statement, which ends when a proxy has refused its token",
    ),
    _entrance(
        "DoAction",
        "to prepare: read on each log of the statement; to close: none",
        "one process for a statement that is prepared, which ends with the answer",
    ),
)
"""All of them; the server has no other method."""


class _Caller(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no types
    """The token of a call; None for none."""

    def __init__(self, token: str | None) -> None:
        self.token = token


class _Callers(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    def start_call(self, _: object, headers: dict[str, list[str]]) -> _Caller:
        """Return the caller by the headers of a call."""
        kind, _sep, token = next(iter(headers.get("authorization", [""]))).partition(" ")
        return _Caller(token.strip() if kind.lower() == _BEARER and token.strip() else None)


class SqlServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Serves from its construction to `stop`.

    Args:
        location: where, such as ``grpc://127.0.0.1:4185``.
        endpoint: the proxies.
        tls: the files for connections to them.
        own: the certificate and key of the server; None: no TLS.
        queries_max: most queries at once.
        memory_bytes: most memory of one.
        query_s: most seconds for one, until its last row is taken.
        version: the release, for clients.
    """

    def __init__(
        self,
        location: str,
        *,
        endpoint: str,
        tls: TlsFiles | None,
        own: tuple[bytes, bytes] | None,
        queries_max: int,
        memory_bytes: int,
        query_s: int,
        version: str,
    ) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._version = version
        self._memory_bytes = memory_bytes
        self._query_s = query_s
        self._slots = threading.BoundedSemaphore(queries_max)
        self._queries_max = queries_max
        self._running: weakref.WeakSet[_Rows] = weakref.WeakSet()
        super().__init__(
            location,
            middleware={_KEY: _Callers()},
            tls_certificates=None if own is None else [own],
        )

    def stop(self) -> None:
        """End the queries, and accept no more."""
        for each in list(self._running):
            each.kill()
        self.shutdown()

    # Flight

    def get_flight_info(
        self, _: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        """Return the ticket of a command.  Its columns come with its rows."""
        with _flight_errors():
            data = bytes(descriptor.command or b"")
            ticket = commands.ticket_of(commands.command_of(data), data)
            return flight.FlightInfo(None, descriptor, [flight.FlightEndpoint(ticket, [])], -1, -1)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """Return the rows of a statement, or those about metadata."""
        with _flight_errors():
            command = commands.command_of(ticket.ticket)
            token = self._token_of(context)
            if isinstance(command, commands.Statement):
                rows = self._begin(command.sql, token)
                return flight.GeneratorStream(rows.schema, rows)
            return flight.RecordBatchStream(self._metadata(command, token))

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[flight.Result]:
        """Prepare a statement: return its columns, from a process that ends then; or close one."""
        with _flight_errors():
            statement = commands.prepared_by(action.type, action.body.to_pybytes())
            if statement is None:
                return iter(())
            rows = self._begin(statement.sql, self._token_of(context))
            rows.end()
            return iter([flight.Result(commands.prepared_result(statement, rows.schema))])

    def list_actions(self, _: flight.ServerCallContext) -> list[tuple[str, str]]:
        """Return the actions."""
        return [
            (commands.PREPARE, "Return the columns of a statement."),
            (commands.CLOSE, "Forget a statement, which nothing was kept of."),
        ]

    def do_put(self, *_: object) -> None:
        """Refuse: parameters of a statement come so, and rows to store."""
        with _flight_errors():
            raise UnsupportedError("DoPut: a statement has no parameters here, and changes nothing")

    def list_flights(self, *_: object) -> Iterator[flight.FlightInfo]:
        """Refuse: a proxy lists logs by Flight alone."""
        raise pa.ArrowNotImplementedError("ListFlights: ask for tables by Flight SQL, or a proxy")

    def _token_of(self, context: flight.ServerCallContext) -> str | None:
        token: str | None = context.get_middleware(_KEY).token
        if token is None and self._tls is not None and self._tls.cert:
            raise UnauthenticatedError(
                "no token: expected `authorization: Bearer TOKEN`.  A call without one would have "
                "the rights of this server's certificate"
            )
        return token

    def _metadata(self, command: commands.Command, token: str | None) -> pa.Table:
        match command:
            case commands.Information(numbers):
                return commands.information_table(numbers, version=self._version)
            case commands.Catalogs():
                return commands.catalogs_table()
            case commands.Schemas():
                return commands.schemas_table(command)
            case commands.Tables():
                found = self._tables(command, token) if commands.are_wanted(command) else {}
                return commands.tables_table(found, with_columns=command.columns)
            case _:
                return commands.table_types_table()

    def _tables(self, asked: commands.Tables, token: str | None) -> dict[str, pa.Schema | None]:
        from dlcore.ops.sql.engine import opened, table_schema

        with opened(self._endpoint, tls=self._tls, token=token) as namespace:
            logs = namespace.get_logs(commands.prefix_of(asked.pattern) or None)
            names = [name for name in logs if commands.matches(asked.pattern, name)]
            if not asked.columns:
                return dict.fromkeys(names)
            found = namespace.get_schemas(names)
            return {name: table_schema(found[name]) for name in names if name in found}

    def _begin(self, sql: str, token: str | None) -> _Rows:
        if not self._slots.acquire(blocking=False):
            raise OverCapacityError(f"{self._queries_max} queries run, which is the most")
        try:
            tls = None if self._tls is None else (self._tls.ca, self._tls.cert, self._tls.key)
            asked = Asked(
                sql=sql,
                endpoint=self._endpoint,
                token=token,
                tls=tls,
                memory_bytes=self._memory_bytes,
                query_s=self._query_s,
            )
            rows = _Rows(asked, self._slots.release)
        except BaseException:
            self._slots.release()
            raise
        self._running.add(rows)
        rows.begin()
        return rows


class _Rows:
    """The rows of one query, from its process; `left` is called when that is gone."""

    def __init__(self, asked: Asked, left: Callable[[], None]) -> None:
        self._asked = asked
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `_end` closes it
        process = subprocess.Popen(
            [sys.executable, "-m", "dlcore.ops.sql.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        self._stderr, self._process = stderr, process
        self._is_late = threading.Event()
        self._timer = threading.Timer(asked.query_s, _kill_late, (process, self._is_late))
        self._timer.daemon = True
        self._timer.start()
        # A client that goes away drops this object, perhaps before it asked for a row.
        self._end = weakref.finalize(self, _end, process, self._timer, stderr, left)

    def begin(self) -> None:
        """Wait for the columns.  Raises: the query's error."""
        process = self._process
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(self._asked))
            process.stdin.close()
        try:
            self._reader = pa.ipc.open_stream(process.stdout)
        except (pa.ArrowException, OSError):
            raise self._error() from None

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self._reader.schema

    def kill(self) -> None:
        """End the query; its client gets an error."""
        self._process.kill()

    def end(self) -> None:
        """End the query, whose client has left."""
        self._end()

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> pa.RecordBatch:
        with _flight_errors():
            try:
                return self._reader.read_next_batch()
            except StopIteration:
                if self._process.wait() != 0:
                    raise self._error() from None
                self._end()
                raise
            except (pa.ArrowException, OSError):
                raise self._error() from None

    def _error(self) -> DLError:
        """Return why the process has failed, which is over then."""
        self._process.kill()
        code = self._process.wait()
        line = _last_line(self._stderr)
        self._end()
        if self._is_late.is_set():
            return OverCapacityError(f"the query took more than {self._asked.query_s} s")
        try:
            failure = msgspec.json.decode(line, type=dict[str, str])
            kind = getattr(errors, failure["kind"])
            return kind(failure["error"])  # type: ignore[no-any-return]
        except (msgspec.MsgspecError, KeyError, AttributeError):
            return UnexpectedError(
                f"the process of the query ended with {code}: it may need more than "
                f"{self._asked.memory_bytes:,} bytes of memory (--memory-mib)"
            )


def _kill_late(process: subprocess.Popen[bytes], is_late: threading.Event) -> None:
    is_late.set()
    process.kill()


def _end(
    process: subprocess.Popen[bytes],
    timer: threading.Timer,
    stderr: IO[bytes],
    left: Callable[[], None],
) -> None:
    timer.cancel()
    process.kill()
    process.wait()
    for each in (process.stdin, process.stdout, stderr):
        if each is not None:
            with suppress(OSError):
                each.close()
    left()


def _last_line(file: IO[bytes]) -> bytes:
    file.seek(max(0, file.seek(0, 2) - _STDERR_BYTES))
    return file.read().rstrip().rpartition(b"\n")[2]


@contextmanager
def _flight_errors() -> Iterator[None]:
    """Raise our errors as those that Flight knows a status for."""
    try:
        yield
    except DLError as error:
        raise _flight_error(error) from None  # Flight tells its client all causes


def _flight_error(error: DLError) -> Any:
    text = f"{type(error).__name__}: {error}"
    match error:
        case errors.UnauthenticatedError():
            return flight.FlightUnauthenticatedError(text)
        case errors.AccessDeniedError():
            return flight.FlightUnauthorizedError(text)
        case LogNotFoundError():
            return pa.ArrowKeyError(text)
        case UnsupportedError():
            return pa.ArrowNotImplementedError(text)
        case UnexpectedError():
            return flight.FlightInternalError(text)
        case _ if error.retriable:
            return flight.FlightUnavailableError(text)
        case _:
            return pa.ArrowInvalid(text)
