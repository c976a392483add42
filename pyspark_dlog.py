"""Makes ``format("dlog")`` known: Spark registers `DefaultSource` of every ``pyspark_*`` module."""

from __future__ import annotations

from dlspark.source import DistributedLogDataSource as DefaultSource

__all__ = ["DefaultSource"]
