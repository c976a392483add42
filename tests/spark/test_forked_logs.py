"""Spark over forks: its own reader takes of a shared object what belongs to the fork."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chispa import assert_df_equality

import dlspark
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from tests.spark.test_tier import tier

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROWS = 30


def test_a_table_of_a_fork(spark: SparkSession, logs: LogBench, tmp_path: Path) -> None:
    """It ends within an object, goes on in one of its own, and then in a tail."""
    log = logs.create("forked")
    fork = f"{log}-fork"
    logs.append(log, [(n, b"%d" % n) for n in range(ROWS)])
    with logs.namespace.open_log(log) as manager:
        with manager.open_writer() as writer:
            for first in range(ROWS, 3 * ROWS, ROWS):
                writer.write_bulk(LogRecord(n, b"%d" % n) for n in range(first, first + ROWS))
                writer.commit()
        manager.update_settings(tier=f"file://{tmp_path}/tier", tier_after_s=0)
    tier(logs.uri, log)
    segments = logs.namespace.open_log(log).get_log_segments()
    assert segments[-1].closed_entry_count > 1
    at = DLSN(segments[-1].lssn, 1, 0)
    assert logs.namespace.fork_log(log, fork, at=at) == at
    kept = logs.frame(log=fork).count()
    assert kept == 2 * ROWS
    for first in (1000, 2000):
        logs.append(fork, [(first + n, b"more") for n in range(ROWS)])
        if first == 1000:
            tier(logs.uri, fork)
        both = dlspark.table(spark, logs.uri, fork), logs.frame(log=fork)
        assert both[0].count() == kept + first // 1000 * ROWS
        assert_df_equality(*both, ignore_row_order=True, ignore_nullable=True, ignore_metadata=True)
    assert dlspark.table(spark, logs.uri, log).count() == 3 * ROWS
