"""Spark beside bookies that speak TLS only: the options name files, and workers read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.sync import open_namespace
from tests.fixtures.tls_cluster import tls_cluster

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from dlcore.sandbox.zookeeper import EmbeddedZooKeeper

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def test_a_batch_is_written_and_streamed_over_tls(
    spark: SparkSession, zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """Driver and workers: a batch write, a stream from log to log, a batch read of the copy."""
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
    with tls_cluster(uri, tmp_path) as cluster:
        with open_namespace(uri, tls=cluster.client) as namespace:
            namespace.create_log("clicks")
            namespace.create_log("copy")
        files = cluster.client
        options = {"uri": uri, "tlsCa": files.ca, "tlsCert": files.cert, "tlsKey": files.key}
        frame = spark.createDataFrame([(str(n),) for n in range(10)], "value string")
        frame.write.format("dlog").options(**options, log="clicks").mode("append").save()
        source = spark.readStream.format("dlog").options(**options, log="clicks")
        live = source.option("startingOffsets", "earliest").load()
        sink = live.select("value").writeStream.format("dlog").options(**options, log="copy")
        sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint"))
        sink.trigger(availableNow=True).start().awaitTermination()
        copied = spark.read.format("dlog").options(**options, log="copy").load()
        assert sorted(int(bytes(row.value)) for row in copied.collect()) == list(range(10))
