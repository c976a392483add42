"""Goal: lost replicas come back, by themselves and without harm.  Method: memory, virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import LedgerFencedError
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ops.autorecovery.listing import RepairList
from tests.fixtures.ledger_cluster import (
    PATHS,
    Cluster,
    TokenClock,
    bodies,
    read_all,
    run,
    write,
)
from tests.fixtures.ledgers import quorum_of
from tests.fixtures.recovery import (
    QUICK,
    assert_whole,
    listed,
    lose,
    metadata_of_ledger,
    publish,
    recovering,
    register,
    replicas,
    unregister,
    until,
    until_none_listed,
)


async def is_repaired(cluster: Cluster, ledger_id: int, *lost: str) -> bool:
    """Whether no ensemble names a lost bookie and the ledger is not on the list."""
    metadata = await metadata_of_ledger(cluster, ledger_id)
    names = {each.name for ensemble in metadata.ensembles for each in ensemble.bookies}
    return names.isdisjoint(lost) and ledger_id not in await listed(cluster)


@pytest.mark.parametrize("quorum", [(3, 3, 2), (4, 2, 2), (4, 3, 2), (3, 3, 3), (3, 2, 1)])
def test_a_lost_bookie_is_replaced_in_a_closed_ledger(quorum: tuple[int, int, int]) -> None:
    """All that it held is on others, byte for byte, and readers find it."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(*quorum))
        await write(writer, 50)
        await writer.close()
        if quorum[2] == 1:
            await asyncio.sleep(1)
        dead = cluster.member(writer, 1)
        held = dict(dead.entries(writer.ledger_id))
        async with recovering(cluster):
            await lose(cluster, dead.bookie.name)
            await until(lambda: is_repaired(cluster, writer.ledger_id, dead.bookie.name))
        metadata = await assert_whole(cluster, writer.ledger_id)
        (ensemble,) = metadata.ensembles
        new = cluster.bookies[ensemble.bookies[1].name]
        assert new.entries(writer.ledger_id) == held
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert await read_all(reader, 0, 49) == bodies(0, 49)

    run(scenario, "ABCDE")


def test_a_bookie_that_comes_back_in_time_changes_nothing() -> None:
    """Nothing is copied, nothing is listed."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 5)
        before = await writer.close()
        name = cluster.member(writer, 0).bookie.name
        async with recovering(cluster):
            await asyncio.sleep(1)
            await unregister(cluster, name)
            await asyncio.sleep(QUICK.lost_bookie_delay_s / 2)
            await register(cluster, name)
            await asyncio.sleep(40)
        assert await metadata_of_ledger(cluster, writer.ledger_id) == before
        assert await listed(cluster) == {}

    run(scenario)


def test_nothing_happens_while_no_bookie_is_registered() -> None:
    """The registrations are gone, not the bookies."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 5)
        before = await writer.close()
        async with recovering(cluster):
            await asyncio.sleep(1)
            # At once: three of four would be lost.
            await asyncio.gather(*(unregister(cluster, name) for name in "ABCD"))
            await asyncio.sleep(100)
            assert await listed(cluster) == {}
            for name in "ABCD":
                await register(cluster, name)
            await asyncio.sleep(40)
        assert await metadata_of_ledger(cluster, writer.ledger_id) == before
        assert await listed(cluster) == {}

    run(scenario)


def test_entries_missing_on_a_living_member_are_found_and_added_there() -> None:
    """By the full check; the ensemble stays as it is."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 20)
        before = await writer.close()
        member = cluster.member(writer, 2)
        for entry_id in (0, 7, 8, 19):
            del member.entries(writer.ledger_id)[entry_id]
        async with recovering(cluster, replace(QUICK, check_interval_s=50.0)):

            async def is_checked() -> bool:
                repairs = RepairList(cluster.store, PATHS, TokenClock())
                return await repairs.read_last_check() is not None and not await listed(cluster)

            await until(is_checked)
            assert await metadata_of_ledger(cluster, writer.ledger_id) == before
            await assert_whole(cluster, writer.ledger_id)
            del member.entries(writer.ledger_id)[5]

            async def is_back() -> bool:
                return 5 in member.entries(writer.ledger_id)

            await until(is_back)

    run(scenario)


def test_a_bookie_that_does_not_answer_is_unknown_and_not_empty() -> None:
    """The full check puts nothing on the list for it; a repair waits for its answer."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        before = await writer.close()
        silent = cluster.member(writer, 1)
        silent.is_silent = True
        repairs = RepairList(cluster.store, PATHS, TokenClock())
        async with recovering(cluster):
            await until(repairs.read_last_check)
            last = await repairs.read_last_check()
            assert last is not None
            assert (last.ledgers, last.under_replicated, last.unknown) == (1, 0, 1)
            assert await listed(cluster) == {}
            await publish(cluster, writer.ledger_id)
            await asyncio.sleep(30)
            (entry,) = (await listed(cluster)).values()
            assert f"{silent.bookie} did not answer within" in entry.reason
            silent.is_silent = False
            silent.wake()
            await until(lambda: is_repaired(cluster, writer.ledger_id))
        assert await metadata_of_ledger(cluster, writer.ledger_id) == before

    run(scenario)


