"""The cost of a table of a log over a year of one commit a minute: 525,600 files.

`python -m benchmarks.table_year delta` (or `iceberg`) makes tables of as many files as a log has
after some days, weeks and months, a commit for each `AT_ONCE` files, and measures three things at
each size:

* the first look of a process at the table, which is paid once: CPU, and how much more memory the
  process needs meanwhile;
* the comparison of all files with the log's chain, which a worker does after its first look and
  every six hours: CPU in all, of its longest run, and memory beside what the first look left.  The
  chain is made up, so what is left out are two requests to the metadata for each segment;
* commits of one file, as a worker that keeps running makes them: two looks, a commit, and what
  tidies the table when that is due.  CPU and bytes written for each, and requests to the store
  beside those of the library deltalake, which makes checkpoints alone.

The store is a folder, and Iceberg's catalog SQLite.  The commits between the sizes are fewer and
larger than a log's, so a table has as many files as after a year, and not as many versions: of
these a checkpoint, or the snapshots that Iceberg keeps, bound what is read.  `--one-by-one` makes
each of a year's commits.  With `--kept 1000` the log has a retention: sizes are commits, and so
many files are left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import obstore
import pyarrow as pa
import pyarrow.parquet as pq

from dlcore.base.steps import run_to_end
from dlcore.log.cold import iceberg_tables
from dlcore.log.cold.delta_log import DeltaState
from dlcore.log.cold.files_kept import FilesKept
from dlcore.log.cold.parquet import POSITIONS, columns_of_object
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.cold.table_format import CHECKPOINT_EVERY, AddedFile, FilesPart
from dlcore.log.cold.tables import form_of, table_at
from dlcore.ops.upkeep.table_commits import (
    BEGINNING,
    CHECKPOINTED_PER_COMMIT_MAX,
    FILES_PER_COMMIT_MAX,
    Chain,
    ChainRead,
    Commit,
    Create,
    Followed,
    Look,
    Looked,
    ObjectAt,
    ReadChain,
    Signal,
    TableCommits,
    Tidy,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.log.cold.table_format import Field, Place, TableForm
    from dlcore.ops.upkeep.table_commits import Event, Work

YEAR = 525_600
SIZES = (0, 1_000, 10_000, 50_000, 100_000, 200_000, 400_000, YEAR)
WINDOW = 100
AT_ONCE = 1_000
_APP = "cluster/log"
_CATALOG = "PYICEBERG_CATALOG__DLOG__URI"
_REQUESTS = ("put", "get", "get_range", "head", "list", "delete")


class Window(NamedTuple):
    """Commits to a table that had so many files before: the mean cost of each."""

    files: int
    commits: int
    cpu_ms: float
    slowest_cpu_ms: float
    requests: float
    written_bytes: int
    tidied: int
    first_look_cpu_ms: float
    first_look_mb: float
    compared_cpu_ms: float
    compared_slowest_cpu_ms: float
    compared_runs: int
    compared_mb: float


class Follower:
    """A worker's way from a log's chain to its table, whose chain is made up: a file for a segment.

    The machine and the table are the product's.  Objects are not there, only their names.
    """

    def __init__(self, folder: Path, form: TableForm, kept: int) -> None:
        columns = columns_of_object(None, 0)
        self._form = form
        self._url = f"file://{folder}"
        self._footer = _footer(columns)
        self._fields: tuple[Field, ...] = form.fields_of(columns)
        self._made = 0
        self._files_kept = kept
        self.tidied = 0
        self.start()

    def start(self) -> None:
        """Be a process that has just been started."""
        iceberg_tables._manifests_read = FilesKept[FilesPart]()
        self._kept = FilesKept[DeltaState]()
        self._followed = Followed((1, 0), (1, 0), self._fields)

    async def look(self) -> None:
        """Look at the table once."""
        await self._table().look()

    def _table(self) -> Any:
        return table_at(self._form, self._url, _APP, StoredObjects(), self._kept)

    async def commit(self, count: int) -> None:
        """Let the log have so many segments more, and the table follow."""
        self._made += count
        self._followed = await self._run(self._followed)

    async def compare(self) -> tuple[float, float, int]:
        """Compare all files with the chain; return the CPU in all and of the longest run, and runs.

        Both are in seconds.
        """
        spent_s, longest_s, runs = 0.0, 0.0, 0
        compared: Place | None = BEGINNING
        while compared is not None:
            began_s = time.process_time()
            machine = self._machine(self._followed, compared)
            await self._run_to_end(machine)
            compared = machine.compared
            took_s = time.process_time() - began_s
            spent_s, longest_s, runs = spent_s + took_s, max(longest_s, took_s), runs + 1
        return spent_s, longest_s, runs

    def _machine(self, known: Followed, compared: Place | None) -> TableCommits:
        return TableCommits(
            _APP, self._form, checkpoint_every=CHECKPOINT_EVERY, known=known, compared=compared
        )

    async def _run(self, known: Followed) -> Followed:
        machine = self._machine(known, None)
        await self._run_to_end(machine)
        assert machine.followed is not None
        return machine.followed

    async def _run_to_end(self, machine: TableCommits) -> None:
        table = self._table()

        async def answer_of(work: Work) -> Event:
            return await self._answer_of(table, work)

        await run_to_end(machine, Signal.BEGIN, answer_of)

    def _chain_from(self, start: Place) -> Chain:
        first = max(1, self._made - self._files_kept + 1)
        begin = max(first, start[0] + (start[1] > 0))
        end = min(self._made, begin + FILES_PER_COMMIT_MAX - 1)
        objects = tuple(
            ObjectAt(f"{each}/{each}-token-0-1.parquet", 1_000_000, (each, 0), (each, 1), 1)
            for each in range(begin, end + 1)
        )
        return Chain((first, 0), (end, 1), objects, self._fields, goes_on=end < self._made)

    async def _answer_of(self, table: Any, work: Work) -> Event:
        match work:
            case Look():
                seen = await table.look()
                return Signal.NO_TABLE if seen is None else Looked(seen)
            case ReadChain(start):
                return ChainRead(self._chain_from(start))
            case Create(fields, adds, position):
                await table.create("log", fields, list(map(self._added, adds)), position)
            case Commit(adds, removes, position, _):
                added = list(map(self._added, adds))
                await table.commit(added, removes, position, now_ms=0, data_change=True)
            case Tidy():
                self.tidied += 1
                await table.tidy()
            case _:
                raise AssertionError(work)
        return Signal.DONE

    def _added(self, found: ObjectAt) -> AddedFile:
        return AddedFile(found.name, found.size_bytes, 0, self._footer, found.end[1])


def _footer(columns: pa.Schema) -> pq.FileMetaData:
    rows = [pa.array([0]).cast(each.type) for each in POSITIONS]
    sink = pa.BufferOutputStream()
    schema = pa.schema([*POSITIONS, *columns])
    pq.write_table(pa.Table.from_arrays([*rows, pa.array([b"x"])], schema=schema), sink)
    return pq.read_metadata(pa.BufferReader(sink.getvalue()))


@contextmanager
def counted() -> Iterator[list[str]]:
    """Count the requests that dlog makes to stores."""
    made: list[str] = []

    def counting(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            return real(*arguments, **options)

        return call

    with ExitStack() as stack:
        for name in _REQUESTS:
            stack.enter_context(patch.object(obstore, name, counting(name, getattr(obstore, name))))
        yield made


class Memory:
    """How much more memory the process had at most since some moment, in MB."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the most that it had is what it has
        self._before = self._most_kb()

    @staticmethod
    def _most_kb() -> int:
        text = Path("/proc/self/status").read_text()
        (line,) = (each for each in text.splitlines() if each.startswith("VmHWM"))
        return int(line.split()[1])

    def more(self) -> float:
        """Return it."""
        return (self._most_kb() - self._before) / 1024


