"""Tiering: the same records from objects, whatever else happens to log and store meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from msgspec.structs import replace as changed

from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    LedgerReadError,
    ObjectStoreError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.ledger.metadata.values import LedgerMetadata
from dlcore.log.cold import parquet, reading
from dlcore.log.entries.stamp import PRODUCERS_KEPT_MS
from dlcore.log.metadata.changes import Change
from dlcore.log.upkeep.staged import drop_merged, list_staged, settle
from dlcore.metadata.port import Put
from dlcore.metadata.stored import decode, encode
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.expiry import expire_log
from dlcore.ops.upkeep.strays import delete_strays
from dlcore.ops.upkeep.swap import MERGING_IDENTITY
from dlcore.ops.upkeep.tierer import LogTierer
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.dlcore.ops.upkeep.test_merger import (
    CHANGES,
    CONFIG,
    POLICY,
    TIME_LIMIT_S,
    MemoryLedgers,
    Scene,
    as_rows,
    check_ledgers,
    forget_ledgers,
    interrupt_at_each,
    scan_all,
    write,
)
from tests.fixtures.encrypted import fixed_keys
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import MemoryCluster, memory_cluster, read_all
from tests.fixtures.memory_objects import MemoryObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.cold.objects import ListedObject
    from dlcore.log.metadata.values import LogKey
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.wire.frames import BytesLike

TIER = "s3://bucket/logs"
CONFIG_OF_TIERS = UpkeepConfig(
    merge=POLICY,
    merged_grace_s=10,
    tier_grace_s=40,
    tier_bytes_per_s=1e12,
    tier_object_bytes=3_000,
    stray_age_s=100,
)
AGE_MS = 1_000_000


class WatchedObjects(MemoryObjects):
    """Objects before whose requests something else can be made to happen."""

    def __init__(self) -> None:
        super().__init__()
        self.met: Callable[[], Awaitable[object]] | None = None
        self.failing: dict[str, list[str]] = {}
        """By method, what happens to its next calls: lost, lost after it was done, or done."""

    async def _meet(self, method: str) -> bool:
        """Return whether the answer is lost."""
        if self.met is not None:
            await self.met()
        fate = self.failing.get(method, [])
        what = fate.pop(0) if fate else "done"
        if what == "lost":
            raise ObjectStoreError(f"{method}: 503")
        return what == "answer lost"

    async def put_new(self, url: str, data: BytesLike) -> None:
        """Store an object."""
        is_lost = await self._meet("put_new")
        await super().put_new(url, data)
        if is_lost:
            raise ObjectStoreError("put_new: no answer")

    async def read(self, url: str, start: int, end: int) -> BytesLike:
        """Return a part of an object, another one if its answer is to be lost."""
        is_lost = await self._meet("read")
        found = bytes(await super().read(url, start, end))
        return found[:-1] + bytes([found[-1] ^ 1]) if is_lost else found

    async def list_below(self, url: str) -> AsyncGenerator[Sequence[ListedObject], None]:
        """Yield all objects below a URL."""
        await self._meet("list_below")
        async for page in super().list_below(url):
            yield page


class TierScene(Scene):
    """A log with a completed segment of small extents, and a process that tiers them."""

    objects: WatchedObjects
    tierer: LogTierer

    async def start(self, *, appends: int = 30) -> None:
        """Append, complete the segment, and let it get old."""
        self.objects = self.cluster.objects = WatchedObjects()
        await super().start(appends=appends)
        await self.log.update_settings(tier=TIER, tier_after_s=AGE_MS / 1000)
        await complete(self)

    async def open_merging(self) -> None:
        """Start a process that tiers."""
        await super().open_merging()
        context, owner = self.merging.log_context, self.merging.staging_owner
        self.tierer = LogTierer(context, owner, CONFIG_OF_TIERS)
        self.pass_time()

    def pass_time(self, ms: int = AGE_MS) -> None:
        """Let time pass, for the tiering process and the store."""
        driver, own = (self.cluster.clocks[name] for name in ("driver", self.merging_name))
        driver.current_ms += ms
        own.current_ms = self.objects.now_ms = driver.current_ms

    async def rewrite(self, log: LogKey) -> None:
        """Tier what is due; each request to the objects counts as one to the metadata, too."""
        store = self.store
        self.objects.met = lambda: store.get("/")
        try:
            await self.tierer.tier(log)
        finally:
            self.objects.met = None

    async def tidy(self) -> None:
        """Sweep objects, too."""
        await tidy(self)

    def check(self) -> None:
        """Check the objects, too."""
        super().check()
        check_objects(self.cluster)

    async def tier(self) -> int:
        """Tier what is due."""
        return await self.tierer.tier(self.log._log)


async def complete(scene: Scene) -> None:
    """Complete the segment in progress, as upkeep does in logs with a retention."""
    scene.cluster.clocks["driver"].current_ms += 10
    await scene.log.update_settings(retention_s=0.001, explicit_truncation=True)
    await expire_log(scene.namespace.log_context, scene.log._log)
    await scene.log.update_settings(retention_s=None, explicit_truncation=False)


async def tidy(scene: TierScene) -> None:
    """Do what sweeps do once dead processes are known to be dead and graces are over."""
    scene.pass_time(200_000)
    context = scene.namespace.log_context
    await settle(context, await list_staged(context, MERGING_IDENTITY))
    await drop_merged(context, grace_ms=10_000)
    await delete_strays(context, age_s=100)


def check_objects(cluster: MemoryCluster) -> None:
    """Each object is named by a ledger, and is as large as that says; and each name has one."""
    named: dict[str, int] = {}
    for path, node in cluster.tree.dump().items():
        parts = path.removeprefix("/dlog/ledgers/").split("/")
        if path.startswith("/dlog/ledgers/") and len(parts) == 3:
            ledger = decode(LedgerMetadata, node.value, source=path)
            named |= {f"{ledger.folder}/{each.name}": each.size_bytes for each in ledger.objects}
    assert {url: len(data) for url, data in cluster.objects.stored.items()} == named


def on_tier_scene(body: Callable[[TierScene], Awaitable[None]], *, appends: int = 30) -> None:
    """Run `body` on a fresh scene."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            scene = TierScene(cluster)
            await scene.start(appends=appends)
            await body(scene)

    run_in_own_time(asyncio.wait_for(run(), TIME_LIMIT_S))


