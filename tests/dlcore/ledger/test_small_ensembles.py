"""Goal: with fewer bookies than wanted writers go on, and promise no less.  Method: memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from dlcore.base.config import PlacementConfig, QuorumConfig
from dlcore.base.errors import CorruptMetadataError, NotEnoughBookiesError
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.ledger.placing.placement import choose_quorum
from dlcore.metadata.stored import decode, encode
from tests.fixtures.ledger_cluster import CONFIG, Cluster, bodies, read_all, run, write
from tests.fixtures.ledgers import bookie, bookies, quorum_of
from tests.fixtures.recovery import lose, register, unregister

FREE = PlacementConfig()
STRICT = replace(CONFIG, placement=PlacementConfig(enforce_ensemble_size=True), bookies_wait_s=0.0)
WAITING = replace(CONFIG, bookies_wait_s=20.0)


@st.composite
def quorums(draw: st.DrawFn) -> QuorumConfig:
    """Draw a quorum."""
    size = draw(st.integers(1, 6))
    write_size = draw(st.integers(1, size))
    return quorum_of(size, write_size, draw(st.integers(1, write_size)))


@given(quorums(), st.integers(0, 8), st.integers(1, 4), st.booleans())
def test_a_smaller_quorum_keeps_the_promise(
    wanted: QuorumConfig, writable: int, racks: int, is_enforced: bool
) -> None:
    """Qa stays, and each bookie holds every entry; it has Qa to Qw bookies."""
    config = PlacementConfig(racks_per_write_quorum_min=racks, enforce_racks=is_enforced)
    quorum = choose_quorum(wanted, writable, config)
    assert quorum.ack_quorum_size == wanted.ack_quorum_size
    if writable >= wanted.ensemble_size:
        assert quorum == wanted
        return
    assert quorum.write_quorum_size <= wanted.write_quorum_size
    if quorum != wanted:
        assert quorum.ensemble_size == quorum.write_quorum_size
    if quorum.ensemble_size > writable:  # the least that would do, which there is not
        needed = min(racks, wanted.write_quorum_size) if is_enforced else 0
        assert quorum.ensemble_size == max(wanted.ack_quorum_size, needed)
    assert choose_quorum(wanted, writable, PlacementConfig(enforce_ensemble_size=True)) == wanted


@pytest.mark.parametrize(
    ("wanted", "writable", "expected"),
    [
        ((3, 3, 2), 2, (2, 2, 2)),
        ((3, 3, 3), 2, (3, 3, 3)),
        ((5, 3, 2), 4, (3, 3, 2)),
        ((5, 3, 2), 2, (2, 2, 2)),
        ((3, 3, 1), 1, (1, 1, 1)),
        ((4, 3, 2), 1, (2, 2, 2)),
    ],
)
def test_the_quorum_of_so_many_bookies(
    wanted: tuple[int, int, int], writable: int, expected: tuple[int, int, int]
) -> None:
    """By hand; N/N/N, which survives all losses but one, is never smaller."""
    assert choose_quorum(quorum_of(*wanted), writable, FREE) == quorum_of(*expected)


def closed(**values: object) -> LedgerMetadata:
    """Return the metadata of a ledger of two ensembles of two bookies."""
    fields: dict[str, object] = {
        "ledger_id": 7,
        "quorum": quorum_of(2, 2, 2),
        "state": LedgerState.CLOSED,
        "ensembles": (Ensemble(0, bookies("AB")), Ensemble(5, bookies("AC"))),
        "token": "t",
        "created_ms": 1,
        "last_entry_id": 9,
        "wanted": QuorumConfig(),
    }
    return LedgerMetadata(**(fields | values))  # type: ignore[arg-type]


def test_the_wanted_value_is_stored_and_joined_calls_count() -> None:
    """Each ensemble grows by one at its end; a value of before reads as nothing lacking."""
    metadata = closed()
    assert decode(LedgerMetadata, encode(metadata), source="here") == metadata
    assert metadata.copies_lacking == 1
    joined = metadata.with_joined({0: bookie("C"), 5: bookie("B")})
    assert joined.quorum == QuorumConfig()
    assert [each.bookies for each in joined.ensembles] == [bookies("ABC"), bookies("ACB")]
    assert joined.copies_lacking == 0
    assert closed(wanted=None).copies_lacking == 0


def test_a_striped_ledger_cannot_lack_copies() -> None:
    """No bookie could join it; such metadata is damaged."""
    ensembles = (Ensemble(0, bookies("ABC")),)
    with pytest.raises(CorruptMetadataError, match="E = Qw"):
        closed(quorum=quorum_of(3, 2, 2), ensembles=ensembles)


def test_a_ledger_begins_with_as_many_bookies_as_there_are() -> None:
    """3/3/2 with two: each entry is on both, and readable from any one of them."""

    async def scenario(cluster: Cluster) -> None:
        await lose(cluster, "C")
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        metadata = await writer.close()
        assert (metadata.quorum, metadata.wanted) == (quorum_of(2, 2, 2), QuorumConfig())
        for name in "AB":
            assert cluster.holders(writer, 9) == {"A", "B"}
            cluster.bookies[name].stop()
            reader = await cluster.client.open_ledger(writer.ledger_id)
            assert await read_all(reader, 0, 9) == bodies(0, 9)
            cluster.bookies[name].start()

    run(scenario, "ABC")


def test_a_small_ledger_is_recovered_from_one_of_its_two_bookies() -> None:
    """Acknowledged entries survive the loss of Qa - 1, as ever; another takes the place."""

    async def scenario(cluster: Cluster) -> None:
        await unregister(cluster, "C")
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        cluster.bookies["A"].stop()
        await register(cluster, "C")
        metadata = await cluster.new_client().recover_ledger(writer.ledger_id)
        assert metadata.last_entry_id == 9
        await writer.abandon()

    run(scenario, "ABC")


def test_a_small_ledger_replaces_a_bookie_by_one_that_is_back() -> None:
    """Its ensemble keeps its size while it is written."""

    async def scenario(cluster: Cluster) -> None:
        await unregister(cluster, "C")
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        await register(cluster, "C")
        cluster.bookies["A"].stop()
        await write(writer, 3)
        assert {each.name for each in writer.metadata.last_ensemble.bookies} == {"B", "C"}
        await writer.close()

    run(scenario, "ABC")


def test_a_client_that_enforces_the_size_refuses() -> None:
    """As it was before."""

    async def scenario(cluster: Cluster) -> None:
        with pytest.raises(
            NotEnoughBookiesError, match="needs 3 writable bookies, registered are 2"
        ):
            await cluster.client.create_ledger(QuorumConfig())

    run(scenario, "AB", STRICT)


def test_a_ledger_waits_for_the_least_that_it_needs_and_no_longer() -> None:
    """It begins once they are there; without them it fails after the time, named in the error."""

    async def scenario(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()
        await unregister(cluster, "B")
        begun = loop.time()
        creating = loop.create_task(cluster.client.create_ledger(QuorumConfig()))
        await asyncio.sleep(7)
        assert not creating.done()
        await register(cluster, "B")
        writer = await creating
        assert loop.time() - begun < 8
        await write(writer, 1)
        await writer.close()
        await unregister(cluster, "A")
        begun = loop.time()
        with pytest.raises(NotEnoughBookiesError, match="needs 2 writable bookies"):
            await cluster.client.create_ledger(QuorumConfig())
        assert loop.time() - begun == pytest.approx(20, abs=0.5)

    run(scenario, "AB", WAITING)


def test_an_entry_waits_for_bookies_that_come_back_and_fails_after_the_time() -> None:
    """Below Qa an open ledger goes on once a bookie is back; each entry waits for the set time.

    A bookie that still is registered and refuses adds shortens and prolongs nothing.
    """

    async def scenario(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 2)
        for name in "BC":
            cluster.bookies[name].stop()
        await unregister(cluster, "B")
        waiting = [writer.append([b"%d" % number]) for number in range(2)]
        await asyncio.sleep(7)
        assert not waiting[0].done()
        cluster.bookies["B"].start()
        await register(cluster, "B")
        begun = loop.time()
        assert [await each for each in waiting] == [2, 3]
        assert loop.time() - begun < 4
        cluster.bookies["B"].stop()
        begun = loop.time()
        with pytest.raises(NotEnoughBookiesError, match="entry 4 cannot reach 2 of 3"):
            await writer.append([b"lost"])
        assert loop.time() - begun == pytest.approx(20, abs=2.5)

    run(scenario, "ABC", WAITING)
