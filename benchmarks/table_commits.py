"""The cost of the next commit to the Iceberg table of a log, after few commits and after many.

A commit is a look at the table and one file more; each twentieth one tidies.  The catalog is SQLite
and the store a folder.  Files leave the table as they come, as with a retention, so that only the
number of commits grows; `python -m benchmarks.table_commits COMMITS` also lets files stay.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.figures import Figure, Target
from dlcore.log.cold.iceberg_format import fields_of
from dlcore.log.cold.iceberg_tables import IcebergTables
from dlcore.log.cold.parquet import POSITIONS, columns_of_object
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.cold.table_format import CHECKPOINT_EVERY, AddedFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ops.sandbox.cluster import Sandbox

COMMITS = 1_000
FILES = 100
WINDOW = 100
_CATALOG = "PYICEBERG_CATALOG__DLOG__URI"


class Window(NamedTuple):
    """Commits one after the other: the number of the last, and each one's cost."""

    last: int
    cpu_ms: float
    wall_ms: float
    metadata_bytes: int
    own_files: int


def table_commits(_sandbox: Sandbox, folder: Path) -> list[Figure]:
    """The CPU of a commit to an Iceberg table after 1,000 commits, beside that after 300."""
    windows = asyncio.run(measure(_made(folder / "iceberg"), COMMITS, files=FILES))
    early, late = windows[2], windows[-1]
    target = Target(ratio=1.2, is_rate=False)
    figure = Figure(
        name="table_commit_cpu", unit="ms", value=late.cpu_ms, limit=early.cpu_ms, target=target
    )
    return [figure]


async def measure(folder: Path, commits: int, *, files: int | None) -> Sequence[Window]:
    """Make so many commits to a table in a folder; with `files` at most so many stay in it."""
    os.environ[_CATALOG] = f"sqlite:///{folder}/catalog.db"
    columns = columns_of_object(None, 0)
    rows = [pa.array([0]).cast(each.type) for each in POSITIONS]
    sink = pa.BufferOutputStream()
    schema = pa.schema([*POSITIONS, *columns])
    pq.write_table(pa.Table.from_arrays([*rows, pa.array([b"x"])], schema=schema), sink)
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    table = IcebergTables(f"file://{folder}", "cluster/log", StoredObjects())
    found: list[Window] = []
    began = (0.0, 0.0)
    for number in range(1, commits + 1):
        if number % WINDOW == 1:
            began = (time.process_time(), time.monotonic())
        added = AddedFile(f"{number}/1-t-0-1.parquet", 1_000_000, 0, footer, 1)
        await _commit(table, columns, added, number, files)
        if number % WINDOW == 0:
            cpu_s, wall_s = time.process_time() - began[0], time.monotonic() - began[1]
            own = _files_of(folder / "metadata")
            newest = max((each for each in own if each.suffix == ".json"), key=_age)
            costs = (cpu_s * 1000 / WINDOW, wall_s * 1000 / WINDOW)
            found.append(Window(number, *costs, newest.stat().st_size, len(own)))
    return found


async def _commit(
    table: IcebergTables, columns: pa.Schema, added: AddedFile, number: int, files: int | None
) -> None:
    seen = await table.look()
    position = (number, 1)
    if seen is None:
        await table.create("log", fields_of(columns), [added], position)
        return
    if seen.version % CHECKPOINT_EVERY == 0:
        await table.tidy()
    removes = (
        [] if files is None else [each for each in seen.files if each.end[0] <= number - files]
    )
    await table.commit([added], removes, position, now_ms=0, data_change=True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _files_of(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def _age(file: Path) -> int:
    return file.stat().st_mtime_ns


if __name__ == "__main__":
    for kept in (FILES, None):
        with tempfile.TemporaryDirectory() as name:
            for each in asyncio.run(measure(Path(name), int(sys.argv[1]), files=kept)):
                if each.last in (100, 300) or each.last % 1_000 == 0:
                    print("files stay" if kept is None else "files leave", each)
