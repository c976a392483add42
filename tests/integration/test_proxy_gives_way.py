"""A direct writer that waits for a log which a proxy owns, both as processes with ZooKeeper.

Goal: it need not wait until the log was idle for as long as the proxy keeps it, nor tell an
operator: the proxy answers what it accepted, and lets go.  Method: a producer writes through the
proxy without a pause while a writer of the core opens the log.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.backends.direct.namespace import open_namespace
from dlcore.backends.flight.namespace import open_namespace as open_remote
from dlcore.base.config import LogConfig
from dlcore.base.records import LogRecord
from tests.fixtures.aio import until
from tests.fixtures.proxies import proxy_process, wait_for_no_proxy

if TYPE_CHECKING:
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

WAIT_S = 90


def test_a_direct_writer_gets_a_log_that_is_written_through_a_proxy(sandbox: Sandbox) -> None:
    """The records of both are there once; then the producer goes on."""
    name = f"gives-way/{uuid4().hex}"

    async def scenario(location: str) -> None:
        done, is_ending = 0, False

        async def produce() -> None:
            nonlocal done
            async with (
                await open_remote(location) as namespace,
                await (await namespace.open_log(name)).open_writer() as writer,
            ):
                while not is_ending:
                    await writer.write(LogRecord(0, b"%d" % done))
                    done += 1

        async with asyncio.timeout(WAIT_S), await open_namespace(sandbox.uri) as namespace:
            await namespace.create_log(name)
            producing = asyncio.create_task(produce())
            await until(lambda: done > 5 or producing.done())
            log = await namespace.open_log(name, config=LogConfig(lock_timeout_s=WAIT_S))
            async with await log.open_writer() as writer:
                await writer.write(LogRecord(0, b"own"))
            before = done
            await until(lambda: done > before + 1 or producing.done())
            is_ending = True
            await producing
            async with await log.open_reader() as reader:
                found = [await reader.read_next() for _ in range(done + 1)]
        payloads = [each.payload for each in found if each is not None]
        payloads.remove(b"own")
        assert payloads == [b"%d" % number for number in range(done)]

    wait_for_no_proxy(sandbox.uri)
    with proxy_process(sandbox.uri) as proxy:
        asyncio.run(scenario(proxy.location))
