"""Both ends of a gRPC call, which may end at any moment and be silent for long."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import grpc

from dlcore.base.config import MIB

if TYPE_CHECKING:
    from typing import TypeAlias

    Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


METHOD = "/arrow.flight.protocol.FlightService/"
"""The path of a method of Flight, before its name."""
BROKEN = "Internal error from Core"
"""What gRPC says of a call that ended while a message was sent."""
_SILENCE_MS, _ANSWER_MS = 2_000, 3_000
_DROPPED_S, _QUIET_S = 1.0, 0.05
_DROPPED_BYTES = 16 * MIB


def keepalive_options(silence_ms: int, answer_ms: int) -> list[tuple[str, int]]:
    """Return how an end asks whether the other one, silent for so long, is still there.

    One that does not answer within `answer_ms` is gone, and the calls of its connection end.
    """
    return [
        ("grpc.keepalive_time_ms", silence_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


CLIENT_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    # A log that is followed may be silent for long, and so is a proxy that was cut off or stopped.
    *keepalive_options(_SILENCE_MS, _ANSWER_MS),
    # The system of a proxy that was stopped still takes connections, on which nothing comes.
    ("grpc.min_reconnect_backoff_ms", _ANSWER_MS),
    # Else a proxy that was away is left alone for up to two minutes after it is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
"""Options of a channel to a proxy, of a client or of another proxy."""


def client_of(context: Context) -> str:
    """Return whose a call is: the principal in his certificate, or the host that it comes from.

    The principal is the certificate's common name; without one a host's calls are one client's.
    """
    for name in context.auth_context().get("x509_common_name", ()):
        return f"principal {name.decode('utf-8', 'replace')!r}"
    kind, _, address = unquote(context.peer()).partition(":")
    host = address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else address
    return f"host {host.removeprefix('::ffff:')!r}"


def close_connection(context: Context) -> bool:
    """Close the connection of a call's client, with all its calls; False if it is not found.

    A server of gRPC cannot reset a call: what its client does not take is kept for it until it is
    gone, whatever became of the call.
    """
    peer = unquote(context.peer())
    for descriptor in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):  # it is no socket, or gone by now
            connection = socket.socket(fileno=int(descriptor.name))
            try:
                if peer == _peer_of(connection):
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
            finally:
                connection.detach()  # it is gRPC's to close
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
    """Take what a client still sends before it is refused: for a while, until it sends nothing.

    A client of grpc.aio that is refused while it sends is told of an internal error, and not why.
    """
    left_bytes = _DROPPED_BYTES
    with suppress(TimeoutError, grpc.aio.InternalError):  # a message is being read already
        async with asyncio.timeout(_DROPPED_S):
            while left_bytes > 0:
                async with asyncio.timeout(_QUIET_S):
                    data = await context.read()
                if not isinstance(data, bytes):
                    return
                left_bytes -= len(data)


async def send(context: Context, message: Any) -> None:
    """Write a message; to a call that has ended it is a cancellation."""
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        # The call ended a moment ago, and the news of it is on its way.
        raise asyncio.CancelledError from error
