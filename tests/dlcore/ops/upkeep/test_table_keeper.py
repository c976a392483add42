"""Tables of logs as readers see them: the rows of the log, whatever happens to it."""

from __future__ import annotations

import asyncio
import re
import shutil
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from dlcore.base.config import LogConfig, LogSettings, QuorumConfig
from dlcore.base.errors import (
    DLError,
    ObjectStoreError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.isolating import Troubles
from dlcore.log.cold.delta_tables import DeltaTables
from dlcore.log.cold.iceberg_tables import IcebergTables
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.cold.table_format import boundary_of, place_of
from dlcore.log.metadata.history import LogHistory
from dlcore.log.upkeep.removal import remove_truncated
from dlcore.ops.upkeep import table_keeper
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.table_keeper import TableKeeper
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.http_relay import http_relay
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.memory_namespace import MemoryCluster, memory_cluster
from tests.fixtures.s3 import s3_server
from tests.fixtures.table_readers import TableView, delete_table, rows_of, table_view

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace

CONFIG = UpkeepConfig(
    merged_grace_s=0, tier_grace_s=0, tier_object_bytes=1_000, leftovers_age_s=0, stray_age_s=0
)
WRITING = LogConfig(quorum=QuorumConfig(), entry_bytes=1_000, lock_timeout_s=0)
RIDES = pa.schema([("fare", pa.int32()), ("city", pa.string())])
BYTES = pa.schema([("txid", pa.int64()), ("value", pa.binary())])
OBJECT = r"/\d+/[^/]*\.parquet$"
TIME_LIMIT_S = amount(1700, sampled=120)


class TableScene:
    """A log with a table in a folder, and a worker."""

    def __init__(self, cluster: MemoryCluster, folder: Path, kind: str) -> None:
        self.cluster = cluster
        self.kind = kind
        self.tier = f"file://{folder}"
        self.namespace: DirectNamespace
        self.log: DirectLog
        self.worker: LogUpkeep
        self.count = 0

    async def start(self, schema: pa.Schema | None) -> None:
        """Make the log."""
        self.cluster.objects = StoredObjects()  # type: ignore[assignment]
        self.namespace = await self.cluster.open("driver", config=WRITING)
        settings = LogSettings(tier=self.tier, tier_after_s=0, table=self.kind)
        await self.namespace.create_log("rides", settings=settings, schema=schema)
        self.log = await self.namespace.open_log("rides", config=WRITING)
        self.start_worker()

    def start_worker(self) -> None:
        """Start a worker that knows nothing."""
        self.worker = LogUpkeep.of(self.namespace, CONFIG)

    @property
    def url(self) -> str:
        """The folder of the table."""
        return f"{self.tier}/{self.cluster.cluster_id}/{self.log._log.log_id}"

    @property
    def folder(self) -> str:
        """The same as a path."""
        return self.url.removeprefix("file://")

    async def write(self, rows: int = 60, **columns: list[Any]) -> None:
        """Write a segment."""
        numbers = list(range(self.count, self.count + rows))
        self.count += rows
        if self.log._log.typed:
            batch = pa.record_batch(
                {
                    "fare": pa.array(numbers, pa.int32()),
                    "city": [f"city-{each}" * 3 for each in numbers],
                    **columns,
                }
            )
        else:
            values = [b"%09d" % each * 4 for each in numbers]
            batch = pa.RecordBatch.from_arrays([numbers, values], schema=BYTES)
        async with await self.log.open_writer() as writer:
            for start in range(0, rows, 10):
                await writer.write_batch(batch.slice(start, 10))

    async def follow(self) -> bool:
        """Tier, then let the table follow; return whether it was looked at."""
        await self.worker._tiers._tierer.tier(self.log._log)
        return await self.worker._tiers._tables.follow(self.log._log)

    async def refused(self, kind: type[DLError], said: str) -> None:
        """Require that a new worker refuses the table, and leaves it as it is."""
        before = self.view().version()
        self.start_worker()
        with pytest.raises(kind, match=said):
            await self.follow()
        assert self.view().version() == before

    def found(self) -> TableView | None:
        """Return what readers see of the table; None if there is none."""
        return table_view(self.kind, self.url, "rides")

    def view(self) -> TableView:
        """Return what readers see of the table."""
        found = self.found()
        assert found is not None
        return found

    def boundary(self) -> DLSN:
        """Return where the table ends, as anybody computes it."""
        return boundary_of(place_of(self.view().number()))

    async def check(self, *, tail: int = 0, first: int = 0) -> None:
        """Require that readers see each row before the boundary once, and dlog the rest.

        Args:
            tail: how many rows are not in the table.
            first: the first row that the log has.
        """
        view = self.view()
        table = view.rows()
        ids = table["_sequence_id"].to_pylist()
        assert ids == list(range(first, self.count - tail))
        assert view.ids() == ids
        name = "_sequence_id" if self.log._log.typed else "sequence_id"
        own = "fare" if self.log._log.typed else "value"
        columns = [name, own]
        whole = await (await self.log.read(columns=columns)).to_arrow()
        assert whole[name].to_pylist() == list(range(first, self.count))
        assert table[own].to_pylist() == whole[own].to_pylist()[: len(ids)]
        rest = await (await self.log.read(start=self.boundary(), columns=columns)).to_arrow()
        assert rest[name].to_pylist() == list(range(self.count - tail, self.count))


def on_table(
    folder: Path,
    body: Callable[[TableScene], Awaitable[None]],
    *,
    kind: str = "delta",
    schema: pa.Schema | None = RIDES,
) -> None:
    """Run `body` on a fresh log."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            scene = TableScene(cluster, folder, kind)
            await scene.start(schema)
            await body(scene)

    run_in_own_time(asyncio.wait_for(run(), TIME_LIMIT_S))


@pytest.fixture
def kind(table_kind: str) -> str:
    """Give the setting `table`."""
    return table_kind


@pytest.mark.parametrize("schema", [RIDES, None], ids=["typed", "bytes"])
def test_a_table_has_what_is_cold_and_the_log_the_rest(
    tmp_path: Path, kind: str, schema: pa.Schema | None
) -> None:
    """Objects are its files, with field ids and statistics; nothing is copied."""

    async def body(scene: TableScene) -> None:
        assert await scene.follow()
        assert scene.found() is None
        await scene.write()
        assert await scene.follow()
        await scene.check()
        await scene.write(rows=7)
        await scene.check(tail=7)
        assert await scene.follow()
        assert not await scene.follow()
        await scene.check()
        objects = {each.url async for page in listed(scene) for each in page}
        assert objects == scene.view().files()
        assert len(objects) > 2
        own = ["fare", "city"] if schema is not None else ["value"]
        assert scene.view().rows().column_names[6:] == own

    on_table(tmp_path / "tier", body, kind=kind, schema=schema)


def test_a_table_follows_between_rounds(tmp_path: Path) -> None:
    """At once where its log had something due; no table is looked at where nothing was."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        assert await scene.worker.tier()
        await scene.check()
        await scene.write(rows=7)
        rounds, troubles = scene.worker._tiers, Troubles()
        with patch.object(rounds._tables, "follow", wraps=rounds._tables.follow) as follow:
            assert await rounds.tier_early(troubles)
            assert not await rounds.tier_early(troubles)
            assert follow.call_count == 1
        await scene.check()
        assert troubles.count == 0

    on_table(tmp_path / "tier", body)


def listed(scene: TableScene) -> Any:
    """List the objects of the log, but for its table."""

    async def pages() -> Any:
        async for page in scene.cluster.objects.list_below(scene.url):
            yield [each for each in page if re.search(OBJECT, each.url)]

    return pages()


def test_columns_that_are_added_and_parts_of_columns(tmp_path: Path) -> None:
    """Older rows have null there; a type that changes is refused until the table is made again."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        point = pa.struct([("x", pa.int64())])
        wider = pa.schema([*RIDES, ("n", pa.int16()), ("p", point), ("t", pa.timestamp("us"))])
        await scene.log.update_schema(wider)
        await scene.follow()
        await scene.write(
            rows=2,
            n=pa.array([1, 2], pa.int16()),
            p=pa.array([{"x": 1}, {"x": 2}], point),
            t=pa.array([5, 6], pa.timestamp("us")),
        )
        await scene.follow()
        await scene.check()
        point = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))])
        await scene.log.update_schema(pa.schema([*wider.remove(3), ("p", point)]))
        await scene.write(rows=1, n=pa.array([3], pa.int16()), p=[{"x": 1, "y": ["a"]}], t=[None])
        await scene.follow()
        await scene.check()
        found = rows_of(DeltaTable(scene.url)).sort_by("_sequence_id").to_pylist()
        assert [each["n"] for each in found][59:] == [None, 1, 2, 3]
        assert [each["p"] for each in found][59:] == [
            None,
            {"x": 1, "y": None},
            {"x": 2, "y": None},
            {"x": 1, "y": ["a"]},
        ]
        known = await scene.log.get_schema()
        assert known is not None
        now = known.set(2, pa.field("n", pa.int64()))
        await scene.log.update_schema(now)
        await scene.refused(UnsupportedError, r"column 'n'.*short.*cannot become long")
        shutil.rmtree(f"{scene.folder}/_delta_log")
        await scene.follow()
        await scene.check()
        again = rows_of(DeltaTable(scene.url)).sort_by("_sequence_id")
        assert again["n"].to_pylist()[59:] == [None, 1, 2, 3]

    on_table(tmp_path, body)


def test_truncated_records_leave_the_table_before_their_objects(tmp_path: Path, kind: str) -> None:
    """A sweep deletes what no ledger names, but for what the table has, or may still add."""

    async def body(scene: TableScene) -> None:
        for _ in range(3):
            await scene.write()
        await scene.follow()
        await scene.log.truncate(DLSN(3, 0, 0))
        await remove(scene)
        await sweep(scene)
        assert scene.view().rows().num_rows == 180  # nothing dangles
        await scene.follow()
        await scene.check(first=120)
        await sweep(scene)
        await scene.check(first=120)
        left = [each.url async for page in listed(scene) for each in page]
        assert left
        assert all("/3/" in each for each in left)
        # A whole segment that never came into the table.
        await scene.write()
        await scene.worker._tiers._tierer.tier(scene.log._log)
        entries = (await scene.log.get_log_segments())[-1].closed_entry_count
        await scene.log.truncate(DLSN(4, entries, 0))
        await scene.write()
        await remove(scene)
        await sweep(scene)
        kept = [each.url async for page in listed(scene) for each in page]
        assert any("/4/" in each for each in kept)
        await scene.follow()
        await sweep(scene)
        left = [each.url async for page in listed(scene) for each in page]
        assert left
        assert all("/5/" in each for each in left)
        await scene.check(first=240)

    on_table(tmp_path / "tier", body, kind=kind)


def test_segments_that_are_truncated_in_part(tmp_path: Path, kind: str) -> None:
    """The table drops what lies before the first kept record, and goes on over what never came.

    A segment on bookies whose first ledgers are gone gets no objects: the table ends before it, and
    passes it once all of it is truncated.
    """

    async def body(scene: TableScene) -> None:
        for _ in range(2):
            await scene.write()
        await scene.follow()
        whole = set(scene.view().files())
        entries = (await scene.log.get_log_segments())[0].closed_entry_count
        await scene.log.truncate(DLSN(1, entries - 1, 0))
        await truncated(scene)
        left = set(scene.view().files())
        assert left < whole
        assert len(left) > 1
        first = await first_kept(scene)
        assert 0 < first < 60
        assert [each for each in scene.view().ids() if each >= first] == list(range(first, 120))
        # In extents of their own, of which the first ledgers go before they are tiered.
        for number in range(6):
            async with await scene.namespace.begin_append("job", number + 1) as staged:
                rows = pa.record_batch({"fare": [number] * 2, "city": ["Rome"] * 2}, schema=RIDES)
                await staged.write_batch("rides", rows)
                await staged.commit()
        scene.count += 12
        ledgers = await ledgers_of(scene, 3)
        await scene.log.truncate(DLSN(3, 4, 0))
        await scene.write()
        await truncated(scene)
        assert await ledgers_of(scene, 3) == ledgers[4:]
        assert (len(ledgers), await first_kept(scene)) == (6, 128)
        assert scene.view().rows().num_rows == 0
        assert scene.boundary() <= DLSN(3, 4, 0)
        # As docs/tables.md says: the log begins after the table's end.
        start = max(scene.boundary(), await scene.log.get_first_dlsn())
        tail = await (await scene.log.read(start=start, columns=["_sequence_id"])).to_arrow()
        assert tail["_sequence_id"].to_pylist() == list(range(128, scene.count))
        assert await scene.log.get_log_record_count(scene.boundary()) == scene.count - 128
        # Also a worker that compares all, and one more segment behind it.
        scene.start_worker()
        await scene.write()
        await truncated(scene)
        assert scene.view().rows().num_rows == 0
        await scene.log.truncate(DLSN(4, 0, 0))
        await truncated(scene)
        await truncated(scene)
        await scene.check(first=132)
        left = {each.url async for page in listed(scene) for each in page}
        assert left == scene.view().files()

    on_table(tmp_path / "tier", body, kind=kind)


async def truncated(scene: TableScene) -> None:
    """Remove what is truncated, let the table follow, and sweep."""
    await remove(scene)
    await scene.follow()
    await sweep(scene)


async def first_kept(scene: TableScene) -> int:
    """Return the sequence id of the first record that the log has."""
    rows = await (await scene.log.read(columns=["_sequence_id"])).to_arrow()
    return int(rows["_sequence_id"][0].as_py())


async def ledgers_of(scene: TableScene, lssn: int) -> list[int]:
    """Return the ledgers of a segment that are in the metadata."""
    context = scene.namespace.log_context
    history = LogHistory(context.logs, scene.log._log, keeps_truncated=True)
    found = (await history.read()).segments
    (segment,) = (each for each in found if each.lssn == lssn)
    ids = [extent.ledger_id for extent in segment.extents]
    known = await context.ledger_store.read_many(ids)
    return [each for each in ids if each in known]


async def remove(scene: TableScene) -> None:
    """Remove what is truncated from the metadata."""
    context = scene.namespace.log_context
    await remove_truncated(context, await context.logs.read(scene.log._log))
    await scene.worker.sweep()


async def sweep(scene: TableScene) -> None:
    """Delete objects that are not needed."""
    scene.cluster.clocks["driver"].current_ms = 10**13
    scene.worker._strays_due_s = 0
    await scene.worker.sweep()


def test_the_table_of_a_deleted_log_goes_with_its_objects(tmp_path: Path, kind: str) -> None:
    """Nothing of the log is left."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        await scene.namespace.delete_log("rides")
        await scene.worker.sweep()
        await sweep(scene)
        assert [
            each async for page in scene.cluster.objects.list_below(scene.tier) for each in page
        ] == []

    on_table(tmp_path / "tier", body, kind=kind)


def test_a_table_without_the_setting_keeps_its_files(tmp_path: Path, kind: str) -> None:
    """It does not follow any more; what it names is not deleted."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.write()
        await scene.follow()
        await scene.log.update_settings(table=None)
        await scene.log.truncate(DLSN(2, 0, 0))
        await remove(scene)
        await sweep(scene)
        assert not await scene.follow()
        assert scene.view().rows().num_rows == 120
        delete_table(scene.kind, scene.url, "rides")
        await sweep(scene)
        left = [each.url async for page in listed(scene) for each in page]
        assert left
        assert all("/2/" in each for each in left)

    on_table(tmp_path / "tier", body, kind=kind)


def test_two_workers_at_once(tmp_path: Path, kind: str) -> None:
    """Both believe to have the lock; each file is added once."""

    async def body(scene: TableScene) -> None:
        others = [
            TableKeeper(
                scene.namespace.log_context, scene.namespace.staging_owner, compare_every_s=0
            )
            for _ in range(2)
        ]
        for _ in range(4):
            await scene.write()
            await scene.worker._tiers._tierer.tier(scene.log._log)
            results = await asyncio.gather(
                *(each.follow(scene.log._log) for each in others), return_exceptions=True
            )
            assert all(each is True or isinstance(each, ObjectStoreError) for each in results)
            await others[0].follow(scene.log._log)
            await scene.check()

    on_table(tmp_path / "tier", body, kind=kind)


def test_files_are_compared_part_by_part(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round compares some, and the next one comes soon; then none for a while.

    In the end an object that has another name by now was found, as one that was written again.
    """
    monkeypatch.setattr(table_keeper, "FILES_PER_COMMIT_MAX", 4)

    async def body(scene: TableScene) -> None:
        for _ in range(6):
            await scene.write()
            await scene.follow()
        await scene.log.update_settings(tier_after_s=3600)  # the log itself is not looked at soon
        scene.start_worker()
        keeper = scene.worker._tiers._tables
        keeper._compare_max = 5
        places, counts = [], []
        read = keeper._chains.read_chain

        async def counted(log: Any, url: str, form: Any, start: Any) -> Any:
            found = await read(log, url, form, start)
            places.append(start)
            counts.append(len(found.objects))
            return found

        monkeypatch.setattr(keeper._chains, "read_chain", counted)
        rounds = 0
        for _ in range(4):
            await scene.worker.tier()
            rounds += keeper.is_comparing(scene.log._log)
        # Twice four objects, then what is new, of which there is none; then the others.
        assert [lssn for lssn, _ in places[:4]] == [1, 2, 6, 4]
        assert (counts[:4], rounds) == ([4, 4, 0, 4], 1)
        places.clear()
        await scene.worker.tier()
        assert places == []  # the log is not looked at
        await scene.check()

    on_table(tmp_path / "tier", body, kind=kind)


def test_answers_that_are_lost(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose answer is lost is looked up; one that is not made is made again."""
    fates: list[str] = []
    tables: Any = DeltaTables if kind == "delta" else IcebergTables

    def lossy(method: str) -> None:
        real = getattr(tables, method)

        async def call(*arguments: Any, **options: Any) -> None:
            fate = fates.pop(0) if fates else "done"
            if fate != "lost":
                await real(*arguments, **options)
            if fate != "done":
                raise ObjectStoreError("504")

        monkeypatch.setattr(tables, method, call)

    for method in ("create", "commit", "add_fields"):
        lossy(method)

    async def body(scene: TableScene) -> None:
        for _ in range(2):
            for fates[:] in (["lost"], ["answer lost"], ["answer lost", "lost"]):
                await scene.write()
                await scene.follow()
                await scene.check()
            delete_table(scene.kind, scene.url, "rides")
            scene.start_worker()
        fates[:] = ["lost"] * 3
        with pytest.raises(ObjectStoreError):
            await scene.follow()
        await scene.follow()
        await scene.check()

    on_table(tmp_path / "tier", body, kind=kind)


@pytest.mark.timeout(1800)  # two seconds a commit on a busy machine, with --full
def test_the_next_commit_costs_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After hundreds of commits as after few: it reads a checkpoint, and the commits since."""
    every, rounds = amount(20, sampled=5), amount(15, sampled=4)

    async def body(scene: TableScene) -> None:
        scene.tier = f"{server.url}/many"
        await scene.log.update_settings(tier=scene.tier)
        counts: list[list[int]] = []
        for _ in range(rounds):
            counts.append([])
            for _ in range(every):
                await scene.write(rows=1)
                await scene.worker._tiers._tierer.tier(scene.log._log)
                keeper = TableKeeper(  # one that knows nothing costs most
                    scene.namespace.log_context,
                    scene.namespace.staging_owner,
                    compare_every_s=1,
                    checkpoint_every=every,
                )
                relay.requests.clear()
                await keeper.follow(scene.log._log)
                counts[-1].append(len(relay.requests))
        await scene.check()
        assert max(counts[0]) > min(counts[0])  # they are counted
        assert max(counts[-1]) <= max(counts[2]) + 2, counts

    with s3_server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        address = server.environment["AWS_ENDPOINT_URL"].removeprefix("http://")
        with http_relay(address) as relay:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{relay.address}")
            on_table(tmp_path, body)
