"""Calls that end while they are answered."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight import calls
from dlcore.proxy import server
from dlcore.proxy.callers import Stay
from dlcore.proxy.service import FlightService
from tests.dlcore.proxy.test_callers import Call
from tests.fixtures.passes import FreePass
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable


class Reads:
    """Has one message for any ticket."""

    get_flight_info = get_schema = list_flights = None

    async def do_get(self, _: bytes, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send it."""
        await send(b"message")


class Gate:
    """Lets everybody in."""

    @asynccontextmanager
    async def enter(self, _: object, __: str) -> AsyncGenerator[Any, None]:
        """Let a call in that may do everything."""

        class Entry(FreePass):
            stay = Stay(FreePass.caller, "peer")

        yield Entry()


class EndedCall(Call):
    """A call that ended, before its client learns of it."""

    async def write(self, _: bytes) -> None:
        """Fail as gRPC does then."""
        raise grpc.aio.InternalError


def test_a_call_that_ended_is_no_defect() -> None:
    """Its handler ends as by the cancellation that is on its way, so that no defect is logged."""
    parts = (None, None, Reads(), None, None, Gate())
    service = FlightService(*[cast("Any", each) for each in parts])
    ticket = pb.Ticket(ticket=b'{"log":"a"}').SerializeToString()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(service._do_get(ticket, cast("Any", EndedCall())))


def test_a_client_refused_while_it_sends_learns_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if more is on its way than gRPC takes of a stream that is not read."""
    # The client here never pauses, and says when it has sent all; a busy machine pauses.
    monkeypatch.setattr(calls, "_DROPPED_S", 60.0)
    monkeypatch.setattr(calls, "_QUIET_S", 60.0)

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        for _ in range(3):
            stream = await client.opened("clicks")
            await stream.call.write(pb.FlightData(data_header=b"no Arrow"))
            for _ in range(8):
                await stream.send(bytes(2**20))
            assert await stream.last_reply() is None
            code, message, metadata = await stream.status()
            assert (code, message[:19]) == ("INVALID_ARGUMENT", "ConfigurationError:")
            assert "dlog-error" in metadata

    with_proxies("clicks")(scenario)


def test_a_silent_client_holds_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before nor after HTTP/2 has begun; a client that comes back is served."""
    monkeypatch.setattr(server, "_HANDSHAKE_MS", 200)
    monkeypatch.setattr(server, "_IDLE_MS", 1000)

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        assert await client.act("logs") == {"logs": []}
        host, port = served.servers[0].address.split(":")
        for begun in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun)
            while await reader.read(1 << 16):
                pass  # what the proxy says of HTTP/2
            writer.close()
            await writer.wait_closed()
        while client.channel.get_state() is grpc.ChannelConnectivity.READY:
            await client.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert await client.act("logs") == {"logs": []}

    with_proxies()(scenario)