def test_completed_ensembles_of_an_open_ledger_are_repaired_and_its_writer_goes_on() -> None:
    """The writer meets the changed metadata at its next ensemble change and at its end."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig(ack_quorum_size=3))
        await write(writer, 10)
        first = cluster.member(writer, 0)
        first.stop()
        await write(writer, 10)
        assert len(writer.metadata.ensembles) == 2
        async with recovering(cluster):
            await lose(cluster, first.bookie.name)
            await until(lambda: is_repaired(cluster, writer.ledger_id, first.bookie.name))
            stored = await metadata_of_ledger(cluster, writer.ledger_id)
            assert stored.state is LedgerState.OPEN
            assert stored.last_ensemble == writer.metadata.last_ensemble
            await write(writer, 10)
            second = cluster.member(writer, 1)
            await lose(cluster, second.bookie.name)
            await write(writer, 10)
            metadata = await writer.close()
            assert metadata.last_entry_id == 39
            lost = (first.bookie.name, second.bookie.name)
            await until(lambda: is_repaired(cluster, writer.ledger_id, *lost))
        await assert_whole(cluster, writer.ledger_id)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert await read_all(reader, 0, 39) == bodies(0, 39)

    run(scenario, "ABCDEF")


def test_a_writer_that_keeps_a_lost_bookie_is_fenced_after_the_grace_and_not_before() -> None:
    """An idle writer notices nothing; its acknowledged entries stay."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        name = cluster.member(writer, 0).bookie.name
        loop = asyncio.get_running_loop()
        async with recovering(cluster):
            await lose(cluster, name)
            start = loop.time()

            async def is_closed() -> bool:
                metadata = await metadata_of_ledger(cluster, writer.ledger_id)
                if metadata.state is LedgerState.OPEN:
                    assert metadata.last_ensemble == writer.metadata.last_ensemble
                return metadata.state is LedgerState.CLOSED

            await until(is_closed)
            assert loop.time() - start >= QUICK.open_ledger_grace_s
            await until(lambda: is_repaired(cluster, writer.ledger_id, name))
        metadata = await assert_whole(cluster, writer.ledger_id)
        assert metadata.last_entry_id == 9
        with pytest.raises(LedgerFencedError):
            await writer.append([b"late"])
        await writer.abandon()

    run(scenario)


def test_a_writer_is_not_fenced_for_a_bookie_without_a_replacement() -> None:
    """It goes on with those that live; the list says what is wanting, until a bookie joins."""

    async def scenario(cluster: Cluster) -> None:
        await unregister(cluster, "D")
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        name = cluster.member(writer, 0).bookie.name
        async with recovering(cluster):
            await lose(cluster, name)
            await asyncio.sleep(100)
            (entry,) = (await listed(cluster)).values()
            assert "no bookie can take the place" in entry.reason
            assert entry.attempts > 1
            await write(writer, 10)
            await register(cluster, "D")
            await write(writer, 10)
            await until(lambda: is_repaired(cluster, writer.ledger_id, name))
            await write(writer, 10)
            await writer.close()

    run(scenario)


def test_an_unfinished_recovery_is_finished_after_the_grace() -> None:
    """The ledger was left IN_RECOVERY; the audit finds it, with no full check in sight."""

    async def scenario(cluster: Cluster) -> None:
        async with recovering(cluster):
            await until(RepairList(cluster.store, PATHS, TokenClock()).read_last_check)
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        await writer.abandon()
        stored = await LedgerStore(cluster.store, PATHS).read(writer.ledger_id)
        await LedgerStore(cluster.store, PATHS).write(
            structs.replace(stored.metadata, state=LedgerState.IN_RECOVERY), version=stored.version
        )
        async with recovering(cluster):

            async def is_closed() -> bool:
                metadata = await metadata_of_ledger(cluster, writer.ledger_id)
                return metadata.state is LedgerState.CLOSED and not await listed(cluster)

            await until(is_closed)
            assert asyncio.get_running_loop().time() >= QUICK.open_ledger_grace_s
        await assert_whole(cluster, writer.ledger_id)

    run(scenario)


