"""A bookie takes nothing of a ledger that was never made, and everything of one that was."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import AsyncMock, patch

import pytest
from msgspec.structs import replace as with_values

from bookie.config import GarbageConfig
from bookie.ledger_storage import LedgerStorage
from bookie.membership.given_ids import _READ_PAUSE_S, GivenIds, Need
from dlcore.base.errors import (
    BadRequestError,
    BookieUnavailableError,
    CorruptMetadataError,
    LedgerFencedError,
    MetadataConnectionError,
)
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import LedgerState
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.paths import NamespacePaths
from tests.fixtures.aio import run, until
from tests.fixtures.ledgers import metadata_of
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.simulated_store import SimulatedTree
from tests.fixtures.storage import ManualClock, make_frame, open_storage, read_all, small_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from bookie.config import StorageConfig
    from dlcore.ledger.metadata.store import ReadLedgers

PATHS = NamespacePaths("/dlog")
HIGHEST = 2**63 - 1


class Counter:
    """The next ledger id, as slowly as the test wants it; ledgers are open but for `states`."""

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self.states: dict[int, LedgerState | None] = {}
        self.on_read: Callable[[], None] = lambda: None
        self.reads = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.error: Exception | None = None

    async def next_ledger_id(self) -> int:
        """Return what it was when the read began."""
        self.reads += 1
        next_id = self.next_id
        await self.is_open.wait()
        if self.error is not None:
            raise self.error
        return next_id

    async def read_many(self, ledger_ids: Sequence[int], *, fresh: bool) -> ReadLedgers:
        """Return the ledgers as they were when the read began."""
        assert fresh
        states = {each: self.states.get(each, LedgerState.OPEN) for each in ledger_ids}
        self.on_read()
        return {
            each: with_values(metadata_of((0, "ABC"), state=state), ledger_id=each)
            for each, state in states.items()
            if state is not None
        }


@asynccontextmanager
async def opened(
    counter: Counter, config: StorageConfig | None = None, *, disk: MemoryDisk | None = None
) -> AsyncIterator[LedgerStorage]:
    """Open a storage that asks `counter`, on a new disk unless one is given."""
    storage = await LedgerStorage.open(
        disk or MemoryDisk(),
        config or small_config(),
        clock=ManualClock(),
        given_ids=GivenIds(counter),
    )
    try:
        yield storage
    finally:
        await storage.aclose()


@pytest.mark.parametrize("made_up", [16, HIGHEST])
def test_an_id_that_was_never_given_is_refused_and_leaves_nothing(made_up: int) -> None:
    """Goal: no fence, add or LAC makes a bookie know a ledger that was never made."""

    async def scenario() -> None:
        async with opened(Counter(16)) as storage:
            reason = f"ledger {made_up} was never created: the next new ledger is 16"
            with pytest.raises(BadRequestError, match=reason):
                await storage.reads.read_lac(made_up, fence=True)
            with pytest.raises(BadRequestError, match=reason):
                await storage.reads.read_entry(made_up, 0, fence=True)
            with pytest.raises(BadRequestError, match=reason):
                await storage.writes.write_lac(made_up, 3)
            for is_recovery in (False, True):
                with pytest.raises(BadRequestError, match=reason):
                    await storage.writes.add_entry(make_frame(made_up, 0), is_recovery=is_recovery)
            assert storage.core.live_ledgers() == []
            await storage.writes.add_entry(make_frame(15, 0))
            assert storage.core.live_ledgers() == [15]

    run(scenario())


def test_a_ledger_made_a_moment_ago_is_taken() -> None:
    """Goal: what was read last may be old; before an id is refused it is read anew."""

    async def scenario() -> None:
        counter = Counter(16)
        async with opened(counter) as storage:
            await storage.writes.add_entry(make_frame(3, 0))
            for next_id, ledger_id in ((32, 16), (48, 47), (64, 50)):
                counter.next_id = next_id
                await storage.reads.read_lac(ledger_id, fence=True)
            assert storage.core.live_ledgers() == [3, 16, 47, 50]

    run(scenario())


def test_nothing_is_asked_about_ids_that_are_known() -> None:
    """Goal: one read serves all ids below what it found, and whatever the bookie holds."""

    async def scenario() -> None:
        counter = Counter(0)
        async with opened(counter) as storage:
            with pytest.raises(BadRequestError):
                await storage.writes.add_entry(make_frame(0, 0))
            counter.next_id = 1000
            for ledger_id in range(200):
                await storage.writes.add_entry(make_frame(ledger_id, 0))
            assert counter.reads == 2
            counter.next_id = 0  # restored from an old backup: what is held goes on
            with pytest.raises(BadRequestError):
                await storage.writes.add_entry(make_frame(1000, 0))
            await storage.writes.add_entry(make_frame(7, 1))
            assert counter.reads == 3

    run(scenario())


def test_requests_that_wait_share_a_read_and_those_that_come_during_one_get_the_next() -> None:
    """Goal: a read that began before a ledger was made says nothing against it."""

    async def scenario() -> None:
        counter = Counter(16)
        counter.is_open.clear()
        async with opened(counter) as storage:
            early = [storage.writes.add_entry(make_frame(1, each)) for each in range(50)]
            await until(lambda: counter.reads == 1)
            counter.next_id = 32
            late = [storage.writes.add_entry(make_frame(20, each)) for each in range(50)]
            counter.is_open.set()
            await asyncio.gather(*early, *late)
            assert counter.reads == 2

    run(scenario())


def test_made_up_ids_cost_the_metadata_few_reads() -> None:
    """Goal: between two reads there is a pause, whichever client asks."""

    async def scenario() -> None:
        counter = Counter(16)
        async with opened(counter) as storage:
            began_s = asyncio.get_running_loop().time()
            for made_up in range(100, 106):
                with pytest.raises(BadRequestError):
                    await storage.reads.read_lac(made_up, fence=True)
            took_s = asyncio.get_running_loop().time() - began_s
            assert took_s > (counter.reads - 1) * _READ_PAUSE_S * 0.9

    run(scenario())


def test_without_an_answer_of_the_metadata_nothing_is_known() -> None:
    """Goal: an outage is no "no": the client may come again, and then it is answered."""

    async def scenario() -> None:
        counter = Counter(16)
        counter.error = MetadataConnectionError("no ZooKeeper")
        async with opened(counter) as storage:
            with pytest.raises(BookieUnavailableError, match="ledger 3 may be written: no Zoo"):
                await storage.writes.add_entry(make_frame(3, 0))
            with pytest.raises(BookieUnavailableError, match="cannot find out whether"):
                await storage.reads.read_lac(3, fence=True)
            counter.error = None
            await storage.writes.add_entry(make_frame(3, 0))

    run(scenario())


def test_a_metadata_store_that_hangs_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: the client gets an error in time that says that nothing is known."""

    async def scenario() -> None:
        monkeypatch.setattr("bookie.membership.given_ids._READ_TIMEOUT_S", 0.01)
        counter = Counter(16)
        counter.is_open.clear()
        async with opened(counter) as storage:
            with pytest.raises(BookieUnavailableError, match=r"did not answer within 0.01 s"):
                await storage.writes.add_entry(make_frame(3, 0))

    run(scenario())


