"""Auto-recovery when what it decided by is gone: locks, list, role, bookies, its own start.

Goal: nothing is done by what was true before, and nothing found is forgotten.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import (
    ConfigurationError,
    DecommissionError,
    MetadataConnectionError,
    NotEnoughBookiesError,
)
from dlcore.ledger.metadata.values import LedgerState
from dlcore.metadata.one_node import ATTEMPTS_MAX
from dlcore.metadata.port import SessionState
from dlcore.ops.autorecovery.check import Held, fragments_of
from dlcore.ops.autorecovery.listing import LOCK_VERSION, RepairList
from dlcore.ops.autorecovery.maintenance import Maintenance
from dlcore.ops.autorecovery.plan import RepairPlan
from dlcore.ops.autorecovery.repair import LedgerRepairer
from dlcore.ops.autorecovery.replicas import ask_replica
from dlcore.ops.autorecovery.runner import PausableRunner
from dlcore.ops.autorecovery.service import AutoRecovery, Election
from dlcore.ops.autorecovery.values import ElectedAuditor
from dlcore.ops.autorecovery.worker import Worker
from dlcore.wire.port import EntryRange
from tests.fixtures.ledger_cluster import PATHS, Cluster, TokenClock, run, write
from tests.fixtures.recovery import (
    QUICK,
    context_of,
    listed,
    lose,
    metadata_of_ledger,
    publish,
    register,
    unregister,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlcore.base.ids import BookieId


async def ledger_of_ten(cluster: Cluster) -> int:
    """Return a closed ledger."""
    writer = await cluster.client.create_ledger(QuorumConfig())
    await write(writer, 10)
    await writer.close()
    return writer.ledger_id


def test_without_any_bookie_a_repair_says_so_and_stays_on_the_list() -> None:
    """There is no bookie to copy from or to."""

    async def scenario(cluster: Cluster) -> None:
        ledger_id = await ledger_of_ten(cluster)
        context, store = context_of(cluster)
        repairs = RepairList(store, PATHS, TokenClock())
        await publish(cluster, ledger_id, "A")
        for name in cluster.bookies:
            await unregister(cluster, name)
        found = await repairs.read(ledger_id)
        assert found is not None
        outcome = await LedgerRepairer(context, QUICK).repair(found)
        assert (outcome.is_done, outcome.reason) == (False, "no bookie is registered")
        assert ledger_id in await listed(cluster)

    run(scenario)


def test_members_are_changed_under_a_repair_lock_only() -> None:
    """One that was lost, or is garbage collection's, proves nothing of what was copied."""

    async def scenario(cluster: Cluster) -> None:
        context, store = context_of(cluster)
        repairer = LedgerRepairer(context, QUICK)
        lock = PATHS.repair_lock(7)
        with pytest.raises(NotEnoughBookiesError, match="was lost while entries were copied"):
            await repairer._check_lock(lock)
        await store.create(lock, b"one", make_parents=True)
        await repairer._check_lock(lock)
        assert await store.put(lock, b"one", version=LOCK_VERSION) != LOCK_VERSION
        with pytest.raises(NotEnoughBookiesError):
            await repairer._check_lock(lock)

    run(scenario)


def test_a_target_that_does_not_answer_takes_no_entries() -> None:
    """Its missing replicas are not known."""

    async def scenario(cluster: Cluster) -> None:
        ledger_id = await ledger_of_ten(cluster)
        context, _ = context_of(cluster)
        metadata = await metadata_of_ledger(cluster, ledger_id)
        (fragment,) = fragments_of(metadata)
        target = cluster.bookies["A"]
        target.stop()
        with pytest.raises(NotEnoughBookiesError, match=f"{target.bookie} cannot take entries"):
            await LedgerRepairer(context, QUICK)._missing_on(target.bookie, metadata, fragment, 0)

    run(scenario)