def _files_in(folder: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in folder.iterdir()} if folder.exists() else {}


async def measure(
    folder: Path,
    form: TableForm,
    sizes: Sequence[int],
    *,
    at_once: int = AT_ONCE,
    kept: int = sys.maxsize,
) -> list[Window]:
    """Return a window for each size: commits of one file to a table of so many.

    A window has two checkpoints at least.  Before it a commit has `at_once` files.  The table
    keeps so many of all files.
    """
    os.environ[_CATALOG] = f"sqlite:///{folder}/catalog.db"
    follower, count = Follower(folder, form, kept), 0
    windows = []
    for size in sizes:
        while count < size:
            some = min(at_once, size - count)
            await follower.commit(some)
            count += some
        commits = max(WINDOW, 2 * (min(size, kept) // CHECKPOINTED_PER_COMMIT_MAX))
        windows.append(await _window(follower, folder / form.folder, count, commits))
        count += commits + 1
        print(windows[-1], flush=True)
    return windows


async def _window(follower: Follower, folder: Path, files: int, commits: int) -> Window:
    follower.start()
    memory = Memory()
    began_s = time.process_time()
    await follower.look()
    first_s = time.process_time() - began_s
    first_mb = memory.more()
    await follower.commit(1)
    memory = Memory()
    compared_s, longest_s, runs = await follower.compare()
    compared_mb = memory.more()
    before, tidied, slowest_s = _files_in(folder), follower.tidied, 0.0
    written = 0
    began_s = time.process_time()
    spent_s = 0.0
    with counted() as requests:
        for _ in range(commits):
            began_s = time.process_time()
            await follower.commit(1)
            took_s = time.process_time() - began_s
            spent_s += took_s
            slowest_s = max(slowest_s, took_s)
            now = _files_in(folder)
            written += sum(size for name, size in now.items() if before.get(name) != size)
            before = now
    return Window(
        files=files,
        commits=commits,
        cpu_ms=spent_s * 1000 / commits,
        slowest_cpu_ms=slowest_s * 1000,
        requests=len(requests) / commits,
        written_bytes=written // commits,
        tidied=follower.tidied - tidied,
        first_look_cpu_ms=first_s * 1000,
        first_look_mb=first_mb,
        compared_cpu_ms=compared_s * 1000,
        compared_slowest_cpu_ms=longest_s * 1000,
        compared_runs=runs,
        compared_mb=compared_mb,
    )


def slope_of(windows: Sequence[Window]) -> tuple[float, float]:
    """Return what a thousand files more add to a commit: milliseconds of CPU, and bytes written."""
    files = [each.files / 1000 for each in windows]
    return (
        statistics.linear_regression(files, [each.cpu_ms for each in windows]).slope,
        statistics.linear_regression(files, [each.written_bytes for each in windows]).slope,
    )


def main() -> None:
    """Print the windows of one format, and what more files add."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("form", choices=("delta", "iceberg"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--kept", type=int, default=sys.maxsize)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        at_once = 1 if given.one_by_one else AT_ONCE
        windows = asyncio.run(
            measure(Path(name), form_of(given.form), given.sizes, at_once=at_once, kept=given.kept)
        )
    for number in range(2, len(windows)):
        cpu_ms, size = slope_of(windows[number - 2 : number + 1])
        some = f"{windows[number - 2].files:,} to {windows[number].files:,} files"
        print(f"{some}: {cpu_ms:+.4f} ms and {size:+.1f} bytes a commit for each 1,000 files")


if __name__ == "__main__":
    main()
