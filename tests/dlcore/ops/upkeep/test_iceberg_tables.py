"""Iceberg tables of logs, and a catalog that lies, is another one, or knows another table."""

from __future__ import annotations

import re
import shutil
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    ObjectStoreError,
    TableError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.log.cold import iceberg_catalog
from dlcore.log.cold.iceberg_format import FIRST_METADATA, REGISTERED_METADATA, merged_away
from dlcore.log.cold.iceberg_io import TierFiles
from dlcore.log.cold.iceberg_tables import IcebergTables
from dlcore.ops.upkeep.table_status import TableReader
from tests.dlcore.ops.upkeep.test_table_keeper import RIDES, TableScene, on_table, remove, sweep
from tests.fixtures.lengths import amount
from tests.fixtures.table_readers import IcebergView, delete_table, make_catalog, own_catalog
from tests.fixtures.table_worker import CATALOG_URI

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pyiceberg.catalog import Catalog

    from tests.fixtures.iceberg_catalogs import Catalogs

NAME = ("dlog", "rides")


@pytest.fixture(autouse=True)
def catalog(catalogs: Catalogs, tmp_path: Path) -> str:
    """Give workers a catalog; return its address."""
    return catalogs.make(tmp_path / "catalog")


def on_iceberg(folder: Path, body: Callable[[TableScene], Awaitable[None]]) -> None:
    """Run `body` on a fresh log with such a table."""
    on_table(folder / "tier", body, kind="iceberg")


def table_of(scene: TableScene) -> Any:
    """Return the table, by the library alone."""
    view = scene.view()
    assert isinstance(view, IcebergView)
    return view.table


def metadata_of(scene: TableScene) -> set[str]:
    """Return the names of the table's own files."""
    return {each.name for each in Path(scene.folder, "metadata").iterdir()}


def own_file(scene: TableScene, name: str) -> Path:
    """Return one of the table's own files."""
    return Path(scene.folder, "metadata", name)


def test_columns_that_are_added_and_parts_of_columns_and_wider_types(tmp_path: Path) -> None:
    """They keep the ids that objects have; older rows have null; other types are refused."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        point = pa.struct([("x", pa.int32())])
        wider = pa.schema([*RIDES, ("n", pa.int16()), ("p", point)])
        await scene.log.update_schema(wider)
        await scene.follow()
        await scene.write(rows=1, n=pa.array([1], pa.int16()), p=pa.array([{"x": 1}], point))
        await scene.follow()
        await scene.check()
        point = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))])
        wider = pa.schema([*RIDES, ("n", pa.int64()), ("p", point)])
        await scene.log.update_schema(wider)
        await scene.write(rows=1, n=pa.array([2**40], pa.int64()), p=[{"x": 2**40, "y": ["a"]}])
        await scene.follow()
        await scene.check()
        found = scene.view().rows().to_pylist()
        assert [each["n"] for each in found][59:] == [None, 1, 2**40]
        assert [each["p"] for each in found][59:] == [
            None,
            {"x": 1, "y": None},
            {"x": 2**40, "y": ["a"]},
        ]
        table = table_of(scene)
        assert [each.field_id for each in table.schema().fields][-4:] == [101, 102, 103, 104]
        await scene.log.update_schema(pa.schema([*wider, ("took", pa.duration("s"))]))
        await scene.refused(UnsupportedError, "column 'took' has the type duration")

    on_iceberg(tmp_path, body)


def test_a_table_that_another_program_changed_is_refused(tmp_path: Path) -> None:
    """It stays as it is, until it is as before or is made again."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        await scene.write()
        await scene.follow()
        table = table_of(scene)
        mine = table.current_snapshot().snapshot_id
        table.append(table.scan().to_arrow()[:1])
        await scene.refused(TableError, "which dlog did not add")
        table.manage_snapshots().set_current_snapshot(snapshot_id=mine).commit()
        await scene.write()
        await scene.follow()
        await scene.check()
        table.refresh()
        mine = table.current_snapshot()
        table.manage_snapshots().set_current_snapshot(mine.parent_snapshot_id).commit()
        await scene.refused(TableError, "went back to an older snapshot")
        table.manage_snapshots().set_current_snapshot(ref_name="dlog").commit()
        table.transaction().set_properties({"commit.retry.num-retries": "4"}).commit_transaction()
        await scene.refused(TableError, r"property commit\.retry\.num-retries is '4'")
        delete_table("iceberg", scene.url, "rides")
        await scene.follow()
        await scene.check()
        table_of(scene).delete()
        await scene.refused(TableError, r"\(delete\) was not made by dlog")

    on_iceberg(tmp_path, body)


