"""Goal: operators are told the truth about replicas, and what keeps a bookie from going."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dlcore.autorecovery.config import AutoRecoveryConfig
from dlcore.autorecovery.listing import RepairList
from dlcore.autorecovery.maintenance import Maintenance, is_replicated
from dlcore.config import QuorumConfig
from dlcore.errors import ConfigurationError, DecommissionError
from dlcore.ledger.codec import BookieCookie, encode_cookie
from tests.fixtures.ledger_cluster import PATHS, Cluster, TokenClock, run, write
from tests.fixtures.ledgers import quorum_of
from tests.fixtures.recovery import (
    listed,
    lose,
    metadata_of_ledger,
    publish,
    recovering,
    register,
    services_of,
    until,
)

if TYPE_CHECKING:
    from dlcore.ids import BookieId


def maintenance_of(cluster: Cluster) -> Maintenance:
    """Return the operations of one more process."""
    services, _ = services_of(cluster, "operator")
    return Maintenance(services)


async def make_cookie(cluster: Cluster, bookie: BookieId) -> str:
    """Give a bookie its cookie, as a real one has; return its path."""
    cookie = BookieCookie(
        name=bookie.name, incarnation=bookie.incarnation, cluster_id="c", created_ms=0
    )
    await cluster.store.create(PATHS.cookie(bookie.name), encode_cookie(cookie))
    return PATHS.cookie(bookie.name)


def test_a_check_tells_of_each_bookie_what_it_holds() -> None:
    """Missing entries by range, unknown as unknown, an open ledger up to its LAC."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        await writer.publish_lac()
        operator = maintenance_of(cluster)
        metadata, checks = await operator.check_ledger(writer.ledger_id)
        assert [each.fragment.last_entry_id for each in checks] == [9, 9, 9]
        assert is_replicated(metadata, checks)
        for entry_id in (3, 4):
            del cluster.member(writer, 1).entries(writer.ledger_id)[entry_id]
        await lose(cluster, cluster.member(writer, 2).bookie.name)
        metadata, checks = await operator.check_ledger(writer.ledger_id)
        assert [(r.first_entry_id, r.last_entry_id) for r in checks[1].missing] == [(3, 4)]
        assert checks[2].unknown == "it is not registered"
        assert not is_replicated(metadata, checks)
        await operator.recover_ledger(writer.ledger_id)
        await writer.abandon()

    run(scenario)


def test_a_decommission_says_what_blocks_it() -> None:
    """A bookie that runs, nobody who works, a pause, too few bookies; then it goes through."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        metadata = await writer.close()
        gone, spare = (
            cluster.member(writer, 0),
            next(
                each
                for each in cluster.bookies.values()
                if each.bookie not in metadata.last_ensemble.bookies
            ),
        )
        cookie = await make_cookie(cluster, gone.bookie)
        name, operator = gone.bookie.name, maintenance_of(cluster)
        repairs = RepairList(cluster.store, PATHS, TokenClock())
        told: list[str] = []

        async def refusal() -> str:
            with pytest.raises(DecommissionError) as caught:
                await operator.decommission(name, timeout_s=0, report=told.append)
            return str(caught.value)

        assert "is registered at 127.0.0.1:1: stop it first" in await refusal()
        await lose(cluster, name, spare.bookie.name)
        assert "no auto-recovery runs" in await refusal()
        assert (await listed(cluster))[writer.ledger_id].missing == (gone.bookie,)
        await repairs.set_paused(is_paused=True)
        assert "is paused" in await refusal()
        async with recovering(cluster):
            await repairs.set_paused(is_paused=False)

            async def is_tried() -> bool:
                return bool((await listed(cluster))[writer.ledger_id].reason)

            await until(is_tried)
            assert f"ledger {writer.ledger_id}: no bookie can take the place" in await refusal()
            assert await cluster.store.get(cookie) is not None
            await register(cluster, spare.bookie.name)
            assert await operator.decommission(name, timeout_s=100, report=told.append) == 1
        assert await cluster.store.get(cookie) is None
        stored = await metadata_of_ledger(cluster, writer.ledger_id)
        assert gone.bookie not in stored.last_ensemble.bookies
        with pytest.raises(ConfigurationError, match="no bookie of that name"):
            await operator.decommission(name, timeout_s=0, report=told.append)
        assert told[0] == f"1 ledgers refer to {name}"

    run(scenario)


def test_a_damaged_node_on_the_list_is_repaired_like_any_other() -> None:
    """What the ledger lacks is found out anew; others are not held up."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await write(writer, 10)
        await writer.close()
        await publish(cluster, writer.ledger_id)
        await cluster.store.put(
            PATHS.under_replicated_ledger(writer.ledger_id), b"\xff\xff", version=0
        )
        await cluster.store.create(PATHS.last_check, b"\xff\xff", make_parents=True)
        del cluster.member(writer, 1).entries(writer.ledger_id)[4]
        status = await maintenance_of(cluster).read_status()
        assert "do not parse" in status.ledgers[0].reason
        assert (status.auditor, status.is_paused, status.last_check) == (None, False, None)
        async with recovering(cluster):

            async def is_done() -> bool:
                return not await listed(cluster)

            await until(is_done)
        assert 4 in cluster.member(writer, 1).entries(writer.ledger_id)

    run(scenario)


@pytest.mark.parametrize("key", ["lost_bookie_delay_s", "open_ledger_grace_s"])
def test_delays_may_be_nothing_and_not_less(key: str) -> None:
    """The message names the option."""
    nothing: dict[str, Any] = {key: 0.0}
    AutoRecoveryConfig(**nothing)
    with pytest.raises(ConfigurationError, match=rf"{key}=-1.*expected seconds >= 0"):
        AutoRecoveryConfig(**(nothing | {key: -1.0}))
    with pytest.raises(ConfigurationError, match="ledgers_at_once=0"):
        AutoRecoveryConfig(ledgers_at_once=0)
