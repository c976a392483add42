"""Readers of cold ledgers that share a budget, over a store whose answers the test gives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.base.config import LedgerClientConfig, QuorumConfig
from dlcore.base.errors import LedgerReadError
from dlcore.ledger.metadata.values import COLD_LAYOUT, LedgerMetadata, LedgerState, StoredObject
from dlcore.log.cold import parquet
from dlcore.log.cold.reading import ColdLedgers, here
from tests.dlcore.log.test_cold_parquet import made
from tests.fixtures.memory_objects import MemoryObjects

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.wire.frames import BytesLike

FOLDER = "s3://bucket/cluster/log/3"
ENTRIES = 40
TIME_LIMIT_S = 60


class SlowObjects(MemoryObjects):
    """Objects whose parts come when the test says so; footers come at once."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slow = True
        self.reading: list[asyncio.Event] = []
        self.most = 0

    async def read(self, url: str, start: int, end: int) -> BytesLike:
        """Return a part of an object."""
        if end < len(self.stored[url]) and self.is_slow:
            come = asyncio.Event()
            self.reading.append(come)
            self.most = max(self.most, len(self.reading))
            try:
                await come.wait()
            finally:
                self.reading.remove(come)
        return await super().read(url, start, end)

    async def give_all(self) -> None:
        """Give what is asked for, again and again, until nothing is."""
        while True:
            await settle()
            if not self.reading:
                return
            for each in self.reading:
                each.set()


async def settle() -> None:
    """Let all go on that can."""
    for _ in range(50):
        await asyncio.sleep(0)


