"""The console's port: the page's files, answers as JSON, tails, and the HTTP door.

A request passes the guard, has its time, and is answered with the rights of the user who started
the console; one of the door with those of its caller.
"""

from __future__ import annotations

import secrets
from contextlib import aclosing, suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import click
import msgspec
from aiohttp import web

from dlcore.base.clock import SystemClock
from dlcore.base.errors import ConfigurationError, DLError
from dlcore.base.http_options import address_of, is_loopback
from dlcore.base.ids import DLSN
from dlcore.base.listening.http_server import HttpBounds, HttpServer, Route
from dlcore.ops.cli.console import entrances
from dlcore.ops.cli.console.changing import Asked, Changing
from dlcore.ops.cli.console.door import Door, failure, unknown
from dlcore.ops.cli.console.door_requests import BODY_BYTES_MAX
from dlcore.ops.cli.console.guard import POLICY, Guard
from dlcore.ops.cli.console.looking import Looking, follow
from dlcore.ops.cli.times import EpochMs

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from dlcore.api.namespace import Namespace
    from dlcore.base.access.entrances import Entrance
    from dlcore.base.access.tls import TlsFiles
    from dlcore.ops.autorecovery.listing import RepairList
    from dlcore.ops.cli.console.changing import Change
    from dlcore.ops.cli.console.guard import Refusal

    Answer = Callable[[web.Request], Awaitable[Any]]

TAILS_MAX = 8
"""Tails at once."""
_REQUEST_S = 60.0
_KINDS = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}


