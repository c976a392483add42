"""One policy for every choice of bookies.

Goal: what the registrations and the answers of bookies say decides who gets a new ledger, who takes
a failed one's place and whom a reader asks first.  Method: memory bookies in virtual time, some of
which swallow requests, and registrations changed by hand.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import PlacementConfig, QuarantineConfig, QuorumConfig
from dlcore.base.errors import ConfigurationError, NotEnoughBookiesError
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.ledger.placing.health import REST_S
from dlcore.metadata.stored import encode
from dlcore.wire.memory_bookies import MemoryBookieClient
from tests.fixtures.ledger_cluster import CONFIG, PATHS, Cluster, TokenClock, run, write
from tests.fixtures.ledgers import bookie, bookies, quorum_of

if TYPE_CHECKING:
    from dlcore.ledger.writing.writer import LedgerWriter

PATIENT = replace(
    CONFIG, quarantine=QuarantineConfig(window_s=600, failures_min=2, period_s=4 * REST_S)
)


async def register(
    cluster: Cluster, name: str, *, rack: str = "/x", session: str = "", total_bytes: int = 0
) -> None:
    """Register a bookie anew, as it does after a restart."""
    registration = BookieRegistration(
        name=name,
        incarnation=bookie(name).incarnation,
        address="127.0.0.1:1",
        rack=rack,
        session=session,
        total_bytes=total_bytes,
    )
    path = PATHS.bookie_available(name)
    node = await cluster.store.get(path)
    assert node is not None
    await cluster.store.put(path, encode(registration), version=node.version)


def members_of(writer: LedgerWriter) -> set[str]:
    """Return the names of the bookies of the last ensemble."""
    return {each.name for each in writer.metadata.last_ensemble.bookies}


async def fail_adds(cluster: Cluster, victim: str, count: int) -> None:
    """Let so many adds to a hung bookie time out, in ledgers that have it."""
    for _ in range(count):
        writer = await cluster.client.create_ledger(quorum_of(5, 5, 4))
        assert victim in members_of(writer)
        await write(writer, 1)
        await asyncio.sleep(CONFIG.add_timeout_s + 0.1)
        await writer.abandon()


async def ensembles(cluster: Cluster, count: int = 12) -> set[str]:
    """Return the bookies chosen for some new ledgers of three."""
    seen: set[str] = set()
    for _ in range(count):
        writer = await cluster.client.create_ledger(QuorumConfig())
        seen |= members_of(writer)
        await writer.abandon()
    return seen


def test_new_ledgers_and_replacements_span_racks() -> None:
    """Four bookies in one rack and two in another: both racks in each ensemble, always."""

    async def scenario(cluster: Cluster) -> None:
        for name in "ABCDEF":
            await register(cluster, name, rack="/y" if name in "EF" else "/x")
        for _ in range(10):
            writer = await cluster.client.create_ledger(quorum_of(2, 2, 1))
            (other_rack,) = members_of(writer) & {*"EF"}
            cluster.bookies[other_rack].stop()
            await write(writer, 1)
            await asyncio.sleep(1)
            assert len(members_of(writer) & {*"EF"} - {other_rack}) == 1
            cluster.bookies[other_rack].start()
            await writer.abandon()
            await asyncio.sleep(REST_S)

    # An avoided bookie comes after a missing rack.
    run(scenario, "ABCDEF", replace(CONFIG, quarantine=QuarantineConfig(failures_min=1000)))


def test_an_enforced_rule_refuses_a_new_ledger() -> None:
    """One rack is not two; the error says where the bookies are."""

    async def scenario(cluster: Cluster) -> None:
        with pytest.raises(NotEnoughBookiesError, match="/default-rack: 4"):
            await cluster.client.create_ledger(QuorumConfig())

    run(scenario, config=replace(CONFIG, placement=PlacementConfig(enforce_racks=True)))


def test_a_hung_bookie_is_quarantined_for_all_ledgers() -> None:
    """Long after it failed it is still not chosen; then its time is over."""

    async def scenario(cluster: Cluster) -> None:
        cluster.bookies["A"].is_silent = True
        await fail_adds(cluster, "A", 2)
        await asyncio.sleep(REST_S + 1)
        assert "A" not in await ensembles(cluster)
        await asyncio.sleep(6 * REST_S)
        assert "A" in await ensembles(cluster)

    run(scenario, "ABCDE", PATIENT)


def test_a_single_failure_is_forgotten_after_a_rest() -> None:
    """The next ledger goes to others, one a little later may not."""

    async def scenario(cluster: Cluster) -> None:
        cluster.bookies["A"].is_silent = True
        await fail_adds(cluster, "A", 1)
        assert "A" not in await ensembles(cluster)
        await asyncio.sleep(REST_S + 1)
        assert "A" in await ensembles(cluster)

    run(scenario, "ABCDE", PATIENT)


def test_a_quarantined_bookie_is_used_where_others_do_not_suffice() -> None:
    """Five of five; and once it does as asked, it is free at once."""

    async def scenario(cluster: Cluster) -> None:
        cluster.bookies["A"].is_silent = True
        await fail_adds(cluster, "A", 2)
        cluster.bookies["A"].is_silent = False
        writer = await cluster.client.create_ledger(quorum_of(5, 5, 5))
        await write(writer, 1)
        assert "A" in await ensembles(cluster)

    run(scenario, "ABCDE", PATIENT)


def test_a_new_registration_ends_a_quarantine() -> None:
    """Another process stands behind the name; news of its disk's space are not that."""

    async def scenario(cluster: Cluster) -> None:
        for name in "ABCDE":
            await register(cluster, name, session="1")
        cluster.bookies["A"].is_silent = True
        await fail_adds(cluster, "A", 2)
        await register(cluster, "A", session="1", total_bytes=1)
        assert "A" not in await ensembles(cluster)
        await register(cluster, "A", session="2")
        assert "A" in await ensembles(cluster)

    run(scenario, "ABCDE", PATIENT)


def test_readers_ask_a_suspect_last() -> None:
    """The one that was silent is not asked again while the others answer."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        metadata = await writer.close()
        reader = cluster.client.open_ledger_of(metadata)

        async def asked() -> list[str]:
            """Read everything; return the bookies that got a request."""
            before = {name: each.requests for name, each in cluster.bookies.items()}
            async for _ in reader.read(0, 2):
                pass
            return [name for name, each in cluster.bookies.items() if each.requests > before[name]]

        (victim,) = await asked()
        cluster.bookies[victim].is_silent = True
        (other,) = await asked()  # after some silence
        cluster.bookies[victim].is_silent = False
        for _ in range(3):
            assert await asked() == [other]
        await asyncio.sleep(REST_S + 1)
        assert await asked() == [victim]

    run(scenario)


def test_a_client_without_a_metadata_store_chooses_no_bookie() -> None:
    """It has ledgers to read, and says so; and no writer chooses a bookie that is read-only."""

    async def scenario(cluster: Cluster) -> None:
        client = LedgerClient(
            ledger_store=None,
            registry=None,
            bookies=MemoryBookieClient(cluster.bookies.values()),
            config=CONFIG,
            clock=TokenClock(),
            rng=random.Random(0),
        )
        with pytest.raises(ConfigurationError, match="no metadata store"):
            _ = client.placer
        full = BookieRegistration(
            name="D", incarnation=bookie("D").incarnation, address="127.0.0.1:1", read_only=True
        )
        chosen = cluster.client.placer.choose_replacements(
            [full], ensemble=bookies("ABC"), positions=[1], quorum=QuorumConfig()
        )
        assert chosen == {}

    run(scenario)
