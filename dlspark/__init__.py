"""dlog for Spark: a data source over replicated logs.

With dlog installed, ``format("dlog")`` works without any code, because Spark finds the module
`pyspark_dlog`.  `register` does the same by hand, for a session that started before the
installation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlspark.source import DistributedLogDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DistributedLogDataSource", "register"]


def register(spark: SparkSession) -> None:
    """Make ``format("dlog")`` known to a session."""
    spark.dataSource.register(DistributedLogDataSource)
