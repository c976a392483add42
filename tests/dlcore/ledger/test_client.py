"""Goal: writers and recoverers keep a ledger's promises.  Method: memory bookies, virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dlcore.base.config import ENTRY_SIZE_BYTES_MAX, QuorumConfig
from dlcore.base.errors import (
    AlreadyClosedError,
    BookieOverloadedError,
    EntryTooLargeError,
    LedgerClosedError,
    LedgerFencedError,
    LedgerNotFoundError,
    LedgerRecoveryError,
    MetadataConnectionError,
    NotEnoughBookiesError,
)
from dlcore.ledger.metadata.values import LedgerState
from dlcore.metadata.port import Create
from tests.fixtures.ledger_cluster import CONFIG, PATHS, Cluster, bodies, read_all, run, write
from tests.fixtures.ledgers import quorum_of


@pytest.mark.parametrize("quorum", [(3, 3, 2), (4, 2, 2), (4, 3, 2), (1, 1, 1), (4, 4, 4)])
def test_write_close_read(quorum: tuple[int, int, int]) -> None:
    """Acknowledged entries are in the closed ledger, with its length, striped or not."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(*quorum), custom={"log": "clicks"})
        await write(writer, 50)
        assert writer.last_add_confirmed == writer.last_add_pushed
        metadata = await writer.close()
        assert metadata.state is LedgerState.CLOSED
        assert metadata.last_entry_id == 49
        assert metadata.length_bytes == sum(map(len, bodies(0, 49))) == writer.length_bytes
        assert metadata.custom == {"log": "clicks"}
        assert await writer.close() == metadata
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert reader.metadata == metadata
        assert await reader.read_last_add_confirmed() == 49
        assert await read_all(reader, 0, 49) == bodies(0, 49)
        assert await read_all(reader, 7, 20) == bodies(7, 20)
        assert await read_all(reader, 7, 6) == []
        with pytest.raises(LedgerClosedError):
            await writer.append([b"late"])
        assert len(cluster.holders(writer, 0)) == quorum[1]

    run(scenario)


def test_an_empty_ledger_closes_at_minus_one() -> None:
    """And its follower sees the end at once."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        metadata = await writer.close()
        assert (metadata.last_entry_id, metadata.length_bytes) == (-1, 0)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        steps = [step async for step in reader.follow(0)]
        assert [(len(s.frames), s.last_add_confirmed, s.closed) for s in steps] == [(0, -1, True)]

    run(scenario)


def test_creation_is_one_transaction_with_the_callers_operations() -> None:
    """The ledger exists exactly if the operations did."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(
            QuorumConfig(), extra_ops=lambda ledger_id: [Create("/dlog/owner", b"%d" % ledger_id)]
        )
        node = await cluster.store.get("/dlog/owner")
        assert node is not None
        assert node.value == b"%d" % writer.ledger_id
        with pytest.raises(Exception, match="/dlog/owner"):
            await cluster.client.create_ledger(
                QuorumConfig(), extra_ops=lambda _: [Create("/dlog/owner")]
            )
        with pytest.raises(LedgerNotFoundError):
            await cluster.client.open_ledger(writer.ledger_id + 1)

    run(scenario)


def test_too_few_bookies_to_create() -> None:
    """The message names those there are."""

    async def scenario(cluster: Cluster) -> None:
        with pytest.raises(
            NotEnoughBookiesError, match="needs 2 writable bookies, registered are 1"
        ):
            await cluster.client.create_ledger(QuorumConfig())

    run(scenario, "A")


def test_a_dead_bookie_is_replaced_and_entries_get_their_quorum_elsewhere() -> None:
    """The change is in the metadata, from the entry after the LAC on."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await write(writer, 5)
        dead = cluster.member(writer, 1)
        dead.stop()
        await write(writer, 5)
        first, second = writer.metadata.ensembles
        assert second.first_entry_id == 5
        assert dead.bookie in first.bookies
        assert dead.bookie not in second.bookies
        stored = (await cluster.client.open_ledger(writer.ledger_id)).metadata
        assert stored == writer.metadata
        assert len(cluster.holders(writer, 7) - {dead.bookie.name}) == 3
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert await read_all(reader, 0, 9) == bodies(0, 9)
        await writer.close()

    run(scenario)


def test_a_silent_bookie_is_replaced_after_the_time_out() -> None:
    """And until then its entries count as in flight."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        silent = cluster.member(writer, 0)
        silent.is_silent = True
        await write(writer, 4)
        waiting = asyncio.create_task(writer.wait_for_capacity())
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await waiting
        assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.1)
        await asyncio.sleep(0.1)
        assert silent.bookie not in writer.metadata.last_ensemble.bookies
        await write(writer, 4)
        await writer.close()

    run(scenario, config=replace(CONFIG, pending_entries_max=4))