class Console:
    """Serves the page for one namespace.

    Args:
        namespace: the logs.
        endpoint: the proxies that it was opened with; None for a direct namespace.
        tls: the files for connections to proxies.
        token: gives the user's token for proxies.
        appends: whether clients of HTTP may append, which needs proxies.
        repairs: the ledgers that lack copies, which a direct namespace knows.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        endpoint: str | None = None,
        tls: TlsFiles | None = None,
        token: Callable[[], str] | None = None,
        appends: bool = False,
        repairs: RepairList | None = None,
    ) -> None:
        self._namespace = namespace
        self._endpoint = endpoint
        self._looking = Looking(namespace, endpoint=endpoint, tls=tls, token=token, repairs=repairs)
        self._changing = Changing(namespace, endpoint=endpoint, tls=tls, token=token)
        self.secret = secrets.token_urlsafe(32)
        # Until the port is known no origin is the console's own, and each request is refused.
        self._guard = Guard(origins=frozenset(), secret=self.secret)
        self._tails = 0
        self._door = Door(
            namespace, endpoint=endpoint, tls=tls, token=token, secret=self.secret, appends=appends
        )

    async def serve(
        self, *, host: str, port: int, tls: Callable[[], ssl.SSLContext] | None = None
    ) -> HttpServer:
        """Start the port.  Raises: ConfigurationError."""
        bounds = HttpBounds(connections=64, request_s=_REQUEST_S, body_bytes=BODY_BYTES_MAX)
        server = await HttpServer.start(
            self.routes(), host=host, port=port, tls=tls, bounds=bounds, unknown=unknown
        )
        scheme = "http" if tls is None else "https"
        names = {host.lower(), *(("localhost", "127.0.0.1", "[::1]") if is_loopback(host) else ())}
        origins = {f"{scheme}://{address_of(name, server.port)}" for name in names}
        self._guard = Guard(origins=frozenset(origins), secret=self.secret)
        return server

    def routes(self) -> list[Route]:
        """Return the table of what the port answers."""
        changing = self._changing
        changes: dict[Entrance, Change] = {
            entrances.TRUNCATE: changing.truncate,
            entrances.SEAL: changing.seal,
            entrances.DELETE: changing.delete,
            entrances.SETTINGS: changing.settings,
            entrances.RELEASE: changing.release,
            entrances.FORGET: changing.forget,
        }
        answers: dict[Entrance, Answer] = {
            entrances.SESSION: self._session,
            entrances.CLUSTER: lambda _: self._looking.cluster(),
            entrances.LOGS: self._logs,
            entrances.LOG: lambda request: self._looking.log(_log_of(request)),
        } | {entrance: _changing(change) for entrance, change in changes.items()}
        table = {each.name: each for each in entrances.ENTRANCES}
        return [
            *(Route(table[f"GET {path}"], self._file(name)) for path, name in _FILES),
            *(Route(entrance, self._answer(answer)) for entrance, answer in answers.items()),
            Route(entrances.TAIL, self._tail, is_stream=True),
            Route(entrances.APPEND, self._door.answered(self._door.append, self._judged)),
            Route(
                entrances.READ, self._door.answered(self._door.read, self._judged), is_stream=True
            ),
        ]

    def _judged(self, request: web.Request) -> Refusal | None:
        return self._guard.refusal(request.method, request.path, request.headers)

    def _refusal(self, request: web.Request) -> web.Response | None:
        refusal = self._judged(request)
        if refusal is None:
            return None
        return web.json_response({"error": refusal.text}, status=refusal.status)

    def _file(self, name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        body = (files(__package__) / "static" / name).read_bytes()
        headers = {"Content-Security-Policy": POLICY}
        kind = _KINDS[name.rpartition(".")[2]]

        async def serve(request: web.Request) -> web.Response:
            refused = self._refusal(request)
            return refused or web.Response(
                body=body, content_type=kind, charset="utf-8", headers=headers
            )

        return serve

    def _answer(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def serve(request: web.Request) -> web.Response:
            refused = self._refusal(request)
            if refused is not None:
                return refused
            try:
                return web.json_response(await answer(request))
            except DLError as error:
                return failure(error)

        return serve

    async def _session(self, _: web.Request) -> dict[str, Any]:
        return {"uri": self._namespace.uri, "proxies": self._endpoint is not None}

    async def _logs(self, request: web.Request) -> dict[str, Any]:
        return await self._looking.logs(
            request.query.get("part", ""), request.query.get("after", "")
        )

    async def _tail(self, request: web.Request) -> web.StreamResponse:
        refused = self._refusal(request)
        if refused is not None:
            return refused
        if self._tails >= TAILS_MAX:
            text = f"{TAILS_MAX} tails are open, which is the most: end one"
            return web.json_response({"error": text}, status=429)
        self._tails += 1
        try:
            dlsn, timestamp_ms = start_of(request.query.get("from", ""))
            async with await self._namespace.open_log(_log_of(request)) as manager:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                events = follow(manager, dlsn=dlsn, timestamp_ms=timestamp_ms)
                with suppress(ConnectionError):  # the page has gone
                    async with aclosing(events):
                        async for data in events:
                            await response.write(data)
                return response
        except DLError as error:
            return failure(error)
        finally:
            self._tails -= 1


_FILES = tuple(entrances.FILES.items())


def _changing(change: Change) -> Answer:
    async def answer(request: web.Request) -> dict[str, Any]:
        try:
            asked = msgspec.json.decode(await request.read(), type=Asked)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(str(error)) from error
        return await change(asked)

    return answer


def _log_of(request: web.Request) -> str:
    return request.query.get("log", "")


def start_of(text: str) -> tuple[DLSN | None, int | None]:
    """Return the start of a tail, a position or a time; none for the last records.

    Raises: ConfigurationError: it is neither.
    """
    if not text:
        return None, None
    if text.count(":") == 2 and text.replace(":", "").isdecimal():
        return DLSN.parse(text), None
    return None, time_of(text)


def time_of(text: str) -> int:
    """Return a time as the command line takes it, in epoch milliseconds.

    Raises: ConfigurationError.
    """
    try:
        return max(0, EpochMs(SystemClock().now_ms).convert(text, None, None))
    except click.ClickException as error:
        raise ConfigurationError(error.message) from error
