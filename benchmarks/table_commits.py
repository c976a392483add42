"""The cost of the next commit to the table of a log, after few commits and after many.

A commit is a look at the table and one file more; each twentieth one tidies.  The store is a
folder, and Iceberg's catalog SQLite.  Files leave the table as they come, as with a retention, so
that only the number of commits grows; `python -m benchmarks.table_commits COMMITS` also lets files
stay, and prints both.  With two words more, as `COMMITS delta 10000`, it is about another format,
and a table that begins with so many files, which stay.
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
from dlcore.log.cold.parquet import POSITIONS, columns_of_object
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.cold.table_format import CHECKPOINT_EVERY, AddedFile, segment_of
from dlcore.log.cold.tables import form_of, table_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dlcore.log.cold.table_format import TableForm
    from dlcore.log.cold.tables import LogTable
    from dlcore.ops.sandbox.cluster import Sandbox

COMMITS = 1_000
FILES = 100
WINDOW = 100
AT_ONCE = 1_000
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
    early, late = asyncio.run(_early_and_late(_made(folder / "iceberg")))
    target = Target(ratio=1.2, is_rate=False)
    figure = Figure(
        name="table_commit_cpu", unit="ms", value=late.cpu_ms, limit=early.cpu_ms, target=target
    )
    return [figure]


async def _early_and_late(folder: Path) -> tuple[Window, Window]:
    form = form_of("iceberg")
    windows = [each async for each in measure(folder, COMMITS, form=form, files=FILES)]
    return windows[2], windows[-1]


async def measure(
    folder: Path, commits: int, *, form: TableForm, files: int | None, first: int = 0
) -> AsyncIterator[Window]:
    """Make so many commits to a table in a folder.

    With `files` at most so many stay in it.  It begins with `first` files, of commits of their own.
    """
    os.environ[_CATALOG] = f"sqlite:///{folder}/catalog.db"
    columns = columns_of_object(None, 0)
    rows = [pa.array([0]).cast(each.type) for each in POSITIONS]
    sink = pa.BufferOutputStream()
    schema = pa.schema([*POSITIONS, *columns])
    pq.write_table(pa.Table.from_arrays([*rows, pa.array([b"x"])], schema=schema), sink)
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue()))

    def table() -> LogTable:
        """Return the table as a worker has it anew in each round."""
        return table_at(form, f"file://{folder}", "cluster/log", StoredObjects())

    for start in range(0, first, AT_ONCE):
        numbers = range(start + 1, min(start + AT_ONCE, first) + 1)
        await _commit(table(), form, columns, [_added(each, footer) for each in numbers], None)
    began = (0.0, 0.0)
    for number in range(1, commits + 1):
        if number % WINDOW == 1:
            began = (time.process_time(), time.monotonic())
        await _commit(table(), form, columns, [_added(first + number, footer)], files)
        if number % WINDOW == 0:
            cpu_s, wall_s = time.process_time() - began[0], time.monotonic() - began[1]
            own = list((folder / form.folder).iterdir())
            newest = max((each for each in own if each.suffix == ".json"), key=_age)
            costs = (cpu_s * 1000 / WINDOW, wall_s * 1000 / WINDOW)
            yield Window(number, *costs, newest.stat().st_size, len(own))


def _added(number: int, footer: pq.FileMetaData) -> AddedFile:
    return AddedFile(f"{number}/1-t-0-1.parquet", 1_000_000, 0, footer, 1)


async def _commit(
    table: LogTable,
    form: TableForm,
    columns: pa.Schema,
    adds: Sequence[AddedFile],
    files: int | None,
) -> None:
    seen = await table.look()
    last = segment_of(adds[-1].name)
    assert last is not None
    position = (last, 1)
    if seen is None:
        await table.create("log", form.fields_of(columns), adds, position)
        return
    if seen.version % CHECKPOINT_EVERY == 0:
        await table.tidy()
    removes = [] if files is None else [each for each in seen.files if each.end[0] <= last - files]
    await table.commit(adds, removes, position, now_ms=0, data_change=True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _age(file: Path) -> int:
    return file.stat().st_mtime_ns


async def _print(commits: int, form: TableForm, files: int | None, first: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        async for each in measure(Path(name), commits, form=form, files=files, first=first):
            if each.last in (100, 300) or each.last % 1_000 == 0:
                print("files stay" if files is None else "files leave", each, flush=True)


if __name__ == "__main__":
    chosen = form_of(*sys.argv[2:3] or ["iceberg"])
    there = int(*sys.argv[3:4] or ["0"])
    for kept in (None,) if there else (FILES, None):
        asyncio.run(_print(int(sys.argv[1]), chosen, kept, there))
