"""Goal: no kill of a worker puts a row into a table twice or leaves one out, as Spark sees it.

Method: workers are processes, killed at each step of theirs.  After each, Spark reads the files of
the tables and by ``dlog`` what comes after them; readers of Delta or Iceberg, and of dlog, do too.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F

import dlspark
from dlcore.backends.direct.namespace import open_namespace
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.table_logs import (
    BYTES,
    TYPED,
    Logs,
    position_of,
    sequence_id_of,
    value_of,
    work_on,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.table_readers import TableView

pytestmark = [pytest.mark.spark, pytest.mark.integration]

STEPS_MAX = 70
STRIDE = amount(1, sampled=23)
TIME_LIMIT_S = amount(1700, sampled=280)


@pytest.mark.timeout(1800)  # some seconds for each step, with --full
def test_a_worker_that_is_killed_at_each_step(
    spark: SparkSession, sandbox: Sandbox, tmp_path: Path, table_kind: str
) -> None:
    """Segments come and go meanwhile; in the end both tables have all."""

    async def scenario() -> None:
        async with await open_namespace(sandbox.uri) as namespace:
            schemas = {"table-clicks": BYTES, "table-rides": TYPED}
            logs = Logs(namespace, f"file://{tmp_path}/tier", table_kind, schemas)
            await logs.start()
            await _kill_at_each_step(spark, logs)

    run_in_own_time(asyncio.wait_for(scenario(), TIME_LIMIT_S))


async def _kill_at_each_step(spark: SparkSession, logs: Logs) -> None:
    ends = []
    for number, step in enumerate(range(1, STEPS_MAX, STRIDE)):
        await logs.write()
        if number % 3 == 2:
            await logs.truncate()
        ends.append(await (await work_on(logs, step)).wait())
        await logs.check()
        await _check_by_spark(spark, logs)
    assert set(ends) <= {0, -signal.SIGKILL}
    killed = ends.count(-signal.SIGKILL)
    print(f"{logs.kind}: {killed} workers were killed at steps")
    assert killed > len(ends) // 3
    assert await (await work_on(logs, 0)).wait() == 0
    await logs.check(whole=True)
    await _check_by_spark(spark, logs)
    assert logs.tables > 2


async def _check_by_spark(spark: SparkSession, logs: Logs) -> None:
    """Require that Spark has what was written, each row once, in both ways; dlog itself has it."""
    tables = {name: await logs.table(name) for name in logs.schemas}

    def read() -> dict[str, list[tuple[int, bytes]]]:
        frames = list(_frames(spark, logs, tables))
        whole = frames[0]
        for each in frames[1:]:
            whole = whole.union(each)
        found: dict[str, list[tuple[int, bytes]]] = {}
        for row in whole.toArrow().to_pylist():
            found.setdefault(row["way"], []).append((row["id"], row["value"]))
        return found

    rows = [(number, value_of(number)) for number in range(logs.first, logs.written)]
    found = await asyncio.to_thread(read)  # the session of the loop's namespace must go on
    made = sum(each is not None for each in tables.values())
    assert len(found) == len(tables) + made
    for way, seen in found.items():
        assert sorted(seen) == rows, way


def _frames(
    spark: SparkSession, logs: Logs, tables: dict[str, TableView | None]
) -> Iterator[DataFrame]:
    """Yield the rows of each log by `dlspark.table`, and by a table's files with the tail."""

    def named(way: str, frame: DataFrame, *columns: str) -> DataFrame:
        key, value = map(F.col, columns)
        return frame.select(
            F.lit(way).alias("way"), key.alias("id"), value.cast("binary").alias("value")
        )

    for name, schema in logs.schemas.items():
        uri, value = logs.namespace.uri, schema.names[-1]
        key = sequence_id_of(schema)
        columns = f"{key},{value}"
        whole = dlspark.table(spark, uri, name, columns=columns)
        yield named(name, whole, key, value)
        table = tables[name]
        if table is None:
            continue
        tail = spark.read.format("dlog").options(
            uri=uri,
            log=name,
            columns=columns,
            startingOffsets=str(position_of(table)),
            failOnDataLoss="false",  # truncation may be beyond the table
        )
        yield named(f"table of {name}", tail.load(), key, value)
        cold = spark.read.parquet(*sorted(table.files())).where(f"_sequence_id >= {logs.first}")
        yield named(f"table of {name}", cold, "_sequence_id", value)
