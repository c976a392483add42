"""Spark's real-time mode reads a log and writes another one, by its connector for Kafka.

Spark lets sources in Python not take part in it, and Kafka's connector does: through a proxy that
speaks Kafka's protocol a log has it, too.  A batch of this mode lasts minutes, and records must be
in the other log long before it ends.  Spark's sink for Kafka writes each record at least once.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from benchmarks.peers.kafka import connector_class_path
from dlcore.base.errors import ConfigurationError
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.kafka_proxies import kafka_address
from tests.fixtures.proxies import payloads_in
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = [pytest.mark.integration, pytest.mark.prove]

PATIENCE_S = 240.0
PROGRAM = """
import sys
from pyspark.sql import SparkSession
address, jars, folder, batch = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.jars", jars).config(
    "spark.ui.enabled", "false").getOrCreate()
kafka = {"kafka.bootstrap.servers": address}
rows = spark.readStream.format("kafka").options(
    **kafka, assign='{"seen": [0]}', startingOffsets="earliest").load()
query = (rows.selectExpr("concat('seen ', cast(value AS string)) AS value").writeStream
    .format("kafka").options(**kafka, topic="passed", checkpointLocation=folder)
    .outputMode("update").trigger(realTime=batch).start())
query.awaitTermination()
"""


@contextmanager
def passing_on(address: str, folder: Path, *, batch: str) -> Iterator[None]:
    """Run the query in a process, which is killed in the end; its checkpoint stays."""
    try:
        jars = connector_class_path().replace(":", ",")
    except ConfigurationError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-c", PROGRAM, address, jars, str(folder), batch]
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()


def write(uri: str, values: range) -> None:
    """Append a record for each number."""
    with (
        open_namespace(uri) as namespace,
        namespace.open_log("seen") as log,
        log.open_writer() as writer,
    ):
        for number in values:
            writer.write(LogRecord(number, b"%d" % number))


def wait_for_passed(uri: str, values: range) -> None:
    """Wait until each number is in the other log."""
    wanted = {b"seen %d" % number for number in values}
    wait_until(lambda: wanted <= {*payloads_in(uri, "passed")}, timeout_s=PATIENCE_S)


def test_records_pass_within_a_batch_and_over_kills(
    sandbox: Sandbox, kafka_proxies: list[ProxyProcess], tmp_path: Path
) -> None:
    """Each record, in the order of the log, before the first batch ends, and after SIGKILL."""
    uri, folder = sandbox.uri, tmp_path / "checkpoint"
    address = kafka_address(kafka_proxies[1], uri)
    with open_namespace(uri) as namespace:
        for name in ("seen", "passed"):
            namespace.create_log(name)
    write(uri, range(500))
    with passing_on(address, folder, batch="30 minutes"):
        wait_for_passed(uri, range(500))
        write(uri, range(500, 600))
        wait_for_passed(uri, range(600))
        assert not [*folder.glob("commits/[0-9]*")], "a batch has ended"
    assert payloads_in(uri, "passed") == [b"seen %d" % number for number in range(600)]
    with passing_on(address, folder, batch="5 seconds"):
        wait_until(lambda: [*folder.glob("commits/[0-9]*")], timeout_s=PATIENCE_S)
        write(uri, range(600, 700))
        wait_for_passed(uri, range(700))
    again = payloads_in(uri, "passed")[600:]
    assert again == [b"seen %d" % number for number in range(700)], "since no batch had ended"
