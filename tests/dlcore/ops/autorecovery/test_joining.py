"""Goal: ledgers that began smaller get the bookies that were wanted.  Method: memory cluster."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from dlcore.base.config import QuorumConfig
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ops.autorecovery.audit import Shortage, lacks_copies
from dlcore.ops.autorecovery.check import Held
from dlcore.ops.autorecovery.plan import joins_of, plan_repair
from dlcore.ops.autorecovery.repair import LedgerRepairer
from dlcore.wire.port import EntryRange
from tests.fixtures.ledger_cluster import Cluster, bodies, read_all, run, write
from tests.fixtures.ledgers import bookies, metadata_of, quorum_of
from tests.fixtures.recovery import (
    QUICK,
    assert_whole,
    context_of,
    listed,
    lose,
    metadata_of_ledger,
    recovering,
    register,
    unregister,
    until,
)

WHOLE = Held([EntryRange(first_entry_id=0, last_entry_id=9)])


async def small_ledger(cluster: Cluster, quorum: QuorumConfig, *gone: str) -> int:
    """Write a ledger while some are gone; return its id."""
    for name in gone:
        await unregister(cluster, name)
    writer = await cluster.client.create_ledger(quorum)
    await write(writer, 10)
    await writer.close()
    return writer.ledger_id


async def has_joined(cluster: Cluster, ledger_id: int) -> bool:
    """Whether a ledger has as many copies as wanted, and is not on the list."""
    metadata = await metadata_of_ledger(cluster, ledger_id)
    return not metadata.copies_lacking and ledger_id not in await listed(cluster)


def test_a_shortage_that_eases_is_noticed_once() -> None:
    """Bookies beyond those wanted are none of its business."""
    shortage = Shortage()
    eased = [shortage.has_eased(count) for count in (2, 2, 3, 3, 4, 3, 2, 1, 2, 5)]
    assert eased == [False, False, True, False, False, False, False, False, True, True]
    shortage.wanted = 6
    assert [shortage.has_eased(count) for count in (6, 5, 7)] == [True, False, True]


@pytest.mark.parametrize("state", LedgerState)
def test_only_a_closed_ledger_gets_more(state: LedgerState) -> None:
    """An open one is its writer's."""
    is_closed = state is LedgerState.CLOSED
    metadata = structs.replace(
        metadata_of(
            (0, "AB"),
            (5, "AC"),
            quorum=quorum_of(2, 2, 2),
            state=state,
            last_entry_id=9 if is_closed else -1,
        ),
        wanted=QuorumConfig(),
    )
    answers = dict.fromkeys(bookies("ABC"), WHOLE)
    plan = plan_repair(metadata, lost=(), answers=answers)
    assert plan.lacks_copies == lacks_copies(metadata) == is_closed
    assert plan.is_done is (state is LedgerState.OPEN)
    joins = [(join.fragment.first_entry_id, join.position) for join in joins_of(metadata)]
    assert joins == [(0, 2), (5, 2)]


@pytest.mark.parametrize(
    ("wanted", "gone", "copies"),
    [((3, 3, 2), "CDE", 3), ((5, 4, 2), "CDE", 4), ((3, 3, 1), "BCDE", 3), ((5, 3, 2), "E", 3)],
)
def test_bookies_that_come_back_join(wanted: tuple[int, int, int], gone: str, copies: int) -> None:
    """At once, though the next audit is far; then any that are left have every entry."""

    async def scenario(cluster: Cluster) -> None:
        async with recovering(cluster):
            for name in gone:
                await unregister(cluster, name)
            await asyncio.sleep(15)  # the first audit does not see the ledger
            ledger_id = await small_ledger(cluster, quorum_of(*wanted))
            begun = asyncio.get_running_loop().time()
            for name in gone:
                await register(cluster, name)
            await until(lambda: has_joined(cluster, ledger_id))
            assert asyncio.get_running_loop().time() - begun < 10
        metadata = await assert_whole(cluster, ledger_id)
        assert metadata.quorum == quorum_of(copies, copies, wanted[2])
        (ensemble,) = metadata.ensembles
        assert len(set(ensemble.bookies)) == copies
        for last in ensemble.bookies:
            for each in ensemble.bookies:
                if each != last:
                    cluster.bookies[each.name].stop()
            reader = await cluster.client.open_ledger(ledger_id)
            assert await read_all(reader, 0, 9) == bodies(0, 9)
            for each in ensemble.bookies:
                cluster.bookies[each.name].start()

    run(scenario, "ABCDE")


def test_the_list_says_what_is_lacking_while_no_bookie_can_join() -> None:
    """A ledger that is closed later is found by the next audit; an open one is let alone."""

    async def scenario(cluster: Cluster) -> None:
        await unregister(cluster, "C")
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        async with recovering(cluster):
            await asyncio.sleep(2 * QUICK.audit_interval_s)
            assert not await listed(cluster)
            await writer.close()
            await asyncio.sleep(2 * QUICK.audit_interval_s)
            (entry,) = (await listed(cluster)).values()
            assert "no bookie can join the 2 that hold the ledger, where 3/3/2 is" in entry.reason
            await register(cluster, "C")
            await until(lambda: has_joined(cluster, writer.ledger_id))

    run(scenario, "ABC")


def test_a_lost_bookie_of_a_small_ledger_is_replaced_before_another_joins() -> None:
    """Each by a copy from the one that is left."""

    async def scenario(cluster: Cluster) -> None:
        ledger_id = await small_ledger(cluster, QuorumConfig(), "C", "D")
        async with recovering(cluster):
            await lose(cluster, "A")
            await register(cluster, "C")
            await register(cluster, "D")
            await until(lambda: has_joined(cluster, ledger_id))

            async def is_without_a() -> bool:
                metadata = await metadata_of_ledger(cluster, ledger_id)
                return {each.name for each in metadata.last_ensemble.bookies} == {*"BCD"}

            await until(is_without_a)
        await assert_whole(cluster, ledger_id)

    run(scenario, "ABCD")


def test_a_joined_bookie_is_kept_out_where_the_ledger_changed_meanwhile() -> None:
    """The copy fits the ledger that was copied, and no other."""

    async def scenario(cluster: Cluster) -> None:
        ledger_id = await small_ledger(cluster, QuorumConfig(), "C", "D")
        context, store = context_of(cluster)
        repairer = LedgerRepairer(context, QUICK)
        planned = await metadata_of_ledger(cluster, ledger_id)
        c, d = (cluster.bookies[name].bookie for name in "CD")
        assert await repairer._enlarge(planned, {0: c}, "")
        assert not await repairer._enlarge(planned, {0: d}, "")
        assert (await metadata_of_ledger(cluster, ledger_id)).last_ensemble.bookies[2:] == (c,)
        await context.ledgers.aclose()
        await store.aclose()

    run(scenario, "ABCD")
