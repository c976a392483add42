"""A log that stands still beside one that does not, on one proxy.

Goal: only writers of a log without a quorum wait or are sent away, and the memory of the proxy for
    that log is bounded.
Method: three bookies, one of which is stopped; one log needs all three, and more is sent to it, by
more streams, than the proxy may hold of all logs.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

from dlcore.backends.direct.namespace import DirectNamespace, open_namespace
from dlcore.base.config import LedgerClientConfig, LogConfig, QuorumConfig
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.server import ProxyServer
from tests.fixtures.aio import run, until
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.proxies import serving_process
from tests.fixtures.resident import resident_kb
from tests.fixtures.served_proxies import Client, Stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

LONG_SESSIONS = ("--session-timeout-s", "60")
PATIENT = LedgerClientConfig(add_timeout_s=60.0)
MIB = 1 << 20
RECORD = bytes(1_000_000)
STREAMS, MESSAGES = 20, 2
# As `dlog proxy run`, but that it waits longer for a bookie than the test may take.
PATIENT_PROXY = """
import asyncio, sys
from dlcore.base.config import LedgerClientConfig
from dlcore.backends.direct.namespace import open_namespace
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.server import ProxyServer

def open_as(client_id):
    client_config = LedgerClientConfig(add_timeout_s=60.0)
    return open_namespace(sys.argv[1], client_id=client_id, client_config=client_config)

async def main():
    config = ProxyConfig(pending_bytes_max=32 << 20, received_bytes_max=32 << 20, window_bytes=1)
    async with await ProxyServer.start(open_as, config) as server:
        print("proxy serving on", server.location, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


async def logs_on(uri: str) -> None:
    """Make a log that needs all three bookies, and one that needs two."""
    for name, quorum in (
        ("still", QuorumConfig.of_replication_factor(3)),
        ("lively", QuorumConfig()),
    ):
        async with await open_namespace(uri, config=LogConfig(quorum=quorum)) as namespace:
            await namespace.create_log(name)


@asynccontextmanager
async def paused(cluster: Sandbox) -> AsyncIterator[None]:
    """Stop a bookie meanwhile."""
    cluster.bookies[0].pause()
    try:
        yield
    finally:
        cluster.bookies[0].resume()


async def write_on(lively: Stream, *, first: int, count: int) -> None:
    """Write so many batches, each of which is acknowledged before the next."""
    for number in range(first, first + count):
        await lively.send(RECORD)
        message = await lively.next_reply()
        assert message is not None, await lively.status()
        assert message["acked"] == number


async def push(stream: Stream) -> None:
    """Send what is acknowledged when all bookies are there."""
    for _ in range(MESSAGES):
        await stream.send(RECORD)
    reply = await stream.last_reply() or {}
    assert reply.get("acked") == MESSAGES, await stream.status()


def test_a_log_without_a_quorum_stops_no_other(fresh_sandbox: Callable[..., Sandbox]) -> None:
    """Its streams want more than all of the memory, and more than its writer takes."""
    cluster = fresh_sandbox(3, bookie_options=LONG_SESSIONS)

    async def open_as(client_id: str) -> DirectNamespace:
        config = LogConfig(pending_bytes_max=16 * MIB)
        return await open_namespace(
            cluster.uri, client_id=client_id, config=config, client_config=PATIENT
        )

    async def scenario() -> None:
        async with AsyncExitStack() as steps:
            await logs_on(cluster.uri)
            direct = await steps.enter_async_context(await open_as("direct"))
            server = await ProxyServer.start(open_as, ProxyConfig(pending_bytes_max=8 * MIB))
            await steps.enter_async_context(server)
            channel = grpc.aio.insecure_channel(server.address)
            steps.push_async_callback(channel.close)
            client = Client(channel)
            still = [await client.opened("still") for _ in range(STREAMS)]
            lively = await client.opened("lively")
            async with paused(cluster):
                pushing = [asyncio.create_task(push(stream)) for stream in still]
                await write_on(lively, first=1, count=20)
                assert not any(task.done() for task in pushing), "it stood still all the while"
            await asyncio.gather(*pushing)
            await lively.last_reply()
            found = await direct.open_log("still")
            assert await found.get_log_record_count() == STREAMS * MESSAGES

    run(scenario())


def test_memory_for_a_log_without_a_quorum_is_bounded(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    """It keeps few messages of 4 MB in 36 streams, and refuses the others; gRPC keeps none."""
    cluster = fresh_sandbox(3, bookie_options=LONG_SESSIONS)
    large = [RECORD] * 4

    async def push_on(stream: Stream) -> None:
        await stream.send(b"small")  # and no more is read until it is acknowledged
        while True:
            await stream.send(*large)

    async def scenario(location: str, pid: int) -> None:
        async with AsyncExitStack() as steps:

            async def opened(log: str) -> Stream:
                address = location.partition("://")[2]
                channel = grpc.aio.insecure_channel(address, options=OWN_CONNECTION)
                steps.push_async_callback(channel.close)
                return await Client(channel).opened(log)

            await logs_on(cluster.uri)
            lively, still = await opened("lively"), [await opened("still") for _ in range(36)]
            pushed = [await opened("still") for _ in range(24)]
            await write_on(lively, first=1, count=5)
            before_kb = resident_kb(pid)
            async with paused(cluster):
                pushing = [asyncio.create_task(push_on(stream)) for stream in pushed]
                await write_on(lively, first=6, count=10)
                assert resident_kb(pid) - before_kb < 60_000, "of what is not read yet"
                await asyncio.gather(*(stream.send(*large) for stream in still))
                ends = [asyncio.create_task(stream.last_reply()) for stream in still]
                await until(lambda: sum(task.done() for task in ends) >= 30)
                await write_on(lively, first=16, count=10)
                # 64 MB may wait or be on their way to bookies.
                assert resident_kb(pid) - before_kb < 150_000
                for task in pushing:
                    task.cancel()
            reply = await asyncio.gather(*ends)
            refused = [
                await each.status() for each, last in zip(still, reply, strict=True) if not last
            ]
            assert len(refused) >= 30
            for code, message, metadata in refused:
                assert (code, metadata["dlog-retry-after-ms"]) == ("UNAVAILABLE", "1000")
                assert "LogNotReadyError: log 'still': " in message
            assert sum("too many bytes wait already" in message for _, message, _ in refused) >= 30
            await lively.last_reply()

    with serving_process([LOADED_PYTHON, "-c", PATIENT_PROXY, cluster.uri]) as proxy:
        run(scenario(proxy.location, proxy.process.pid))
