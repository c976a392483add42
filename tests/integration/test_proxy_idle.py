"""Thousands of streams that are open and silent: they cost a proxy little, and others nothing.

Method: a proxy in a process of its own; some streams are ready and send nothing, some did not even
say which log they are for; its memory is read before and after, while another client writes.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
from uuid import uuid4

import grpc
import pytest

from dlcore.backends.direct.namespace import open_namespace
from tests.fixtures.aio import run, until
from tests.fixtures.lengths import amount
from tests.fixtures.proxies import proxy_process
from tests.fixtures.resident import resident_kb
from tests.fixtures.served_proxies import Client, Stream

if TYPE_CHECKING:
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

STREAMS = amount(5000, sampled=400)
CONNECTIONS = 10
KB_EACH_MAX = 60
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


async def opened(client: Client, log: str) -> list[Stream]:
    """Open streams that wait for nothing, every other of them to no log that is known."""
    return [
        client.put() if number % 2 else await client.opened(log)
        for number in range(STREAMS // CONNECTIONS)
    ]


async def write_one_by_one(stream: Stream, acked: asyncio.Semaphore) -> None:
    """Write as long as it is let, and tell of each acknowledgement."""
    count = 0
    while True:
        await stream.send(b"lively")
        count += 1
        assert (await stream.next_reply() or {}).get("acked") == count, await stream.status()
        acked.release()


def test_idle_streams_cost_little(sandbox: Sandbox) -> None:
    """A client that writes beside them is served, and clients that wake up are, too."""

    async def scenario(location: str, pid: int) -> None:
        logs = [f"idle/{uuid4().hex}" for _ in range(CONNECTIONS)]
        async with AsyncExitStack() as steps:
            async with await open_namespace(sandbox.uri) as namespace:
                for log in logs:
                    await namespace.create_log(log)
            clients = []
            for _ in logs:
                address = location.partition("://")[2]
                channel = grpc.aio.insecure_channel(address, options=OWN_CONNECTION)
                steps.push_async_callback(channel.close)
                clients.append(Client(channel))
            acked = asyncio.Semaphore(0)
            lively = await clients[0].opened(logs[0])
            writing = asyncio.create_task(write_one_by_one(lively, acked))
            await acked.acquire()
            before_kb = resident_kb(pid)
            groups = await asyncio.gather(*map(opened, clients, logs))
            grown_kb = resident_kb(pid) - before_kb
            assert grown_kb < 10_000 + KB_EACH_MAX * STREAMS
            while not acked.locked():
                await acked.acquire()
            for _ in range(20):
                await acked.acquire()
            assert not writing.done()
            for streams in groups:
                await streams[0].send(b"woken")
                assert (await streams[0].last_reply() or {})["acked"] == 1
            writing.cancel()
            for stream in (lively, *(stream for streams in groups for stream in streams)):
                stream.call.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    with proxy_process(sandbox.uri) as proxy:
        run(scenario(proxy.location, proxy.process.pid))