def test_a_table_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    """One that is there before, and one that takes the place of the log's."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        catalog = own_catalog()
        catalog.create_namespace("dlog")
        rows = pa.table({"x": [1]})
        other = catalog.create_table(NAME, rows.schema, location=f"{scene.tier}/sales")
        other.append(rows)
        with pytest.raises(TableError, match=r"has a table dlog\.rides already"):
            await scene.follow()
        assert catalog.load_table(NAME).scan().to_arrow() == rows
        catalog.rename_table(NAME, ("dlog", "sales"))
        await scene.follow()
        await scene.check()
        catalog.drop_table(NAME)
        catalog.rename_table(("dlog", "sales"), NAME)
        scene.start_worker()
        with pytest.raises(TableError, match=r"dlog\.rides is not the one in"):
            await scene.follow()
        assert catalog.load_table(NAME).scan().to_arrow() == rows

    on_iceberg(tmp_path, body)


def test_another_catalog_does_not_make_the_table_again(
    tmp_path: Path, catalogs: Catalogs, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a sweep delete its files; with the right one all goes on."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.write()
        await scene.follow()
        catalogs.make(tmp_path / "wrong")
        scene.start_worker()
        with pytest.raises(TableError, match=r"lacks the table dlog\.rides of .*another catalog"):
            await scene.follow()
        await scene.log.truncate(DLSN(2, 0, 0))
        await remove(scene)
        await sweep(scene)
        monkeypatch.setenv(CATALOG_URI, catalog)
        assert scene.view().rows().num_rows == 120
        await scene.follow()
        await scene.check(first=60)

    on_iceberg(tmp_path, body)


def test_a_catalog_that_is_closed_while_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may use its connection: it is closed behind that use."""
    make_catalog(tmp_path, monkeypatch)
    with iceberg_catalog.open_catalog("file:///a").engine.connect() as used:
        connection = used.connection.dbapi_connection
        iceberg_catalog.reopen()
        connection.execute("SELECT 1")
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        connection.execute("SELECT 1")


def test_a_catalog_that_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file was away and is another one by now: the same worker goes on, and nothing doubles."""
    file = Path(make_catalog(tmp_path / "own", monkeypatch).removeprefix("sqlite:///"))

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        kept = tmp_path / "kept"
        shutil.move(file, kept)
        await scene.write()
        with pytest.raises(ObjectStoreError, match=r"catalog dlog: .* no such table"):
            await scene.follow()  # SQLite makes an empty file
        with pytest.raises(TableError, match="is it another catalog"):
            await scene.follow()
        shutil.move(shutil.copy(kept, tmp_path / "copy"), file)
        await scene.follow()
        shutil.move(file, kept)
        shutil.copy(kept, file)
        await scene.write()
        await scene.follow()
        await scene.check()

    on_iceberg(tmp_path, body)


@pytest.mark.parametrize("step", ["_register", "_apply"])
def test_a_worker_that_dies_while_it_makes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The next one goes on with what is there, also if the log has other columns by now."""

    async def body(scene: TableScene) -> None:
        await scene.write()

        def die(*_: Any) -> None:
            raise DLError("dead")

        with monkeypatch.context() as dying:
            dying.setattr(IcebergTables, step, die)
            with pytest.raises(DLError, match="dead"):
                await scene.follow()
        assert metadata_of(scene) - {REGISTERED_METADATA} == {FIRST_METADATA}
        reader = await TableReader.of(scene.namespace.log_context, "rides")
        with pytest.raises(TableError, match="has no table in"):
            await reader.status()
        assert scene.found() is None
        await scene.log.update_schema(pa.schema([*RIDES, ("n", pa.int16())]))
        scene.start_worker()
        await scene.follow()
        await scene.check()

    on_iceberg(tmp_path, body)


