"""Spark reads and writes through proxies alone: it knows no ZooKeeper, and no bookie.

One test runs it where it could not reach them either.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.sync import open_namespace
from tests.chaos_spark.hosts import launcher_apart
from tests.fixtures.proxies import proxy_process
from tests.fixtures.relay import listen_at, relay
from tests.fixtures.spark import spark_environment
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import Namespace
    from tests.fixtures.proxies import ProxyProcess

pytestmark = [pytest.mark.spark, pytest.mark.integration]
WAIT_S = 120
COLUMNS = pa.schema([("fare", pa.float64()), ("city", pa.string())])


class Logs:
    """Two logs of bytes and one that is typed, written by who reaches bookies."""

    def __init__(self, namespace: Namespace) -> None:
        self.home = uuid4().hex
        self.names = [f"{self.home}/a", f"{self.home}/b"]
        self._namespace = namespace
        for name in self.names:
            namespace.create_log(name)
        namespace.create_log(f"{self.home}-typed", schema=COLUMNS)
        with namespace.open_log(f"{self.home}-typed").open_writer() as writer:
            writer.write_batch(pa.record_batch({"fare": [1.5, None], "city": ["x", "y"]}))

    def write(self, first: int, count: int) -> None:
        """Write numbers to both."""
        for name in self.names:
            with self._namespace.open_log(name).open_writer() as writer:
                numbers = list(range(first, first + count))
                payloads = [b"%d" % number for number in numbers]
                writer.write_batch(pa.record_batch({"txid": numbers, "value": payloads}))


@pytest.fixture
def logs(namespace_uri: str) -> Iterator[Logs]:
    """A thousand records in each, in two segments."""
    with open_namespace(namespace_uri) as namespace:
        logs = Logs(namespace)
        logs.write(0, 500)
        logs.write(500, 500)
        yield logs


def test_batches_through_an_endpoint(
    spark: SparkSession, namespace_uri: str, proxy: ProxyProcess, logs: Logs
) -> None:
    """The rows of a read with `uri`."""

    def read(**options: str) -> list[tuple[Any, ...]]:
        chosen = {"logsPattern": f"{logs.home}/.*"} | options
        frame = spark.read.format("dlog").options(**chosen).load()
        return sorted(map(tuple, frame.collect()))

    more: list[dict[str, str]] = [
        {"minPartitions": "5"},
        {"startingTxid": "333", "columns": "log,txid,value"},
        {"columns": "log,sequence_id"},
    ]
    for options in more:
        there = read(uri=namespace_uri, **options)
        assert read(endpoint=proxy.location, **options) == there
        assert there
    source = spark.read.format("dlog").option("endpoint", proxy.location)
    typed = source.option("log", f"{logs.home}-typed").option("includeMetadata", "true").load()
    assert [(row.fare, row.city) for row in typed.collect()] == [(1.5, "x"), (None, "y")]


def test_a_stream_through_an_endpoint(
    spark: SparkSession, proxy: ProxyProcess, logs: Logs, tmp_path: Path
) -> None:
    """Each record is in one micro-batch, also over a restart."""
    taken: dict[int, list[tuple[str, int]]] = {}

    def take(frame: DataFrame, batch_id: int) -> None:
        taken[batch_id] = [(row.log, int(bytes(row.value))) for row in frame.collect()]

    def run(first: int, count: int) -> None:
        live = spark.readStream.format("dlog").option("endpoint", proxy.location)
        live = live.option("logsPattern", f"{logs.home}/.*").option("startingOffsets", "earliest")
        writing = live.load().writeStream.foreachBatch(take)
        query = writing.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            logs.write(first, 100)
            wait_until(
                lambda: sum(map(len, taken.values())) >= count or not query.isActive,
                timeout_s=WAIT_S,
            )
            query.processAllAvailable()
        finally:
            query.stop()

    run(1000, 2200)
    run(1100, 2400)
    rows = [row for batch_id in sorted(taken) for row in taken[batch_id]]
    for name in logs.names:
        assert [number for log, number in rows if log == name] == list(range(1200))


def test_options_that_an_endpoint_does_not_have(spark: SparkSession, proxy: ProxyProcess) -> None:
    """Tables about the system, and logs that are not there, with what would be right."""
    frame = spark.createDataFrame([("a", "no/such/log")], "value string, log string")
    sink = frame.write.format("dlog").option("endpoint", proxy.location)
    with pytest.raises(Exception, match="or let a write create it with the option createLog"):
        sink.mode("append").save()
    source = spark.read.format("dlog").option("endpoint", proxy.location)
    with pytest.raises(Exception, match="there is no log 'no/such/log'"):
        source.option("log", "no/such/log").load().collect()
    with pytest.raises(Exception, match="is read with the option uri"):
        source.option("metadata", "logs").load()


def test_batches_are_written_through_an_endpoint(
    spark: SparkSession, namespace_uri: str, proxy: ProxyProcess
) -> None:
    """To logs that rows choose, once; in place of what was there; and to typed logs."""
    home = uuid4().hex

    def write(frame: DataFrame, mode: str = "append", **options: str) -> None:
        chosen = {"endpoint": proxy.location, "createLog": "true"} | options
        frame.write.format("dlog").options(**chosen).mode(mode).save()

    rows = [(f"{n}", f"{home}/{n % 3}", n) for n in range(3000)]
    frame = spark.createDataFrame(rows, "value string, log string, txid long").repartition(1)
    frame = frame.sortWithinPartitions("txid")
    for _ in range(2):
        write(frame, txnAppId=home, txnVersion="3")
    with open_namespace(namespace_uri) as namespace:
        for n in range(3):
            table = namespace.open_log(f"{home}/{n}").read().to_arrow()
            assert table["txid"].to_pylist() == list(range(n, 3000, 3))
        small = spark.createDataFrame([(b"x",), (b"y",)], "value binary")
        write(small, "overwrite", log=f"{home}/0")
        write(small.limit(0), log=f"{home}/0", txnAppId=home, txnVersion="1")
        found = namespace.open_log(f"{home}/0").read().to_arrow()
        assert sorted(map(bytes, found["value"].to_pylist())) == [b"x", b"y"]
        typed = f"{home}/typed"
        write(spark.createDataFrame([(1.5, "x")], "fare double, city string"), log=typed)
        more = spark.createDataFrame([(2.5, 7)], "fare double, tip long")
        with pytest.raises(Exception, match="The option mergeSchema adds columns"):
            write(more, log=typed)
        write(more, log=typed, mergeSchema="true")
        assert namespace.open_log(typed).read().to_arrow().select(["fare", "tip"]).to_pylist() == [
            {"fare": 1.5, "tip": None},
            {"fare": 2.5, "tip": 7},
        ]


@pytest.mark.prove  # `test_remote_writing` has the deaths, the test of a stream above the path
def test_a_stream_is_written_through_proxies_that_die(
    spark: SparkSession, namespace_uri: str, logs: Logs, tmp_path: Path
) -> None:
    """Each record is written once, over the death of a proxy and a restart of the query."""
    source, target = logs.names[0], f"{logs.home}/target"

    with ExitStack() as steps:
        starting = [proxy_process(namespace_uri, is_killed=True) for _ in range(2)]
        first, second = (steps.enter_context(each) for each in starting)
        namespace = steps.enter_context(open_namespace(namespace_uri))
        endpoint = f"{first.location},{second.location.partition('://')[2]}"
        namespace.create_log(target)

        def start() -> StreamingQuery:
            live = spark.readStream.format("dlog").option("endpoint", endpoint)
            live = live.option("startingOffsets", "earliest").option("log", source)
            frame = live.option("maxRecordsPerTrigger", "100").load().select("value", "txid")
            sink = frame.coalesce(1).writeStream.format("dlog").option("endpoint", endpoint)
            sink = sink.option("log", target).trigger(processingTime="0 seconds")
            return sink.option("checkpointLocation", str(tmp_path / "sink")).start()

        def count() -> int:
            return namespace.open_log(target).get_log_record_count()

        query = start()
        try:
            wait_until(lambda: count() >= 200 or not query.isActive, timeout_s=WAIT_S)
            first.kill()
            wait_until(lambda: count() >= 500 or not query.isActive, timeout_s=WAIT_S)
        finally:
            query.stop()
        query = start()
        try:
            logs.write(1000, 100)
            wait_until(lambda: count() >= 1100 or not query.isActive, timeout_s=WAIT_S)
            query.processAllAvailable()
        finally:
            query.stop()
        table = namespace.open_log(target).read().to_arrow()
    assert table["txid"].to_pylist() == list(range(1100))
    assert [int(bytes(each)) for each in table["value"].to_pylist()] == list(range(1100))


@pytest.mark.prove  # the tests above show that only the endpoint is known
def test_spark_where_proxies_alone_can_be_reached(
    sandbox: Sandbox, proxy: ProxyProcess, logs: Logs, tmp_path: Path
) -> None:
    """Its driver and its workers have a network of their own, with one proxy in it."""
    launcher = launcher_apart()
    if not launcher:
        pytest.skip("this user may not have a network namespace")
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(f"{logs.home}/copy")
    host, _, port = proxy.location.partition("://")[2].rpartition(":")
    others = [sandbox.metadata_server.servers, *(each.address for each in sandbox.bookies)]
    path = tmp_path / "proxy"
    with listen_at(path) as listener:
        relay(listener, lambda: socket.create_connection((host, int(port))))
        done = subprocess.run(
            [
                *(*launcher, sys.executable, "-m", "tests.spark.apart"),
                *(str(path), port, logs.home, str(tmp_path), *others),
            ],
            env=spark_environment(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        listener.shutdown(socket.SHUT_RDWR)
    assert json.loads(done.stdout) == list(range(1000))
    with open_namespace(sandbox.uri) as namespace:
        copied = namespace.open_log(f"{logs.home}/copy").read().to_arrow()
        assert sorted(copied["txid"].to_pylist()) == list(range(1000))
        new = namespace.open_log(f"{logs.home}/new").read().to_arrow()
        assert sorted(map(bytes, new["value"].to_pylist())) == [b"%d" % n for n in range(10)]
