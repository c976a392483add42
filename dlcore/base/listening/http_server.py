"""A small HTTP server for operators: it serves a table of entrances, and bounds each caller.

It runs on the loop of the process that it tells about, so a caller must not be able to hold it up.
Connections are limited in number, requests in size, and both in time: a request must come, be
answered and be received within its time, or its connection is cut.  A path or method that is not
in the table does not exist.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlcore.base.access.tls_in_use import LOOK_S
from dlcore.base.background import BackgroundTasks
from dlcore.base.closing import AsyncClosing
from dlcore.base.extras import missing_packages_explained
from dlcore.base.listening.listener import Listener, listening_error

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp import web

    from dlcore.base.access.entrances import Entrance

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    Unknown = Callable[[str, str, int], dict[str, str] | None]

logger = logging.getLogger(__name__)

KIB = 1024
SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of each answer; one that a handler sets itself stays."""
_STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Route:
    """An entrance, called like ``GET /metrics``, and what answers there."""

    entrance: Entrance
    handler: Handler
    is_stream: bool = False
    """Whether the answer may last, such as that of a page that shows changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    """The most that callers may take."""

    connections: int = 32
    """Connections at once; a further one is closed unheard."""
    request_s: float = 10.0
    """Seconds for a request to come, and once more to be answered and received; without a request
    a connection is closed after as long."""
    body_bytes: int = 64 * KIB
    header_bytes: int = 8 * KIB
    """Bytes of a line or header; there are 64 headers at most."""


class HttpServer(AsyncClosing):
    """Serves from `start` to `aclose`.

    Args:
        routes: what it serves.
        bounds: the most that callers may take.
        unknown: gives the JSON value of an answer without an entrance, by method, path and status;
            None: the answer is the status in words.
    """

    def __init__(
        self, routes: Sequence[Route], bounds: HttpBounds, unknown: Unknown | None = None
    ) -> None:
        with missing_packages_explained():
            from aiohttp import web  # processes without a port need it not

        self._bounds = bounds
        self._unknown = unknown
        self._streams: set[web.AbstractRoute] = set()

        @web.middleware
        async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._bounded(request, handler)

        app = web.Application(middlewares=[bounded], client_max_size=bounds.body_bytes)
        for each in routes:
            method, path = each.entrance.name.split(" ")
            added = app.router.add_route(method, path, each.handler)
            if each.is_stream:
                self._streams.add(added)
        app.on_response_prepare.append(_set_headers)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_STOP_GRACE_S,
            keepalive_timeout=bounds.request_s,
            lingering_time=0.0,
            max_line_size=bounds.header_bytes,
            max_field_size=bounds.header_bytes,
            max_headers=64,
        )
        self._tasks = BackgroundTasks()
        self._listener: Listener | None = None
        self.port = 0
        """The port that it listens on."""

    @classmethod
    async def start(
        cls,
        routes: Sequence[Route],
        *,
        host: str,
        port: int,
        tls: Callable[[], ssl.SSLContext] | None = None,
        bounds: HttpBounds | None = None,
        unknown: Unknown | None = None,
    ) -> HttpServer:
        """Listen at an address; `tls` returns the context for the next connections.

        `bounds` and `unknown` are those of the class.

        Raises:
            ConfigurationError: it cannot listen there.
        """
        server = cls(routes, bounds or HttpBounds(), unknown)
        try:
            await server._listen(host, port, tls)
        except BaseException:
            await server.aclose()
            raise
        return server

    async def _listen(self, host: str, port: int, tls: Callable[[], ssl.SSLContext] | None) -> None:
        await self._runner.setup()
        listener = Listener(self._connection, tls, handshake_s=self._bounds.request_s)
        try:
            await listener.open(host, port)
        except OSError as error:
            where = f"host={host!r} port={port} for HTTP"
            raise listening_error(where, error) from error
        self._listener = listener
        self.port = listener.sockets[0].getsockname()[1]
        if tls is not None:
            self._tasks.start(self._renew(listener), name="looking at the certificates for HTTP")

    async def aclose(self) -> None:
        """Accept no more, and end the connections."""
        await self._tasks.aclose()
        if self._listener is not None:
            self._listener.close()
        server = self._runner.server
        left = [each.transport for each in server.connections] if server is not None else []
        await self._runner.cleanup()
        for each in left:
            if each is not None:
                each.abort()  # TLS waits for the caller to say goodbye
        # A connection that was aborted is reported as lost in the next turn of the loop.
        await asyncio.sleep(0)

    async def _renew(self, listener: Listener) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await listener.renew()

    def _connection(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        if server is None or len(server.connections) >= self._bounds.connections:
            return _Refusal()
        return server()

    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request in its time, until the caller has received the answer."""
        from aiohttp import web

        route = request.match_info.route
        name = "" if route.resource is None else f"{request.method} {route.resource.canonical}"
        seconds = None if route in self._streams else self._bounds.request_s
        try:
            async with asyncio.timeout(seconds) as timeout:
                try:
                    response = await handler(request)
                except web.HTTPException as error:
                    response = self._failed(request, error)
                with suppress(ConnectionError):  # the caller has gone
                    await response.prepare(request)
                    await response.write_eof()
        except TimeoutError:
            if not timeout.expired():
                raise
            logger.warning(
                "cut a request for HTTP that took %g s: %s; to do: nothing, or see to that caller",
                seconds,
                name or "unknown",
            )
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the request took too long") from None
        return response

    def _failed(self, request: web.Request, error: web.HTTPException) -> web.StreamResponse:
        from aiohttp import web

        answer = None
        if self._unknown is not None and request.match_info.http_exception is not None:
            answer = self._unknown(request.method, request.path, error.status)
        if answer is not None:
            return web.json_response(answer, status=error.status, headers=_kept(error))
        return web.Response(status=error.status, text=f"{error.reason}\n", headers=_kept(error))


class _Refusal(asyncio.Protocol):
    """A connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()


def _kept(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


async def _set_headers(_: web.Request, response: web.StreamResponse) -> None:
    headers: Any = response.headers
    headers["Server"] = "dlog"  # instead of the names and versions of libraries
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)