def test_a_storage_that_closes_answers_who_waits() -> None:
    """Goal: no request is left without an answer, and no task behind."""

    async def scenario() -> None:
        counter = Counter(16)
        counter.is_open.clear()
        async with opened(counter) as storage:
            added = storage.writes.add_entry(make_frame(3, 0))
            fenced = asyncio.create_task(storage.reads.read_lac(4, fence=True))
            await until(lambda: counter.reads == 1)
            later = asyncio.create_task(storage.reads.read_lac(5, fence=True))
            await asyncio.sleep(0)
            await storage.aclose()
            for each in (added, fenced, later):
                with pytest.raises(BookieUnavailableError):
                    await each
        assert len(asyncio.all_tasks()) == 1

    run(scenario())


def test_a_storage_that_closes_makes_a_lac_durable_that_waited_for_its_id() -> None:
    """Nothing else but the LAC's own timer would do it, and closing waits for it."""

    async def scenario() -> None:
        counter = Counter(16)
        counter.next_id = 20
        async with opened(counter, replace(small_config(), lac_delay_s=1.0)) as storage:
            lac = storage.writes.write_lac(17, 3)
            await until(lambda: 17 in storage.core.ledgers)
            async with asyncio.timeout(20):
                await storage.aclose()
            await lac

    run(scenario())