def test_a_long_list_of_entries_may_take_longer_than_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a ledger of very many ranges would never be repaired; each part comes in time."""

    async def scenario(cluster: Cluster) -> None:
        context, _ = context_of(cluster)
        ranges = [EntryRange(first_entry_id=0, last_entry_id=9)]

        async def list_entries(_bookie: BookieId, *, ledger_id: int) -> list[EntryRange]:
            await asyncio.sleep(3 * context.client_config.read_timeout_s)
            return ranges if ledger_id == 1 else []

        monkeypatch.setattr(context.bookies, "list_entries", list_entries)
        answer = await ask_replica(context, cluster.bookies["A"].bookie, 1)
        assert answer == Held(ranges)

    run(scenario)


def test_a_ledger_that_was_closed_meanwhile_is_not_recovered() -> None:
    """Its writer has ended it, or replaced the lost bookie, after the decision."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        context, _ = context_of(cluster)
        repairer = LedgerRepairer(context, QUICK)
        before = writer.metadata
        assert before.state is LedgerState.OPEN
        lost = cluster.member(writer, 0)

        def plan(*bookies: BookieId) -> RepairPlan:
            return RepairPlan(
                replaces=(),
                refills=(),
                lacks_copies=False,
                lost_in_tail=bookies,
                is_in_recovery=False,
                unknown=(),
            )

        assert not await repairer._is_still_kept(plan(lost.bookie), before)  # it is back
        await lose(cluster, lost.bookie.name)
        assert await repairer._is_still_kept(plan(lost.bookie), before)
        await write(writer, 3)

        async def is_replaced() -> bool:
            return writer.metadata.last_ensemble != before.last_ensemble

        await until(is_replaced)
        assert not await repairer._is_still_kept(plan(lost.bookie), before)
        after = writer.metadata
        await writer.close()
        assert not await repairer._is_still_kept(plan(lost.bookie), after)

    run(scenario)


