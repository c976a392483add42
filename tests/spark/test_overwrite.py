"""Writes that replace what a log held, by batch and by stream, on a real session.

Goal: after each write the log holds its rows and no others.  Method: one log overwritten twice, and
an aggregation whose complete result is written again and again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def test_overwrite_and_complete(spark: SparkSession, logs: LogBench, tmp_path: Path) -> None:
    """The last write is all there is; a micro-batch of the complete mode is such a write."""
    source, target = logs.create("source"), logs.create("target")
    to = {"uri": logs.uri, "log": target}
    for values in (["a", "b"], ["c"]):
        frame = spark.createDataFrame([(value,) for value in values], "value string")
        frame.write.format("dlog").options(**to).mode("overwrite").save()
        assert sorted(logs.payloads(target)) == [value.encode() for value in values]
    counts = (
        logs.stream(log=source, startingOffsets="earliest")
        .groupBy("value")
        .count()
        .selectExpr("concat(string(value), '=', count) AS value")
    )
    query = (
        counts.writeStream.format("dlog")
        .options(**to, checkpointLocation=str(tmp_path))
        .outputMode("complete")
        .start()
    )
    try:
        for txid, letters, expected in (
            (1, "xy", [b"x=1", b"y=1"]),
            (3, "xz", [b"x=2", b"y=1", b"z=1"]),
        ):
            logs.append(source, [(n, value.encode()) for n, value in enumerate(letters, txid)])
            query.processAllAvailable()
            assert sorted(logs.payloads(target)) == expected
    finally:
        query.stop()
