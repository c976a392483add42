"""Shapes of streams beside copying: joins with itself, watermarks, an abrupt end.

Goal: Spark's own machinery finds in this source what it finds in Kafka's.  Method: one small query
each, and what its progress and its checkpoint say of it.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from pyspark.sql import functions as F

from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
TIMEOUT_S = 120


def test_a_stream_that_is_joined_with_itself(logs: LogBench, tmp_path: Path) -> None:
    """Spark reads it for each side, up to the same position; progress tells the rows written."""
    source, target = logs.create("in"), logs.create("out")
    logs.append(source, [(n, b"%d" % n) for n in range(20)])
    frame = logs.stream(log=source, startingOffsets="earliest")
    joined = frame.select("txid", "value").join(frame.select("txid"), "txid").select("value")
    query = (
        joined.writeStream.format("dlog")
        .options(uri=logs.uri, log=target)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(TIMEOUT_S)
    assert sorted(logs.payloads(target)) == sorted(b"%d" % n for n in range(20))
    lines = (tmp_path / "offsets" / "0").read_text().splitlines()[2:]
    positions = [json.loads(line)["logs"] for line in lines]
    assert positions[0].keys() == {source}
    assert positions == [positions[0]] * len(positions)
    progress = [each for each in query.recentProgress if each["numInputRows"]]
    assert [each["sink"]["numOutputRows"] for each in progress] == [20]


def test_a_watermark_on_the_column_timestamp(
    logs: LogBench, spark: SparkSession, tmp_path: Path
) -> None:
    """A window comes out once a record was written after it; times are those of the writes."""
    source, table = logs.create("in"), f"windows_{uuid4().hex}"
    logs.append(source, [(n, b"") for n in range(5)])
    written_ms = logs.read(source)[0].timestamp_ms
    windows = (
        logs.stream(log=source, startingOffsets="earliest")
        .withWatermark("timestamp", "0 seconds")
        .groupBy(F.window("timestamp", "1 second"))
        .count()
    )
    query = (
        windows.writeStream.format("memory")
        .queryName(table)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:

        def is_out() -> bool:
            logs.append(source, [(5, b"")])
            query.processAllAvailable()
            return spark.table(table).count() > 0

        wait_until(is_out, timeout_s=TIMEOUT_S)
    finally:
        query.stop()
    first = spark.table(table).selectExpr("unix_millis(window.start)", "count").first()
    assert first is not None
    assert first[0] == written_ms // 1000 * 1000
    assert first[1] >= 5


def test_a_query_is_stopped_while_the_cluster_is_gone(
    spark: SparkSession, fresh_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    """At once, though nothing answers."""
    cluster = fresh_sandbox()
    with open_namespace(cluster.uri) as namespace:
        namespace.create_log("gone")
        with namespace.open_log("gone") as log, log.open_writer() as writer:
            writer.write(LogRecord(1, b"a"))
    frame = spark.readStream.format("dlog").options(uri=cluster.uri, log="gone")
    query = (
        frame.option("startingOffsets", "earliest")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    query.processAllAvailable()
    cluster.stop()
    started = time.monotonic()
    query.stop()
    assert time.monotonic() - started < TIMEOUT_S
    assert not query.isActive
