"""A log that stands still beside one that does not, on one proxy.

Goal: whoever writes to a log without a quorum waits, and nobody else.
Method: three bookies, one of which is stopped; one log needs all three, and more is sent to it, by
more streams, than the proxy may hold of all logs.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc
import pytest

from dlcore.config import LedgerClientConfig, LogConfig, QuorumConfig
from dlcore.namespace import Namespace, open_namespace
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.server import ProxyServer
from tests.fixtures.aio import run
from tests.fixtures.served_proxies import Client, Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

LONG_SESSIONS = ("--session-timeout-s", "60")
PATIENT = LedgerClientConfig(add_timeout_s=60.0)
MIB = 1 << 20
PAYLOAD = bytes(1_000_000)
STREAMS, MESSAGES = 20, 2


async def push(stream: Stream) -> None:
    """Send what is acknowledged when all bookies are there."""
    for _ in range(MESSAGES):
        await stream.send(PAYLOAD)
    told = await stream.told_all() or {}
    assert told.get("acked") == MESSAGES, await stream.status()


def test_a_log_without_a_quorum_stops_no_other(fresh_sandbox: Callable[..., Sandbox]) -> None:
    """Its streams want more than all of the memory, and more than its writer takes."""
    cluster = fresh_sandbox(3, bookie_options=LONG_SESSIONS)

    async def open_as(client_id: str) -> Namespace:
        config = LogConfig(pending_bytes_max=16 * MIB)
        return await open_namespace(
            cluster.uri, client_id=client_id, config=config, client_config=PATIENT
        )

    async def scenario() -> None:
        async with AsyncExitStack() as steps:
            direct = await steps.enter_async_context(await open_as("direct"))
            for name, quorum in (
                ("still", QuorumConfig.of_replication_factor(3)),
                ("lively", QuorumConfig()),
            ):
                config = LogConfig(quorum=quorum)
                namespace = await open_namespace(cluster.uri, config=config)
                async with namespace:
                    await namespace.create_log(name)
            server = await ProxyServer.start(open_as, ProxyConfig(pending_bytes_max=8 * MIB))
            await steps.enter_async_context(server)
            channel = grpc.aio.insecure_channel(server.address)
            steps.push_async_callback(channel.close)
            client = Client(channel)
            still = [await client.opened("still") for _ in range(STREAMS)]
            lively = await client.opened("lively")
            cluster.bookies[0].pause()
            try:
                pushing = [asyncio.create_task(push(stream)) for stream in still]
                for number in range(1, 21):
                    await lively.send(PAYLOAD)
                    message = await lively.told()
                    assert message is not None
                    assert message["acked"] == number
                assert not any(task.done() for task in pushing), "it stood still all the while"
            finally:
                cluster.bookies[0].resume()
            await asyncio.gather(*pushing)
            await lively.told_all()
            found = await direct.open_log("still")
            assert await found.get_log_record_count() == STREAMS * MESSAGES

    run(scenario())
