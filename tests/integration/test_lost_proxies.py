"""A proxy that is stopped in the middle of what it does, or killed.

Goal: its clients, writers and readers, those that are open and those that begin, go on at another
proxy: of a stopped one as soon as ZooKeeper gives its logs away, of a killed one at once.  Method:
a proxy's process is stopped for good, whose system still takes connections, or killed.  Each step
has a time that no client keeps that waits for gRPC's own limits, 20 s and more.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.records import LogRecord
from tests.fixtures.proxies import log_name_for, two_proxies

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.backends.flight.reader import FlightReader
    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

WAIT_S = 60
HANG_S = 20


async def ids(reader: FlightReader) -> AsyncGenerator[int, None]:
    """Yield the transaction ids of records as they come."""
    async for batch in reader.batches(follow=True):
        for txid in batch.column("txid").to_pylist():
            yield txid


def test_clients_of_a_stopped_proxy_go_on_at_another(sandbox: Sandbox) -> None:
    """An open writer, an open reader, and those that begin then and ask the stopped one first."""

    async def scenario(frozen: ProxyProcess, endpoint: str, name: str) -> None:
        async with await open_namespace(endpoint) as namespace:
            log = await namespace.open_log(name, create_if_missing=True)
            async with await log.open_writer() as writer, await log.open_reader() as reader:
                seen = ids(reader)
                async with asyncio.timeout(WAIT_S):
                    await writer.write(LogRecord(0, b"x"))
                    assert await anext(seen) == 0
                frozen.process.send_signal(signal.SIGSTOP)
                following = asyncio.create_task(anext(seen))
                async with asyncio.timeout(HANG_S):
                    await writer.write(LogRecord(1, b"x"))
                    assert await following == 1
        async with asyncio.timeout(HANG_S), await open_namespace(endpoint) as namespace:
            log = await namespace.open_log(name)
            assert await log.get_log_record_count() == 2
            async with await log.open_writer() as writer:
                await writer.write(LogRecord(2, b"x"))
            async with await log.open_reader() as reader:
                assert [await anext(rows) for rows in [ids(reader)] for _ in range(3)] == [0, 1, 2]

    with two_proxies(sandbox.uri, is_killed=True) as (frozen, other):
        name = log_name_for(frozen, sandbox.uri)
        endpoint = f"{frozen.location},{other.location.partition('://')[2]}"
        asyncio.run(scenario(frozen, endpoint, name))


def test_the_logs_of_a_killed_proxy_are_taken_before_its_session_is_over(sandbox: Sandbox) -> None:
    """The one that is asked next finds no listener there, and need not wait for ZooKeeper.

    Its session of 30 s outlasts what the writer is given.
    """

    async def scenario(killed: ProxyProcess, endpoint: str, name: str) -> None:
        async with await open_namespace(endpoint) as namespace:
            log = await namespace.open_log(name, create_if_missing=True)
            async with await log.open_writer() as writer:
                async with asyncio.timeout(WAIT_S):
                    await writer.write(LogRecord(0, b"x"))
                killed.kill()
                async with asyncio.timeout(HANG_S):
                    await writer.write(LogRecord(1, b"x"))

    with two_proxies(sandbox.uri) as (killed, other):
        name = log_name_for(killed, sandbox.uri)
        endpoint = f"{killed.location},{other.location.partition('://')[2]}"
        asyncio.run(scenario(killed, endpoint, name))