class LyingCatalog:
    """Decides how the next commits and loads end; it is the catalog of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fates: list[Exception] = []
        self.is_made = True
        self.stale: list[Any] = []
        kind: Any = RestCatalog if isinstance(own_catalog(), RestCatalog) else SqlCatalog
        commit, load = kind.commit_table, kind.load_table

        def lying_commit(catalog: Catalog, table: Any, needs: Any, updates: Any) -> Any:
            stale, self.stale = self.stale, []
            fate = self.fates.pop(0) if self.fates else None
            done = commit(catalog, table, needs, updates) if fate is None or self.is_made else None
            self.stale = stale
            if fate is not None:
                raise fate
            return done

        def lying_load(catalog: Catalog, identifier: Any) -> Any:
            return self.stale.pop(0) if self.stale else load(catalog, identifier)

        monkeypatch.setattr(kind, "commit_table", lying_commit)
        monkeypatch.setattr(kind, "load_table", lying_load)


@pytest.mark.parametrize("is_made", [True, False], ids=["made", "not made"])
@pytest.mark.parametrize(
    "fate",
    [CommitFailedException("409"), CommitStateUnknownException("504"), OSError("reset")],
    ids=["refused", "unknown", "no answer"],
)
def test_a_catalog_that_lies_of_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: Exception, *, is_made: bool
) -> None:
    """A failed commit may be made: its manifests stay, and nothing is added before a look."""
    lies = LyingCatalog(monkeypatch)
    lies.is_made = is_made

    async def body(scene: TableScene) -> None:
        for count in (1, 1, 2):
            await scene.write()
            lies.fates = [fate] * count
            await scene.follow()
            await scene.check()
            lies.fates = []
        await scene.log.update_schema(pa.schema([*RIDES, ("n", pa.int16())]))
        lies.fates = [fate]
        await scene.follow()
        assert "n" in scene.view().rows().column_names

    on_iceberg(tmp_path, body)


def test_a_catalog_that_shows_an_older_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that was decided by it is refused; after a commit it is known to be older."""
    lies = LyingCatalog(monkeypatch)

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        older = table_of(scene)
        older.catalog = own_catalog()
        await scene.write()
        await scene.follow()
        await scene.write()
        scene.start_worker()
        lies.stale = [older]
        await scene.follow()
        await scene.check()
        await scene.write()
        real = IcebergTables.commit

        async def commit(*arguments: Any, **options: Any) -> None:
            await real(*arguments, **options)
            lies.stale = [older]

        with monkeypatch.context() as slow:
            slow.setattr(IcebergTables, "commit", commit)
            with pytest.raises(ObjectStoreError, match="older than the last commit"):
                await scene.follow()
        lies.stale = []
        await scene.follow()
        await scene.check()

    on_iceberg(tmp_path, body)


def test_old_snapshots_go_with_what_only_they_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tag stays, a snapshot that a user tagged can be read, and files do not pile up."""
    made = IcebergTables.__init__

    def small(self: IcebergTables, *arguments: Any) -> None:
        made(self, *arguments, snapshots_kept=5)

    monkeypatch.setattr(IcebergTables, "__init__", small)

    async def body(scene: TableScene) -> None:
        reader = await TableReader.of(scene.namespace.log_context, "rides")
        for number in range(amount(60, sampled=32)):
            await scene.write(rows=1)
            await scene.follow()
            if number == 10:
                mine = table_of(scene).current_snapshot().snapshot_id
                table_of(scene).manage_snapshots().create_tag(mine, "eve").commit()
        await scene.check()
        table = table_of(scene)
        assert len(table.snapshots()) < 5 + 1 + 20
        assert table.scan(snapshot_id=mine).to_arrow().num_rows == 11
        assert await reader.end_of(mine) == DLSN(11, 1, 0)
        kept = {each.manifest_list for each in table.snapshots()}
        kept |= {m.manifest_path for each in table.snapshots() for m in each.manifests(table.io)}
        names = metadata_of(scene)
        merged = {m for each in table.snapshots() for m in merged_by(table, each)}
        assert len(merged) <= 2
        assert {each.rpartition("/")[2] for each in kept | merged} == {
            each for each in names if each.endswith(".avro")
        }
        assert len([each for each in names if each.endswith(".json")]) <= 22

    on_iceberg(tmp_path, body)


def test_a_manifest_is_read_once_and_by_removals_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a commit does not grow with the files that stay."""
    read: Counter[str] = Counter()
    real = TierFiles.new_input

    def counted(files: TierFiles, location: str) -> Any:
        read[location] += bool(re.search(r"-m\d+\.avro$", location))
        return real(files, location)

    async def body(scene: TableScene) -> None:
        for _ in range(8):
            await scene.write(rows=1)
            scene.start_worker()
            await scene.follow()
        assert len(+read) == 8
        assert set((+read).values()) == {1}
        await scene.log.truncate(DLSN(3, 0, 0))
        await remove(scene)
        read.clear()
        await scene.follow()
        await scene.check(first=2)
        assert 2 <= len(+read) <= 4  # those of two files, and what says that they are gone

    with monkeypatch.context() as counting:
        counting.setattr(TierFiles, "new_input", counted)
        on_iceberg(tmp_path, body)