class Scene:
    """A cold ledger of two objects with a row group for each entry."""

    def __init__(self, cold_reads_at_once: int = 8, cold_read_bytes: int = 10**6) -> None:
        self.objects = SlowObjects()
        config = LedgerClientConfig(
            cold_reads_at_once=cold_reads_at_once, cold_read_bytes=cold_read_bytes
        )
        self.cold = ColdLedgers(self.objects, here, config=config)
        batches = [
            pa.record_batch([pa.array([number]), pa.array([bytes([number]) * 1_000])], BYTES)
            for number in range(ENTRIES // 2)
        ]
        data, facts = made(batches)
        names = ("7-t-0-1.parquet", "7-t-1-1.parquet")
        for name in names:
            self.objects.stored[f"{FOLDER}/{name}"] = data
        self.ledger = LedgerMetadata(
            layout=COLD_LAYOUT,
            ledger_id=7,
            quorum=QuorumConfig(),
            state=LedgerState.CLOSED,
            ensembles=(),
            token="t",
            created_ms=1,
            last_entry_id=ENTRIES - 1,
            length_bytes=1,
            folder=FOLDER,
            objects=tuple(
                StoredObject(number * facts.entries, number * facts.records, name, len(data))
                for number, name in enumerate(names)
            ),
        )

    def reader(self) -> Reader:
        """Return one more reader of all entries."""
        return Reader(self)


class Reader:
    """A reader of all entries, in a task that goes on as long as it is allowed to."""

    def __init__(self, scene: Scene) -> None:
        self.found: list[int] = []
        self.may_take = asyncio.Semaphore(0)
        self.task = asyncio.create_task(self._run(scene))

    async def _run(self, scene: Scene) -> None:
        frames = scene.cold.read(scene.ledger, 0, ENTRIES - 1)
        try:
            await self.may_take.acquire()
            async for each in frames:
                self.found += [frame.entry_id for frame in each]
                await self.may_take.acquire()
        finally:
            await frames.aclose()

    def go_on(self) -> None:
        """Take all without a stop."""
        for _ in range(ENTRIES + 1):
            self.may_take.release()


BYTES = pa.schema([("txid", pa.int64()), ("value", pa.binary())])


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group has one entry."""
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 100)


def run(body: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario."""
    asyncio.run(asyncio.wait_for(body(), TIME_LIMIT_S))


def test_one_reader_reads_many_parts_at_once_and_gives_them_in_order() -> None:
    """Those of the next object, too; all slots but one are used to read ahead."""

    async def body() -> None:
        scene = Scene(cold_reads_at_once=6)
        reader = scene.reader()
        reader.go_on()
        await settle()
        assert len(scene.objects.reading) == 5
        scene.objects.reading[-1].set()  # the others come later
        await settle()
        assert reader.found == []
        await scene.objects.give_all()
        await reader.task
        assert reader.found == list(range(ENTRIES))
        assert scene.objects.most <= 6

    run(body)


@pytest.mark.parametrize(("at_once", "most"), [(1, 1), (2, 1), (4, 4)])
def test_all_readers_together_read_no_more_at_once(at_once: int, most: int) -> None:
    """However many they are; with one slot nothing is read ahead."""

    async def body() -> None:
        scene = Scene(cold_reads_at_once=at_once)
        readers = [scene.reader() for _ in range(1 if most == 1 else 10)]
        for each in readers:
            each.go_on()
        await scene.objects.give_all()
        for each in readers:
            await each.task
            assert each.found == list(range(ENTRIES))
        assert scene.objects.most == most

    run(body)


def test_a_reader_that_takes_nothing_holds_up_no_other() -> None:
    """The read-ahead is bounded by bytes, and others read beside it."""

    async def body() -> None:
        scene = Scene(cold_reads_at_once=8, cold_read_bytes=20_000)
        still = scene.reader()
        still.may_take.release()
        await scene.objects.give_all()
        assert still.found == [0]
        budget = scene.cold._budget
        budget.validate()
        assert 1_000 < budget._ahead_bytes <= 7_500  # half of three quarters
        other = scene.reader()
        other.go_on()
        await scene.objects.give_all()
        await other.task
        assert other.found == list(range(ENTRIES))
        still.go_on()
        await scene.objects.give_all()
        await still.task
        assert still.found == list(range(ENTRIES))
        assert_nothing_is_held(scene)

    run(body)


def test_readers_that_leave_give_all_back() -> None:
    """While they wait for a slot, for the store, or stand still."""

    async def body() -> None:
        scene = Scene(cold_reads_at_once=2)
        readers = [scene.reader() for _ in range(6)]
        for each in readers:
            each.go_on()
        await settle()
        assert len(scene.objects.reading) == 2
        for each in readers:
            each.task.cancel()
        await asyncio.wait([each.task for each in readers])
        assert_nothing_is_held(scene)
        last = scene.reader()
        last.go_on()
        await scene.objects.give_all()
        await last.task
        assert last.found == list(range(ENTRIES))

    run(body)


def test_a_part_that_cannot_be_read_fails_its_reader_only() -> None:
    """All that it had is given back."""

    async def body() -> None:
        scene = Scene(cold_reads_at_once=2)
        scene.objects.is_slow = False
        whole, url = scene.objects.stored, f"{FOLDER}/{scene.ledger.objects[1].name}"
        layout = await scene.cold.layout_of(url, scene.ledger.objects[1].size_bytes)
        at = layout.row_groups[3].start + 60
        kept = whole[url]
        whole[url] = kept[:at] + bytes(100) + kept[at + 100 :]
        reader = scene.reader()
        reader.go_on()
        with pytest.raises(LedgerReadError, match="row group 3"):
            await reader.task
        assert reader.found == list(range(ENTRIES // 2 + 3))
        assert_nothing_is_held(scene)
        whole[url] = kept
        again = scene.reader()
        again.go_on()
        await again.task

    run(body)


def test_an_object_with_other_entries_is_an_error() -> None:
    """A gap is never passed over."""

    async def body() -> None:
        scene = Scene()
        scene.objects.is_slow = False
        stored = scene.ledger.objects[0]
        layout = await scene.cold.layout_of(f"{FOLDER}/{stored.name}", stored.size_bytes)
        layout.row_groups[4] = layout.row_groups[4]._replace(first_entry=99, last_entry=99)
        reader = scene.reader()
        reader.go_on()
        with pytest.raises(LedgerReadError, match="entries from 4 on are missing"):
            await reader.task
        assert reader.found == [0, 1, 2, 3]

    run(body)


def assert_nothing_is_held(scene: Scene) -> None:
    """All slots and bytes are free."""
    budget = scene.cold._budget
    budget.validate()
    assert (budget._slots, budget._ahead_bytes, budget._wanted_bytes) == (0, 0, 0)
    assert not budget._waiting
    assert not scene.cold._granted
