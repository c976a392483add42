"""The HTTP door: appends and reads of `curl` and other clients without a library.

A caller has the rights of the token that it sends, which the proxies judge as on any call of
Flight; the console only passes it on.  A caller with the console's secret has the rights of the
user who started the console.  An append goes to the log's owner as any client's.

Each kind of request is limited in number.  An append, and an answer of lines, are held in memory
whole, and are small.  A stream holds some records, and reads the next ones when the client has
taken those; a client that takes nothing for `SEND_S` is cut off.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

from aiohttp import web

from dlcore.backends.flight.bearer import Bearer, user_of
from dlcore.backends.flight.log import append_once
from dlcore.backends.flight.namespace import open_namespace
from dlcore.backends.flight.reader import records_of
from dlcore.base.background import side_tasks
from dlcore.base.clock import SystemClock
from dlcore.base.errors import (
    AccessDeniedError,
    ConfigurationError,
    DLError,
    EndOfStreamError,
    OverCapacityError,
    ProducerFencedError,
    UnauthenticatedError,
)
from dlcore.base.records import NotLessThan, RecordField
from dlcore.log.entries.batches import typed_read_fields
from dlcore.log.entries.body import batch_of
from dlcore.ops.cli.console import door_answers as answers, door_requests as requests
from dlcore.ops.cli.console.door_answers import error_value, headers_of, status_of
from dlcore.ops.cli.console.values import end_count

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Iterator,
        Sequence,
    )

    import pyarrow as pa

    from dlcore.api.log import DistributedLogManager
    from dlcore.api.namespace import Namespace
    from dlcore.backends.flight.bearer import Token
    from dlcore.backends.flight.log import FlightLog
    from dlcore.base.access.tls import TlsFiles
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.ops.cli.console.door_answers import Shown
    from dlcore.ops.cli.console.guard import Refusal

    Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

APPENDS_MAX, PAGES_MAX, STREAMS_MAX = 16, 8, 32
"""Appends, answers of lines, and streams of events at once."""
PATIENCE_S = 10.0
"""A call to the proxies fails after this time without a proxy that answers."""
PAGE_S = 60.0
SEND_S = 30.0
KEEP_S = 1.0
"""A stream without records has a comment after this time."""
DROPPED_BYTES = 4 * requests.BODY_BYTES_MAX
DROPPED_S = 1.0
"""The most that is taken of a body that is refused, and for how long."""
_ROWS = 100
"""Records that are converted at once."""


class Door:
    """Answers the requests of the door.

    Args:
        namespace: the logs, for callers with the secret and a console without proxies.
        endpoint: the proxies; None for a direct namespace.
        tls: the files for connections to proxies.
        token: gives the token of the user who started the console.
        secret: the console's secret.
        appends: whether records may be appended.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        endpoint: str | None,
        tls: TlsFiles | None,
        token: Token | None,
        secret: str,
        appends: bool,
    ) -> None:
        self._namespace = namespace
        self._endpoint = endpoint
        self._tls = tls
        self._token = token
        self._secret = secret
        self._appends = appends
        self._open: dict[str, int] = {}

    def answered(self, answer: Answer, refusal: Callable[[web.Request], Refusal | None]) -> Answer:
        """Return what answers a request of another program than a foreign page."""

        async def serve(request: web.Request) -> web.StreamResponse:
            refused = refusal(request)
            if refused is not None:
                value = error_value(AccessDeniedError(refused.text))
                return web.json_response(value, status=refused.status)
            try:
                requests.require_single(request.headers.keys())
                requests.token_of(request.headers)  # before anything else is answered
                return await answer(request)
            except DLError as error:
                await _drop_the_rest(request)
                return failure(error)

        return serve

    # Appending

    async def append(self, request: web.Request) -> web.Response:
        """Append the records of the body once.  Raises: DLError."""
        if not self._appends or self._endpoint is None:
            raise AccessDeniedError(
                "appends over HTTP are off: start the console with --allow-appends"
            )
        key, kind = requests.key_of(request.headers), requests.kind_of(request.headers)
        requests.require_size(request.content_length)
        with self._counted("appends", APPENDS_MAX):
            # The proxies judge the caller before the body is read.
            async with self._opened_by_proxies(self._endpoint, request) as manager:
                schema = await manager.get_schema()
                body = await _body_of(request)
                batch = await asyncio.to_thread(_batch_of, kind, body, schema)
                try:
                    claim = requests.claim_of(self._user(request), key, kind, body)
                    last = await append_once(manager, batch, claim)
                except ProducerFencedError as error:
                    raise ProducerFencedError(
                        f"{requests.KEY} {key!r} belongs to an append of another body: expected "
                        "the same body as before, or a new key"
                    ) from error
        return web.json_response(
            {"records": batch.num_rows, "last": None if last is None else str(last)}
        )

    # Reading

    async def read(self, request: web.Request) -> web.StreamResponse:
        """Answer with lines or with events, as the caller accepts.  Raises: DLError."""
        asked = requests.read_of(
            list(request.query.items()), request.headers, now_ms=SystemClock().now_ms()
        )
        if asked.is_stream:
            with self._counted("streams", STREAMS_MAX):
                return await self._stream(request, asked)
        try:
            with self._counted("reads", PAGES_MAX):
                async with asyncio.timeout(PAGE_S):
                    return await self._page(request, asked)
        except TimeoutError:
            raise OverCapacityError(
                f"the records were not read within {PAGE_S:g} s: ask for fewer with limit"
            ) from None

    async def _page(self, request: web.Request, asked: requests.Reading) -> web.Response:
        page = answers.Page(asked.limit)
        async with self._opened(request) as manager, await _reader(manager, asked) as reader:
            try:
                while not page.is_full:
                    batch = await reader.read_batch(until_caught_up=True)
                    if batch is None:
                        break
                    for records in _shown(batch, is_typed=reader.is_typed):
                        page.add(records)
            except EndOfStreamError:
                pass  # a sealed log has been read to its end
            if not page.lines and asked.dlsn is not None:
                requests.require_within(asked.dlsn, (await manager.get_snapshot()).end)
        headers = {} if page.last is None else {"Dlog-Last": str(page.last)}
        return web.Response(
            body=b"".join(page.lines), content_type="application/x-ndjson", headers=headers
        )

    async def _stream(self, request: web.Request, asked: requests.Reading) -> web.StreamResponse:
        async with self._opened(request) as manager, await _reader(manager, asked) as reader:
            headers = {"Content-Type": f"{requests.EVENTS_KIND}; charset=utf-8"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            try:
                async with aclosing(_events(reader)) as events:
                    async for data in events:
                        async with asyncio.timeout(SEND_S):
                            await response.write(data)
            except (ConnectionError, TimeoutError):  # the client has gone, or takes nothing
                if request.transport is not None:
                    request.transport.abort()
            return response

    # The callers

    @asynccontextmanager
    async def _opened(self, request: web.Request) -> AsyncIterator[DistributedLogManager]:
        """Open the log of a request as its caller."""
        if self._endpoint is not None:
            async with self._opened_by_proxies(self._endpoint, request) as log:
                yield log
            return
        if not self._is_owner(request):
            raise UnauthenticatedError(
                "only proxies know users, and this console was started without --endpoint: "
                "expected the secret that it has printed"
            )
        async with await self._namespace.open_log(request.match_info["log"]) as manager:
            yield manager

    @asynccontextmanager
    async def _opened_by_proxies(
        self, endpoint: str, request: web.Request
    ) -> AsyncIterator[FlightLog]:
        token = self._token_of(request)
        opening = open_namespace(endpoint, patience_s=PATIENCE_S, tls=self._tls, token=token)
        async with (
            await opening as namespace,
            await namespace.open_log(request.match_info["log"]) as log,
        ):
            yield log

    def _is_owner(self, request: web.Request) -> bool:
        """Return whether a request has the console's secret."""
        given = requests.token_of(request.headers)
        return hmac.compare_digest(given.encode(), self._secret.encode())

    def _token_of(self, request: web.Request) -> Token | None:
        """Return what the proxies are sent for a request."""
        return self._token if self._is_owner(request) else requests.token_of(request.headers)

    def _user(self, request: web.Request) -> tuple[str, str]:
        """Return whose the keys of a request are, which proxies have accepted."""
        token = self._token_of(request)
        return ("", "") if token is None else user_of(Bearer(token).token())

    @contextmanager
    def _counted(self, kind: str, count_max: int) -> Iterator[None]:
        """Count a request during the block.  Raises: OverCapacityError."""
        count = self._open.get(kind, 0)
        if count >= count_max:
            raise OverCapacityError(f"{count_max} {kind} are open, which is the most: ask later")
        self._open[kind] = count + 1
        try:
            yield
        finally:
            self._open[kind] -= 1


def unknown(method: str, path: str, status: int) -> dict[str, str] | None:
    """Return the value of an answer to a path or method that is not served; None for others."""
    error = requests.unknown(method, path, status)
    return None if error is None else error_value(error)


def failure(error: DLError) -> web.Response:
    """Return the answer for an error."""
    return web.json_response(error_value(error), status=status_of(error), headers=headers_of(error))


async def _drop_the_rest(request: web.Request) -> None:
    """Drop what still comes of a body, for a while.

    A connection that is closed while its client sends is reset, and the client never sees why.
    """
    left_bytes = DROPPED_BYTES
    with suppress(TimeoutError, ConnectionError, web.HTTPException):
        async with asyncio.timeout(DROPPED_S):
            while left_bytes > 0 and (data := await request.content.readany()):
                left_bytes -= len(data)


async def _body_of(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        requests.require_size(requests.BODY_BYTES_MAX + 1)
        raise AssertionError from error
    except ConnectionError as error:
        raise ConfigurationError(f"the body is cut off ({error}): expected all of it") from error


def _batch_of(kind: str, body: bytes, schema: pa.Schema | None) -> pa.RecordBatch:
    """Return the records of a body as rows for the log.  Raises: ConfigurationError."""
    records = requests.records_in(kind, body)
    if schema is None:
        return batch_of([0] * len(records), records).select(["value"])
    from dlcore.ops.cli.rows import batch_of_json

    return batch_of_json(records, schema, written=0)


async def _reader(manager: DistributedLogManager, asked: requests.Reading) -> AsyncLogReader:
    columns = None
    if asked.columns is not None:
        schema = await manager.get_schema()
        names = None if schema is None else schema.names
        chosen = requests.columns_of(asked.columns, names, manager.name)
        columns = [*(each.name for each in typed_read_fields()), *chosen]
    dlsn = asked.dlsn
    if asked.at_end:
        count = end_count(await manager.get_snapshot())
        place = await manager.find_place(NotLessThan(RecordField.SEQUENCE_ID, count))
        dlsn = place.dlsn
    return await manager.open_reader(dlsn=dlsn, timestamp_ms=asked.timestamp_ms, columns=columns)


def _shown(batch: pa.RecordBatch, *, is_typed: bool) -> Iterator[Sequence[Shown]]:
    """Yield the rows of a batch, some at a time."""
    for start in range(0, batch.num_rows, _ROWS):
        part = batch.slice(start, _ROWS)
        if is_typed:
            from dlcore.ops.cli.rows import rows_of

            yield rows_of(part)
        else:
            yield records_of(part)


async def _events(reader: AsyncLogReader) -> AsyncGenerator[bytes, None]:
    try:
        while True:
            async with side_tasks() as tasks:
                reading = tasks.start(reader.read_batch(), name="reading for a stream of events")
                while not (await asyncio.wait({reading}, timeout=KEEP_S))[0]:
                    yield answers.WAITING
            for records in _shown(reading.result(), is_typed=reader.is_typed):
                yield answers.events_of(records)
    except EndOfStreamError:
        yield answers.event("end", None)
    except DLError as error:
        yield answers.event("failed", error_value(error))
