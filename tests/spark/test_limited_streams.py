"""Limits, Trigger.AvailableNow and lag as a real Spark drives them.

Goal: what the machines promise reaches a query: batches of the size asked for, runs that end, and a
progress that tells how far it is behind.  Method: one query over two logs, run twice, with its
batches and progresses kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlspark.admission import has_admission_control
from dlspark.lag import LagReport

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
TIMEOUT_S = 120


def test_available_now_in_limited_batches_over_restarts_with_logs_added(
    logs: LogBench, tmp_path: Path
) -> None:
    """Each run reads what was there when it began, at most 40 a batch; the progress has the lag."""
    prefix = logs.create("limited")
    logs.append(prefix, [(n, b"%d" % n) for n in range(100)])
    batches: list[dict[str, list[int]]] = []

    def take(frame: DataFrame, batch_id: int) -> None:
        found: dict[str, list[int]] = {}
        for row in frame.select("log", "sequence_id").collect():
            found.setdefault(row.log, []).append(row.sequence_id)
        batches.append(found)
        if len(batches) == 2:
            logs.append(prefix, [(n, b"%d" % n) for n in range(100, 130)])
            logs.namespace.create_log(f"{prefix}/late")
            logs.append(f"{prefix}/late", [(n, b"") for n in range(10)])

    def run() -> list[LagReport | None]:
        query = (
            logs.stream(
                logsPattern=f"{prefix}.*",
                startingOffsets="earliest",
                maxRecordsPerTrigger="40",
                columns="log,sequence_id,txid",
            )
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(TIMEOUT_S)
        return [
            LagReport.parse(progress["sources"][0].get("latestOffset"))
            for progress in query.recentProgress
        ]

    reports = run()
    if not has_admission_control():  # PySpark 4.1 makes one batch of it, and reports no offset
        assert batches == [{prefix: [*range(40)]}]
        return
    assert batches == [{prefix: [*range(s, min(100, s + 40))]} for s in (0, 40, 80)]
    assert all(report is not None for report in reports)
    records = [report.behind.records for report in reports if report is not None]
    assert records[:3] == [60, 20, 40], "behind by 30 and 10 more that came after the second batch"
    batches.clear()
    reports = run()
    assert batches == [{prefix: [*range(100, 130)], f"{prefix}/late": [*range(10)]}]
    assert reports[0] is not None
    assert reports[0].behind.records == 0


def test_start_at_a_time_that_no_record_has_yet(logs: LogBench, tmp_path: Path) -> None:
    """With the strategy latest a stream starts at the end; counted rows come without reading."""
    log = logs.create()
    logs.append(log, [(n, b"%d" % n) for n in range(5)])
    found: list[int] = []
    frame = logs.stream(
        log=log,
        startingOffsetsByTimestamp=f'{{"{log}": "2100-01-01"}}',
        startingOffsetsByTimestampStrategy="latest",
        columns="sequence_id",
    )
    query = (
        frame.writeStream.foreachBatch(
            lambda batch, _: found.extend(row.sequence_id for row in batch.collect())
        )
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        query.processAllAvailable()
        logs.append(log, [(n, b"%d" % n) for n in range(5, 8)])
        query.processAllAvailable()
    finally:
        query.stop()
    assert found == [5, 6, 7]


def test_columns_of_a_batch(logs: LogBench) -> None:
    """In the order in which they are named; a count of numbered rows is exact."""
    log = logs.create()
    for first in (0, 7):
        logs.append(log, [(n * 10, b"%d" % n) for n in range(first, first + 7)])
    frame = logs.frame(log=log, columns="value,txid")
    assert frame.columns == ["value", "txid"]
    assert [(bytes(row.value), row.txid) for row in frame.collect()] == [
        (b"%d" % n, n * 10) for n in range(14)
    ]
    counted = logs.frame(log=log, columns="log,sequence_id", startingTxid="30", endingTxid="111")
    assert [tuple(row) for row in counted.collect()] == [(log, n) for n in range(3, 12)]
