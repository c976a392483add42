"""The HTTP server: it serves its table and nothing else, and no caller can hold it up."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from dlcore.base.access import tls_in_use
from dlcore.base.access.entrances import Entrance
from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.errors import ConfigurationError
from dlcore.base.listening import http_server
from dlcore.base.listening.http_server import SECURITY_HEADERS, HttpBounds, HttpServer, Route
from tests.fixtures.certificates import Authority
from tests.fixtures.served_bookie import run

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

LARGE = 64 * 1024 * 1024
BOUNDS = HttpBounds(connections=3, request_s=0.2, body_bytes=1000, header_bytes=500)
"""A short time, which the tests that wait for its end use up."""


def _entrance(name: str) -> Entrance:
    return Entrance(name=name, resource="", right="none", callers="", cost="")


async def _echo(request: web.Request) -> web.Response:
    return web.Response(text=(await request.text()) or "hello")


async def _own_policy(_: web.Request) -> web.Response:
    return web.Response(headers={"Content-Security-Policy": "default-src 'self'"})


async def _never(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def _large(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * LARGE)


async def _stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.sleep(3 * BOUNDS.request_s)
    await response.write(b"late")
    return response


ROUTES = [
    Route(_entrance("GET /echo"), _echo),
    Route(_entrance("POST /echo"), _echo),
    Route(_entrance("GET /policy"), _own_policy),
    Route(_entrance("GET /never"), _never),
    Route(_entrance("GET /large"), _large),
    Route(_entrance("GET /stream"), _stream, is_stream=True),
]


async def _serve(
    bounds: HttpBounds | None = None, tls: Callable[[], ssl.SSLContext] | None = None
) -> HttpServer:
    return await HttpServer.start(ROUTES, host="127.0.0.1", port=0, bounds=bounds, tls=tls)


async def _raw(server: HttpServer, sent: bytes) -> bytes:
    """Send bytes, and return what comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_only_what_the_table_names_is_served() -> None:
    """Another path and another method do not exist; each answer has the headers of safety."""

    async def scenario() -> None:
        async with await _serve() as server, aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{server.port}"
            async with session.get(f"{url}/echo") as answer:
                assert await answer.text() == "hello"
            for method, path, status in (
                ("GET", "/", 404),
                ("GET", "/../etc/passwd", 404),
                ("HEAD", "/echo", 405),
                ("DELETE", "/echo", 405),
                ("POST", "/policy", 405),
            ):
                async with session.request(method, url + path) as answer:
                    assert (answer.status, path) == (status, path)
                    assert SECURITY_HEADERS.items() <= dict(answer.headers).items()
                    assert answer.headers["Server"] == "dlog"
            async with session.get(f"{url}/policy") as answer:
                assert answer.headers.getall("Content-Security-Policy") == ["default-src 'self'"]

    run(scenario)


def test_large_requests_are_refused() -> None:
    """A body, a header and a line above their bounds are no more than an error's answer."""

    async def scenario() -> None:
        async with await _serve(BOUNDS) as server:
            body = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000
            assert _status(await _raw(server, body)) == 413
            header = b"GET /echo HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 2000 + b"\r\n\r\n"
            assert _status(await _raw(server, header)) == 400
            line = b"GET /echo?" + b"x" * 2000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
            assert _status(await _raw(server, line)) in (400, 414)

    run(scenario)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /echo HTT",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nslow",
        b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["nothing", "half a line", "half a body", "an answer that never comes"],
)
def test_a_slow_request_is_cut(sent: bytes) -> None:
    """No part of a request may take longer than the bound; nothing is answered."""

    async def scenario() -> None:
        async with await _serve(BOUNDS) as server:
            assert await _raw(server, sent) == b""

    run(scenario)


def test_a_caller_that_does_not_receive_is_cut() -> None:
    """The server does not keep an answer for a client that takes nothing of it."""

    async def scenario() -> None:
        async with await _serve(BOUNDS) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
            writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(3 * BOUNDS.request_s)
            received = 0
            with suppress(ConnectionResetError):
                while data := await reader.read(2**20):
                    received += len(data)
            assert received < LARGE
            writer.close()

    run(scenario)


def test_a_stream_may_last() -> None:
    """The bound of time is not for routes that are streams."""

    async def scenario() -> None:
        async with (
            await _serve(BOUNDS) as server,
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{server.port}/stream") as answer,
        ):
            assert await answer.read() == b"late"

    run(scenario)


def test_connections_above_the_bound_are_closed_unheard() -> None:
    """The others go on, and there is room again once one of them ends."""

    async def scenario() -> None:
        bounds = HttpBounds(connections=2)
        request = b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        async with await _serve(bounds) as server:
            kept = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
            assert await _raw(server, request) == b""
            for reader, writer in kept:
                writer.write(request)
                assert _status(await reader.read()) == 200
                writer.close()
            while not await _raw(server, request):  # noqa: ASYNC110  # in the server
                await asyncio.sleep(0.01)

    run(scenario)


def test_an_address_that_cannot_be_taken_is_named() -> None:
    """The port is in use, or the host is no name at all."""

    async def scenario() -> None:
        async with await _serve() as server:
            for host in ("127.0.0.1", "a..b"):
                with pytest.raises(ConfigurationError, match=f"host='{host}' port={server.port}"):
                    await HttpServer.start(ROUTES, host=host, port=server.port)

    run(scenario)


def test_tls_asks_for_certificates_and_renews_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a certificate no client is heard; a new certificate is shown without a restart."""
    for module in (tls_in_use, http_server):
        monkeypatch.setattr(module, "LOOK_S", 0.01)
    authority = Authority(tmp_path / "tls")
    server_files, client_files = authority.issue("server"), authority.issue("client")
    other = Authority(tmp_path / "other").issue("server")

    async def scenario() -> None:
        tls = TlsInUse(server_files)
        make = partial(tls.server_context, asks_clients=True)
        async with await _serve(tls=make) as server, aiohttp.ClientSession() as session:
            url = f"https://127.0.0.1:{server.port}/echo"
            async with session.get(url, ssl=client_files.client_context()) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get(url, ssl=False)
            for name in ("ca", "key", "cert"):
                shutil.copy(getattr(other, name), getattr(server_files, name))
            trusting_other = other.client_context()
            while True:
                try:
                    async with session.get(url, ssl=trusting_other) as answer:
                        assert answer.status == 200
                        return
                except aiohttp.ClientConnectorCertificateError:
                    await asyncio.sleep(0.05)

    run(scenario)
