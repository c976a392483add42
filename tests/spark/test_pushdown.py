"""Filters that a real Spark hands over, with its setting on and off.

Goal: a filter costs what it leaves, and no error reveals the setting.  Method: the same
queries under both values of the setting, and partitions, which follow what is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.lengths import sample
from tests.fixtures.spark import count_partitions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
SETTING = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(params=sample(["true", "false"], 1))
def pushdown(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[bool]:
    """Set it for a test."""
    spark.conf.set(SETTING, request.param)
    yield request.param == "true"
    spark.conf.unset(SETTING)


def test_filters_with_the_setting_on_and_off(logs: LogBench, pushdown: bool) -> None:
    """The same rows; of four segments only those are read that can have them."""
    log = logs.create()
    for segment in range(4):
        logs.append(log, [(n, b"%d" % n) for n in range(segment * 10, segment * 10 + 10)])
    frame = logs.frame(log=log)
    for condition, expected, parts in [
        ("txid between 12 and 14", [12, 13, 14], 1),
        ("dlsn.lssn = 2 and sequence_id > 17", [18, 19], 1),
        ("sequence_id >= 25 and value <> '27'", [25, 26, *range(28, 40)], 2),
        ("timestamp > timestamp'2100-01-01'", [], 0),
        ("txid % 20 = 0", [0, 20], 4),
    ]:
        found = frame.where(condition)
        assert [row.txid for row in found.collect()] == expected, condition
        assert count_partitions(found) == (max(parts, 1) if pushdown else 4), condition
    assert frame.count() == 40
