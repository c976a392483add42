"""Positions of real queries, as logs keep them and others see them.

Goal: without Spark one knows how far a query is and what it still needs, and truncation leaves
that.  Method: queries on a real session and cluster, and the `dlog` command beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlspark.admission import has_admission_control
from dlspark.keeping import NAME_PREFIX, QUERIES_MAX
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.fixtures.proxies import ProxyProcess
    from tests.fixtures.shell import Shell
    from tests.fixtures.spark import LogBench

pytestmark = [
    pytest.mark.spark,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_admission_control(), reason="PySpark 4.1 tells the last batch late"),
]
TIMEOUT_S = 400
"""A query waits a hundred times as long as its last position took to store, on a busy machine."""


def run(logs: LogBench, log: str, folder: Path, **options: str) -> None:
    """Run a query up to the present end of a log."""
    query = (
        logs.stream(log=log, startingOffsets="earliest", **options)
        .writeStream.format("noop")
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(TIMEOUT_S)


def append(logs: LogBench, log: str, count: int) -> None:
    """Append a segment of some records."""
    logs.append(log, [(0, b"%d" % n) for n in range(count)])


def test_a_query_is_a_subscriber(logs: LogBench, shell: Shell, tmp_path: Path) -> None:
    """It keeps its name over restarts, and another query has another one."""
    log = logs.create()
    append(logs, log, 3)
    run(logs, log, tmp_path / "one")
    (row,) = shell.json("log", "subscriptions", log)
    assert row["subscriber"].startswith(NAME_PREFIX)
    assert shell.json("log", "lag", log)[0]["records_behind"] == 0
    append(logs, log, 2)
    assert shell.json("log", "lag", log)[0]["records_behind"] == 2
    run(logs, log, tmp_path / "one", maxRecordsPerTrigger="1")
    assert shell.json("log", "lag", log)[0]["records_behind"] == 0
    run(logs, log, tmp_path / "two", subscription="two")
    names = [each["subscriber"] for each in shell.json("log", "subscriptions", log)]
    assert names == [row["subscriber"], "two"]
    run(logs, log, tmp_path / "three", subscription="none")
    assert len(shell.json("log", "subscriptions", log)) == 2


def test_truncation_leaves_what_a_query_needs(logs: LogBench, shell: Shell, tmp_path: Path) -> None:
    """Records that all have read go; a query that is behind reads on without a loss."""
    log = logs.create()
    append(logs, log, 3)
    run(logs, log, tmp_path / "slow", subscription="slow")
    append(logs, log, 2)
    run(logs, log, tmp_path / "fast", subscription="fast")
    shell.text("log", "truncate", log, "--read", "--yes")
    assert logs.payloads(log) == [b"0", b"1"]
    run(logs, log, tmp_path / "slow", subscription="slow")  # fails if anything was lost
    assert [row["records_behind"] for row in shell.json("log", "lag", log)] == [0, 0]


def test_a_query_over_proxies(
    spark: SparkSession, logs: LogBench, shell: Shell, proxy: ProxyProcess, tmp_path: Path
) -> None:
    """As over ZooKeeper and bookies, also with the same checkpoint."""
    log = logs.create()
    append(logs, log, 3)
    query = (
        spark.readStream.format("dlog")
        .options(endpoint=proxy.location, log=log, startingOffsets="earliest")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(TIMEOUT_S)
    (row,) = shell.json("log", "lag", log)
    assert row["records_behind"] == 0
    append(logs, log, 2)
    run(logs, log, tmp_path)
    (again,) = shell.json("log", "lag", log)
    assert (again["subscriber"], again["records_behind"]) == (row["subscriber"], 0)


def test_a_running_query_comes_up_to_its_end(logs: LogBench, shell: Shell, tmp_path: Path) -> None:
    """Also while nothing new comes, and after its subscription was deleted."""
    log = logs.create()
    append(logs, log, 3)
    query = (
        logs.stream(log=log, startingOffsets="earliest", subscription="live")
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .start()
    )

    def behind() -> list[int]:
        return [row["records_behind"] for row in shell.json("log", "lag", log)]

    try:
        wait_until(lambda: behind() == [0], timeout_s=TIMEOUT_S)
        shell.text("log", "subscriptions", log, "--delete", "live", "--yes")
        append(logs, log, 2)
        wait_until(lambda: behind() == [0], timeout_s=TIMEOUT_S)
    finally:
        query.stop()


def test_queries_that_are_gone_leave_room(logs: LogBench, tmp_path: Path) -> None:
    """A query that has no name of the user's is not kept in a log that keeps as many as it may."""
    log = logs.create()
    append(logs, log, 3)
    with logs.namespace.open_log(log) as manager:
        for n in range(QUERIES_MAX):
            manager.move_subscription(f"{NAME_PREFIX}{n}")
        run(logs, log, tmp_path / "one")
        assert len(manager.get_subscriptions()) == QUERIES_MAX
        assert manager.delete_subscription(f"{NAME_PREFIX}0")
        append(logs, log, 1)
        run(logs, log, tmp_path / "one")
        assert len(manager.get_subscriptions()) == QUERIES_MAX
