"""The proxy between processes: it distinguishes callers, and breaks only what its rules say."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from dlcore.ops.sandbox.process import HOST
from tests.chaos.links import Network, Rule
from tests.fixtures.aio import run, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

ME = "me"
THIS_PROCESS = {ME: os.getpid()}
SERVER = "server"


def rule(
    source: str = ME, *, cut: bool = False, requests: bool = False, answers: bool = False
) -> Rule:
    """Return a rule for the links from `source`."""
    return Rule(
        frozenset([source]),
        frozenset([SERVER]),
        cut=cut,
        holds_requests=requests,
        holds_answers=answers,
    )


class Echo:
    """A server that sends back what it gets, and a client's connection to it by the proxy."""

    def __init__(self, network: Network, port: int) -> None:
        self.network = network
        self.port = port
        self.received = bytearray()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send back."""
        while data := await reader.read(100):
            self.received += data
            writer.write(data)
        writer.close()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection through the proxy."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


@asynccontextmanager
async def echo(processes: Mapping[str, int]) -> AsyncIterator[Echo]:
    """Start a server behind a proxy."""
    network = Network(lambda: processes)
    echo = Echo(network, 0)
    server = await asyncio.start_server(lambda r, w: echo.serve(r, w), HOST, 0)
    port = server.sockets[0].getsockname()[1]
    echo.port = await network.open_proxy(SERVER, lambda: port)
    try:
        yield echo
    finally:
        await network.aclose()
        server.close()
        await server.wait_closed()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes) -> bytes:
    """Send and wait for the same number of bytes."""
    writer.write(text)
    return await reader.readexactly(len(text))


def test_a_message_without_a_rule_passes() -> None:
    """Rules of other callers do not hold for this one; neither does one that is gone."""

    async def scenario() -> None:
        async with echo(THIS_PROCESS) as server, server.connect() as (reader, writer):
            other = rule("another caller", cut=True)
            server.network.add_rule(other)
            assert await ask(reader, writer, b"one") == b"one"
            mine = rule(cut=False, requests=True)
            server.network.add_rule(mine)
            server.network.remove_rule(mine)
            assert await ask(reader, writer, b"two") == b"two"
            writer.write_eof()
            assert await reader.read() == b""

    run(scenario())


def test_an_unknown_caller_is_no_named_process() -> None:
    """Its process is none of those named."""

    async def scenario() -> None:
        async with echo({ME: os.getppid()}) as server, server.connect() as (reader, writer):
            server.network.add_rule(rule(cut=True))
            assert await ask(reader, writer, b"one") == b"one"

    run(scenario())


@pytest.mark.parametrize("resets_only", [False, True], ids=["cut", "reset"])
def test_a_cut_ends_connections(resets_only: bool) -> None:
    """Those that are open, and as long as the cut lasts new ones too."""

    async def scenario() -> None:
        async with echo(THIS_PROCESS) as server:
            cut = rule(cut=True)
            async with server.connect() as (reader, writer):
                assert await ask(reader, writer, b"one") == b"one"
                if resets_only:
                    server.network.reset(cut)
                else:
                    server.network.add_rule(cut)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await ask(reader, writer, b"two")
            if not resets_only:
                async with server.connect() as (reader, writer):
                    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                        await ask(reader, writer, b"three")
                server.network.remove_rule(cut)
            async with server.connect() as (reader, writer):
                assert await ask(reader, writer, b"four") == b"four"

    run(scenario())


@pytest.mark.parametrize(("requests", "answers"), [(True, False), (False, True), (True, True)])
def test_a_held_message_arrives_later(requests: bool, answers: bool) -> None:
    """In one direction, or in both; nothing is lost, nothing is reset."""

    async def scenario() -> None:
        async with echo(THIS_PROCESS) as server, server.connect() as (reader, writer):
            assert await ask(reader, writer, b"one") == b"one"
            held = rule(requests=requests, answers=answers)
            server.network.add_rule(held)
            asking = asyncio.create_task(ask(reader, writer, b"two"))
            if not requests:
                await until(lambda: bytes(server.received) == b"onetwo")
            await asyncio.wait([asking], timeout=0.2)
            assert not asking.done()
            assert bytes(server.received) == (b"one" if requests else b"onetwo")
            server.network.remove_rule(held)
            assert await asking == b"two"

    run(scenario())