def test_a_finding_that_cannot_be_written_down_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a number of attempts; each of them may have been applied."""

    async def scenario(cluster: Cluster) -> None:
        _, store = context_of(cluster)
        repairs = RepairList(store, PATHS, TokenClock())
        tried = 0

        async def lose_reply(*_asked: object, **_options: object) -> None:
            nonlocal tried
            tried += 1
            raise MetadataConnectionError("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(store, "create", lose_reply)
            with pytest.raises(MetadataConnectionError):
                await repairs.publish(7, missing=[cluster.bookies["A"].bookie])
        assert tried == ATTEMPTS_MAX
        assert await listed(cluster) == {}
        store.lose_next_reply(applied=True)  # of its first look
        await repairs.publish(7, missing=[cluster.bookies["A"].bookie])
        assert list(await listed(cluster)) == [7]

    run(scenario)


def test_a_worker_leaves_what_others_do_and_keeps_what_is_found_meanwhile() -> None:
    """A lock that is held, a ledger that is off the list, one that was found again."""

    async def scenario(cluster: Cluster) -> None:
        ledger_id = await ledger_of_ten(cluster)
        context, store = context_of(cluster)
        repairs = RepairList(store, PATHS, TokenClock())
        worker = Worker(context, repairs, QUICK, token="mine")
        other = RepairList(cluster.store, PATHS, TokenClock())
        assert await other.lock(ledger_id, owner="theirs")
        await worker._repair_one(ledger_id)
        assert worker._retries[ledger_id].due_s > 0
        await other.unlock(ledger_id, owner="theirs")
        worker._retries.clear()
        await worker._repair_one(ledger_id)  # it is not listed
        assert worker._retries == {}
        await publish(cluster, ledger_id, "A")  # nothing is wrong with it
        repair = worker._repairer.repair

        async def repair_and_find(*asked: object, **options: object) -> object:
            outcome = await repair(*asked, **options)  # type: ignore[arg-type]
            await publish(cluster, ledger_id, "B")
            return outcome

        worker._repairer.repair = repair_and_find  # type: ignore[assignment, method-assign]
        await worker._repair_one(ledger_id)
        assert (await listed(cluster))[ledger_id].findings > 0
        worker._repairer.repair = repair  # type: ignore[method-assign]
        await worker._repair_one(ledger_id)
        assert await listed(cluster) == {}
        assert await repairs.lock(ledger_id, owner="anybody")

    run(scenario)


def test_a_service_that_was_closed_before_it_began_does_nothing() -> None:
    """It ends at once."""

    async def scenario(cluster: Cluster) -> None:
        context, store = context_of(cluster)
        other = AutoRecovery(context, config=QUICK, owner="two")
        await other.aclose()
        await other.run()
        await context.ledgers.aclose()
        await store.aclose()

    run(scenario)


def test_work_begins_only_in_a_session_that_is_there() -> None:
    """Nor twice: a session that expires, and again while works are stopped already."""

    async def scenario(cluster: Cluster) -> None:
        _, store = context_of(cluster)
        runner = PausableRunner(store, PATHS, RepairList(store, PATHS, TokenClock()))
        begun: list[float] = []

        async def work() -> None:
            begun.append(asyncio.get_running_loop().time())
            await asyncio.Event().wait()

        async def count_is(count: int) -> bool:
            return len(begun) == count

        running = asyncio.create_task(runner.run([work]))
        await until(lambda: count_is(1))
        for _ in range(2):
            runner._on_session(SessionState.EXPIRED)
        await until(lambda: count_is(2))
        store.disconnect()
        await asyncio.sleep(5)
        assert len(begun) == 2
        store.reconnect()
        await asyncio.sleep(5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.aclose()

    run(scenario)


def test_a_role_whose_answer_was_lost_is_taken_and_one_that_is_lost_is_left() -> None:
    """The work ends with the role."""

    async def scenario(cluster: Cluster) -> None:
        _, store = context_of(cluster)
        begun = asyncio.Event()

        async def work() -> None:
            begun.set()
            await asyncio.Event().wait()

        election = Election(store, PATHS, ElectedAuditor(owner="one", token="t"))
        store.lose_next_reply(applied=True)
        serving = asyncio.create_task(election.serve(work))
        await begun.wait()
        await cluster.store.delete(PATHS.auditor)
        await serving
        assert await cluster.store.get(PATHS.auditor) is None
        await store.aclose()

    run(scenario)


def test_an_operator_gets_the_known_facts_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that no bookie has, cookies that others deleted, a few of many reasons."""

    async def scenario(cluster: Cluster) -> None:
        context, _ = context_of(cluster, "operator")
        operator = Maintenance(context)
        repairs = RepairList(cluster.store, PATHS, TokenClock())
        with pytest.raises(ConfigurationError, match="no bookie of that name has a cookie"):
            await operator.release_garbage("unknown")
        await operator._delete_cookie("unknown", incarnation="f" * 32)
        left = {}
        for ledger_id in range(5):
            await publish(cluster, ledger_id, "A")
            found = await repairs.read(ledger_id)
            assert found is not None
            await repairs.note_failure(found, f"reason {ledger_id}")
            left[ledger_id] = ()
        failures = await operator._failures(left)
        assert failures == "; ".join(f"ledger {number}: reason {number}" for number in range(3))
        read = operator._repairs.read

        async def read_and_lose(ledger_id: int) -> object:
            return None if ledger_id == 1 else await read(ledger_id)

        monkeypatch.setattr(operator._repairs, "read", read_and_lose)
        status = await operator.read_status()
        assert [each.ledger_id for each in status.ledgers] == [0, 2, 3, 4]

    run(scenario)


def test_a_decommission_publishes_again_what_was_taken_off_the_list() -> None:
    """A process saw the bookie for a moment; without a cookie there is none to delete."""

    async def scenario(cluster: Cluster) -> None:
        ledgers = [await ledger_of_ten(cluster) for _ in range(3)]
        gone = cluster.bookies["A"].bookie
        await lose(cluster, "A")
        context, _ = context_of(cluster, "operator")
        reported: list[str] = []
        waiting = asyncio.create_task(
            Maintenance(context).decommission("A", timeout_s=1000, report=reported.append)
        )

        async def are_listed(wanted: Collection[int]) -> bool:
            return set(wanted) <= set(await listed(cluster))

        named = [
            each
            for each in ledgers
            if gone in (await metadata_of_ledger(cluster, each)).last_ensemble.bookies
        ]
        await until(lambda: are_listed(named))
        repairs = RepairList(cluster.store, PATHS, TokenClock())
        for ledger_id in named:
            found = await repairs.read(ledger_id)
            assert found is not None
            assert await repairs.remove(found)
        await until(lambda: are_listed(named))
        await register(cluster, "A")
        with pytest.raises(DecommissionError, match="stop it first"):
            await waiting

    run(scenario)
