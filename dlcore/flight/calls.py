"""Both ends of a gRPC call, which may end at any moment and be silent for long."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import grpc
import msgspec

from dlcore.base.background import BackgroundTasks
from dlcore.base.config import MIB
from dlcore.base.proto import flight_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


METHOD = "/arrow.flight.protocol.FlightService/"
"""The path of a method of Flight, before its name."""
BROKEN = "Internal error from Core"
"""gRPC's message if a call ended while a message was sent."""
_IDLE_MAX = 16
"""Most channels without a call that are kept."""
_SILENCE_MS, _ANSWER_MS = 2_000, 3_000
_DROPPED_S, _QUIET_S = 1.0, 0.05
_DROPPED_BYTES = 16 * MIB


def keepalive_options(silence_ms: int, answer_ms: int) -> list[tuple[str, int]]:
    """Return gRPC options for pings after `silence_ms` of silence.

    If no answer comes within `answer_ms`, the other end is gone, and the connection's calls end.
    """
    return [
        ("grpc.keepalive_time_ms", silence_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


CLIENT_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    # A followed log may be silent for long.  Only a ping shows whether its proxy is still there.
    *keepalive_options(_SILENCE_MS, _ANSWER_MS),
    # The kernel of a stopped process still accepts connections, but no byte comes on them.
    ("grpc.min_reconnect_backoff_ms", _ANSWER_MS),
    # By default gRPC may wait two minutes before it connects to a restarted proxy.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
"""Options of a channel from a client or a proxy to a proxy."""


class _Channel:
    """A channel to a proxy, and its number of calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0


class Channels:
    """Channels to proxies by location; those without calls are closed, except the latest few.

    Restarted proxies may have new addresses, so the number of locations has no bound.
    """

    def __init__(self, connect: Callable[[str], grpc.aio.Channel]) -> None:
        self._connect = connect
        self.known: dict[str, _Channel] = {}
        """Open channels in the order of use, the latest last."""
        self._closings = BackgroundTasks()

    def call(self, location: str, kind: str, method: str, *request: bytes, **options: Any) -> Any:
        """Begin a call of a method of Flight to the proxy at a location."""
        channel = self.known.pop(location, None) or _Channel(self._connect(location))
        self.known[location] = channel
        call = getattr(channel.channel, kind)(f"{METHOD}{method}")(*request, **options)
        channel.calls += 1
        call.add_done_callback(partial(self._ended, channel))
        return call

    def _ended(self, channel: _Channel, _: object) -> None:
        channel.calls -= 1
        idle = [location for location, each in self.known.items() if not each.calls]
        for location in idle[:-_IDLE_MAX]:
            closing = self.known.pop(location).channel.close()
            self._closings.start(closing, name=f"closing the channel to {location}")

    async def aclose(self) -> None:
        """Close the channels; their calls end with an error."""
        await asyncio.gather(*(each.channel.close() for each in self.known.values()))
        await self._closings.finish()


def client_of(context: Context) -> str:
    """Return the client of a call: the principal in its certificate, or the host of its connection.

    The principal is the certificate's common name.  Without one, all calls of a host count as one
    client.
    """
    for name in context.auth_context().get("x509_common_name", ()):
        return f"principal {name.decode('utf-8', 'replace')!r}"
    kind, _, address = unquote(context.peer()).partition(":")
    host = address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else address
    return f"host {host.removeprefix('::ffff:')!r}"


def close_connection(context: Context) -> bool:
    """Close the connection of a call's client, with all its calls; False if it is not found.

    A gRPC server cannot reset a call: it keeps messages that the client does not receive until the
    client is gone, even after the call has ended.
    """
    peer = unquote(context.peer())
    for descriptor in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):  # it is no socket, or closed by now
            connection = socket.socket(fileno=int(descriptor.name))
            try:
                if peer == _peer_of(connection):
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
            finally:
                connection.detach()  # gRPC owns the descriptor, and closes it
    return False


def _peer_of(connection: socket.socket) -> str | None:
    """Return the other end of a connection as gRPC names it."""
    address = connection.getpeername()
    if connection.family == socket.AF_INET6 and not address[0].startswith("::ffff:"):
        return f"ipv6:[{address[0]}]:{address[1]}"
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        return f"ipv4:{address[0].removeprefix('::ffff:')}:{address[1]}"
    return None


async def drop_the_rest(context: Context) -> None:
    """Read and drop messages of a client before a refusal, for a while or until it sends no more.

    If a client of grpc.aio is refused while it sends, it gets an internal error instead of the
    reason.
    """
    left_bytes = _DROPPED_BYTES
    with suppress(TimeoutError, grpc.aio.InternalError):  # another read is in progress
        async with asyncio.timeout(_DROPPED_S):
            while left_bytes > 0:
                async with asyncio.timeout(_QUIET_S):
                    data = await context.read()
                if not isinstance(data, bytes):
                    return
                left_bytes -= len(data)


async def send(context: Context, message: Any) -> None:
    """Write a message; raise `CancelledError` if the call has ended."""
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        # The call has just ended; gRPC will cancel this task in a moment.
        raise asyncio.CancelledError from error


async def send_reply(context: Context, reply: msgspec.Struct) -> None:
    """Write a reply of DoPut, as `send` does."""
    await send(context, pb.PutResult(app_metadata=msgspec.json.encode(reply)))
