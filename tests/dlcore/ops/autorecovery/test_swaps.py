"""Goal: clients that use a ledger while its ensembles change go on, safely.

Method: writers, recoverers, readers and other workers on the memory cluster, in virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import MetadataVersionError
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.repair import LedgerRepairer
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
    context_of,
    listed,
    lose,
    metadata_of_ledger,
    publish,
    recovering,
    register,
    until,
    until_none_listed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.writing.writer import LedgerWriter
    from dlcore.metadata.port import Op


async def with_two_ensembles(cluster: Cluster) -> tuple[LedgerWriter, BookieId]:
    """Return the writer of an open ledger whose first ensemble has a dead member."""
    writer = await cluster.client.create_ledger(QuorumConfig(ack_quorum_size=3))
    await write(writer, 10)
    dead = cluster.member(writer, 0)
    dead.stop()
    await write(writer, 10)
    assert len(writer.metadata.ensembles) == 2
    return writer, dead.bookie


async def swap_first(cluster: Cluster, ledger_id: int, old: BookieId) -> LedgerMetadata:
    """Put another bookie, which gets the entries, into the first ensemble."""
    ledgers = LedgerStore(cluster.store, PATHS)
    stored = await ledgers.read(ledger_id)
    first, second = stored.metadata.ensembles[:2]
    new = next(
        each
        for each in cluster.bookies.values()
        if each.bookie not in (*first.bookies, *second.bookies)
    )
    source = cluster.bookies[first.bookies[1].name].entries(ledger_id)
    for entry_id in range(second.first_entry_id):
        new.add_entry(source[entry_id], is_recovery=True)
    changed = stored.metadata.with_replaced(first_entry_id=0, old=old, new=new.bookie)
    await ledgers.write(changed, version=stored.version)
    return changed


def test_a_recovery_keeps_what_was_changed_in_earlier_ensembles_meanwhile() -> None:
    """It closes the ledger with the ensembles of that moment, and its own in the last place."""

    async def scenario(cluster: Cluster) -> None:
        writer, dead = await with_two_ensembles(cluster)
        await writer.abandon()
        other = cluster.new_client()
        recovery = asyncio.create_task(other.recover_ledger(writer.ledger_id))
        state = LedgerState.OPEN
        while state is LedgerState.OPEN:
            state = (await metadata_of_ledger(cluster, writer.ledger_id)).state
        changed = await swap_first(cluster, writer.ledger_id, dead)
        assert changed.state is LedgerState.IN_RECOVERY
        closed = await recovery
        assert closed.ensembles == changed.ensembles
        assert closed.last_entry_id == 19
        assert await metadata_of_ledger(cluster, writer.ledger_id) == closed
        await other.aclose()

    run(scenario, "ABCDE")


def test_a_writer_changes_its_ensemble_on_top_of_what_was_changed_meanwhile() -> None:
    """Its compare-and-set fails once, and both changes stay."""

    async def scenario(cluster: Cluster) -> None:
        writer, dead = await with_two_ensembles(cluster)
        changed = await swap_first(cluster, writer.ledger_id, dead)
        cluster.member(writer, 1).stop()
        await write(writer, 10)
        stored = await metadata_of_ledger(cluster, writer.ledger_id)
        assert len(stored.ensembles) == 3
        assert stored.ensembles[:2] == changed.ensembles
        assert writer.metadata == stored
        closed = await writer.close()
        assert closed.ensembles == stored.ensembles

    run(scenario, "ABCDEF")


def test_a_writer_closes_its_ledger_on_top_of_what_was_changed_meanwhile() -> None:
    """The change stays in the closed ledger."""

    async def scenario(cluster: Cluster) -> None:
        writer, dead = await with_two_ensembles(cluster)
        changed = await swap_first(cluster, writer.ledger_id, dead)
        closed = await writer.close()
        assert closed.ensembles == changed.ensembles
        assert closed.last_entry_id == 19
        assert await metadata_of_ledger(cluster, writer.ledger_id) == closed

    run(scenario, "ABCDE")


def test_a_bookie_that_is_back_before_the_copy_is_complete_keeps_its_place() -> None:
    """The copy is not needed."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 100)
        before = await writer.close()
        members = before.last_ensemble.bookies
        (spare,) = (each for each in cluster.bookies.values() if each.bookie not in members)
        async with recovering(cluster, replace(QUICK, copy_bytes_per_s=500.0)):
            await lose(cluster, members[0].name)

            async def is_half_copied() -> bool:
                return len(spare.entries(writer.ledger_id)) > 50

            await until(is_half_copied)
            await register(cluster, members[0].name)
            await until_none_listed(cluster)
        assert await metadata_of_ledger(cluster, writer.ledger_id) == before

    run(scenario)