def test_without_a_spare_it_goes_on_and_takes_the_bookie_back() -> None:
    """Delayed ensemble change: Qa of the rest suffice; the metadata does not change."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        gone = cluster.member(writer, 2)
        gone.stop()
        await write(writer, 20)
        requests = gone.requests
        await write(writer, 20)
        assert gone.requests == requests  # not bothered with every entry
        gone.start()
        await asyncio.sleep(10.0)
        await write(writer, 1)
        assert 40 in gone.entries(writer.ledger_id)
        assert len(writer.metadata.ensembles) == 1
        await writer.close()

    run(scenario, "ABC")


def test_too_many_dead_bookies_end_the_writer_and_a_recovery_decides_the_end() -> None:
    """Unacknowledged entries may be in the ledger: a reader may have seen them."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        for position in (0, 1):
            cluster.member(writer, position).stop()
        with pytest.raises(NotEnoughBookiesError, match="entry 3 cannot reach 2 of 3"):
            await writer.append([b"lost"])
        with pytest.raises(NotEnoughBookiesError):
            await writer.append([b"too"])
        for wait in (writer.flush, writer.wait_for_capacity, writer.publish_lac):
            with pytest.raises(NotEnoughBookiesError):
                await wait()
        with pytest.raises(LedgerRecoveryError, match="too few bookies fenced it"):
            await writer.close()
        for position in (0, 1):
            cluster.member(writer, position).start()
        assert (await writer.close()).last_entry_id == 2  # they deny entry 3

    run(scenario, "ABC")


def test_an_overloaded_bookie_is_asked_again() -> None:
    """Early rejection is back-pressure, not a failure."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        cluster.member(writer, 0).fail_next(*[BookieOverloadedError("full")] * 3)
        before = writer.metadata
        await write(writer, 1)
        assert writer.metadata == before
        cluster.member(writer, 0).fail_next(*[BookieOverloadedError("full")] * 100)
        await write(writer, 1)
        assert writer.metadata != before  # patience ends with the time-out
        await writer.close()

    run(scenario)


def test_read_only_and_replaced_bookies_are_replaced() -> None:
    """A full disk, and an empty disk under the same name, take no adds."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        full = cluster.member(writer, 0)
        full.is_read_only = True
        await write(writer, 1)
        assert full.bookie not in writer.metadata.last_ensemble.bookies
        await writer.close()

    run(scenario)


def test_an_entry_that_is_too_large_is_refused_and_nothing_else() -> None:
    """The writer stays usable, and no id is spent."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        with pytest.raises(EntryTooLargeError, match=str(ENTRY_SIZE_BYTES_MAX)):
            await writer.append([bytes(ENTRY_SIZE_BYTES_MAX)])
        await write(writer, 2)
        await writer.close()

    run(scenario)


def test_recovery_fences_the_writer_for_good() -> None:
    """Every later add of the old writer fails, and it cannot close the ledger either."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        other = cluster.new_client()
        metadata = await other.recover_ledger(writer.ledger_id)
        assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, 9)
        assert metadata.length_bytes == writer.length_bytes
        with pytest.raises(LedgerFencedError):
            await writer.append([b"zombie"])
        with pytest.raises(LedgerFencedError):
            await writer.append([b"again"])
        with pytest.raises(LedgerFencedError):
            await writer.close()
        assert await other.recover_ledger(writer.ledger_id) == metadata
        await other.aclose()

    run(scenario)


