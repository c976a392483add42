"""Tables that a log refuses, and what is logged of tables."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    TableError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.upkeep.removal import remove_truncated
from dlcore.ops.upkeep.table_status import TableReader
from tests.dlcore.ops.upkeep.test_table_keeper import (
    RIDES,
    WRITING,
    TableScene,
    on_table,
    remove,
    sweep,
)
from tests.fixtures.table_readers import rows_of

if TYPE_CHECKING:
    from pathlib import Path


def test_columns_that_tables_cannot_have(tmp_path: Path) -> None:
    """The error names the column; the log stays cold as it is."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.log.update_schema(pa.schema([*RIDES, ("took", pa.duration("s"))]))
        with pytest.raises(UnsupportedError, match="column 'took' has the type duration"):
            await scene.follow()
        assert not DeltaTable.is_deltatable(scene.url)

    on_table(tmp_path, body)


def test_a_table_of_others_is_refused(tmp_path: Path) -> None:
    """One that dlog did not make, one of another log, and one that another program wrote to."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.worker._tiers._tierer.tier(scene.log._log)
        write_deltalake(scene.url, pa.table({"x": [1]}))
        await scene.refused(TableError, "which dlog did not add")
        shutil.rmtree(f"{scene.folder}/_delta_log")
        DeltaTable.create(scene.url, pa.schema([("x", pa.int64())]), description="sales")
        await scene.refused(TableError, "'sales' and has no position of this log")
        shutil.rmtree(f"{scene.folder}/_delta_log")
        await scene.follow()
        await scene.check()
        write_deltalake(scene.url, rows_of(DeltaTable(scene.url))[:1], mode="append")
        await scene.refused(TableError, "which dlog did not add")
        shutil.rmtree(f"{scene.folder}/_delta_log")
        await scene.follow()
        DeltaTable(scene.url).delete()
        await scene.refused(TableError, "differ")

    on_table(tmp_path, body)


def test_a_table_that_is_ahead_is_refused(tmp_path: Path) -> None:
    """As after an import of metadata from before."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        before = scene.cluster.tree.dump()
        await scene.write()
        await scene.follow()
        tree = scene.cluster.tree
        store = tree.connect()
        log_id = scene.log._log.log_id
        for path in sorted(tree.dump(), reverse=True):
            if log_id in path and path not in before:
                await store.delete(path)
            elif log_id in path and tree.dump()[path].value != before[path].value:
                await store.put(path, before[path].value, version=-1)
        await scene.refused(TableError, "the table is ahead of the log")

    on_table(tmp_path, body)


def test_objects_in_another_folder_are_refused(tmp_path: Path) -> None:
    """A table names what is below it."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.follow()
        await scene.log.update_settings(tier=f"{scene.tier}/elsewhere")
        scene.start_worker()
        with pytest.raises(TableError, match="set `tier` as it was"):
            await scene.follow()

    on_table(tmp_path, body)


def test_objects_that_are_not_those_of_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their end is compared before they are added."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.worker._tiers._tierer.tier(scene.log._log)
        chains = scene.worker._tiers._tables._chains
        read = chains.read_chain

        async def other(*arguments: Any, **options: Any) -> Any:
            found = await read(*arguments, **options)
            first, *rest = found.objects
            changed = replace(first, records=first.records + 1)
            return replace(found, objects=(changed, *rest))

        monkeypatch.setattr(chains, "read_chain", other)
        with pytest.raises(CorruptMetadataError, match="says that it holds"):
            await scene.follow()

    on_table(tmp_path, body)


def test_a_round_of_a_worker_names_the_tables_that_it_cannot_keep(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its log, and in the metadata that `dlog autorecovery status` shows."""
    reported: list[str] = []

    async def body(scene: TableScene) -> None:
        await scene.write()
        write_deltalake(scene.url, pa.table({"x": [1]}))

        async def tell(_: str, troubles: Any, **_about: str) -> None:
            reported.extend(troubles.found)

        monkeypatch.setattr(scene.worker._repairs, "tell", tell)
        assert await scene.worker.tier() == 1

    on_table(tmp_path, body)
    assert "the table of log rides: TableError: the table has the file" in reported[0]
    assert "the table of log rides" in caplog.text