def test_an_add_that_waited_is_decided_behind_the_fence_that_overtook_it() -> None:
    """Goal: waiting changes no promise: what came before the fence is in, later adds are not."""

    async def scenario() -> None:
        counter = Counter(16)
        counter.is_open.clear()
        async with opened(counter) as storage:
            before = storage.writes.add_entry(make_frame(3, 0))
            await until(lambda: counter.reads == 1)
            fence = asyncio.create_task(storage.reads.read_lac(3, fence=True))
            await asyncio.sleep(0)
            after = storage.writes.add_entry(make_frame(3, 1))
            counter.is_open.set()
            await before
            await fence
            with pytest.raises(LedgerFencedError):
                await after

    run(scenario())


async def used_disk() -> MemoryDisk:
    """Return a disk on which a storage has filled more than a file, with ledger 15."""
    disk = MemoryDisk()
    async with open_storage(disk, small_config(file_bytes_max=4096)) as storage:
        for entry_id in range(20):
            await storage.writes.add_entry(make_frame(15, entry_id, bytes(1000)))
        assert storage.core.files.numbers()
    return disk


def test_after_a_restart_a_ledger_that_may_be_over_is_looked_up() -> None:
    """Goal: which ledgers it forgot before, a bookie does not know."""

    async def scenario() -> None:
        counter = Counter(16)
        counter.states |= {3: None, 4: LedgerState.IN_RECOVERY}
        async with opened(counter, disk=await used_disk()) as storage:
            with pytest.raises(LedgerFencedError, match="ledger 3 was deleted"):
                await storage.writes.add_entry(make_frame(3, 0))
            with pytest.raises(LedgerFencedError, match="ledger 4 is in recovery"):
                await storage.writes.add_entry(make_frame(4, 0))
            await storage.writes.add_entry(make_frame(5, 0))
            await storage.writes.add_entry(make_frame(15, 20))
            assert storage.core.live_ledgers() == [5, 15]

    run(scenario())


@asynccontextmanager
async def forgetful(counter: Counter) -> AsyncIterator[LedgerStorage]:
    """Open a storage that fenced ledger 3, forgot it as deleted, and has ledger 9."""
    config = small_config(garbage=GarbageConfig(age_ms=0))
    async with opened(counter, config) as storage:
        await storage.writes.add_entry(make_frame(3, 0))
        await storage.writes.fence(3)
        with pytest.raises(LedgerFencedError, match="ledger 3 is fenced"):
            await storage.writes.add_entry(make_frame(3, 1))
        await storage.writes.add_entry(make_frame(9, 0))

        async def is_doomed(ledger_id: int) -> bool:
            return ledger_id == 3

        counter.states[3] = None
        collect = partial(storage.upkeep.collect_garbage, is_doomed, at_once={3})
        assert await storage.upkeep.erase(collect) == ("", frozenset())
        assert list(storage.core.ledgers) == [9]
        yield storage


def test_a_writer_that_was_paused_adds_nothing_to_a_deleted_ledger() -> None:
    """Goal: the fence is forgotten with the ledger, and what it promised is not."""

    async def scenario() -> None:
        async with forgetful(Counter(16)) as storage:
            for is_recovery in (False, True):
                with pytest.raises(LedgerFencedError, match="ledger 3 was deleted"):
                    await storage.writes.add_entry(make_frame(3, 1), is_recovery=is_recovery)
            with pytest.raises(LedgerFencedError, match="ledger 3 was deleted"):
                await storage.writes.write_lac(3, 0)
            assert list(storage.core.ledgers) == [9]
            await storage.writes.fence(3)  # it promises nothing that does not hold
            with pytest.raises(LedgerFencedError, match="ledger 3 is fenced"):
                await storage.writes.add_entry(make_frame(3, 1))

    run(scenario())


