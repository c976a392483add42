"""Both ends of a gRPC call, which may end at any moment and be silent for long."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

import grpc
import msgspec

from dlcore.base.background import BackgroundTasks, all_of
from dlcore.base.config import MIB
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.replies import PutReply

if TYPE_CHECKING:
    from typing import TypeAlias

    from dlcore.base.access.tls_in_use import TlsInUse

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
_decode_reply = msgspec.json.Decoder(PutReply).decode


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

    Restarted proxies may have new addresses, so the number of locations has no bound.  When the
    files of TLS have changed, new calls use new channels.
    """

    def __init__(self, tls: TlsInUse | None) -> None:
        self._tls = tls
        # Without files the system's own certificate authorities are trusted.
        self._credentials = grpc.ssl_channel_credentials()
        self.known: dict[str, _Channel] = {}
        """Open channels in the order of use, the latest last."""
        self._left: set[_Channel] = set()
        """Channels that close after their last call."""
        self._closings = BackgroundTasks()

    def call(self, location: str, kind: str, method: str, *request: bytes, **options: Any) -> Any:
        """Begin a call of a method of Flight to the proxy at a location."""
        self._use_new_files()
        channel = self.known.pop(location, None) or _Channel(self._connect(location))
        self.known[location] = channel
        call = getattr(channel.channel, kind)(f"{METHOD}{method}")(*request, **options)
        channel.calls += 1
        call.add_done_callback(partial(self._ended, channel))
        return call

    def _connect(self, location: str) -> grpc.aio.Channel:
        scheme, _, address = location.partition("://")
        if scheme == "grpc":
            return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=CLIENT_OPTIONS)

    def _use_new_files(self) -> None:
        """Leave the channels that were opened with files of TLS that have changed since."""
        if self._tls is None:
            return
        credentials = self._tls.channel_credentials()
        if credentials is self._credentials:
            return
        self._credentials = credentials
        left, self.known = self.known, {}
        for each in left.values():
            if each.calls:
                self._left.add(each)
            else:
                self._close(each)

    def _ended(self, channel: _Channel, _: object) -> None:
        channel.calls -= 1
        if channel in self._left and not channel.calls:
            self._left.remove(channel)
            self._close(channel)
        idle = [location for location, each in self.known.items() if not each.calls]
        for location in idle[:-_IDLE_MAX]:
            self._close(self.known.pop(location))

    def _close(self, channel: _Channel) -> None:
        self._closings.start(channel.channel.close(), name="closing a channel to a proxy")

    async def aclose(self) -> None:
        """Close the channels; their calls end with an error."""
        channels = (*self.known.values(), *self._left)
        await all_of(*(each.channel.close() for each in channels))
        await self._closings.finish()


def host_of(context: Context) -> str:
    """Return the host of a call's connection."""
    kind, _, address = unquote(context.peer()).partition(":")
    host = address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else address
    return host.removeprefix("::ffff:")


def close_connection(context: Context) -> bool:
    """Close the connection of a call's client, with all its calls; False if it is not found.

    A gRPC server cannot reset a call: it keeps messages that the client does not receive until the
    client is gone, even after the call has ended.
    """
    peer = unquote(context.peer())
    # gRPC gives no access to its sockets, so those of the whole process are searched.
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


async def abort(
    context: Context,
    code: grpc.StatusCode,
    details: str,
    metadata: tuple[tuple[str, str], ...] = (),
) -> NoReturn:
    """End a call with a status, or with its connection while a message is still on its way.

    gRPC keeps the error that it raises for this with the call.  The error refers to the frames
    that it passes, and they to the call: only Python's collector would free such a call.
    """
    try:
        await context.abort(code, details, trailing_metadata=metadata)
    except grpc.aio.AbortError as aborted:
        asyncio.get_running_loop().call_soon(_forget_frames, aborted)
        raise
    except grpc.aio.InternalError as error:
        # The client does not take a message that is on its way, and no status can overtake it.
        close_connection(context)
        raise asyncio.CancelledError from error
    raise AssertionError("abort raises")


def _forget_frames(aborted: grpc.aio.AbortError) -> None:
    aborted.__context__ = aborted.__traceback__ = None


async def send(context: Context, message: Any) -> None:
    """Write a message; raise `CancelledError` if the call has ended."""
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        # The call has just ended; gRPC will cancel this task in a moment.
        raise asyncio.CancelledError from error


def reply_of(message: bytes) -> PutReply:
    """Return the reply in a message of DoPut."""
    return _decode_reply(pb.PutResult.FromString(message).app_metadata)


async def send_reply(context: Context, reply: msgspec.Struct) -> None:
    """Write a reply of DoPut, as `send` does."""
    await send(context, pb.PutResult(app_metadata=msgspec.json.encode(reply)))
