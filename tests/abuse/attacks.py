"""Attacks of strangers on a server: ``python -m tests.abuse.attacks`` runs one of them.

An attacker is a process of its own, which keeps no rule.  It begins at once, and ends when its
standard input does.  With files it speaks TLS: with an authority alone as who has no certificate,
and else with its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from dlcore.base.access.tls import TlsFiles
from dlcore.base.proto import flight_pb2 as pb
from dlcore.wire.frames import encode_frame
from dlcore.wire.messages import (
    ADD_FRAMES_MAX,
    FEATURES,
    PROTOCOL_VERSION,
    Add,
    Hello,
    Message,
    Ping,
    ReadEntry,
    ReadLac,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LARGE_BYTES = 4_100_000
LARGE_ENTRY_ID = 1_000_000
"""The id of the entry that is asked for: far above those that the ledger's own writer adds."""
UNREAD_CONNECTIONS, UNREAD_REQUESTS = 250, 8
BUSY_CONNECTIONS = 100
SILENT_CONNECTIONS = 3_000
PROXY_CONNECTIONS, PROXY_STREAMS = 50, 20
LOG = "honest"


class Target:
    """A server, and what a stranger may know of it."""

    def __init__(
        self,
        address: str,
        ledger_id: int,
        bookie: str,
        cluster_id: str,
        files: TlsFiles | None = None,
    ) -> None:
        self.files = files
        self.tls = None if files is None else files.client_context()
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.ledger_id = ledger_id
        name, _, incarnation = bookie.partition("/")
        self.open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.hello = bytes_of(Hello(PROTOCOL_VERSION, FEATURES, cluster_id, name, incarnation))

    async def connect(self, *, hello: bool = True) -> asyncio.StreamWriter:
        """Connect, and read nothing; the system alone takes a little of what comes."""
        reader, writer = await self.connection(limit=1024)
        if hello:
            writer.write(self.hello)
        self.open.append((reader, writer))
        return writer

    def connection(
        self, *, limit: int = 1 << 16
    ) -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Return a new connection."""
        return asyncio.open_connection(self.host, self.port, limit=limit, ssl=self.tls)

    def channel(self, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """Return a new channel to a proxy."""
        address, files = f"{self.host}:{self.port}", self.files
        if files is None:
            return grpc.aio.insecure_channel(address, options)
        ca, key, cert = (
            Path(each).read_bytes() if each else None for each in (files.ca, files.key, files.cert)
        )
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return grpc.aio.secure_channel(address, credentials, options)


def bytes_of(message: Message) -> bytes:
    """Return a message as it is sent."""
    return b"".join(encode(message))


def large_add(ledger_id: int, entry_id: int) -> bytes:
    """Return an add of a large entry."""
    frame = encode_frame(
        ledger_id=ledger_id,
        entry_id=entry_id,
        last_add_confirmed=-1,
        ledger_bytes=LARGE_BYTES,
        body=[bytes(LARGE_BYTES)],
    )
    return bytes_of(Add(1, False, [frame]))


async def read_nothing(target: Target) -> None:
    """Ask for a large entry many times, and take no answer."""
    request = b"".join(
        bytes_of(ReadEntry(number + 1, target.ledger_id, LARGE_ENTRY_ID, False))
        for number in range(UNREAD_REQUESTS)
    )
    for _ in range(UNREAD_CONNECTIONS):
        (await target.connect()).write(request)


async def never_finish(target: Target) -> None:
    """Send large adds but for their last byte."""
    data = memoryview(large_add(target.ledger_id, LARGE_ENTRY_ID + 1))[:-1]
    for _ in range(UNREAD_CONNECTIONS):
        (await target.connect()).write(data)


async def repeat(target: Target, parts: list[bytes]) -> None:
    """Send the same as fast as it is taken, on many connections; read what comes."""

    async def one() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await target.connection()
                writer.write(target.hello)
                taking = asyncio.create_task(take_all(reader))
                try:
                    for part in itertools.cycle(parts):
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(0)  # else who is refused would never see it
                        if taking.done() or writer.is_closing():
                            break
                finally:
                    taking.cancel()
                    writer.transport.abort()

    tasks.extend(asyncio.create_task(one()) for _ in range(BUSY_CONNECTIONS))


async def take_all(reader: asyncio.StreamReader) -> None:
    """Read until the other end closes."""
    while await reader.read(1 << 16):
        pass


async def ping(target: Target) -> None:
    """Send nothing but signs of life."""
    await repeat(target, [bytes_of(Ping(1)) * 100])


async def add_refused(target: Target) -> None:
    """Add to a ledger that was never made."""
    await add_small(target, 2**40)


async def add_small(target: Target, ledger_id: int) -> None:
    """Send small adds; after 10,000 of them break the protocol, and come again."""
    frame = encode_frame(
        ledger_id=ledger_id,
        entry_id=LARGE_ENTRY_ID + 1,
        last_add_confirmed=-1,
        ledger_bytes=100,
        body=[bytes(100)],
    )
    adds = [bytes_of(Add(n + 1, False, [frame])) for n in range(10_000)]
    await repeat(target, [b"".join(adds[at : at + 100]) for at in range(0, len(adds), 100)])


async def add_runs_refused(target: Target) -> None:
    """Add as many entries as one message may have, to a ledger that was never made."""
    frames = [
        encode_frame(
            ledger_id=2**40, entry_id=n, last_add_confirmed=-1, ledger_bytes=n + 1, body=[b"x"]
        )
        for n in range(ADD_FRAMES_MAX)
    ]
    await repeat(target, [bytes_of(Add(1 + n * len(frames), False, frames)) for n in range(100)])


async def add_fenced(target: Target) -> None:
    """Fence a ledger, and add to it."""
    (await target.connect()).write(bytes_of(ReadLac(1, target.ledger_id, fence=True)))
    await asyncio.sleep(1.0)
    await add_small(target, target.ledger_id)


async def connect_in_vain(target: Target) -> None:
    """Connect and send what is no protocol, again and again."""

    async def one() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await target.connection()
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                await take_all(reader)
                writer.transport.abort()

    tasks.extend(asyncio.create_task(one()) for _ in range(BUSY_CONNECTIONS))


async def say_nothing(target: Target) -> None:
    """Connect, and say nothing."""
    for _ in range(SILENT_CONNECTIONS):
        await target.connect(hello=False)


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        read_nothing,
        never_finish,
        ping,
        add_refused,
        add_runs_refused,
        add_fenced,
        connect_in_vain,
        say_nothing,
    )
}
tasks: list[asyncio.Task[None]] = []


async def connect_to_proxy(target: Target) -> None:
    """Connect to a proxy, and say nothing."""
    await say_nothing(target)


async def read_nothing_of_proxy(target: Target) -> None:
    """Ask a proxy for a whole log on many streams, and take nothing."""
    ticket = json.dumps({"log": LOG}).encode()
    for _ in range(PROXY_CONNECTIONS):
        channel = target.channel(
            [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        )
        method: Any = channel.unary_stream("/arrow.flight.protocol.FlightService/DoGet")
        request = pb.Ticket(ticket=ticket).SerializeToString()
        channels.append(channel)
        calls.extend(method(request) for _ in range(PROXY_STREAMS))
    await asyncio.sleep(1.0)


ATTACKS_ON_PROXY: dict[str, Callable[[Target], Awaitable[None]]] = {
    each.__name__: each for each in (connect_to_proxy, read_nothing_of_proxy)
}
channels: list[grpc.aio.Channel] = []
calls: list[Any] = []


async def attack(name: str, target: Target) -> None:
    """Attack until standard input ends."""
    await (ATTACKS | ATTACKS_ON_PROXY)[name](target)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    name, address, ledger_id, bookie, cluster_id, *files = sys.argv[1:]
    tls = TlsFiles(**dict(zip(("ca", "cert", "key"), files, strict=False))) if files else None
    asyncio.run(attack(name, Target(address, int(ledger_id), bookie, cluster_id, tls)))