def test_unreadable_entries_keep_their_ledger_on_the_list_and_hold_up_no_other() -> None:
    """Each attempt says why; when the entry is back, the repair ends by itself."""

    async def scenario(cluster: Cluster) -> None:
        bad = await cluster.client.create_ledger(quorum_of(3, 2, 2))
        good = await cluster.client.create_ledger(quorum_of(3, 2, 2))
        for writer in (bad, good):
            await write(writer, 12)
            await writer.close()
        dead = cluster.member(bad, 0)
        others = [each for each in cluster.bookies.values() if each is not dead]
        kept = {
            (each.bookie.name, 3): each.entries(bad.ledger_id).pop(3)
            for each in others
            if 3 in each.entries(bad.ledger_id)
        }
        async with recovering(cluster):
            await lose(cluster, dead.bookie.name)
            await until(lambda: is_repaired(cluster, good.ledger_id, dead.bookie.name))

            async def has_tried() -> bool:
                entry = (await listed(cluster)).get(bad.ledger_id)
                return entry is not None and entry.attempts >= 3

            await until(has_tried)
            entry = (await listed(cluster))[bad.ledger_id]
            assert f"entry 3 of ledger {bad.ledger_id} cannot be read" in entry.reason
            assert entry.missing == (dead.bookie,)
            for (name, entry_id), frame in kept.items():
                cluster.bookies[name].entries(bad.ledger_id)[entry_id] = frame
            await until(lambda: is_repaired(cluster, bad.ledger_id, dead.bookie.name))
        await assert_whole(cluster, bad.ledger_id)

    run(scenario, "ABCDE")


def test_a_damaged_copy_is_not_copied() -> None:
    """Another replica gives the entry."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await write(writer, 10)
        await writer.close()
        dead = cluster.member(writer, 0)
        held = dict(dead.entries(writer.ledger_id))
        damaged = cluster.member(writer, 1).entries(writer.ledger_id)
        damaged[4] = damaged[4][:-1] + b"!"
        async with recovering(cluster):
            await lose(cluster, dead.bookie.name)
            await until(lambda: is_repaired(cluster, writer.ledger_id, dead.bookie.name))
        metadata = await metadata_of_ledger(cluster, writer.ledger_id)
        new = cluster.bookies[metadata.ensembles[0].bookies[0].name]
        assert new.entries(writer.ledger_id) == held

    run(scenario)


def test_a_deleted_ledger_leaves_the_list() -> None:
    """There is nothing to repair."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await writer.close()
        await cluster.client._context().ledger_store.delete(writer.ledger_id)
        await publish(cluster, writer.ledger_id, "A")
        async with recovering(cluster):
            await until_none_listed(cluster)

    run(scenario)


def test_a_finding_made_while_a_ledger_is_repaired_is_not_lost() -> None:
    """A node that changed since it was read is not deleted."""

    async def scenario(cluster: Cluster) -> None:
        repairs = RepairList(cluster.store, PATHS, TokenClock())
        await repairs.publish(5, missing=[cluster.bookies["A"].bookie])
        before = await repairs.read(5)
        assert before is not None
        await repairs.publish(5, missing=[cluster.bookies["A"].bookie])
        assert not await repairs.remove(before)
        after = await repairs.read(5)
        assert after is not None
        assert (after.entry.findings, after.entry.missing) == (2, before.entry.missing)
        assert await repairs.note_failure(before, "late") is None
        assert await repairs.remove(after)
        assert await repairs.read(5) is None

    run(scenario)


