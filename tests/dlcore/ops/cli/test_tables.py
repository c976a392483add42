"""The table of a log in `dlog log show`, and one that is left where the setting was unset."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.errors import TableError
from dlcore.log.cold.tables import FORMS
from dlcore.ops.cli.tables import table_of, table_text
from dlcore.ops.upkeep.table_status import TableReader
from tests.dlcore.ops.upkeep.test_table_keeper import TableScene, on_table

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMIT_S = 600.0


async def shown(scene: TableScene, limit_s: float = LIMIT_S) -> Mapping[str, Any]:
    """Return what is shown of the table, which the log must have by its settings."""
    found = await table_of(scene.namespace, scene.log, limit_s=limit_s)
    assert found is not None
    return found


def damage(folder: Path) -> None:
    """Write to each file of a table that has JSON what is none, in three lines."""
    for file in folder.rglob("*.json"):
        file.write_bytes(b"{\n\n")


def test_the_output_about_a_table(tmp_path: Path, table_kind: str) -> None:
    """Its kind, place, version and end, and the records after that; before it is there, why."""

    async def body(scene: TableScene) -> None:
        await scene.write(rows=10)
        before = await shown(scene)
        assert "has no table in" in before["error"]
        assert "dlog autorecovery status says what keeps a worker" in before["error"]
        assert (before["format"], before["url"]) == (table_kind, scene.url)
        await scene.follow()
        await scene.write(rows=7)
        status = await (await TableReader.of(scene.namespace.log_context, "rides")).status()
        table = await shown(scene)
        assert table == {
            "format": table_kind,
            "url": scene.url,
            "version": status.version,
            "end": str(scene.boundary()),
            "records_after": 7,
            "error": None,
        }
        assert table_text(table) == (
            f"{table_kind} version {status.version} in {scene.url}, up to {scene.boundary()}, "
            "7 records after that"
        )

    on_table(tmp_path / "tier", body, kind=table_kind)


def test_an_unreadable_table_is_reported_in_a_line(
    tmp_path: Path, table_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the library, with damaged files, and where nothing answers in time."""
    library = {"delta": "deltalake", "iceberg": "pyiceberg.utils.config"}[table_kind]

    async def body(scene: TableScene) -> None:
        await scene.write(rows=10)
        await scene.follow()
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, library, None)
            without = await shown(scene)
        text = table_text(without)
        assert text is not None
        assert text.startswith(f"{table_kind}, cannot be read: the table in {scene.url}")
        assert f"distributed-dlog[{'table' if table_kind == 'delta' else 'iceberg'}]" in text
        with monkeypatch.context() as patched:
            patched.setattr(TableReader, "status", lambda _: asyncio.Event().wait())
            late = await shown(scene, limit_s=0.01)
        assert late["error"] == "the store or catalog did not answer within 0.01 s"
        damage(Path(scene.folder))
        damaged = await shown(scene)
        assert damaged["error"]
        assert "\n" not in damaged["error"]
        assert damaged["version"] is damaged["records_after"] is None

    on_table(tmp_path / "tier", body, kind=table_kind)


def test_a_log_without_a_table_loads_no_libraries_of_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their libraries are not imported; a log with a table would fail."""

    async def body(scene: TableScene) -> None:
        monkeypatch.setitem(sys.modules, "dlcore.ops.upkeep.table_status", None)
        with pytest.raises(ImportError):
            await table_of(scene.namespace, scene.log, limit_s=LIMIT_S)
        await scene.log.update_settings(table=None)
        assert await table_of(scene.namespace, scene.log, limit_s=LIMIT_S) is None
        assert table_text(None) is None

    on_table(tmp_path / "tier", body)


def test_a_table_is_found_after_the_setting_was_unset(tmp_path: Path, table_kind: str) -> None:
    """Either format works; two of them, and none, are errors."""

    async def body(scene: TableScene) -> None:
        context = scene.namespace.log_context
        await scene.write(rows=10)
        await scene.follow()
        expected = await (await TableReader.of(context, "rides")).status()
        await scene.log.update_settings(table=None)
        assert await (await TableReader.of(context, "rides")).status() == expected
        (folder,) = [form.folder for form in FORMS if form.kind == table_kind]
        (other,) = [form.folder for form in FORMS if form.kind != table_kind]
        shutil.copytree(Path(scene.folder, folder), Path(scene.folder, other))
        with pytest.raises(TableError, match=r"2 tables in .*_delta_log away; or .*metadata away"):
            await TableReader.of(context, "rides")
        for each in (folder, other):
            shutil.rmtree(Path(scene.folder, each))
        with pytest.raises(TableError, match="has no table in"):
            await TableReader.of(context, "rides")
        await scene.log.update_settings(tier=None)
        with pytest.raises(TableError, match="no setting `tier`"):
            await TableReader.of(context, "rides")

    on_table(tmp_path / "tier", body, kind=table_kind)
