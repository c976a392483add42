"""Kafka's own clients read logs of real bookies through proxies of their own processes.

Goal: each reads every record once and in its order, byte for byte, through rolls of segments, a
truncation, a move of the log to another proxy, and the death of the proxy that it reads from.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.peers.kafka import connector_class_path
from dlcore.base.errors import ConfigurationError
from dlcore.sync import open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.kafka import consumed, consumer
from tests.fixtures.kafka_proxies import (
    filled,
    go_on_through_faults,
    kafka_address,
    kafka_addresses,
)
from tests.fixtures.lengths import amount
from tests.fixtures.proxies import log_name_for, payloads_in, produce
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

RECORDS = amount(1_000_000, sampled=40_000)
FILLED = RECORDS * 3 // 4
"""Number of records before a client reads; the others come while the log moves."""


def test_a_log_of_many_segments(sandbox: Sandbox, kafka_proxies: list[ProxyProcess]) -> None:
    """Truncated records are out of range, and the others come as they were written.

    It also does when the log moves, and when the proxy is killed that serves it.
    """
    uri, addresses = sandbox.uri, kafka_addresses(kafka_proxies, sandbox.uri)
    name = filled(uri, FILLED, log_name_for(kafka_proxies[0], uri))
    first = FILLED - len(payloads_in(uri, name))
    assert first > 1
    reader = consumer(addresses, name.replace("/", "."), 1, **{"auto.offset.reset": "earliest"})
    found: list[Any] = []
    ignored: list[Any] = []

    def wait_for(number: int) -> None:
        found.extend(consumed(reader, number - first - len(found), on_error=ignored.append))

    try:
        go_on_through_faults(uri, kafka_proxies, name, range(FILLED, RECORDS), wait_for)
    finally:
        reader.close()
    assert [each.offset() for each in found] == list(range(first, RECORDS))
    assert [each.value() for each in found] == payloads_in(uri, name)


def test_a_follower_goes_on_at_another_proxy(
    sandbox: Sandbox, kafka_proxies: list[ProxyProcess]
) -> None:
    """When the log moves, and when the proxy is killed from which it reads."""
    killed, other = kafka_proxies
    addresses = kafka_addresses(kafka_proxies, sandbox.uri)
    name = log_name_for(killed, sandbox.uri)
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name)
    reader = consumer(addresses, name.replace("/", "."))
    sent: list[bytes] = []
    found: list[Any] = []
    ignored: list[Any] = []

    def follow(writing: ProxyProcess, *, more: int, kills: bool = False) -> None:
        stop, now = threading.Event(), list[bytes]()
        thread = threading.Thread(target=produce, args=(writing.location, name, "p", stop, now))
        thread.start()
        try:
            found.extend(consumed(reader, more, on_error=ignored.append))
        finally:
            stop.set()
            thread.join()
            sent.extend(now)
        if kills:
            killed.kill()

    try:
        follow(killed, more=300)
        killed.act("drain")  # the log moves to the other one
        follow(other, more=300)
        killed.act("undrain")
        follow(other, more=100, kills=True)
        follow(other, more=300)
        found.extend(consumed(reader, len(sent) - len(found), on_error=ignored.append))
    finally:
        reader.close()
    assert [each.value() for each in found] == sent == payloads_in(sandbox.uri, name)
    assert [each.offset() for each in found] == list(range(len(sent)))


@pytest.mark.prove
def test_kcat(sandbox: Sandbox, kafka_proxies: list[ProxyProcess]) -> None:
    """Debian's command lists the log, and reads it."""
    if shutil.which("kcat") is None:
        pytest.skip("kcat is not installed: apt-get install kcat")
    name = filled(sandbox.uri, 40_000)
    topic, address = name.replace("/", "."), kafka_address(kafka_proxies[0], sandbox.uri)
    listed = subprocess.run(["kcat", "-b", address, "-L", "-J"], capture_output=True, check=True)
    assert topic in [each["topic"] for each in json.loads(listed.stdout)["topics"]]
    command = ["kcat", "-b", address, "-C", "-q", "-e", "-t", topic, "-p", "0", "-o", "beginning"]
    read = subprocess.run([*command, "-D", "\n"], capture_output=True, check=True, timeout=120)
    assert read.stdout.splitlines() == payloads_in(sandbox.uri, name)


SPARK = """
import sys
from pyspark.sql import SparkSession, functions as F
address, topic, jars, folder = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.jars", jars).config(
    "spark.ui.enabled", "false").getOrCreate()
options = {"kafka.bootstrap.servers": address, "startingOffsets": "earliest"}
rows = spark.read.format("kafka").options(**options, subscribe=topic, minPartitions="3").load()
found = rows.orderBy("offset").select("offset", F.col("value").cast("string")).collect()
options["assign"] = '{"%s": [0]}' % topic
stream = spark.readStream.format("kafka").options(**options, maxOffsetsPerTrigger="7000").load()
query = (stream.select("offset", F.col("value").cast("string")).writeStream.format("parquet")
    .option("path", folder + "/out").option("checkpointLocation", folder + "/checkpoint")
    .trigger(availableNow=True).start())
query.awaitTermination()
streamed = spark.read.parquet(folder + "/out").orderBy("offset").collect()
assert [tuple(each) for each in found] == [tuple(each) for each in streamed]
with open(folder + "/values", "w") as values:
    values.writelines(each[1] + "\\n" for each in found)
assert [each[0] for each in found] == list(range(found[0][0], found[0][0] + len(found)))
"""


@pytest.mark.prove
def test_the_connector_of_spark(
    sandbox: Sandbox, kafka_proxies: list[ProxyProcess], tmp_path: Any
) -> None:
    """Its batches and its streams, by Kafka's client in Java, which Maven brings."""
    try:
        jars = connector_class_path().replace(":", ",")
    except ConfigurationError as error:
        pytest.skip(str(error))
    name = filled(sandbox.uri, 40_000)
    address = kafka_address(kafka_proxies[0], sandbox.uri)
    arguments = [address, name.replace("/", "."), jars, str(tmp_path)]
    subprocess.run(
        [sys.executable, "-c", SPARK, *arguments], check=True, cwd=REPOSITORY, timeout=240
    )
    values = (tmp_path / "values").read_bytes().splitlines()
    assert values == payloads_in(sandbox.uri, name)


def test_kafka_addresses_are_listed(sandbox: Sandbox, kafka_proxies: list[ProxyProcess]) -> None:
    """Each proxy tells those of all."""
    wanted = sorted(kafka_address(each, sandbox.uri) for each in kafka_proxies)
    reader = consumer(wanted[0], "none")
    try:
        wait_until(
            lambda: (
                sorted(f"{each.host}:{each.port}" for each in reader.list_topics().brokers.values())
                == wanted
            ),
            timeout_s=60,
        )
    finally:
        reader.close()
