"""Spark's workers are known as such: what they keep is frozen, so that tasks of few rows are quick.

Method: a source whose task begins as those of the connector do, and tells what is frozen.  It also
tells whether the worker was forked with dlog loaded, as those of the tests are.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.datasource import DataSource, DataSourceReader

from dlspark.workers import freeze_imports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(600)]


class FrozenReader(DataSourceReader):
    """Has one row: how many objects are frozen, and whether dlog was there."""

    def read(self, partition: InputPartition) -> Iterator[tuple[int, bool]]:
        """Do as tasks of the connector do at their beginning."""
        freeze_imports()
        yield gc.get_freeze_count(), "bookie.server" in sys.modules


class FrozenSource(DataSource):
    """``format("frozen")``."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "frozen"

    def schema(self) -> str:
        """Return two columns."""
        return "objects long, is_forked boolean"

    def reader(self, schema: StructType) -> FrozenReader:
        """Return the reader."""
        return FrozenReader()


def test_workers_freeze_what_they_import(spark: SparkSession, spark_python: Path) -> None:
    """Spark's modules alone are tens of thousands of objects."""
    spark.dataSource.register(FrozenSource)
    (row,) = spark.read.format("frozen").load().collect()
    assert row.objects > 10_000
    assert row.is_forked == (str(spark_python) != sys.executable)