def test_a_reader_with_old_metadata_finds_entries_that_moved() -> None:
    """All bookies that it knows are gone, one after the other."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(2, 2, 2))
        await write(writer, 30)
        before = await writer.close()
        reader = await cluster.client.open_ledger(writer.ledger_id)
        async with recovering(cluster):
            for gone in before.last_ensemble.bookies:
                await lose(cluster, gone.name)

                async def has_moved(gone: BookieId = gone) -> bool:
                    metadata = await metadata_of_ledger(cluster, writer.ledger_id)
                    return gone not in metadata.last_ensemble.bookies

                await until(has_moved)
        assert reader.metadata == before
        assert await read_all(reader, 0, 29) == bodies(0, 29)

    run(scenario, "ABCDE")


def test_a_follower_with_old_metadata_reads_a_completed_ensemble_that_moved() -> None:
    """And then follows the writer."""

    async def scenario(cluster: Cluster) -> None:
        writer, dead = await with_two_ensembles(cluster)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        await swap_first(cluster, writer.ledger_id, dead)
        second = (await metadata_of_ledger(cluster, writer.ledger_id)).last_ensemble
        for each in cluster.bookies.values():
            if each.bookie in second.bookies:
                for entry_id in range(10):  # the bookie that was put in has them alone
                    each.entries(writer.ledger_id).pop(entry_id, None)
        got: list[bytes] = []
        async for step in reader.follow(0):
            got += [bytes(each.body) for each in step.frames]
            if len(got) == 20:
                await writer.close()
        assert got == bodies(0, 19)

    run(scenario, "ABCDE")


def test_two_workers_at_one_ledger_do_no_harm() -> None:
    """As if the lock did not hold: of two replacements one enters the ensemble."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 40)
        await writer.close()
        dead = cluster.member(writer, 0).bookie
        await lose(cluster, dead.name)
        await publish(cluster, writer.ledger_id, dead.name)
        entry = await RepairList(cluster.store, PATHS, TokenClock()).read(writer.ledger_id)
        assert entry is not None
        workers = [context_of(cluster, name)[0] for name in ("one", "two", "three")]
        outcomes = await asyncio.gather(
            *(LedgerRepairer(each, QUICK).repair(entry) for each in workers)
        )
        assert all(outcome.is_done for outcome in outcomes)
        metadata = await assert_whole(cluster, writer.ledger_id)
        assert dead not in metadata.last_ensemble.bookies

    run(scenario, "ABCDEF")