def merged_by(table: Any, snapshot: Any) -> list[str]:
    """Return the manifests that the commit of a snapshot merged into others."""
    manifests = {each.manifest_path for each in snapshot.manifests(table.io)}
    return merged_away(snapshot.manifest_list, manifests)


def test_versions_by_positions(tmp_path: Path) -> None:
    """They are ids of snapshots, as readers of Iceberg take them."""

    async def body(scene: TableScene) -> None:
        reader = await TableReader.of(scene.namespace.log_context, "rides")
        with pytest.raises(TableError, match="has no table in"):
            await reader.status()
        with pytest.raises(TableError, match="has no records"):
            await reader.version_with(DLSN(1, 0, 0))
        for _ in range(4):
            await scene.write(rows=10)
            await scene.follow()
        status = await reader.status()
        table = table_of(scene)
        assert status.form == "iceberg"
        assert (status.version, status.end) == (
            table.current_snapshot().snapshot_id,
            scene.boundary(),
        )
        assert (status.records, status.files) == (40, len(scene.view().files()))
        versions = [each.snapshot_id for each in table.snapshots()]
        ends = [await reader.end_of(version) for version in versions]
        assert ends == sorted(set(ends))
        assert [await reader.version_with(each) for each in ends] == versions
        assert await reader.version_with(DLSN(1, 0, 0)) == versions[0]
        assert table.scan(snapshot_id=versions[1]).to_arrow().num_rows == 20
        past = DLSN(scene.boundary().lssn, scene.boundary().entry_id, 1)
        with pytest.raises(TableError, match="none of its versions has all before"):
            await reader.version_with(past)
        with pytest.raises(TableError, match=r"version 5 of the table in .*: expected the id"):
            await reader.end_of(5)

    on_iceberg(tmp_path, body)


def test_a_worker_without_the_library_or_a_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what is to be installed or set, and repeats no password."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        with monkeypatch.context() as changed:
            changed.setitem(sys.modules, "pyiceberg.utils.config", None)
            with pytest.raises(ConfigurationError, match=r"distributed-dlog\[iceberg\]"):
                await scene.follow()
        for uri, said in (
            ("", "set PYICEBERG_CATALOG__DLOG__URI to its address"),
            ("mystery://me:secret@host/x", "Could not infer the catalog type .*: its address"),
        ):
            monkeypatch.setenv(CATALOG_URI, uri)
            with pytest.raises(ConfigurationError, match=said) as caught:
                await scene.follow()
            assert "secret" not in str(caught.value)
        segments = await scene.log.get_log_segments()
        assert all(each.is_cold for segment in segments for each in segment.extents)

    on_iceberg(tmp_path, body)


def test_the_catalog_is_in_no_metadata(tmp_path: Path, catalog: str) -> None:
    """Its address may have a password; only the process has it."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        stored = [value.value for value in scene.cluster.tree.dump().values()]
        stored += [own_file(scene, each).read_bytes() for each in metadata_of(scene)]
        assert any(b"dlog.name" in each for each in stored)
        assert not any(catalog.partition("://")[2].encode() in each for each in stored)

    on_iceberg(tmp_path, body)


def test_first_metadata_that_cannot_be_read(tmp_path: Path) -> None:
    """The error says which file; nothing is made in its place."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        first = own_file(scene, FIRST_METADATA)
        good = first.read_bytes()
        for bad in (b"{", b"[]", good.replace(b'"dlog.name": "rides"', b'"dlog.name": 5')):
            first.write_bytes(bad)
            scene.start_worker()
            with pytest.raises(TableError, match=f"{FIRST_METADATA} is not what dlog wrote"):
                await scene.follow()
        first.write_bytes(good)
        await scene.follow()
        shutil.rmtree(first.parent)
        own_catalog().drop_table(NAME)
        scene.start_worker()
        await scene.follow()
        await scene.check()

    on_iceberg(tmp_path, body)
