"""A writer whose bookie falls silent: noticed in time, replaced, and no acknowledgement doubted.

Goal: a bookie whose connections stay open and bring nothing costs a writer one add time-out.
Method: a bookie process stopped with SIGSTOP, and a network that drops requests, answers or both on
the way to a bookie; all copies must be acknowledged, so that nothing goes on without a replacement.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.clock import SystemClock
from dlcore.base.config import LedgerClientConfig, QuorumConfig
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.stored import encode
from dlcore.wire.client import WireBookieClient
from tests.fixtures.freezer import Freezer
from tests.fixtures.ledger_cluster import read_all, write
from tests.fixtures.ledgers import bookie
from tests.fixtures.served_bookie import CLUSTER_ID, run, serve
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.base.ids import BookieId
    from dlcore.ledger.writing.writer import LedgerWriter
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

LONG_SESSIONS = ("--session-timeout-s", "60")
"""The stopped bookie stays registered: nothing but its silence tells of it."""
COPIES = QuorumConfig.of_replication_factor(3)
CLIENT = LedgerClientConfig(add_timeout_s=5.0, read_timeout_s=5.0)
"""As much again has the replacement, to which other processes and disks answer."""
PATHS = NamespacePaths("/dlog")


async def write_past(writer: LedgerWriter, victim: BookieId) -> None:
    """Write while `victim` is silent: acknowledged in time, and without it."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    await write(writer, 10)
    assert clock() - began_s < 2 * CLIENT.add_timeout_s
    last = writer.metadata.last_ensemble
    assert victim not in last.bookies
    assert last.first_entry_id == 10
    await write(writer, 10)


async def check(ledgers: LedgerClient, ledger_id: int, count: int) -> None:
    """See that a reader is given what was acknowledged."""
    reader = await ledgers.open_ledger(ledger_id)
    assert await read_all(reader, 0, count - 1) == [b"entry-%d" % i for i in range(count)]


def test_a_stopped_process_is_noticed_and_replaced(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    """SIGSTOP; the kernel goes on taking what is sent to it.  Then it goes on, too late."""
    cluster = fresh_sandbox(4, bookie_options=LONG_SESSIONS)

    async def scenario() -> None:
        async with (
            await open_namespace(cluster.uri, client_config=CLIENT) as namespace,
            await open_namespace(cluster.uri, client_config=CLIENT) as other,
        ):
            writer = await namespace.ports.ledgers.create_ledger(COPIES)
            await write(writer, 10)
            member = writer.metadata.last_ensemble.bookies[1]
            process = next(each for each in cluster.bookies if each.name == member.name)
            process.pause()
            try:
                await write_past(writer, member)
                await writer.publish_lac()
                await check(other.ports.ledgers, writer.ledger_id, 30)
            finally:
                process.resume()
            await write(writer, 10)
            metadata = await writer.close()
            assert metadata.last_entry_id == 39
            await check(other.ports.ledgers, writer.ledger_id, 40)

    run(scenario)


@pytest.mark.parametrize(("requests", "answers"), [(True, True), (True, False), (False, True)])
def test_a_half_open_connection_is_noticed_and_replaced(
    tmp_path: Path, requests: bool, answers: bool
) -> None:
    """Sent data vanishes, one way or both; later all of it arrives after all."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        clock = SystemClock()
        await ensure_namespace(store, PATHS, clock)
        freezers: dict[BookieId, Freezer] = {}
        addresses: dict[BookieId, str] = {}
        async with AsyncExitStack() as stack:
            for name in "ABCD":
                here = bookie(name)
                served = await stack.enter_async_context(serve(tmp_path / name, bookie=here))
                freezers[here] = Freezer(served.address)
                addresses[here] = await stack.enter_async_context(freezers[here].listen())
                registration = BookieRegistration(
                    name=name, incarnation=here.incarnation, address=addresses[here]
                )
                await store.create(PATHS.bookie_available(name), encode(registration))

            async def resolve(here: BookieId) -> str:
                return addresses[here]

            ledgers = LedgerClient(
                ledger_store=LedgerStore(store, PATHS),
                registry=BookieRegistry(store, PATHS),
                bookies=WireBookieClient(resolve, cluster_id=CLUSTER_ID, config=CLIENT),
                config=CLIENT,
                clock=clock,
                rng=random.Random(5),
            )
            stack.push_async_callback(ledgers.aclose)
            writer = await ledgers.create_ledger(COPIES)
            await write(writer, 10)
            member = writer.metadata.last_ensemble.bookies[1]
            freezers[member].freeze(requests=requests, answers=answers)
            await write_past(writer, member)
            await writer.publish_lac()
            await check(ledgers, writer.ledger_id, 30)
            freezers[member].thaw()
            await write(writer, 10)
            assert (await writer.close()).last_entry_id == 39
            await check(ledgers, writer.ledger_id, 40)

    run(scenario)