async def is_cold(scene: Scene) -> list[bool]:
    """Return of each segment whether all of it is cold."""
    segments = await scene.log.get_log_segments()
    return [all(extent.is_cold for extent in segment.extents) for segment in segments]


def test_the_same_records_from_objects() -> None:
    """Positions, sequence ids, transaction ids, timestamps and payloads are what they were."""

    async def body(scene: TierScene) -> None:
        before = await read_all(scene.log)
        assert sum(await scene.extent_counts()) == 60
        assert await scene.tier() > 1  # runs of at most 40 extents
        assert await is_cold(scene) == [True]
        assert len(scene.objects.stored) > 2
        assert await read_all(scene.log) == before
        assert await scene.tier() == 0
        for _ in range(3):
            await scene.append()
        assert await scene.tier() == 0  # too young, and in progress
        await tidy(scene)
        check_ledgers(scene.cluster, filled=2)
        check_objects(scene.cluster)
        assert forget_ledgers(scene.cluster) >= 2
        fresh = await (await scene.cluster.open("other")).open_log("clicks")
        assert (await read_all(fresh))[: len(before)] == before
        await complete(scene)
        scene.pass_time()
        assert await scene.tier() == 1
        assert await is_cold(scene) == [True, True]
        assert (await read_all(fresh))[: len(before)] == before

    on_tier_scene(body)


def test_reads_from_any_position() -> None:
    """Wherever a reader begins: in the first object, at the edge of two, and in the last entry."""

    async def body(scene: TierScene) -> None:
        before = await read_all(scene.log)
        await scene.tier()
        for at in (*range(0, len(before), 7), len(before) - 1):
            found = await scene.log.read(start=before[at].dlsn, end=before[-1].dlsn)
            table = await found.to_arrow()
            assert table["sequence_id"].to_pylist() == list(range(at, len(before) - 1))
            txid = await scene.log.read(start=before[at].txid)
            expected = [each.txid for each in before if each.txid >= before[at].txid]
            assert (await txid.to_arrow())["txid"].to_pylist() == expected

    on_tier_scene(body)