def test_two_processes_share_the_work_and_one_of_them_audits() -> None:
    """When the auditor's session ends the other one takes the role over."""

    async def scenario(cluster: Cluster) -> None:
        writers = [await cluster.client.create_ledger(QuorumConfig()) for _ in range(6)]
        for writer in writers:
            await write(writer, 10)
            await writer.close()
        repairs = RepairList(cluster.store, PATHS, TokenClock())

        async def auditor() -> str:
            held = await repairs.read_auditor()
            return "" if held is None else held.owner

        async with recovering(cluster) as one, recovering(cluster, name="two"):
            await until(auditor)
            first = await auditor()
            assert first == "one"
            one.disconnect()
            one.expire()

            async def has_moved() -> bool:
                return await auditor() == "two"

            await until(has_moved)
            one.reconnect()
            await lose(cluster, "A")
            for writer in writers:
                ledger_id = writer.ledger_id

                async def repaired(ledger_id: int = ledger_id) -> bool:
                    return await is_repaired(cluster, ledger_id, "A")

                await until(repaired)
            assert await auditor() == "two"
        for writer in writers:
            await assert_whole(cluster, writer.ledger_id)
        assert await repairs.read_auditor() is None

    run(scenario, "ABCDE")


def test_a_pause_stops_work_and_an_end_of_it_lets_it_go_on() -> None:
    """Also in the middle of a copy: what was begun is given up."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 200)
        before = await writer.close()
        name = cluster.member(writer, 0).bookie.name
        repairs = RepairList(cluster.store, PATHS, TokenClock())
        slow = replace(QUICK, copy_bytes_per_s=500.0)
        async with recovering(cluster, slow):
            await lose(cluster, name)

            async def has_begun() -> bool:
                outsider = next(
                    b
                    for b in cluster.bookies.values()
                    if b.bookie not in before.ensembles[0].bookies
                )
                return len(outsider.entries(writer.ledger_id)) > 3

            await until(has_begun)
            await repairs.set_paused(is_paused=True)
            await asyncio.sleep(200)
            assert await metadata_of_ledger(cluster, writer.ledger_id) == before
            assert len(await listed(cluster)) == 1
            await repairs.set_paused(is_paused=False)
            await until(lambda: is_repaired(cluster, writer.ledger_id, name))
        await assert_whole(cluster, writer.ledger_id)

    run(scenario)


def test_the_metadata_is_changed_only_after_the_replacement_holds_everything() -> None:
    """At every moment each entry is on all members of the ensemble that the metadata names."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await write(writer, 30)
        await writer.close()
        dead = cluster.member(writer, 0)

        async def is_repaired_and_sound() -> bool:
            metadata = await metadata_of_ledger(cluster, writer.ledger_id)
            assert all(
                each.is_complete
                for each in replicas(cluster, metadata)
                if each.bookie != dead.bookie
            )
            return await is_repaired(cluster, writer.ledger_id, dead.bookie.name)

        async with recovering(cluster, replace(QUICK, copy_bytes_per_s=1000.0)):
            await lose(cluster, dead.bookie.name)
            await until(is_repaired_and_sound)

    run(scenario, "ABCD")


def test_copies_and_checks_keep_their_pace() -> None:
    """In virtual time: bytes of all ledgers together, and ledgers of the full check."""

    async def scenario(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()
        await unregister(cluster, "E")
        copied = 0
        for _ in range(4):
            writer = await cluster.client.create_ledger(quorum_of(4, 4, 4))
            await write(writer, 50)
            await writer.close()
            copied += sum(map(len, cluster.member(writer, 0).entries(writer.ledger_id).values()))
        gone = cluster.bookies["A"].bookie
        repairs = RepairList(cluster.store, PATHS, TokenClock())
        pace = replace(QUICK, copy_bytes_per_s=copied / 100.0, check_ledgers_per_s=0.1)
        async with recovering(cluster, pace):
            await until(repairs.read_last_check)
            assert loop.time() >= 40.0
            await register(cluster, "E")
            await lose(cluster, gone.name)
            start = loop.time()
            for ledger_id in range(4):

                async def repaired(ledger_id: int = ledger_id) -> bool:
                    return await is_repaired(cluster, ledger_id, gone.name)

                await until(repaired)
            assert loop.time() - start >= 99.0

    run(scenario, "ABCDE")


def test_lost_replies_of_the_metadata_store_do_no_harm() -> None:
    """Whether the write took effect or not."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        await writer.close()
        name = cluster.member(writer, 0).bookie.name
        async with recovering(cluster) as store:
            await lose(cluster, name)
            for turn in range(20):
                await asyncio.sleep(0.3)
                store.lose_next_reply(applied=turn % 2 == 0)
            await until(lambda: is_repaired(cluster, writer.ledger_id, name))
        await assert_whole(cluster, writer.ledger_id)

    run(scenario)
