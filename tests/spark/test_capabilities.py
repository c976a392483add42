"""Spark without a certificate, beside bookies that let such a client do what capabilities give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.sync import open_namespace
from tests.fixtures.tls_cluster import tls_cluster
from tests.spark.test_tls import require_copied

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def test_a_job_without_a_certificate(
    spark: SparkSession, zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """A batch write, a stream from log to log, a batch read; and nothing without the option."""
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
    with tls_cluster(uri, tmp_path, "--tls-client-auth", "or_capability") as cluster:
        with open_namespace(uri, tls=cluster.client) as namespace:
            namespace.create_log("clicks")
            namespace.create_log("copy")
        without = {"uri": uri, "tlsCa": cluster.client.ca}
        options = without | {"capabilities": "1h"}
        require_copied(spark, options, tmp_path / "checkpoint")
        with pytest.raises(Exception, match="no right to READ"):
            spark.read.format("dlog").options(**without, log="copy").load().collect()
