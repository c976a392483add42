"""The public and private names of pyiceberg that dlog uses are there, and do what they are for."""

from __future__ import annotations

import ast
import asyncio
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.manifest import ManifestFile

from dlcore.log.cold.iceberg_format import fields_of
from dlcore.log.cold.iceberg_private import VERSIONS, BoundedRestCatalog
from dlcore.log.cold.iceberg_tables import IcebergTables
from dlcore.log.cold.parquet import POSITIONS, columns_of_object
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.cold.table_format import AddedFile
from tests.fixtures.table_readers import make_catalog

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[3]
ALONE = "iceberg_private.py"


def test_the_versions_of_the_library() -> None:
    """Those that may be installed are those of which the private names are known."""
    assert pyiceberg.__version__.startswith(f"{VERSIONS}.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (each for each in project["optional-dependencies"]["iceberg"] if "py" in each)
    _, minor = VERSIONS.split(".")
    assert needed.endswith(f">={VERSIONS},<0.{int(minor) + 1}"), needed
    assert BoundedRestCatalog._create_session is not RestCatalog._create_session


def test_no_other_module_uses_private_names_of_libraries() -> None:
    """A private attribute is one of the module's own classes, or of a named tuple."""
    for file in (ROOT / "dlcore/log/cold").glob("*.py"):
        text = file.read_text()
        tree = ast.parse(text)
        own = set(re.findall(r"(?:def|self\.|^|class )\s*(_[a-z]\w*)", text, re.MULTILINE))
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
        }
        foreign = used - own - {"_replace", "_asdict"}
        if file.name == ALONE:
            assert foreign == {"_build_manifest_evaluator"}
        else:
            assert not foreign, f"{file.name} uses {foreign}"


def test_only_manifests_that_hold_what_goes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of some manifests has the file that is removed."""
    make_catalog(tmp_path / "catalog", monkeypatch)
    columns = columns_of_object(None, 0)
    rows = [pa.array([0]).cast(each.type) for each in POSITIONS]
    sink = pa.BufferOutputStream()
    schema = pa.schema([*POSITIONS, *columns])
    pq.write_table(pa.Table.from_arrays([*rows, pa.array([b"x"])], schema=schema), sink)
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    table = IcebergTables(f"file://{tmp_path}/tier", "c/l", StoredObjects())

    async def fill() -> None:
        for lssn in range(1, 6):
            adds = [AddedFile(f"{lssn}/7-t-0-1.parquet", 1, 0, footer, 1)]
            if lssn == 1:
                await table.create("log", fields_of(columns), adds, (1, 1))
            else:
                await table.commit(adds, (), (lssn, 1), now_ms=0, data_change=True)
            await table.look()

    (tmp_path / "tier").mkdir()
    asyncio.run(fill())
    seen = asyncio.run(table.look())
    assert seen is not None
    assert len(seen.files.parts) == 5
    read: list[str] = []
    fetch = ManifestFile.fetch_manifest_entry

    def counted(self: ManifestFile, *arguments: object, **options: object) -> object:
        read.append(self.manifest_path)
        return fetch(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ManifestFile, "fetch_manifest_entry", counted)
    gone = list(seen.files)[2:3]
    asyncio.run(table.commit((), gone, (5, 1), now_ms=0, data_change=True))
    assert len(set(read)) == 1
