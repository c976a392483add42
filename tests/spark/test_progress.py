"""The listener of progresses on a real session, and what a version of Spark does not tell it.

Goal: who adds the listener sees every micro-batch and how far the query is behind, in points, in
print and for Prometheus.  Method: one limited query, and the progresses that Spark itself sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dlspark import ProgressListener
from dlspark.admission import has_admission_control
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
TIMEOUT_S = 60


def test_a_listener_follows_a_query(
    spark: SparkSession,
    logs: LogBench,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every batch, with what is left after it; the gauges go with the query."""
    log = logs.create()
    logs.append(log, [(n, b"%d" % n) for n in range(100)])
    registry = CollectorRegistry()
    listener = ProgressListener(registry=registry)
    version = ".".join(pyspark.__version__.split(".")[:2])
    warnings = [text for text in caplog.messages if f"PySpark {version}" in text]
    assert len(warnings) == (0 if has_admission_control() else 1), warnings
    spark.streams.addListener(listener)
    try:
        query = (
            logs.stream(log=log, startingOffsets="earliest", maxRecordsPerTrigger="40")
            .writeStream.format("noop")
            .queryName(log)
            .option("checkpointLocation", str(tmp_path))
            .start()
        )
        try:
            query.processAllAvailable()
            last = f'dlog_stream_batch_id{{query="{log}"}} 2.0'
            wait_until(lambda: last in generate_latest(registry).decode(), timeout_s=TIMEOUT_S)
            gauges = generate_latest(registry).decode()
        finally:
            query.stop()
        wait_until(lambda: log not in generate_latest(registry).decode(), timeout_s=TIMEOUT_S)
    finally:
        spark.streams.removeListener(listener)
    points = [point for point in listener.points if point.input_rows]
    assert [(point.query, point.input_rows) for point in points] == [(log, n) for n in (40, 40, 20)]
    behind = [60, 20, 0] if has_admission_control() else [None] * 3
    assert [point.records_behind for point in points] == behind
    assert (f'dlog_stream_records_behind{{query="{log}"}} 0.0' in gauges) == has_admission_control()
    lines = [line for line in capsys.readouterr().out.splitlines() if f" {log} batch 0: " in line]
    assert len(lines) == 1
    assert "40 rows in" in lines[0]
