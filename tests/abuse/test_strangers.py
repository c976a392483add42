"""Goal: identity ends the attacks: a secured server gives strangers nothing, and takes nothing.

Method: real processes.  Strangers without TLS, without a certificate, and with one of another
authority send what each attack sends, and read to the end; and an honest client goes on beside
each of the attacks.  `make abuse ARGS="--stranger foreign"` measures what is left.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from dlcore import LogRecord, TlsFiles
from dlcore.backends.direct.namespace import open_namespace as open_direct
from dlcore.ops.sandbox.cluster import Sandbox
from dlcore.wire.fields import Status
from dlcore.wire.messages import ANYTHING, Failed, Message, Ping, ReadEntry, ReadLac, decode
from dlcore.wire.receiving import Assembly, ReceiveMemory
from tests.abuse.__main__ import STRANGERS, attacker, honest, stranger_to
from tests.abuse.attacks import (
    ATTACKS,
    ATTACKS_ON_PROXY,
    LARGE_ENTRY_ID,
    LOG,
    Target,
    bytes_of,
    channels,
    large_add,
    read_nothing_of_proxy,
)
from tests.fixtures.resident import resident_kb

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

RECORDS = 20
GROWTH_MIB_MAX = 32
"""Half of what a bookie may hold of incomplete payloads, and of a proxy's messages in transit."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """A secured cluster; no test changes what strangers see of it."""
    with Sandbox(bookies=1, proxies=1, autorecovery=False, secure=True) as running:
        yield running


@pytest.fixture(scope="module")
def addresses(sandbox: Sandbox) -> list[str]:
    """The names and ids that a stranger may know: of the bookie, of a ledger and of the cluster."""

    async def scenario() -> list[str]:
        async with honest(sandbox) as (_, addresses):
            return addresses

    return asyncio.run(scenario())


def target_of(addresses: list[str], files: list[str]) -> Target:
    """Return what a stranger attacks, as the stranger that has these files."""
    tls = TlsFiles(**dict(zip(("ca", "cert", "key"), files, strict=False))) if files else None
    return Target(addresses[0], int(addresses[1]), addresses[2], addresses[3], tls)


async def answers(target: Target, request: bytes) -> bytes:
    """Return what a bookie answers to HELLO and a request, to the end of the connection."""
    received = bytearray()
    with suppress(OSError):
        reader, writer = await target.connection()
        try:
            writer.write(target.hello + request)
            while part := await reader.read(1 << 16):
                received += part
        finally:
            writer.close()
            await writer.wait_closed()
    return bytes(received)


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_bookie_answers_a_stranger_nothing(
    sandbox: Sandbox, addresses: list[str], kind: str
) -> None:
    """Whatever it asks for, and although it knows all names and ids."""
    target = target_of(addresses, stranger_to(sandbox, kind))
    requests = [
        bytes_of(Ping(1)),
        bytes_of(ReadEntry(1, target.ledger_id, LARGE_ENTRY_ID, False)),
        bytes_of(ReadLac(1, target.ledger_id, True)),
        large_add(target.ledger_id, LARGE_ENTRY_ID + 1),
        b"",
    ]

    async def scenario() -> None:
        for request in requests:
            # Only a client without TLS sees the bytes of TLS's own alert.
            assert len(await answers(target, request)) <= (7 if kind == "clear" else 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_proxy_answers_a_stranger_nothing(
    sandbox: Sandbox, addresses: list[str], kind: str
) -> None:
    """Each of its calls fails before it reaches the proxy."""
    (proxy,) = sandbox.proxies
    addresses = [proxy.location.partition("://")[2], *addresses[1:]]

    async def scenario() -> None:
        target = target_of(addresses, stranger_to(sandbox, kind))
        await read_nothing_of_proxy(target)
        channel = channels[-1]
        method: Any = channel.unary_stream("/arrow.flight.protocol.FlightService/DoGet")
        call = method(b"")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.gather(*(each.close() for each in channels))
        channels.clear()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", STRANGERS)
def test_honest_records_go_on_beside_each_attack(
    sandbox: Sandbox, addresses: list[str], kind: str
) -> None:
    """And the attacked servers take no memory for what strangers send or ask for."""
    ((bookie,), (proxy,)) = sandbox.bookies, sandbox.proxies
    at_proxy = [proxy.location.partition("://")[2], *addresses[1:]]
    files = stranger_to(sandbox, kind)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            opening = await open_direct(sandbox.uri, tls=sandbox.tls)
            namespace = await stack.enter_async_context(opening)
            log = await namespace.open_log(LOG)
            writer = await stack.enter_async_context(await log.open_writer())
            for name in (*ATTACKS, *ATTACKS_ON_PROXY):
                # Thousands of handshakes in progress have a memory of their own.
                is_measured = "connect" not in name and name != "say_nothing"
                server = proxy if name in ATTACKS_ON_PROXY else bookie
                before_kb = resident_kb(server.pid)
                where = at_proxy if name in ATTACKS_ON_PROXY else addresses
                with attacker(name, [*where, *files], niceness=19):
                    for _ in range(RECORDS):
                        await writer.write(LogRecord(0, b"x" * 100))
                        await asyncio.sleep(0.02)
                growth_mib = (resident_kb(server.pid) - before_kb) / 1024
                assert growth_mib < GROWTH_MIB_MAX or not is_measured, name

    asyncio.run(scenario())
    assert "request denied" not in bookie.log_path.read_text()


def test_a_bookie_that_takes_capabilities_denies_each_request_of_a_stranger() -> None:
    """It lets connect who has no certificate, and takes no memory for what such a client sends."""
    options = ("--tls-client-auth=or_capability",)

    async def scenario(sandbox: Sandbox) -> None:
        async with honest(sandbox) as (_, addresses):
            target = target_of(addresses, stranger_to(sandbox, "no-certificate"))
            ledger_id = target.ledger_id
            large = large_add(ledger_id, LARGE_ENTRY_ID + 1)
            for request in (
                bytes_of(ReadEntry(1, ledger_id, LARGE_ENTRY_ID, False)),
                bytes_of(ReadLac(1, ledger_id, True)),
                large,
            ):
                end = await asyncio.wait_for(failure(target, request), 60)
                assert end.status == Status.ACCESS_DENIED

    with Sandbox(bookies=1, autorecovery=False, secure=True, bookie_options=options) as sandbox:
        asyncio.run(scenario(sandbox))


async def failure(target: Target, request: bytes) -> Failed:
    """Return the first refusal that a bookie sends."""
    reader, writer = await target.connection()
    assembly = Assembly(ReceiveMemory(), ANYTHING)
    writer.write(target.hello + request)
    while part := await reader.read(1 << 10):
        assembly.get_buffer()[: len(part)] = part
        assembly.received(len(part))
        while (frame := assembly.next_frame()) is not None:
            message: Message = decode(*frame)
            if isinstance(message, Failed):
                writer.transport.abort()
                return message
    raise AssertionError("the connection ended without a refusal")
