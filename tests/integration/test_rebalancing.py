"""Proxies that were started again one after the other come to an even share of the logs.

Goal: a rolling restart leaves nearly all logs at the proxy that was started again first.  Then each
comes to own about as many, while all are written: no record is lost, doubled or out of order, and
no writer fails.  Method: three proxies as processes are stopped in good order and started again at
their addresses, one after the other, under a writer over proxies for each log.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.backends.flight.namespace import open_namespace as open_remote
from dlcore.base.records import LogRecord
from dlcore.proxy.rendezvous import preferred_owner
from dlcore.sync import open_namespace
from tests.fixtures.lengths import amount
from tests.fixtures.ports import free_ports
from tests.fixtures.proxies import ask, knows, proxy_process, wait_for_no_proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.backends.flight.writing import FlightWriter
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

PROXIES = 3
WAIT_S = 120
REST_S = 0.1
"""The rest of each of two dozen writers; if it is shorter, their writes are most of the cost."""
TOLERANCE = 0.2
OPTIONS = (
    "--rebalance-after-s=1",
    "--rebalance-pause-s=0.05",
    f"--rebalance-tolerance={TOLERANCE}",
)


@dataclass
class Writing:
    """Writes numbers to one log, one after the other."""

    writer: FlightWriter
    done: int = 0
    task: asyncio.Task[None] = field(init=False)

    async def run(self, ending: asyncio.Event) -> None:
        """Do so until the end."""
        while not ending.is_set():
            await self.writer.write(LogRecord(self.done, b"%d" % self.done))
            self.done += 1
            await asyncio.sleep(REST_S)


def names_at(locations: list[str], each: int) -> list[str]:
    """Return names of logs, of which each proxy should own as many."""
    names = (f"even/{uuid4().hex}" for _ in itertools.count())
    return [
        name
        for location in locations
        for name in islice((n for n in names if preferred_owner(n, locations) == location), each)
    ]


def counts(locations: list[str]) -> list[int]:
    """Return how many logs each proxy owns."""
    return [len(ask(location, "logs")["logs"]) for location in locations]


async def until(holds: Callable[[], bool], running: list[Writing]) -> None:
    """Wait until something holds, while all writers write."""
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(holds):
            for each in running:
                if each.task.done():
                    each.task.result()
            await asyncio.sleep(0.05)


def test_a_rolling_restart_under_writers_ends_in_a_balance(sandbox: Sandbox) -> None:
    """The one that was started again first hands over what it has too much."""
    first = free_ports(PROXIES)
    ports = range(first, first + PROXIES)
    locations = [f"grpc://127.0.0.1:{port}" for port in ports]
    names = names_at(locations, amount(20, sampled=8))
    limit = len(names) / PROXIES * (1 + TOLERANCE)

    def is_even() -> bool:
        return max(counts(locations)) <= limit and sum(counts(locations)) == len(names)

    async def scenario(steps: ExitStack) -> list[Writing]:
        proxies = [
            steps.enter_context(proxy_process(sandbox.uri, f"--port={port}", *OPTIONS))
            for port in ports
        ]
        addresses = [each.partition("://")[2] for each in locations]
        async with AsyncExitStack() as opened:
            namespace = await opened.enter_async_context(
                await open_remote(f"grpc://{','.join(addresses)}")
            )
            ending = asyncio.Event()
            running = []
            for name in names:
                writer = await (await namespace.open_log(name)).open_writer()
                running.append(Writing(await opened.enter_async_context(writer)))
            for each in running:
                each.task = asyncio.create_task(each.run(ending))
            for place, port in enumerate(ports):
                await asyncio.to_thread(proxies[place].stop)
                proxies[place] = await asyncio.to_thread(
                    steps.enter_context, proxy_process(sandbox.uri, f"--port={port}", *OPTIONS)
                )
                await until(lambda: all(knows(each, set(locations)) for each in locations), running)
                if place < PROXIES - 1:
                    before = [each.done for each in running]
                    await until(
                        lambda before=before: all(  # type: ignore[misc]
                            each.done > count for each, count in zip(running, before, strict=True)
                        ),
                        running,
                    )
            await until(is_even, running)
            before = [each.done for each in running]
            await until(
                lambda: all(each.done > count for each, count in zip(running, before, strict=True)),
                running,
            )
            moved = [ask(each, "health")["balance"]["handed_over"] for each in locations]
            assert 0 < sum(moved) < len(names)
            ending.set()
            await asyncio.gather(*(each.task for each in running))
        return running

    wait_for_no_proxy(sandbox.uri)
    with open_namespace(sandbox.uri) as namespace:
        for name in names:
            namespace.create_log(name)
        with ExitStack() as steps:
            running = asyncio.run(scenario(steps))
        for name, writing in zip(names, running, strict=True):
            found = namespace.open_log(name).read().to_arrow()["txid"].to_pylist()
            assert found == list(range(writing.done))