def test_a_writer_with_nothing_to_append_learns_of_its_fencing_when_it_closes() -> None:
    """IN_RECOVERY in the metadata means that another client decides about the end."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        for name in "ABCD":
            cluster.bookies[name].stop()
        other = cluster.new_client()
        with pytest.raises(LedgerRecoveryError, match="too few bookies fenced it"):
            await other.recover_ledger(writer.ledger_id)
        with pytest.raises(LedgerFencedError):
            await writer.close()
        for name in "ABCD":
            cluster.bookies[name].start()
        assert (await other.recover_ledger(writer.ledger_id)).last_entry_id == 0
        await other.aclose()

    run(scenario)


def test_a_writer_whose_ledger_was_closed_at_its_lac_may_close() -> None:
    """The result is the same if another client stored it; at another entry it is an error."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        metadata = await cluster.new_client().recover_ledger(writer.ledger_id)
        assert await writer.close() == metadata

        writer = await cluster.client.create_ledger(QuorumConfig())
        cluster.member(writer, 0).is_silent = cluster.member(writer, 1).is_silent = True
        writer.append([b"half written"])
        other = cluster.new_client()
        cluster.member(writer, 0).is_silent = False
        # One copy is enough; one no and one silence are not.
        assert (await other.recover_ledger(writer.ledger_id)).last_entry_id == 0
        cluster.member(writer, 1).is_silent = False
        with pytest.raises(LedgerClosedError, match="closed by another client at entry 0"):
            await writer.close()
        await other.aclose()

    run(scenario)


def test_a_half_written_entry_is_recovered_onto_a_quorum() -> None:
    """One valid copy is enough, and then Qa bookies hold it."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        for position in (1, 2):
            cluster.member(writer, position).is_silent = True
        for _ in range(20):
            writer.append([b"half"])
        cluster.member(writer, 1).is_silent = False
        await writer.abandon()
        metadata = await cluster.client.recover_ledger(writer.ledger_id)
        cluster.member(writer, 2).is_silent = False
        assert metadata.last_entry_id == 22
        assert all(len(cluster.holders(writer, entry)) >= 2 for entry in range(23))
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert await read_all(reader, 3, 22) == [b"half"] * 20

    run(scenario)


def test_recovery_replaces_dead_bookies_in_the_closing_write_only() -> None:
    """Recovered entries get a quorum of live bookies, from the first recovered one on."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 2))
        await write(writer, 3)
        stopped, damaged = (cluster.member(writer, position) for position in (1, 2))
        stopped.is_silent = True
        await write(writer, 1)
        await writer.abandon()
        stopped.stop()
        damaged.entries(writer.ledger_id)[3] = b"damaged"
        metadata = await cluster.client.recover_ledger(writer.ledger_id)
        stopped.is_silent = False
        assert metadata.last_entry_id == 3
        # IN_RECOVERY and CLOSED are the only two writes.
        assert cluster.tree.dump()[PATHS.ledger(writer.ledger_id)].version == 2
        assert [each.first_entry_id for each in metadata.ensembles] == [0, 3]
        members = {each.name for each in metadata.last_ensemble.bookies}
        damaged.entries(writer.ledger_id).pop(3)
        assert len(cluster.holders(writer, 3) & members) >= 2

    run(scenario)


def test_recovery_does_not_guess() -> None:
    """Unknown answers abort it; the ledger stays IN_RECOVERY and can be recovered later."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        await write(writer, 2)
        await writer.abandon()
        for position in (0, 1):
            damaged = cluster.member(writer, position).entries(writer.ledger_id)
            damaged[2] = damaged[2][:-1] + b"!"
        cluster.member(writer, 2).stop()
        with pytest.raises(LedgerRecoveryError, match=r"entry 2 may exist: .*DigestMismatchError"):
            await cluster.client.recover_ledger(writer.ledger_id)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert reader.metadata.state is LedgerState.IN_RECOVERY
        cluster.member(writer, 2).start()
        assert (await cluster.client.recover_ledger(writer.ledger_id)).last_entry_id == 2

    run(scenario)


def test_recovery_that_cannot_tell_the_length_aborts() -> None:
    """The last entry's own frame tells it; without that frame there is no closing."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        await writer.publish_lac()
        await writer.abandon()
        members = [cluster.member(writer, position) for position in range(3)]
        good = members[0].entries(writer.ledger_id)[2]
        for each in members:
            each.entries(writer.ledger_id)[2] = b"damaged"
        with pytest.raises(LedgerRecoveryError, match="its last entry 2 cannot be read"):
            await cluster.client.recover_ledger(writer.ledger_id)
        members[1].entries(writer.ledger_id)[2] = good
        metadata = await cluster.client.recover_ledger(writer.ledger_id)
        assert metadata.length_bytes == writer.length_bytes

    run(scenario)


