"""Garbage of a bookie: the metadata of each ledger decides, twice, what goes of it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from bookie.config import GarbageConfig
from bookie.upkeep.garbage_collector import GarbageCollector
from dlcore.base.config import QuorumConfig
from dlcore.base.errors import CorruptMetadataError, NoSuchLedgerError
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.values import BookieCookie, Ensemble, LedgerMetadata, LedgerState
from dlcore.metadata.binding import Restored, ensure_namespace
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.stored import encode
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.simulated_store import SimulatedTree
from tests.fixtures.storage import ManualClock, make_frame, open_storage, small_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bookie.ledger_storage import LedgerStorage
    from tests.fixtures.simulated_store import SimulatedStore

PATHS = NamespacePaths("/dlog")
OWN, OTHER = BookieId("one", "a" * 32), BookieId("two", "b" * 32)
AGAIN = BookieId("one", "c" * 32)
"""The same name on another disk."""


class Bench:
    """One bookie's storage, its metadata, and passes of garbage collection."""

    def __init__(self, storage: LedgerStorage, store: SimulatedStore, clock: ManualClock) -> None:
        self.storage = storage
        self.store = store
        self.clock = clock
        self.cluster_id = ""

    async def hold(self, ledger_id: int, *, bookie: BookieId = OTHER, state: LedgerState) -> None:
        """Store an entry of a ledger whose metadata names `bookie`."""
        await self.storage.writes.add_entry(make_frame(ledger_id, 0))
        is_closed = state is LedgerState.CLOSED
        metadata = LedgerMetadata(
            ledger_id=ledger_id,
            quorum=QuorumConfig(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1),
            ensembles=(Ensemble(0, (bookie,)),),
            state=state,
            last_entry_id=0 if is_closed else -1,
            length_bytes=1 if is_closed else 0,
            token="t" * 32,
            created_ms=0,
        )
        await self.store.create(PATHS.ledger(ledger_id), encode(metadata), make_parents=True)

    async def collect(self, passes: int = 2) -> set[int]:
        """Return the ledgers that are left after some passes."""
        for _ in range(passes):
            self.clock.now += 1000
            collector = GarbageCollector(
                self.storage.upkeep,
                bookie=OWN,
                store=self.store,
                paths=PATHS,
                cluster_id=self.cluster_id,
            )
            await collector.collect()
        return set(self.storage.core.live_ledgers())


@contextlib.asynccontextmanager
async def bench(**garbage: float) -> AsyncIterator[Bench]:
    """Set a bookie up."""
    clock = ManualClock()
    store = SimulatedTree().connect()
    binding = await ensure_namespace(store, PATHS, clock)
    cookie = BookieCookie(
        name=OWN.name, incarnation=OWN.incarnation, cluster_id=binding.cluster_id, created_ms=0
    )
    await store.create(PATHS.cookie(OWN.name), encode(cookie), make_parents=True)
    await store.create(PATHS.repair_lock(0).rpartition("/")[0], make_parents=True)
    await store.put(PATHS.ledger_idgen, b"1000", version=-1)
    config = small_config(garbage=GarbageConfig(**{"age_ms": 500, **garbage}))  # type: ignore[arg-type]
    async with open_storage(MemoryDisk(), config, clock=clock) as storage:
        one = Bench(storage, store, clock)
        one.cluster_id = binding.cluster_id
        yield one
    await store.aclose()


def test_only_closed_ledgers_that_do_not_name_the_bookie_are_given_up() -> None:
    """Goal: state, members and incarnation decide; what cannot be read is kept."""

    async def scenario() -> None:
        async with bench() as one:
            await one.hold(1, state=LedgerState.CLOSED)
            await one.hold(2, state=LedgerState.CLOSED, bookie=OWN)
            await one.hold(3, state=LedgerState.OPEN)
            await one.hold(4, state=LedgerState.IN_RECOVERY)
            await one.hold(5, state=LedgerState.CLOSED, bookie=AGAIN)
            await one.hold(6, state=LedgerState.CLOSED)
            await one.store.put(PATHS.ledger(6), b"broken", version=0)
            await one.storage.writes.add_entry(make_frame(7, 0))
            assert await one.collect(1) == {1, 2, 3, 4, 5, 6, 7}
            assert await one.collect(1) == {2, 3, 4, 6}
            with pytest.raises(NoSuchLedgerError):
                list(one.storage.reads.list_entries(1))
            assert await one.store.get(PATHS.repair_lock(1)) is None

    run(scenario())


