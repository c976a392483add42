"""Racks and quarantine with real bookies.

Goal: every ensemble spans both racks of a cluster, and a bookie that stands still is not chosen
until it works again.  Method: five bookie processes in two racks, one of which is stopped with
SIGSTOP while its registration lives on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.config import LedgerClientConfig, QuarantineConfig, QuorumConfig
from dlcore.base.ids import BookieId
from tests.fixtures.aio import until_async
from tests.fixtures.lateness import run_in_own_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.ledger.client import LedgerClient
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

RACKS = ("/eu/r1", "r2")
LONG_SESSIONS = ("--session-timeout-s", "40")
"""The stopped bookie stays registered: nothing but its silence tells of it."""
TIMEOUT_S = 240.0
PAIR = QuorumConfig(ensemble_size=2, write_quorum_size=2, ack_quorum_size=1)
ALL = QuorumConfig(ensemble_size=5, write_quorum_size=5, ack_quorum_size=4)
CLIENT = LedgerClientConfig(
    add_timeout_s=8.0, quarantine=QuarantineConfig(failures_min=1, period_s=3600.0)
)


async def choose_pair(ledgers: LedgerClient) -> tuple[BookieId, ...]:
    """Return the ensemble of a new ledger."""
    writer = await ledgers.create_ledger(PAIR)
    await writer.close()
    return writer.metadata.last_ensemble.bookies


def test_both_racks_and_no_bookie_that_stands_still(fresh_sandbox: Callable[..., Sandbox]) -> None:
    """Stop, let an add time out, look at new ensembles; go on, let it answer, look again."""
    cluster = fresh_sandbox(5, racks=RACKS, bookie_options=LONG_SESSIONS)

    async def scenario() -> None:
        async with (
            asyncio.timeout(TIMEOUT_S),
            await open_namespace(cluster.uri, client_config=CLIENT) as namespace,
        ):
            infos = {info.bookie: info for info in await namespace.get_bookies()}
            assert [info.rack for info in infos.values()] == [RACKS[i % 2] for i in range(5)]
            assert all(0 < info.free_bytes < info.total_bytes for info in infos.values())
            ledgers = namespace.ports.ledgers
            for _ in range(10):
                pair = await choose_pair(ledgers)
                assert {infos[each].rack for each in pair} == {*RACKS}
            process = cluster.bookies[2]
            victim = BookieId(process.name, process.incarnation)
            conduct, loop = ledgers.placer.health.adds, asyncio.get_running_loop()
            writer = await ledgers.create_ledger(ALL)
            await writer.append([b"before"])
            process.pause()
            await writer.append([b"while it stands still"])

            async def is_quarantined() -> bool:
                return conduct.is_quarantined(victim, loop.time())

            await until_async(is_quarantined)
            await writer.close()
            assert victim in await ledgers.placer.list_writable()
            for _ in range(10):
                pair = await choose_pair(ledgers)
                assert victim not in pair
                assert {infos[each].rack for each in pair} == {*RACKS}
            process.resume()
            writer = await ledgers.create_ledger(ALL)  # for five there are no others
            await writer.append([b"after"])

            async def is_chosen() -> bool:
                return victim in await choose_pair(ledgers)

            await until_async(is_chosen)
            await writer.close()

    run_in_own_time(scenario())