def test_concurrent_recoverers_agree() -> None:
    """However many, in one process or several; one that is cancelled disturbs no other."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 30)
        others = [cluster.new_client() for _ in range(3)]
        recoveries = [
            asyncio.create_task(each.recover_ledger(writer.ledger_id))
            for each in (*others, others[0])
        ]
        await asyncio.sleep(0)
        recoveries[-1].cancel()
        found = await asyncio.gather(*recoveries[:-1])
        assert len({(each.last_entry_id, each.length_bytes) for each in found}) == 1
        for each in others:
            await each.aclose()

    run(scenario)


def test_a_recovery_in_progress_ends_with_its_client() -> None:
    """Nothing is left running."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        for each in cluster.bookies.values():
            each.is_silent = True
        other = cluster.new_client()
        recovery = asyncio.create_task(other.recover_ledger(writer.ledger_id))
        await asyncio.sleep(0.5)
        await other.aclose()
        with pytest.raises(asyncio.CancelledError):
            await recovery
        with pytest.raises(AlreadyClosedError):
            await other.recover_ledger(writer.ledger_id)

    run(scenario)


def test_acks_are_held_back_until_the_ensemble_change_is_stored() -> None:
    """A metadata store that is away stops exactly those acks, and they come when it is back."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await write(writer, 1)
        cluster.member(writer, 0).stop()
        cluster.store.disconnect()
        ack = writer.append([b"entry-1"])
        await asyncio.sleep(3.0)
        assert not ack.done()
        cluster.store.reconnect()
        assert await ack == 1
        assert len(writer.metadata.ensembles) == 2
        await writer.close()

    run(scenario)


def test_adds_within_the_ensemble_go_on_without_the_metadata_store() -> None:
    """A failed third replica does not need it at once."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        cluster.store.disconnect()
        await write(writer, 5)
        cluster.member(writer, 0).stop()
        await write(writer, 5)
        await asyncio.sleep(1.0)  # the writer looks for a replacement meanwhile
        await write(writer, 5)
        cluster.store.reconnect()
        await asyncio.sleep(10.0)
        await write(writer, 1)
        assert len(writer.metadata.ensembles) == 2
        await writer.close()

    run(scenario)


def test_a_metadata_store_that_stays_away_ends_a_writer() -> None:
    """After its patience, with the store's own error."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        cluster.member(writer, 0).stop()
        cluster.store.disconnect()
        with pytest.raises(MetadataConnectionError):
            await writer.append([b"x"])
        with pytest.raises(MetadataConnectionError):
            await writer.close()
        cluster.store.reconnect()
        assert (await writer.close()).last_entry_id == 0  # two bookies hold it

    run(scenario)


@pytest.mark.parametrize("applied", [True, False])
def test_lost_replies_of_the_metadata_store_are_classified(*, applied: bool) -> None:
    """Creation, ensemble change and close survive each one, applied or not."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await write(writer, 1)
        cluster.member(writer, 1).stop()
        for _ in range(7):
            cluster.store.lose_next_reply(applied=applied)
        await write(writer, 2)
        assert [e.first_entry_id for e in writer.metadata.ensembles] == [0, 1]
        cluster.store.lose_next_reply(applied=applied)
        metadata = await writer.close()
        assert metadata == (await cluster.client.open_ledger(writer.ledger_id)).metadata

    run(scenario)


def test_a_deleted_ledger_cannot_change_or_close() -> None:
    """The writer learns it when it needs the metadata."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await cluster.client._context().ledger_store.delete(writer.ledger_id)
        cluster.member(writer, 0).stop()
        with pytest.raises(LedgerNotFoundError):
            await writer.append([b"x"])
        with pytest.raises(LedgerNotFoundError):
            await writer.close()
        with pytest.raises(LedgerNotFoundError):
            await cluster.client._context().ledger_store.delete(writer.ledger_id)

    run(scenario)


def test_an_abandoned_writer_fails_what_is_pending() -> None:
    """And leaves the ledger open, for recovery."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        for position in (0, 1):
            cluster.member(writer, position).is_silent = True
        pending = writer.append([b"x"])
        await writer.abandon()
        with pytest.raises(LedgerClosedError, match="abandoned"):
            await pending
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert reader.metadata.state is LedgerState.OPEN

    run(scenario)


def test_values_say_what_they_are() -> None:
    """For logs and debuggers."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 2)
        assert repr(writer) == f"<LedgerWriter {writer.ledger_id} OPEN lac=1 pushed=1 E3/Qw3/Qa2>"
        await writer.close()
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert repr(reader) == f"<LedgerReader {writer.ledger_id} CLOSED>"

    run(scenario)