@pytest.mark.parametrize("after", [1, 30, 59])
def test_a_scan_goes_on_when_its_ledgers_went(after: int) -> None:
    """It was planned before the tiering, and reads the rest from objects."""

    async def body(scene: TierScene) -> None:
        snapshot = await scene.log.get_snapshot()
        expected = as_rows(await read_all(scene.log))

        async def tier() -> None:
            assert await scene.tier()
            await tidy(scene)
            assert forget_ledgers(scene.cluster)

        assert await scan_all(scene, snapshot, after=after, meanwhile=tier) == expected
        assert await scan_all(scene, snapshot) == expected  # all of its ledgers are gone
        cold = scene.namespace.log_context.cold
        with pytest.MonkeyPatch.context() as patch:
            client_of = MemoryLedgers.client_of

            def with_cold(*arguments: object) -> object:
                client = client_of(*arguments)  # type: ignore[arg-type]
                client.cold = cold
                return client

            patch.setattr(MemoryLedgers, "client_of", with_cold)
            assert await scan_all(scene, await scene.log.get_snapshot()) == expected

    on_tier_scene(body)


@pytest.mark.parametrize("position", [0, 1, 25, 59])
def test_a_reader_goes_on_when_its_ledgers_went(position: int) -> None:
    """Wherever it was, it gives each record once, then follows the log."""

    async def body(scene: TierScene) -> None:
        expected = await read_all(scene.log)
        other = await scene.cluster.open("reader", config=replace(CONFIG, read_ahead_bytes=1))
        async with await (await other.open_log("clicks")).open_reader() as reader:
            found = await reader.read_bulk(position, until_caught_up=True) if position else []
            assert await scene.tier()
            await tidy(scene)
            assert forget_ledgers(scene.cluster)
            await scene.append()
            expected = await read_all(scene.log)
            while len(found) < len(expected):
                found += await reader.read_bulk(10)
        assert found == expected

    on_tier_scene(body)


