"""Goal: rare conditions neither lose a finding nor load the store nor fence a writer too early.

Method: each condition is made on the memory cluster, in virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import BookieUnavailableError
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.values import LedgerState
from dlcore.metadata.stored import encode
from dlcore.ops.autorecovery.listing import ListedLedger, RepairList
from dlcore.ops.autorecovery.repair import LedgerRepairer
from dlcore.ops.autorecovery.values import ElectedAuditor, UnderReplicatedLedger
from tests.fixtures.ledger_cluster import PATHS, Cluster, TokenClock, run, write
from tests.fixtures.ledgers import quorum_of
from tests.fixtures.recovery import (
    QUICK,
    assert_whole,
    context_of,
    listed,
    lose,
    metadata_of_ledger,
    publish,
    recovering,
    register,
    unregister,
    until,
    until_none_listed,
)

if TYPE_CHECKING:
    from dlcore.ledger.metadata.values import BookieRegistration


def finding(ledger_id: int, *missing: BookieId) -> ListedLedger:
    """Return a ledger as it is on the list."""
    entry = UnderReplicatedLedger(ledger_id=ledger_id, missing=missing, since_ms=0)
    return ListedLedger(entry, version=0)


def test_a_failure_without_words_is_a_failure() -> None:
    """A ledger whose repair failed stays on the list, whatever the error says of itself."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await write(writer, 10)
        await writer.close()
        member = cluster.member(writer, 1)
        del member.entries(writer.ledger_id)[4]

        def refuse(frame: bytes, *, is_recovery: bool) -> None:
            raise BookieUnavailableError("")

        member.add_entry = refuse  # type: ignore[method-assign]  # a bookie without words
        context, _ = context_of(cluster)
        outcome = await LedgerRepairer(context, QUICK).repair(finding(writer.ledger_id))
        assert not outcome.is_done
        assert outcome.reason == "BookieUnavailableError"

    run(scenario)


def test_a_long_list_is_not_read_again_for_every_ledger() -> None:
    """The store is asked for the list some times, and not as often as there are ledgers."""

    async def scenario(cluster: Cluster) -> None:
        for _ in range(100):
            writer = await cluster.client.create_ledger(QuorumConfig())
            await writer.close()
            await publish(cluster, writer.ledger_id)
        asked: list[str] = []
        async with recovering(cluster, replace(QUICK, poll_interval_s=10.0)) as store:
            get_children = store.get_children

            async def count(path: str, *, fresh: bool = False) -> list[str] | None:
                if path == PATHS.under_replicated:
                    asked.append(path)
                return await get_children(path, fresh=fresh)

            store.get_children = count  # type: ignore[method-assign]  # counts
            await until_none_listed(cluster)
        assert len(asked) <= 5

    run(scenario)


def test_the_role_is_taken_also_after_a_lost_request() -> None:
    """Nothing changes in the store when the request for it did not arrive."""

    async def scenario(cluster: Cluster) -> None:
        repairs = RepairList(cluster.store, PATHS, TokenClock())
        value = encode(ElectedAuditor(owner="other", token="other"))
        await cluster.store.create(PATHS.auditor, value, make_parents=True)
        async with recovering(cluster) as store:
            await asyncio.sleep(5)
            store.lose_next_reply(applied=False)
            await cluster.store.delete(PATHS.auditor)
            await asyncio.sleep(60)
            assert await repairs.read_auditor() is not None

    run(scenario)


def test_an_incarnation_that_was_replaced_is_lost_at_the_first_audit() -> None:
    """Only the ledgers' metadata tells of it: its successor's cookie has taken its place."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        metadata = await writer.close()
        here = metadata.last_ensemble.bookies[0]
        before = BookieId(here.name, "f" * 32)
        stored = await cluster.store.get(PATHS.ledger(writer.ledger_id))
        assert stored is not None
        context, _ = context_of(cluster)
        changed = metadata.with_replaced(first_entry_id=0, old=here, new=before)
        await context.ledger_store.write(changed, version=stored.version)
        loop = asyncio.get_running_loop()
        async with recovering(cluster, replace(QUICK, audit_interval_s=10_000.0)):

            async def is_repaired() -> bool:
                metadata = await metadata_of_ledger(cluster, writer.ledger_id)
                return before not in metadata.last_ensemble.bookies

            start = loop.time()
            await until(is_repaired)
            assert loop.time() - start < 100
        await assert_whole(cluster, writer.ledger_id)

    run(scenario)


@pytest.mark.parametrize("is_paused", [False, True])
def test_each_lost_bookie_gives_the_writer_its_own_grace(is_paused: bool) -> None:
    """One that was lost earlier and is back counts no more, nor does what was before a pause."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        first, second = (cluster.member(writer, each).bookie.name for each in (0, 1))
        loop = asyncio.get_running_loop()
        repairs = RepairList(cluster.store, PATHS, TokenClock())
        async with recovering(cluster):
            await lose(cluster, first)

            async def has_waited() -> bool:
                entry = (await listed(cluster)).get(writer.ledger_id)
                return entry is not None and "it is recovered in" in entry.reason

            await until(has_waited)
            await asyncio.sleep(QUICK.open_ledger_grace_s / 2)
            if is_paused:
                await repairs.set_paused(is_paused=True)
                await asyncio.sleep(QUICK.open_ledger_grace_s)
                since = loop.time()
                await repairs.set_paused(is_paused=False)
            else:
                await publish(cluster, writer.ledger_id, second)
                await unregister(cluster, second)
                since = loop.time()
                await register(cluster, first)

            async def is_fenced() -> bool:
                metadata = await metadata_of_ledger(cluster, writer.ledger_id)
                return metadata.state is not LedgerState.OPEN

            await until(is_fenced)
            assert loop.time() - since >= QUICK.open_ledger_grace_s
        await writer.abandon()

    run(scenario)