def test_a_ledger_that_waits_for_repair_or_is_repaired_is_kept() -> None:
    """Goal: a bookie that is chosen as a new member keeps its entries, until that is decided."""

    async def scenario() -> None:
        async with bench() as one:
            await one.hold(1, state=LedgerState.CLOSED)
            await one.store.create(PATHS.under_replicated_ledger(1), make_parents=True)
            assert await one.collect(4) == {1}
            await one.store.delete(PATHS.under_replicated_ledger(1))
            await one.store.create(PATHS.repair_lock(1), b"a worker", ephemeral=True)
            assert await one.collect(4) == {1}
            await one.store.delete(PATHS.repair_lock(1))
            assert await one.collect(4) == set()

    run(scenario())


def test_a_ledger_given_up_is_unknown_until_it_is_added_again() -> None:
    """Goal: a repair that asks finds nothing proven; what it then adds stays."""

    async def scenario() -> None:
        async with bench() as one:
            await one.hold(1, state=LedgerState.CLOSED)
            assert await one.collect() == set()
            await one.storage.writes.add_entry(make_frame(1, 0), is_recovery=True)
            assert one.storage.core.live_ledgers() == [1]
            (held,) = one.storage.reads.list_entries(1)
            assert (held.first_entry_id, held.last_entry_id) == (0, 0)

    run(scenario())


def test_an_operator_lets_the_brake_go_once() -> None:
    """Goal: what many looked deleted at once are collected when an operator says so; only then."""

    async def scenario() -> None:
        async with bench(brake_count=3, brake_age_ms=10**9) as one:
            for ledger_id in range(10):
                await one.storage.writes.add_entry(make_frame(ledger_id, 0))
            assert len(await one.collect(5)) == 10
            path = PATHS.garbage_release(OWN.name)
            await one.store.create(path, AGAIN.incarnation.encode(), make_parents=True)
            assert len(await one.collect(2)) == 10
            await one.store.put(path, OWN.incarnation.encode(), version=-1)
            assert await one.collect(1) == set()
            assert await one.store.get(path) is None
            for ledger_id in range(10, 20):
                await one.storage.writes.add_entry(make_frame(ledger_id, 0))
            assert len(await one.collect(5)) == 10

    run(scenario())


def test_metadata_that_does_not_know_the_bookie_deletes_nothing() -> None:
    """Goal: identity is looked at afresh in each pass."""

    async def scenario() -> None:
        async with bench() as one:
            await one.storage.writes.add_entry(make_frame(1, 0))
            await one.store.delete(PATHS.cookie(OWN.name))
            with pytest.raises(CorruptMetadataError, match="is not the cookie of bookie"):
                await one.collect()
            assert one.storage.core.live_ledgers() == [1]

    run(scenario())


def test_imported_metadata_deletes_nothing_until_accepted() -> None:
    """Goal: what was made after the export, there or on other bookies, stays as long as needed."""

    async def scenario() -> None:
        async with bench() as one:
            await one.storage.writes.add_entry(make_frame(1, 0))  # made after the export
            await one.hold(2, state=LedgerState.CLOSED)  # a copy that a repair made after it
            restored = Restored(exported_ms=0, imported_ms=1)
            await one.store.create(PATHS.restored, encode(restored))
            for _ in range(5):
                with pytest.raises(CorruptMetadataError, match="as it was at 1970-01-01T00:00:00Z"):
                    await one.collect(1)
            assert one.storage.core.live_ledgers() == [1, 2]
            await one.store.delete(PATHS.restored)
            assert await one.collect(3) == set()

    run(scenario())


def test_a_server_that_lags_makes_no_garbage() -> None:
    """Goal: before a ledger counts as gone, all that was stored before is asked for."""

    async def scenario() -> None:
        tree = SimulatedTree(lag=lambda: 3600.0)
        writer = tree.connect()
        await ensure_namespace(writer, PATHS, ManualClock())
        behind = tree.connect()
        async with open_storage(MemoryDisk(), small_config()) as storage:
            one = Bench(storage, writer, ManualClock())
            await one.hold(1, state=LedgerState.OPEN)
            assert await behind.get(PATHS.ledger(1)) is None
            collector = GarbageCollector(
                storage.upkeep, bookie=OWN, store=behind, paths=PATHS, cluster_id=""
            )
            assert not await collector._is_unneeded(1)
            await writer.delete(PATHS.ledger(1))
            await behind.sync(PATHS.ledger(1))
            assert await collector._is_unneeded(1)
        await writer.aclose()
        await behind.aclose()

    run(scenario())