def test_footers_that_are_large_and_those_that_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A longer end is read again; the layouts of few objects are kept, and others read anew."""
    monkeypatch.setattr(parquet, "TAIL_BYTES", 100)
    monkeypatch.setattr(reading, "_LAYOUTS_KEPT_MAX", 1)

    async def body(scene: TierScene) -> None:
        before = await read_all(scene.log)
        await scene.tier()
        assert len(scene.objects.stored) > 2
        for _ in range(2):
            assert await read_all(scene.log) == before
        assert len(scene.namespace.log_context.cold._layouts) == 1

    on_tier_scene(body)


def test_typed_logs_over_versions_of_their_schema() -> None:
    """Each object has entries of one version; a reader gives the latest, as from bookies."""

    async def body(scene: TierScene) -> None:
        namespace = scene.namespace
        first = pa.schema([("city", pa.string()), ("fare", pa.float32())])
        more = pa.schema([("city", pa.string()), ("fare", pa.float64()), ("n", pa.int8())])
        await namespace.create_log(
            "rides",
            schema=first,
            settings=LogSettings(tier=TIER, tier_after_s=0),
        )
        log = scene.log = await namespace.open_log("rides")

        async def append(version: int, schema: pa.Schema, **columns: list[object]) -> None:
            async with await namespace.open_staging_writer(identity="rides") as writer:
                await writer.write_batch("rides", pa.RecordBatch.from_pydict(columns, schema))
                append = await namespace.begin_append("rides", version)
                assert (await append.commit(await writer.stage())).committed

        await append(1, first, city=["Bern", None], fare=[1.5, 2.0])
        await log.update_schema(more)
        await append(2, more, city=["Genf"], fare=[2.5], n=[1])
        await complete(scene)
        before = await (await log.read()).to_arrow()
        columns = ["_dlsn", "_txid", "_sequence_id", "_timestamp", "city", "fare", "n"]
        rows = await (await log.read(columns=columns)).to_arrow()
        scene.pass_time()
        assert await scene.tier()
        assert all(await is_cold(scene))
        assert (await (await log.read()).to_arrow()).equals(before)
        assert (await (await log.read(columns=columns)).to_arrow()).equals(rows)
        assert before["city"].to_pylist() == ["Bern", None, "Genf"]
        assert len(scene.objects.stored) == 2

    on_tier_scene(body, appends=2)


def test_truncated_cold_segments_go_with_their_objects() -> None:
    """The chain gives up the ledger; its objects go once they are old, and no others."""

    async def body(scene: TierScene) -> None:
        await scene.tier()
        await write(scene)
        scene.objects.stored[f"{TIER}/{scene.cluster.cluster_id}/notes.txt"] = b"not dlog's"
        scene.objects._modified |= dict.fromkeys(scene.objects.stored, scene.objects.now_ms)
        await scene.log.truncate(DLSN(2, 0, 0))
        await scene.namespace.log_context.tidier.settled()
        context = scene.namespace.log_context
        scene.pass_time(200_000)
        assert await delete_strays(context, age_s=100) == 0  # the ledger is there for a grace
        await drop_merged(context, grace_ms=0)
        assert await delete_strays(context, age_s=300) == 0  # they are young
        assert await delete_strays(context, age_s=100) > 2
        assert list(scene.objects.stored) == [f"{TIER}/{scene.cluster.cluster_id}/notes.txt"]

    on_tier_scene(body)


def test_the_objects_of_truncated_segments_stay_for_the_longest_planned_read() -> None:
    """However old they are: a reader that planned before goes on, until the grace of tiers ends."""

    async def body(scene: TierScene) -> None:
        records = await read_all(scene.log)
        await scene.tier()
        await tidy(scene)  # all is old, and nothing else is to go
        await write(scene)
        objects = set(scene.objects.stored)
        upkeep = LogUpkeep(scene.merging.log_context, scene.merging.staging_owner, CONFIG_OF_TIERS)
        planned = await (await scene.cluster.open("planned")).open_log("clicks")
        async with await planned.open_reader() as reader:
            first = await reader.read_bulk(1)
            await scene.log.truncate(DLSN(2, 0, 0))
            await scene.namespace.log_context.tidier.settled()
            for _ in range(2):
                scene.pass_time(15_000)  # longer than the grace of merges
                upkeep._strays_due_s = 0.0
                await upkeep.sweep()
            assert objects == set(scene.objects.stored)
            found = [*first, *await read_some(reader, len(records) - 1)]
        assert [each.sequence_id for each in found] == [each.sequence_id for each in records]
        scene.pass_time(15_000)
        upkeep._strays_due_s = 0.0
        await upkeep.sweep()
        assert not scene.objects.stored

    on_tier_scene(body)


async def read_some(reader: AsyncLogReader, count: int) -> list[LogRecordWithDLSN]:
    """Return the next records of a reader."""
    found: list[LogRecordWithDLSN] = []
    while len(found) < count:
        found += await reader.read_bulk(count - len(found))
    return found


def test_a_deleted_log_leaves_no_object() -> None:
    """Also if it was the last one that used the store."""

    async def body(scene: TierScene) -> None:
        await scene.tier()
        await scene.log.delete()
        await scene.namespace.log_context.tidier.settled()
        scene.pass_time(200_000)
        context = scene.namespace.log_context
        await drop_merged(context, grace_ms=0)
        # After an import of metadata they wait for an operator.
        await context.store.create(context.paths.restored, b"{}")
        assert await delete_strays(context, age_s=100) == 0
        await context.store.delete(context.paths.restored)
        assert await delete_strays(context, age_s=100) > 2
        assert scene.objects.stored == {}

    on_tier_scene(body)


def test_objects_that_are_being_written_are_no_strays() -> None:
    """However young or old: a sweep before each request to the store deletes none of them."""

    async def body(scene: TierScene) -> None:
        before = await read_all(scene.log)

        async def sweep() -> None:
            scene.objects.met = None
            assert await delete_strays(scene.namespace.log_context, age_s=-1e6) == 0
            scene.objects.met = sweep

        scene.objects.met = sweep
        assert await scene.tier()
        scene.objects.met = None
        assert await read_all(scene.log) == before
        check_objects(scene.cluster)

    on_tier_scene(body, appends=6)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_anything_may_happen_at_any_step(change: Callable[[Scene], Awaitable[None]]) -> None:
    """Before requests in turn, to the metadata and to the objects; then all is right.

    Each change comes before every `STRIDE`th request; together they cover all requests.
    """

    interrupt_at_each(TierScene, change, appends=6)


@pytest.mark.parametrize(
    "failing",
    [
        {"put_new": ["lost"]},
        {"put_new": ["answer lost", "answer lost"]},
        {"read": ["lost"]},
        {"read": ["answer lost"]},
        {"read": ["done", "answer lost"]},
        {"put_new": ["lost", "done"], "read": ["lost", "done", "done"]},
    ],
)
def test_a_store_that_fails_sometimes(failing: dict[str, list[str]]) -> None:
    """The object is written again under another name; what is left over is swept."""

    async def body(scene: TierScene) -> None:
        before = await read_all(scene.log)
        scene.objects.failing = failing
        assert await scene.tier()
        assert not any(failing.values())
        assert all(await is_cold(scene))
        await tidy(scene)
        assert await read_all(scene.log) == before
        check_objects(scene.cluster)

    on_tier_scene(body, appends=6)


@pytest.mark.parametrize("method", ["put_new", "read"])
def test_a_store_that_fails_always(method: str) -> None:
    """The log stays as it is, and the next round begins anew."""

    async def body(scene: TierScene) -> None:
        before = await read_all(scene.log)
        scene.objects.failing = {method: ["lost"] * 3}
        with pytest.raises(ObjectStoreError, match="503"):
            await scene.tier()
        assert not any(await is_cold(scene))
        assert await read_all(scene.log) == before
        assert await scene.tier()
        await tidy(scene)
        assert await read_all(scene.log) == before
        check_ledgers(scene.cluster)
        check_objects(scene.cluster)

    on_tier_scene(body, appends=6)


def test_a_lost_object_is_an_error_that_names_it() -> None:
    """It is never a gap."""

    async def body(scene: TierScene) -> None:
        await scene.tier()
        lost = list(scene.objects.stored)[1]
        await scene.objects.delete(lost)
        reading = await scene.cluster.open("reader")
        with pytest.raises(LedgerReadError, match=f"cold, and its entries.*{lost}"):
            await (await (await reading.open_log("clicks")).read()).to_arrow()

    on_tier_scene(body)


def test_encrypted_segments_stay(caplog: pytest.LogCaptureFixture) -> None:
    """They would be plain in the store; that is reported once, and later ones go."""

    async def body(scene: TierScene) -> None:
        encrypting = await scene.cluster.open("keys", encryption_keys=fixed_keys("one"))
        config = replace(CONFIG, encrypted=True)
        log = scene.log = await encrypting.open_log("clicks", config=config)
        async with await log.open_writer() as writer:
            await writer.write_batch(pa.record_batch({"txid": [2**60], "value": [b"secret"]}))
        async with await (await encrypting.open_log("clicks")).open_writer() as writer:
            await writer.write_batch(pa.record_batch({"txid": [2**60], "value": [b"plain"]}))
        scene.pass_time()
        for _ in range(2):
            await scene.tier()
        assert caplog.text.count("segment 2 is encrypted, and stays on bookies") == 1
        assert await is_cold(scene) == [True, False, True]
        await tidy(scene)
        check_objects(scene.cluster)

    on_tier_scene(body)


def test_the_worker_tiers_and_sweeps() -> None:
    """It finds logs by their settings, goes on if one fails, and deletes stray objects."""

    async def body(scene: TierScene) -> None:
        before = await read_all(scene.log)
        await scene.namespace.create_log("other", settings=LogSettings(retention_s=1))
        settings = LogSettings(tier=TIER, tier_after_s=0)
        await scene.namespace.create_log("another", settings=settings)
        async with await (await scene.namespace.open_log("another")).open_writer() as writer:
            await writer.write(LogRecord(1, b"waits with the other log for the store"))
        scene.pass_time()
        worker = LogUpkeep.of(scene.merging, CONFIG_OF_TIERS)
        stray = f"{TIER}/{scene.cluster.cluster_id}/gone/1/999999-token-0-1.parquet"
        await scene.objects.put_new(stray, b"")
        scene.objects.failing = {"put_new": ["lost"] * 3}
        assert await worker.tier() == 0
        scene.pass_time(200_000)
        assert await worker.tier() > 0
        assert await read_all(scene.log) == before
        scene.objects.failing = {"list_below": ["lost"]}
        await worker.sweep()
        assert stray in scene.objects.stored
        await worker.sweep()
        assert stray in scene.objects.stored  # they are listed now and then only
        await LogUpkeep.of(scene.merging, CONFIG_OF_TIERS).sweep()
        assert stray not in scene.objects.stored
        check_objects(scene.cluster)
        await scene.log.update_settings(tier=None)
        assert await worker.tier() == 0

    on_tier_scene(body, appends=6)


def test_the_last_stamps_of_producers_stay_on_bookies() -> None:
    """An owner of the log reads them from there, however old they are."""

    async def body(scene: TierScene) -> None:
        context = scene.namespace.log_context
        at = await context.logs.read(scene.log._log)
        head = changed(at.head, producers_lssn=1)
        path = context.logs.paths_of(at.log).head
        await context.logs.apply(Change((Put(path, encode(head), at.version),), at.with_head(head)))
        scene.pass_time(2 * PRODUCERS_KEPT_MS)
        assert await scene.tier() == 0

    on_tier_scene(body, appends=2)