def test_a_ledger_that_is_at_work_is_not_forgotten_with_the_list() -> None:
    """Another process took it off the list while a copy for it was about to fail."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        before = await writer.close()
        members = before.last_ensemble.bookies
        (spare,) = (each for each in cluster.bookies.values() if each.bookie not in members)
        context, _ = context_of(cluster)
        repairer = LedgerRepairer(context, QUICK)

        def refuse(frame: bytes, *, is_recovery: bool) -> None:
            repairer.keep_only(())
            raise BookieUnavailableError("gone")

        spare.add_entry = refuse  # type: ignore[method-assign]  # at the worst moment
        await lose(cluster, members[0].name)
        outcome = await repairer.repair(finding(writer.ledger_id, members[0]))
        assert "gone" in outcome.reason

    run(scenario)


def test_a_bookie_that_is_back_is_not_kept_on_the_list() -> None:
    """The ledger stays there for another reason; the next absence is judged like the first."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        before = await writer.close()
        first, second, third = (cluster.member(writer, each) for each in range(3))
        await lose(cluster, first.bookie.name)
        lost = [each.entries(writer.ledger_id).pop(4) for each in (second, third)]
        async with recovering(cluster):

            async def has_tried() -> bool:
                entry = (await listed(cluster)).get(writer.ledger_id)
                return entry is not None and bool(entry.missing) and "entry 4" in entry.reason

            await until(has_tried)
            held = first.entries(writer.ledger_id).pop(4)
            await register(cluster, first.bookie.name)

            async def is_off() -> bool:
                return not (await listed(cluster))[writer.ledger_id].missing

            await until(is_off)
            await unregister(cluster, first.bookie.name)
            for each, frame in zip((second, third), lost, strict=True):
                each.entries(writer.ledger_id)[4] = frame
            await asyncio.sleep(QUICK.lost_bookie_delay_s / 2)
            assert await metadata_of_ledger(cluster, writer.ledger_id) == before
            first.entries(writer.ledger_id)[4] = held
            await register(cluster, first.bookie.name)
            await until_none_listed(cluster)
        assert await metadata_of_ledger(cluster, writer.ledger_id) == before

    run(scenario)


def test_a_writer_that_replaces_its_lost_bookie_at_the_last_moment_is_not_fenced() -> None:
    """Between the decision and the recovery there may be a long copy."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig(ack_quorum_size=3))
        await write(writer, 10)
        dead = cluster.member(writer, 0).bookie
        await lose(cluster, dead.name)
        context, _ = context_of(cluster)
        repairer = LedgerRepairer(context, QUICK)
        first = await repairer.repair(finding(writer.ledger_id, dead))
        assert "it is recovered in" in first.reason
        await asyncio.sleep(QUICK.open_ledger_grace_s)
        get_bookies = context.registry.get_bookies

        async def replace_it_first() -> list[BookieRegistration]:
            if dead in writer.metadata.last_ensemble.bookies:
                await write(writer, 10)
            return await get_bookies()

        context.registry.get_bookies = replace_it_first  # type: ignore[method-assign]  # a race
        assert (await repairer.repair(finding(writer.ledger_id, dead))).is_done
        metadata = await metadata_of_ledger(cluster, writer.ledger_id)
        assert metadata.state is LedgerState.OPEN
        assert dead not in {each for e in metadata.ensembles for each in e.bookies}
        await write(writer, 10)
        await writer.close()

    run(scenario, "ABCDE")


def test_a_writer_whose_lost_bookie_comes_back_is_not_fenced() -> None:
    """It keeps the bookie, which serves it again since the decision was made."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        dead = cluster.member(writer, 0).bookie
        await unregister(cluster, dead.name)
        context, _ = context_of(cluster)
        repairer = LedgerRepairer(context, QUICK)
        first = await repairer.repair(finding(writer.ledger_id, dead))
        assert "it is recovered in" in first.reason
        await asyncio.sleep(QUICK.open_ledger_grace_s)
        get_bookies = context.registry.get_bookies
        looks: list[int] = []

        async def come_back_after_the_decision() -> list[BookieRegistration]:
            looks.append(1)
            if len(looks) == 2:
                await register(cluster, dead.name)
            return await get_bookies()

        context.registry.get_bookies = come_back_after_the_decision  # type: ignore[method-assign]  # a race
        await repairer.repair(finding(writer.ledger_id, dead))
        assert len(looks) >= 2
        metadata = await metadata_of_ledger(cluster, writer.ledger_id)
        assert metadata.state is LedgerState.OPEN
        assert metadata.last_ensemble.bookies[0] == dead
        await write(writer, 10)
        await writer.close()

    run(scenario, "ABCDE")


def test_a_bookie_that_cannot_be_replaced_is_logged_with_a_remedy() -> None:
    """Another bookie, or one in another rack."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await write(writer, 10)
        await writer.close()
        dead = cluster.member(writer, 0).bookie
        await lose(cluster, dead.name)
        context, _ = context_of(cluster)
        outcome = await LedgerRepairer(context, QUICK).repair(finding(writer.ledger_id, dead))
        assert outcome.reason == (
            f"no bookie can take the place of {dead}: 2 are registered and writable, all of them "
            "in the ensemble; start another one"
        )

    run(scenario, "ABC")