def test_a_forgotten_copy_of_a_closed_ledger_is_made_again_by_repairs_only() -> None:
    """Goal: a bookie that was replaced, and is chosen again, takes copies and no new entry."""

    async def scenario() -> None:
        counter = Counter(16)
        async with forgetful(counter) as storage:
            counter.states[3] = LedgerState.CLOSED
            with pytest.raises(LedgerFencedError, match="ledger 3 is closed"):
                await storage.writes.add_entry(make_frame(3, 1))
            await storage.writes.add_entry(make_frame(3, 0), is_recovery=True)
            assert await read_all(storage, 3, first=0, last=0)

    run(scenario())


def test_a_ledger_below_a_forgotten_one_is_looked_up_once_and_those_above_are_not() -> None:
    """Goal: ids are taken in ranges, so an old id may be a new ledger's."""

    async def scenario() -> None:
        counter = Counter(16)
        async with forgetful(counter) as storage:
            before = counter.reads
            first = [storage.writes.add_entry(make_frame(2, each)) for each in range(20)]
            await asyncio.gather(*first)
            await storage.writes.add_entry(make_frame(2, 20))
            assert counter.reads == before + 1
            counter.next_id = 32
            await storage.writes.fence(20)  # learns that more ids are given
            await storage.writes.add_entry(make_frame(21, 0))
            assert counter.reads == before + 2

    run(scenario())


def test_a_ledger_forgotten_during_a_look_is_looked_up_again() -> None:
    """Goal: an answer from before the ledger was deleted does not count."""

    async def scenario() -> None:
        counter = Counter(16)
        async with opened(counter, disk=await used_disk()) as storage:
            given = storage.writes._given_ids

            def delete() -> None:
                given.forget(5)
                counter.states[5] = None
                counter.on_read = lambda: None

            counter.on_read = delete
            with pytest.raises(LedgerFencedError, match="ledger 5 was deleted"):
                await storage.writes.add_entry(make_frame(5, 0))

    run(scenario())


def test_damaged_metadata_says_nothing() -> None:
    """Goal: neither accepted nor refused for good."""

    async def scenario() -> None:
        counter = Counter(16)
        async with opened(counter, disk=await used_disk()) as storage:
            damaged = {4: CorruptMetadataError("node 4 is damaged")}
            with (
                patch.object(counter, "read_many", AsyncMock(return_value=damaged)),
                pytest.raises(BookieUnavailableError, match="may be written: node 4 is damaged"),
            ):
                await storage.writes.add_entry(make_frame(4, 0))

    run(scenario())


def test_a_look_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what is more waits for the next look, and comes before what was asked later."""

    async def scenario() -> None:
        monkeypatch.setattr("bookie.membership.given_ids._LEDGERS_AT_ONCE", 3)
        counter = Counter(16)
        async with opened(counter, disk=await used_disk()) as storage:
            added = [storage.writes.add_entry(make_frame(each, 0)) for each in range(8)]
            await asyncio.gather(*added)
            assert counter.reads == 3

    run(scenario())


def test_a_metadata_server_that_lags_makes_no_new_ledger_refused() -> None:
    """Goal: the id is read after a sync: the bookie's server may be behind the writer's."""

    async def scenario() -> None:
        tree = SimulatedTree(lag=lambda: 3600.0)
        writer, store = tree.connect(), tree.connect()
        await ensure_namespace(writer, PATHS, ManualClock())
        ids = GivenIds(LedgerStore(store, PATHS))
        for _ in range(40):  # more than are taken at once
            await ids.check(await LedgerStore(writer, PATHS).new_ledger_id(), Need.ALLOCATED)
        with pytest.raises(BadRequestError, match="was never created"):
            await ids.check(HIGHEST, Need.ALLOCATED)
        await ids.aclose()

    run(scenario())
