"""Spark over cold segments: batch and stream, and its own reader of the objects beside them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from pyspark.sql import functions as F

import dlspark
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.config import LogSettings
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.ops.upkeep.tierer import LogTierer
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.tier_worker import CONFIG

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROWS, SEGMENTS = 300, 3
COLUMNS = "_dlsn,_sequence_id,city,fare"
SCHEMA = pa.schema([("city", pa.string()), ("fare", pa.float64())])


def tier(uri: str, log: str) -> None:
    """Tier all that is due of a log."""

    async def body() -> None:
        async with await open_namespace(uri) as namespace:
            context = namespace.log_context
            tierer = LogTierer(context, namespace.staging_owner, CONFIG)
            assert await tierer.tier(await context.logs.find(log)) > 0

    run_in_own_time(asyncio.wait_for(body(), 60))


def write(logs: LogBench, log: str, first: int) -> None:
    """Write one segment of rows."""
    numbers = range(first, first + ROWS)
    columns = {"city": [f"city {n % 7}" for n in numbers], "fare": list(map(float, numbers))}
    with logs.namespace.open_log(log) as manager, manager.open_writer() as writer:
        writer.write_batch(pa.RecordBatch.from_pydict(columns, SCHEMA))


def test_spark_reads_over_the_boundary(spark: SparkSession, logs: LogBench, tmp_path: Path) -> None:
    """A stream that began on bookies goes on in objects; counts and sums are those of all rows.

    Spark's own reader finds in the objects what is cold, and with the tail it makes the whole log.
    """
    log = f"cold-{tmp_path.name}".replace("_", "-")[:60]
    tiered = tmp_path / "tier"
    logs.namespace.create_log(log, schema=SCHEMA)
    with logs.namespace.open_log(log) as manager:
        manager.update_settings(tier=f"file://{tiered}", tier_after_s=0)
    write(logs, log, 0)
    target, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def run() -> None:
        stream = logs.stream(log=log, startingOffsets="earliest", columns=COLUMNS)
        writer = stream.writeStream.format("parquet").option("checkpointLocation", checkpoint)
        writer.trigger(availableNow=True).start(target).awaitTermination()

    run()
    for segment in range(1, SEGMENTS):
        write(logs, log, segment * ROWS)
    planned = logs.frame(log=log)
    tier(logs.uri, log)
    write(logs, log, SEGMENTS * ROWS)
    run()
    total, cold = (SEGMENTS + 1) * ROWS, SEGMENTS * ROWS
    expected = [(total, total, 0, total - 1, sum(range(total)))]
    sums = (
        F.count("*"),
        F.countDistinct("_sequence_id"),
        F.min("_sequence_id"),
        F.max("_sequence_id"),
        F.sum("fare"),
    )
    for frame in (logs.frame(log=log, columns=COLUMNS), spark.read.parquet(target)):
        assert [tuple(row) for row in frame.agg(*sums).collect()] == expected
    assert planned.count() >= cold
    some = logs.frame(log=log).where("fare >= 298 and fare < 302").select("city", "fare")
    assert sorted(row.fare for row in some.collect()) == [298.0, 299.0, 300.0, 301.0]
    objects = spark.read.parquet(*[f"file://{each}" for each in tiered.glob("*/*/*/*.parquet")])
    assert objects.count() == cold
    whole = dlspark.table(spark, logs.uri, log, columns=COLUMNS)
    assert [tuple(row) for row in whole.agg(*sums).collect()] == expected
    assert_df_equality(
        whole,
        logs.frame(log=log, columns=COLUMNS),
        ignore_row_order=True,
        ignore_nullable=True,
        ignore_metadata=True,
    )
    plan = whole.where("fare > 100").select("fare")._jdf.queryExecution().executedPlan().toString()
    assert "FileScan parquet" in plan
    assert "PushedFilters: [IsNotNull(fare), GreaterThan(fare,100.0)" in plan
    with logs.namespace.open_log(log) as manager:
        manager.truncate(DLSN(2, 0, 7))
    left = [row.fare for row in dlspark.table(spark, logs.uri, log).select("fare").collect()]
    assert sorted(left) == list(map(float, range(ROWS + 7, total)))


def test_a_table_of_a_log_of_bytes_and_of_one_that_spark_does_not_know(
    spark: SparkSession, logs: LogBench, tmp_path: Path
) -> None:
    """All of it cold, and none; a type that Spark's reader lacks is read by dlog."""
    log = logs.create("table")
    logs.append(log, [(n, b"%d" % n) for n in range(50)])
    before = dlspark.table(spark, logs.uri, log)
    assert before.count() == 50
    with logs.namespace.open_log(log) as manager:
        manager.update_settings(tier=f"file://{tmp_path}/tier", tier_after_s=0)
    tier(logs.uri, log)
    both = dlspark.table(spark, logs.uri, log), logs.frame(log=log)
    assert_df_equality(*both, ignore_nullable=True, ignore_metadata=True)
    some = dlspark.table(spark, logs.uri, log, columns="value,sequence_id")
    rows = [(bytes(row.value), row.sequence_id) for row in some.collect()]
    assert sorted(rows, key=lambda row: row[1]) == [(b"%d" % n, n) for n in range(50)]
    odd = f"{log}-odd"
    settings = LogSettings(tier=f"file://{tmp_path}/tier", tier_after_s=0)
    schema = pa.schema([("took", pa.duration("us"))])
    logs.namespace.create_log(odd, schema=schema, settings=settings)
    with logs.namespace.open_log(odd) as manager, manager.open_writer() as writer:
        writer.write_batch(pa.RecordBatch.from_pydict({"took": [1, 2]}, schema))
    tier(logs.uri, odd)
    assert dlspark.table(spark, logs.uri, odd).count() == 2
    with pytest.raises(ConfigurationError, match="endingOffsets: a table has all records"):
        dlspark.table(spark, logs.uri, log, endingOffsets="latest")