def test_a_replacement_that_does_not_hold_what_it_acknowledged_stays_out() -> None:
    """Its own list decides, not its acknowledgements."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 40)
        before = await writer.close()
        dead = cluster.member(writer, 0).bookie
        members = before.last_ensemble.bookies
        (spare,) = (each for each in cluster.bookies.values() if each.bookie not in members)
        store_entry = spare.add_entry

        def forget_some(frame: bytes, *, is_recovery: bool) -> None:
            store_entry(frame, is_recovery=is_recovery)
            spare.entries(writer.ledger_id).pop(17, None)

        spare.add_entry = forget_some  # type: ignore[method-assign]  # a bookie that forgets
        async with recovering(cluster):
            await lose(cluster, dead.name)

            async def has_tried() -> bool:
                entry = (await listed(cluster)).get(writer.ledger_id)
                return entry is not None and entry.attempts >= 3

            await until(has_tried)
            assert "does not hold entry 17" in (await listed(cluster))[writer.ledger_id].reason
            assert await metadata_of_ledger(cluster, writer.ledger_id) == before
            spare.add_entry = store_entry  # type: ignore[method-assign]
            await until_none_listed(cluster)
        await assert_whole(cluster, writer.ledger_id)

    run(scenario)


def test_a_ledger_that_changes_between_copy_and_swap_is_decided_anew() -> None:
    """Another process puts another bookie in the place: that stays."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        before = await writer.close()
        dead = cluster.member(writer, 0).bookie
        await lose(cluster, dead.name)
        await publish(cluster, writer.ledger_id, dead.name)
        entry = await RepairList(cluster.store, PATHS, TokenClock()).read(writer.ledger_id)
        assert entry is not None
        context, _ = context_of(cluster)
        ledgers, write_metadata = context.ledger_store, context.ledger_store.write
        source = cluster.member(writer, 1).entries(writer.ledger_id)
        taken: list[BookieId] = []

        async def lose_the_race(
            metadata: LedgerMetadata, *, version: int, guards: Sequence[Op] = ()
        ) -> int:
            if not taken:
                chosen = metadata.last_ensemble.bookies[0]
                other = next(
                    each
                    for each in cluster.bookies.values()
                    if each.bookie not in (*before.last_ensemble.bookies, chosen)
                )
                for frame in source.values():
                    other.add_entry(frame, is_recovery=True)
                taken.append(other.bookie)
                stored = await ledgers.read(writer.ledger_id)
                changed = before.with_replaced(first_entry_id=0, old=dead, new=other.bookie)
                await write_metadata(changed, version=stored.version)
                raise MetadataVersionError("another process was faster")
            return await write_metadata(metadata, version=version, guards=guards)

        ledgers.write = lose_the_race  # type: ignore[method-assign]  # a race, at its worst moment
        outcome = await LedgerRepairer(context, QUICK).repair(entry)
        assert outcome.is_done
        metadata = await assert_whole(cluster, writer.ledger_id)
        assert metadata.last_ensemble.bookies[0] == taken[0]

    run(scenario, "ABCDE")


def test_a_repair_that_lost_its_lock_changes_nothing() -> None:
    """Goal: what a bookie proved to hold counts only while its garbage collection is kept away.

    Method: the lock goes, or garbage collection takes it, right before the change is stored.
    """

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        await writer.close()
        dead = cluster.member(writer, 0).bookie
        await lose(cluster, dead.name)
        await publish(cluster, writer.ledger_id, dead.name)
        context, store = context_of(cluster)
        ledgers, repairs = context.ledger_store, RepairList(store, PATHS, TokenClock())
        entry = await repairs.read(writer.ledger_id)
        assert entry is not None
        lock = PATHS.repair_lock(writer.ledger_id)
        write_metadata = ledgers.write
        for is_taken in (False, True):
            assert await repairs.lock(writer.ledger_id, owner="one")

            async def lose_the_lock(
                metadata: LedgerMetadata,
                *,
                version: int,
                guards: Sequence[Op] = (),
                is_taken: bool = is_taken,
            ) -> int:
                await store.delete(lock)
                if is_taken:
                    await store.create(lock, b"garbage collection", ephemeral=True)
                    await store.put(lock, b"garbage collection", version=0)
                return await write_metadata(metadata, version=version, guards=guards)

            ledgers.write = lose_the_lock  # type: ignore[method-assign]
            outcome = await LedgerRepairer(context, QUICK).repair(entry, lock=lock)
            assert "was lost while entries were copied" in outcome.reason
            stored = await ledgers.read(writer.ledger_id, fresh=True)
            assert stored.metadata.last_ensemble.bookies[0] == dead
            ledgers.write = write_metadata  # type: ignore[method-assign]
            if is_taken:
                await repairs.unlock(writer.ledger_id, owner="one")  # which is not ours any more
                assert await store.get(lock) is not None
                await store.delete(lock)
        assert await repairs.lock(writer.ledger_id, owner="one")
        outcome = await LedgerRepairer(context, QUICK).repair(entry, lock=lock)
        assert outcome.is_done

    run(scenario, "ABCDE")
