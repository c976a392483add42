"""Delta tables of which only later commits are read: whatever happens to the table meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dlcore.base.errors import ObjectStoreError, TableError
from dlcore.log.cold import delta_tables, stores
from dlcore.log.cold.delta_format import fields_of
from dlcore.log.cold.delta_log import DeltaState
from dlcore.log.cold.delta_tables import DeltaTables
from dlcore.log.cold.files_kept import FilesKept
from dlcore.log.cold.parquet import POSITIONS, columns_of_object
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.cold.table_format import AddedFile, TableSeen
from tests.fixtures.table_readers import rows_of

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = columns_of_object(None, 0)


class Scene:
    """A table in a folder, and the files of its log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = FilesKept[DeltaState]()

    def table(self) -> DeltaTables:
        """Return the table as the same worker has it in its next round."""
        return DeltaTables(f"file://{self.folder}", "c/l", StoredObjects(), self.kept)

    def file(self, lssn: int) -> AddedFile:
        """Write the object of a segment with one record."""
        file = self.folder / f"{lssn}/7-t-0-1.parquet"
        file.parent.mkdir(exist_ok=True)
        rows = [pa.array([0]).cast(each.type) for each in POSITIONS]
        schema = pa.schema([*POSITIONS, *COLUMNS])
        pq.write_table(pa.Table.from_arrays([*rows, pa.array([b"x"])], schema=schema), file)
        size = file.stat().st_size
        return AddedFile(f"{lssn}/7-t-0-1.parquet", size, 0, pq.read_metadata(file), 1)

    def create(self, lssn: int = 1) -> None:
        """Make the table."""
        adds = [self.file(lssn)]
        asyncio.run(self.table().create("log", fields_of(COLUMNS), adds, (lssn, 1)))

    def look(self) -> TableSeen:
        """Look, and compare that with what a look at all finds."""
        found = asyncio.run(self.table().look())
        whole = asyncio.run(DeltaTables(self.url, "c/l", StoredObjects()).look())
        assert found is not None
        assert whole is not None
        assert set(found.files) == set(whole.files)
        assert found[:5] == whole[:5]
        return found

    @property
    def url(self) -> str:
        """The folder of the table."""
        return f"file://{self.folder}"

    def commit(self, lssn: int, removes: Any = ()) -> None:
        """Look, then add the object of a segment."""
        table = self.table()
        asyncio.run(table.look())
        adds = [self.file(lssn)]
        asyncio.run(table.commit(adds, removes, (lssn, 1), now_ms=1_000, data_change=True))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Make a table, and see it."""
    made = Scene(tmp_path)
    made.create()
    made.look()
    return made


def refuse_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all fail that reads a whole table."""

    def refuse(_: DeltaTables) -> None:
        raise AssertionError("all of the table is read")

    monkeypatch.setattr(DeltaTables, "_read_whole", refuse)


def test_only_later_commits_are_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look reads the commit that was the last one, and those after it."""
    read: list[str] = []
    real = stores.read_whole

    def counted(url: str) -> bytes | None:
        read.append(url.rpartition("/")[2])
        return real(url)

    monkeypatch.setattr(delta_tables, "read_whole", counted)
    for lssn in range(2, 6):
        scene.commit(lssn)
    with monkeypatch.context() as patched:
        refuse_the_library(patched)
        read.clear()
        found = asyncio.run(scene.table().look())
        assert found is not None
        assert (found.version, found.position, len(found.files)) == (4, (5, 1), 5)
        assert [int(each[:20]) for each in read] == [3, 4, 5]
    scene.commit(6, removes=list(scene.look().files)[:2])
    assert scene.look().version == 5
    assert rows_of(DeltaTable(scene.url)).num_rows == 4


def test_commits_of_the_library_are_read(scene: Scene) -> None:
    """A column more, a checkpoint, and another program's property."""
    table = scene.table()
    asyncio.run(table.look())
    more = pa.schema([*COLUMNS, pa.field("tip", pa.int64(), metadata={"PARQUET:field_id": "9"})])
    asyncio.run(table.add_fields(fields_of(more)[-1:], (1, 1)))
    assert scene.look().fields[-1]["name"] == "tip"
    asyncio.run(table.tidy())
    found = scene.look()
    assert (found.version, found.checkpoint) == (1, 1)
    scene.commit(2)
    DeltaTable(scene.url).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    with pytest.raises(TableError, match="asks of its writers"):
        asyncio.run(scene.table().look())


def test_a_table_that_was_made_again(scene: Scene) -> None:
    """It is read whole, with as many versions as it had, and with fewer."""
    for lssn in (2, 3):
        scene.commit(lssn)
    scene.look()
    shutil.rmtree(scene.folder / "_delta_log")
    assert asyncio.run(scene.table().look()) is None
    for count in (1, 3):
        scene.create(7)
        for lssn in range(8, 7 + count):
            scene.commit(lssn)
        scene.kept.forget(scene.url)
        before = scene.look()
        shutil.rmtree(scene.folder / "_delta_log")
        scene.create(20)
        for lssn in range(21, 20 + count):
            table = DeltaTables(scene.url, "c/l", StoredObjects())  # another worker
            asyncio.run(table.look())
            adds = [scene.file(lssn)]
            asyncio.run(table.commit(adds, (), (lssn, 1), now_ms=1, data_change=True))
        found = scene.look()
        assert (found.version, found.position) == (before.version, (19 + count, 1))
        shutil.rmtree(scene.folder / "_delta_log")


def test_a_table_that_others_committed_to_very_often(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is read, instead of each commit."""
    monkeypatch.setattr(delta_tables, "_COMMITS_READ_MAX", 2)
    other = Scene(scene.folder)
    for lssn in (2, 3):
        other.commit(lssn)
    assert scene.look().version == 2
    with monkeypatch.context() as patched:
        for lssn in (4, 5, 6):
            other.commit(lssn)
        refuse_the_library(patched)
        with pytest.raises(AssertionError):
            asyncio.run(scene.table().look())
    assert scene.look().version == 5


def test_one_of_two_commits_is_refused(scene: Scene) -> None:
    """The one whose table is not the newest any more; also a column that comes too late."""
    first, second, third = (scene.table() for _ in range(3))
    for each in (first, second, third):
        asyncio.run(each.look())
    adds = [scene.file(2)]
    asyncio.run(first.commit(adds, (), (2, 1), now_ms=1, data_change=True))
    with pytest.raises(ObjectStoreError, match=r"0{19}1\.json"):
        asyncio.run(second.commit(adds, (), (2, 1), now_ms=1, data_change=True))
    more = pa.schema([*COLUMNS, pa.field("tip", pa.int64(), metadata={"PARQUET:field_id": "9"})])
    with pytest.raises(ObjectStoreError, match="adding columns"):
        asyncio.run(third.add_fields(fields_of(more)[-1:], (1, 1)))
    assert scene.look().version == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"version": null}'])
def test_a_damaged_hint_of_the_last_checkpoint(scene: Scene, text: str) -> None:
    """It is passed over, as all readers do."""
    (scene.folder / "_delta_log/_last_checkpoint").write_text(text)
    scene.kept.forget(scene.url)
    assert scene.look().checkpoint == 0
