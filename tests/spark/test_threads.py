"""Threads that the user's program started: what they need to write logs, by batch and by stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from py4j.protocol import Py4JJavaError

import dlspark

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def test_a_thread_that_registers_writes(
    spark: SparkSession, logs: LogBench, tmp_path: Path
) -> None:
    """Spark looks the format of a write up in the thread's active session: a new thread has none.

    The format of a read is looked up in the session of the DataFrame.
    """
    rows = spark.range(3).selectExpr("id AS txid", "string(id) AS value")
    source, target = logs.create("source"), logs.create("target")

    def write() -> None:
        logs.save(rows, log=source)

    def copy() -> None:
        writer = logs.stream(log=source, startingOffsets="earliest").writeStream.format("dlog")
        writer = writer.options(uri=logs.uri, log=target, checkpointLocation=str(tmp_path))
        writer.trigger(availableNow=True).start().awaitTermination()

    with ThreadPoolExecutor(1) as plain:
        for action in (write, copy):
            with pytest.raises(Py4JJavaError, match="DATA_SOURCE_NOT_FOUND"):
                plain.submit(action).result()
        plain.submit(dlspark.register, spark).result()
        plain.submit(write).result()
        plain.submit(copy).result()
        assert plain.submit(logs.frame(log=target).count).result() == 3
