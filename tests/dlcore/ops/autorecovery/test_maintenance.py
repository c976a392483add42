"""Goal: operators get the truth about replicas, and what keeps a bookie from going."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import ConfigurationError, DecommissionError
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.values import BookieCookie, BookieRegistration
from dlcore.metadata.stored import encode
from dlcore.ops.autorecovery.config import AutoRecoveryConfig
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.maintenance import Maintenance, is_replicated
from dlcore.ops.autorecovery.replicas import read_cookies
from tests.fixtures.ledger_cluster import PATHS, Cluster, TokenClock, run, write
from tests.fixtures.ledgers import quorum_of
from tests.fixtures.recovery import (
    context_of,
    listed,
    lose,
    metadata_of_ledger,
    publish,
    recovering,
    register,
    unregister,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.metadata.port import Op


def maintenance_of(cluster: Cluster) -> Maintenance:
    """Return the operations of one more process."""
    context, _ = context_of(cluster, "operator")
    return Maintenance(context)


async def make_cookie(cluster: Cluster, bookie: BookieId) -> str:
    """Give a bookie its cookie, as a real one has; return its path."""
    cookie = BookieCookie(
        name=bookie.name, incarnation=bookie.incarnation, cluster_id="c", created_ms=0
    )
    await cluster.store.create(PATHS.cookie(bookie.name), encode(cookie))
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
        await cluster.client.recover_ledger(writer.ledger_id)
        await writer.abandon()

    run(scenario)


def test_a_decommission_says_what_blocks_it() -> None:
    """A running bookie, no worker, a pause, too few bookies; then it goes through."""

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
        reported: list[str] = []

        async def refusal() -> str:
            with pytest.raises(DecommissionError) as caught:
                await operator.decommission(name, timeout_s=0, report=reported.append)
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
            assert f"too few bookies: 1 of 1 ledgers, such as ledger {writer.ledger_id} " in (
                await refusal()
            )
            assert await cluster.store.get(cookie) is not None
            await register(cluster, spare.bookie.name)
            assert await operator.decommission(name, timeout_s=100, report=reported.append) == 1
        assert await cluster.store.get(cookie) is None
        stored = await metadata_of_ledger(cluster, writer.ledger_id)
        assert gone.bookie not in stored.last_ensemble.bookies
        with pytest.raises(ConfigurationError, match="no bookie of that name"):
            await operator.decommission(name, timeout_s=0, report=reported.append)
        assert reported[0] == f"1 ledgers refer to {name}"

    run(scenario)


def test_too_few_bookies_are_reported_at_once_and_again() -> None:
    """Before auto-recovery tried, each minute, and with what to do; then it goes through."""

    async def scenario(cluster: Cluster) -> None:
        gone, ledger_id = await stopped_bookie(cluster)
        members = (await metadata_of_ledger(cluster, ledger_id)).last_ensemble.bookies
        spare = next(each.bookie for each in cluster.bookies.values() if each.bookie not in members)
        await unregister(cluster, spare.name)
        read_only, held = (
            PATHS.bookie_readonly(spare.name),
            BookieRegistration(
                name=spare.name,
                incarnation=spare.incarnation,
                address="127.0.0.1:1",
                read_only=True,
            ),
        )
        await cluster.store.create(read_only, encode(held), make_parents=True)
        warned: list[str] = []
        async with recovering(cluster):
            repairs = RepairList(cluster.store, PATHS, TokenClock())
            await until(repairs.read_auditor)
            waiting = asyncio.create_task(
                maintenance_of(cluster).decommission(
                    gone.name, timeout_s=10_000, report=lambda _: None, warn=warned.append
                )
            )
            await asyncio.sleep(150)
            expected = (
                f"too few bookies: 1 of 1 ledgers, such as ledger {ledger_id} with E/Qw/Qa 3/3/2, "
                f"need another bookie in the place of {gone.name}; 2 are registered and writable, "
                "1 read-only, and all that are writable hold them already; to do: start another "
                "bookie, and this goes on by itself"
            )
            assert warned == [expected] * 3
            await cluster.store.delete(read_only)
            await register(cluster, spare.name)
            assert await waiting == 1

    run(scenario)


async def stopped_bookie(cluster: Cluster) -> tuple[BookieId, int]:
    """Return a bookie that is stopped and has a cookie, and a ledger that needs it."""
    writer = await cluster.client.create_ledger(QuorumConfig())
    await write(writer, 10)
    await writer.close()
    gone = cluster.member(writer, 0).bookie
    await make_cookie(cluster, gone)
    await lose(cluster, gone.name)
    return gone, writer.ledger_id


def test_a_decommission_ends_when_its_bookie_is_started_again() -> None:
    """It would wait in vain: the list is for bookies that are gone."""

    async def scenario(cluster: Cluster) -> None:
        gone, _ = await stopped_bookie(cluster)
        operator = maintenance_of(cluster)
        waiting = asyncio.create_task(
            operator.decommission(gone.name, timeout_s=10_000, report=lambda _: None)
        )
        await asyncio.sleep(5)
        assert not waiting.done()
        await register(cluster, gone.name)
        start = asyncio.get_running_loop().time()
        with pytest.raises(DecommissionError, match="stop it first"):
            await waiting
        assert asyncio.get_running_loop().time() - start < 10
        assert await cluster.store.get(PATHS.cookie(gone.name)) is not None

    run(scenario)


def test_a_decommission_does_not_take_the_cookie_of_a_successor() -> None:
    """An empty bookie of that name was set up while the ledgers moved."""

    async def scenario(cluster: Cluster) -> None:
        gone, _ = await stopped_bookie(cluster)
        operator = maintenance_of(cluster)
        waiting = asyncio.create_task(
            operator.decommission(gone.name, timeout_s=10_000, report=lambda _: None)
        )
        await asyncio.sleep(5)
        await cluster.store.delete(PATHS.cookie(gone.name))
        cookie = await make_cookie(cluster, BookieId(gone.name, "f" * 32))
        async with recovering(cluster):
            with pytest.raises(DecommissionError, match=r"another incarnation.*f{32}"):
                await waiting
        assert await cluster.store.get(cookie) is not None

    run(scenario)


def test_a_cookie_is_deleted_only_while_its_bookie_is_not_registered() -> None:
    """In one transaction: it may have been started after the last look."""

    async def scenario(cluster: Cluster) -> None:
        gone = cluster.bookies["A"].bookie
        cookie = await make_cookie(cluster, gone)
        await lose(cluster, gone.name)
        context, store = context_of(cluster, "operator")
        multi = store.multi

        async def start_it_first(ops: Sequence[Op]) -> None:
            if any(op.path == cookie for op in ops):
                await register(cluster, gone.name)
            await multi(ops)

        store.multi = start_it_first  # type: ignore[method-assign]  # a race, at its worst moment
        with pytest.raises(DecommissionError, match="was started meanwhile"):
            await Maintenance(context).decommission(gone.name, timeout_s=0, report=lambda _: None)
        assert await cluster.store.get(cookie) is not None
        store.multi = multi  # type: ignore[method-assign]
        await unregister(cluster, gone.name)
        store.lose_next_reply(applied=True)
        await Maintenance(context).decommission(gone.name, timeout_s=0, report=lambda _: None)
        assert await cluster.store.get(cookie) is None
        assert await cluster.store.get(PATHS.bookie_available(gone.name)) is None

    run(scenario)


def test_a_damaged_cookie_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """A caller that lists the bookies gets a line about it, and the rest."""

    async def scenario(cluster: Cluster) -> None:
        a, b, c = (each.bookie for each in list(cluster.bookies.values())[:3])
        for each in (c, a, b):
            path = await make_cookie(cluster, each)
            if each is b:
                await cluster.store.put(path, b"{", version=0)
        context, _ = context_of(cluster, "operator")
        assert [each.bookie for each in await read_cookies(context)] == [a, c]
        assert PATHS.cookie(b.name) in caplog.text

    run(scenario)


def test_a_damaged_node_on_the_list_is_repaired_like_any_other() -> None:
    """The missing replicas are found anew; others are not held up."""

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
        assert "does not parse" in status.ledgers[0].reason
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
    with pytest.raises(ConfigurationError, match=rf"{key}=-1.*expected a number >= 0"):
        AutoRecoveryConfig(**(nothing | {key: -1.0}))
    with pytest.raises(ConfigurationError, match="ledgers_at_once=0"):
        AutoRecoveryConfig(ledgers_at_once=0)
