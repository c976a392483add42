"""Spark beside bookies that speak TLS only: the options name files, and workers read them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.base.access.tls import TlsFiles
from dlcore.sync import open_namespace
from tests.fixtures.certificates import Authority
from tests.fixtures.proxies import proxy_process, wait_for_no_proxy
from tests.fixtures.secure_zookeeper import secure_zookeeper
from tests.fixtures.tls_cluster import tls_cluster

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrameWriter, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def test_a_batch_is_written_and_streamed_over_tls(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Driver and workers: a batch write, a stream from log to log, a batch read of the copy.

    ZooKeeper has TLS as well, and a user for whom alone all nodes are.
    """
    with ExitStack() as stack:
        zookeeper = stack.enter_context(secure_zookeeper(tmp_path))
        access, uri = zookeeper.access, f"distributedlog://{zookeeper.secure_servers}/dlog"
        with monkeypatch.context() as patched:
            for key, value in zookeeper.variables.items():
                patched.setenv(key, value)
            cluster = stack.enter_context(tls_cluster(uri, tmp_path))
        with open_namespace(uri, tls=cluster.client, zookeeper=access) as namespace:
            namespace.create_log("clicks")
            namespace.create_log("copy")
        files = cluster.client
        options = {"uri": uri, "tlsCa": files.ca, "tlsCert": files.cert, "tlsKey": files.key}
        assert access.tls is not None
        options |= {"zkTlsCa": access.tls.ca, "zkAuthFile": access.auth_file}
        options |= {"zkTlsCert": access.tls.cert, "zkTlsKey": access.tls.key}
        require_copied(spark, options, tmp_path / "checkpoint")


def require_copied(
    spark: SparkSession, options: dict[str, str], checkpoint: Path, *, home: str = ""
) -> None:
    """Write a batch to the log clicks, copy it by a stream to the log copy, and read that."""
    clicks, copy = f"{home}clicks", f"{home}copy"
    frame = spark.createDataFrame([(str(n),) for n in range(10)], "value string")
    frame.write.format("dlog").options(**options, log=clicks).mode("append").save()
    source = spark.readStream.format("dlog").options(**options, log=clicks)
    live = source.option("startingOffsets", "earliest").load()
    sink = live.select("value").writeStream.format("dlog").options(**options, log=copy)
    sink = sink.option("checkpointLocation", str(checkpoint))
    sink.trigger(availableNow=True).start().awaitTermination()
    copied = spark.read.format("dlog").options(**options, log=copy).load()
    assert sorted(int(bytes(row.value)) for row in copied.collect()) == list(range(10))


@pytest.mark.prove  # `tests/dlcore/backends` has it without Spark
def test_proxies_that_speak_tls(spark: SparkSession, namespace_uri: str, tmp_path: Path) -> None:
    """Driver and workers go through them with the right files; with others they say what is."""
    wait_for_no_proxy(namespace_uri)  # one of another test would be asked in vain
    home, creating = uuid4().hex, {"createLog": "true"}
    authority = Authority(tmp_path / "ours")
    files, client = authority.issue("proxy"), authority.issue("client", host="DNS:client")
    serving = [f"--serve-tls-{name}={getattr(files, name)}" for name in ("ca", "cert", "key")]
    with proxy_process(namespace_uri, *serving) as proxy:

        def options(tls: TlsFiles, **more: str) -> dict[str, str]:
            given = {"tlsCa": tls.ca, "tlsCert": tls.cert, "tlsKey": tls.key}
            given |= {"endpoint": proxy.location} | more
            return {name: value for name, value in given.items() if value}

        def written(tls: TlsFiles) -> DataFrameWriter:
            frame = spark.createDataFrame([(str(n),) for n in range(10)], "value string")
            return frame.write.format("dlog").options(**options(tls, log=f"{home}/a", **creating))

        written(client).mode("append").save()
        source = spark.readStream.format("dlog").options(**options(client, log=f"{home}/a"))
        source = source.option("startingOffsets", "earliest")
        sink = source.load().select("value").writeStream.format("dlog")
        sink = sink.options(**options(client, log=f"{home}/b", **creating))
        sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint"))
        sink.trigger(availableNow=True).start().awaitTermination()
        copied = spark.read.format("dlog").options(**options(client, log=f"{home}/b")).load()
        assert sorted(int(bytes(row.value)) for row in copied.collect()) == list(range(10))
        for tls, reason in (
            (TlsFiles(ca=client.ca), "lets no client in without a certificate"),
            (TlsFiles(ca=str(Authority(tmp_path / "theirs").ca)), "certificate is not accepted"),
        ):
            with pytest.raises(Exception, match=f"the proxy at grpc.tls://[^ ]+: .*{reason}"):
                written(tls).mode("append").save()
            with pytest.raises(Exception, match=f"the proxy at grpc.tls://[^ ]+: .*{reason}"):
                spark.read.format("dlog").options(**options(tls, log=f"{home}/a")).load().collect()