def test_versions_by_positions(tmp_path: Path) -> None:
    """Also once old commits are gone: the oldest that can be read is that of a checkpoint."""

    async def body(scene: TableScene) -> None:
        context = scene.namespace.log_context
        reader = await TableReader.of(context, "rides")
        with pytest.raises(TableError, match="has no table in"):
            await reader.status()
        for _ in range(5):
            await scene.write(rows=10)
            await scene.follow()
        status = await reader.status()
        assert (status.version, status.end) == (4, scene.boundary())
        ends = [await reader.end_of(version) for version in range(5)]
        assert ends == sorted(set(ends))
        assert [await reader.version_with(each) for each in ends] == list(range(5))
        assert await reader.version_with(DLSN(1, 0, 0)) == 0
        past = DLSN(scene.boundary().lssn, scene.boundary().entry_id, 1)
        with pytest.raises(TableError, match="none of its versions has all before"):
            await reader.version_with(past)
        DeltaTable(scene.url, version=2).create_checkpoint()
        for version in (0, 1):
            (tmp_path / f"{scene.folder}/_delta_log/{version:020}.json").unlink()
        assert [await reader.version_with(each) for each in ends] == [2, 2, 2, 3, 4]
        for version in (1, 7):
            with pytest.raises(TableError, match=f"version {version} of .* from 2, .* to 4$"):
                await reader.end_of(version)
        write_deltalake(f"{scene.tier}/other", pa.table({"x": [1]}))
        other = TableReader(context, scene.log._log, scene.tier, scene.kind)
        other._table.url = f"{scene.tier}/other"
        with pytest.raises(TableError, match="has no position"):
            await other.end_of(0)
        with pytest.raises(TableError, match="no setting `tier`"):
            TableReader(context, scene.log._log, None, scene.kind)

    on_table(tmp_path, body)


def test_a_sweep_leaves_objects_of_a_table_that_it_cannot_judge(tmp_path: Path) -> None:
    """One that is not there yet, and one that another program changed; other logs go on."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        await scene.write()
        await scene.worker._tiers._tierer.tier(scene.log._log)
        other = await scene.cluster.open("other", config=WRITING)
        settings = LogSettings(tier=scene.tier, tier_after_s=0)
        await other.create_log("plain", settings=settings)
        plain = await other.open_log("plain", config=WRITING)
        for _ in range(2):
            async with await plain.open_writer() as writer:
                await writer.write(LogRecord(1, b"a"))
        await scene.worker._tiers._tierer.tier(plain._log)
        await scene.log.truncate(DLSN(2, 0, 0))
        await remove(scene)
        before = await objects_of(scene)
        await sweep(scene)
        assert await objects_of(scene) == before
        write_deltalake(scene.url, pa.table({"x": [1]}))
        await plain.truncate(DLSN(2, 0, 0))
        context = scene.namespace.log_context
        await remove_truncated(context, await context.logs.read(plain._log))
        await scene.worker.sweep()
        await sweep(scene)
        after = await objects_of(scene)
        gone = before - after
        assert gone
        assert all(f"/{plain._log.log_id}/1/" in each for each in gone)
        await scene.log.update_settings(table=None)
        (tmp_path / f"{scene.folder}/_delta_log").rename(tmp_path / "away")
        await sweep(scene)
        assert any(
            f"/{scene.log._log.log_id}/1/" in each for each in after - await objects_of(scene)
        )

    on_table(tmp_path, body)


async def objects_of(scene: TableScene) -> set[str]:
    """Return the objects of all logs."""
    objects = scene.cluster.objects
    names = {each.url async for page in objects.list_below(scene.tier) for each in page}
    return {each for each in names if "/_delta_log/" not in each}


def test_a_worker_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the table and the extra; the log is tiered as without a table."""

    async def body(scene: TableScene) -> None:
        await scene.write()
        monkeypatch.setitem(sys.modules, "deltalake", None)
        with pytest.raises(
            ConfigurationError, match=r"the table in file:.*distributed-dlog\[table\]"
        ):
            await scene.follow()
        segments = await scene.log.get_log_segments()
        assert all(each.is_cold for segment in segments for each in segment.extents)

    on_table(tmp_path, body)


def test_the_setting() -> None:
    """It needs a tier, and a kind of table that there is."""
    assert LogSettings(tier="s3://bucket/f", table="delta").table == "delta"
    with pytest.raises(ConfigurationError, match="table='delta': expected a tier of the log's own"):
        LogSettings.of({"table": "delta"})
    with pytest.raises(ConfigurationError, match="table='hudi': expected delta or iceberg"):
        LogSettings.of({"tier": "s3://bucket/f", "table": "hudi"})
