"""Tables of logs: a log with its table as one frame, and how soon a row is in the table.

The tier is a folder on the disk of the benchmarks, so that no network decides.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

import dlspark
from benchmarks.cold import CONFIG, QUESTION, many_flights, scans, tier_all
from benchmarks.figures import Figure, Target
from benchmarks.logs import CpuCost, drop_log
from benchmarks.spark import spark_session
from dlcore.base.config import LogSettings
from dlcore.ops.sandbox.cluster import AutoRecoveryProcess
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from dlcore.ops.sandbox.cluster import Sandbox

TAIL_SHARE = 0.05
"""The rows of `table_union` that are on bookies and not in the table."""
WRITTEN_S = 75.0
"""How long rows are written whose way into a table is watched, once the first one is in it."""
FRESH_GOAL_S, FRESH_S = 30.0, 10.0
"""The times in which 95 of 100 rows shall be in the table: the goal, and the bold one."""
SEGMENT_AGE_S = 2.0
ROWS = 5
_PAUSE_S = 0.2
_POLL_S = 0.05
_PATIENCE_S = 180.0


def table_union(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """`dlspark.table` of a log with 5 % of its rows on bookies, beside a Delta table of all rows.

    There is no Delta for this Spark, which therefore reads the files that `deltalake` lists.
    The first figure is of a question asked again of the same frames; the second one has the call
    of `dlspark.table`, and that of `deltalake` and `spark.read.parquet`.  Two more are of the frame
    whose columns the option `columns` names, as Spark tells no Python source which ones a question
    needs.  The last two are of the cold rows beside a Python source of one row: what Spark costs.
    """
    table = many_flights()
    tail_rows = int(table.num_rows * TAIL_SHARE)
    parts = table.slice(0, table.num_rows - tail_rows), table.slice(table.num_rows - tail_rows)
    log, whole = f"bench/{uuid4().hex}", f"bench/{uuid4().hex}"
    tiers = {each: folder / uuid4().hex for each in (log, whole)}
    with open_namespace(sandbox.uri) as namespace:
        for name, path in tiers.items():
            settings = LogSettings(tier=f"file://{path}", tier_after_s=0, table="delta")
            namespace.create_log(name, config=CONFIG, schema=table.schema, settings=settings)
    _append(sandbox.uri, log, parts[:1])
    _append(sandbox.uri, whole, parts)
    asyncio.run(tier_all(sandbox.uri, CpuCost([])))
    _append(sandbox.uri, log, parts[1:])
    assert rows_in(tiers[log]) == parts[0].num_rows
    assert rows_in(tiers[whole]) == table.num_rows
    with spark_session(folder) as spark:

        def ours() -> DataFrame:
            return dlspark.table(spark, sandbox.uri, log)

        def named() -> DataFrame:
            return dlspark.table(spark, sandbox.uri, log, columns=",".join(QUESTION))

        def alone() -> DataFrame:
            return spark.read.parquet(*DeltaTable(table_in(tiers[whole])).file_uris())

        def cold() -> DataFrame:
            return spark.read.parquet(*DeltaTable(table_in(tiers[log])).file_uris())

        def beside_one_row() -> DataFrame:
            return cold().select(*QUESTION).unionByName(_one_row(spark))

        rows = table.num_rows
        figures = [
            *scans("table_union", ours, alone, rows=rows, ratio=0.8),
            *scans("table_union_columns", named, alone, rows=rows, ratio=0.8),
            *scans("table_union_floor", beside_one_row, alone, rows=rows, ratio=0.8, alike=False),
        ]
    for each in tiers:
        drop_log(sandbox.uri, each)
    return figures


def _one_row(spark: SparkSession) -> DataFrame:
    """Return a row of a Python source that does nothing else, with the columns of the question."""
    source = spark.read.format("bench_noop").options(
        rows=1, value_bytes=1, partitions=1, batch_rows=1, columns="txid"
    )
    key, *summed = QUESTION
    columns = (f"string(txid) AS {key}", *(f"txid AS {each}" for each in summed))
    return source.load().selectExpr(*columns)


def table_freshness(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """A row from its acknowledgement to a Delta table, while a worker's settings are the shortest.

    Segments of the log are completed after 2 s, its `tier_after_s` is 0, and the worker looks each
    second.  The second four figures are of a worker with its default settings.  A worker finds a
    new log by its next list; the first row, which waits for that, has a figure of its own, and
    rows that were written before it was in the table are in no other.
    """
    return [
        figure
        for name, options in (
            ("table_freshness", ("--tier-interval-s=1",)),
            ("table_freshness_default", ()),
        )
        for figure in _freshness(name, sandbox, folder / name, options)
    ]


def _freshness(name: str, sandbox: Sandbox, tier: Path, options: Sequence[str]) -> Iterator[Figure]:
    """Yield the first one, then the median, the 95th of a hundred, and the slowest; s."""
    worker = AutoRecoveryProcess(options=options, cluster=sandbox)
    worker.restart()
    try:
        first, *later = _waits(sandbox.uri, tier)
    finally:
        worker.terminate()
    waits = sorted(later)
    for which, value in (
        ("first", first),
        ("p50", statistics.median(waits)),
        ("p95", waits[len(waits) * 95 // 100]),
        ("max", waits[-1]),
    ):
        yield Figure(
            name=f"{name}_{which}",
            unit="s",
            value=value,
            limit=FRESH_S,
            target=Target(ratio=1.0, is_rate=False) if which == "p95" else None,
            limits={"goal": FRESH_GOAL_S, "bold goal": FRESH_S},
        )


class _Row(NamedTuple):
    """When the row with a number, and all before it, were acknowledged."""

    number: int
    acknowledged_s: float


def _waits(uri: str, tier: Path) -> list[float]:
    """Return how long rows took from their acknowledgement into the table.

    The first one is of the log's first row, the others are of those that were written after that.
    """
    log, rows, waits = f"bench/{uuid4().hex}", list[_Row](), list[float]()
    table, is_enough = _Watched(tier), threading.Event()
    found, began_s = 0, math.inf
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(_write_rows, uri, log, tier, rows, is_enough)
        try:
            end_s = time.perf_counter() + WRITTEN_S + _PATIENCE_S
            while not writing.done() or found < len(rows):
                seen, now_s = table.newest(), time.perf_counter()
                for row in rows[found:]:
                    if row.number > seen:
                        break
                    if not found or row.acknowledged_s > began_s:
                        waits += [now_s - row.acknowledged_s] * (ROWS if found else 1)
                    found, began_s = found + 1, min(began_s, now_s)
                if now_s > began_s + WRITTEN_S:
                    is_enough.set()
                assert now_s < end_s, f"the table has {found * ROWS} of {len(rows) * ROWS} rows"
                time.sleep(_POLL_S)
        finally:
            is_enough.set()
        writing.result()
    assert rows_in(tier) == len(rows) * ROWS
    drop_log(uri, log)
    return waits


def _write_rows(
    uri: str, log: str, tier: Path, rows: list[_Row], is_enough: threading.Event
) -> None:
    """Write a few rows, again and again, and note when each were acknowledged."""
    settings = LogSettings(
        tier=f"file://{tier}", tier_after_s=0, table="delta", segment_age_max_s=SEGMENT_AGE_S
    )
    schema = pa.schema([("number", pa.int64())])
    with open_namespace(uri) as namespace:
        namespace.create_log(log, config=CONFIG, schema=schema, settings=settings)
        with namespace.open_log(log, config=CONFIG).open_writer() as writer:
            while not is_enough.is_set():
                first = len(rows) * ROWS
                numbers = pa.array(range(first, first + ROWS), pa.int64())
                writer.write_table(pa.table([numbers], schema=schema))
                writer.flush()
                rows.append(_Row(first + ROWS - 1, time.perf_counter()))
                time.sleep(_PAUSE_S)


class _Watched:
    """The table below a tier, as `deltalake` reads it; it is read again when it has a new version.

    It has rows in the order of the log, so it has all up to the newest one.
    """

    def __init__(self, tier: Path) -> None:
        self._tier = tier
        self._table: DeltaTable | None = None
        self._newest = -1

    def newest(self) -> int:
        """Return the largest number in the table; -1: none."""
        version = -1
        if self._table is not None:
            version = self._table.version()
            self._table.update_incremental()
        elif any(self._tier.glob("*/*/_delta_log/*.json")):
            self._table = DeltaTable(table_in(self._tier))
        if self._table is not None and self._table.version() != version:
            numbers = self._table.to_pyarrow_table(columns=["number"])["number"]
            self._newest = pc.max(numbers).as_py()
        return self._newest


def table_in(tier: Path) -> str:
    """Return the folder of the only table below a tier."""
    (folder,) = tier.glob("*/*/_delta_log")
    return str(folder.parent)


def rows_in(tier: Path) -> int:
    """Return how many rows the table below a tier has."""
    return int(DeltaTable(table_in(tier)).to_pyarrow_dataset().count_rows())


def _append(uri: str, log: str, parts: Iterable[pa.Table]) -> None:
    with (
        open_namespace(uri) as namespace,
        namespace.open_log(log, config=CONFIG).open_writer() as writer,
    ):
        for part in parts:
            writer.write_table(part)
