"""A bookie takes nothing of a ledger that was never made, and everything of one that was."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie.disks.memory import MemoryDisk
from bookie.membership.given_ids import _READ_PAUSE_S, GivenIds
from bookie.storage.ledger_storage import LedgerStorage
from dlcore.base.errors import (
    BadRequestError,
    BookieUnavailableError,
    LedgerFencedError,
    MetadataConnectionError,
)
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.memory import MemoryTree
from dlcore.metadata.paths import NamespacePaths
from tests.fixtures.aio import run, until
from tests.fixtures.storage import ManualClock, make_frame, small_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bookie.config import StorageConfig

PATHS = NamespacePaths("/dlog")
HIGHEST = 2**63 - 1


class Counter:
    """The next ledger id, as slowly as the test wants it."""

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self.reads = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.error: Exception | None = None

    async def read(self) -> int:
        """Return what it was when the read began."""
        self.reads += 1
        next_id = self.next_id
        await self.is_open.wait()
        if self.error is not None:
            raise self.error
        return next_id


@asynccontextmanager
async def opened(
    counter: Counter, config: StorageConfig | None = None
) -> AsyncIterator[LedgerStorage]:
    """Open a storage that asks `counter`."""
    storage = await LedgerStorage.open(
        MemoryDisk(),
        config or small_config(),
        clock=ManualClock(),
        given_ids=GivenIds(counter.read),
    )
    try:
        yield storage
    finally:
        await storage.aclose()


@pytest.mark.parametrize("made_up", [16, HIGHEST])
def test_an_id_that_was_never_given_is_refused_and_leaves_nothing(made_up: int) -> None:
    """Goal: neither a fence nor an add nor a LAC makes a bookie know a ledger that nobody made."""

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
        counter = Counter(1000)
        async with opened(counter) as storage:
            for ledger_id in range(200):
                await storage.writes.add_entry(make_frame(ledger_id, 0))
            assert counter.reads == 1
            counter.next_id = 0  # restored from an old backup: what is held goes on
            with pytest.raises(BadRequestError):
                await storage.writes.add_entry(make_frame(1000, 0))
            await storage.writes.add_entry(make_frame(7, 1))
            assert counter.reads == 2

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


def test_who_makes_ids_up_costs_the_metadata_few_reads() -> None:
    """Goal: between two reads there is a pause, whoever asks."""

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
            with pytest.raises(BookieUnavailableError, match="ledger 3 was ever created: no Zoo"):
                await storage.writes.add_entry(make_frame(3, 0))
            with pytest.raises(BookieUnavailableError, match="cannot find out whether"):
                await storage.reads.read_lac(3, fence=True)
            counter.error = None
            await storage.writes.add_entry(make_frame(3, 0))

    run(scenario())


def test_a_metadata_store_that_hangs_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: the client is told in time that nothing is known."""

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


def test_a_metadata_server_that_lags_makes_no_new_ledger_refused() -> None:
    """Goal: the id is read after a sync: the bookie's server may be behind the writer's."""

    async def scenario() -> None:
        tree = MemoryTree(lag=lambda: 3600.0)
        writer, store = tree.connect(), tree.connect()
        await ensure_namespace(writer, PATHS, ManualClock())
        ids = GivenIds(LedgerStore(store, PATHS).next_ledger_id)
        for _ in range(40):  # more than are taken at once
            await ids.check(await LedgerStore(writer, PATHS).new_ledger_id())
        with pytest.raises(BadRequestError, match="was never created"):
            await ids.check(HIGHEST)
        await ids.aclose()

    run(scenario())
