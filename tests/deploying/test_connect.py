"""Spark Connect: the connector's core with a client that has no JVM, against a real server.

Goal: what works in a classic session works there, with the same errors.  Method: a server that is a
process of its own; tests of the classic session run again in one whose session is remote.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.deployment import SPARK_HOME, running
from tests.fixtures.ports import free_ports
from tests.fixtures.spark import ROOT, settings_in, spark_environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(600)]
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
TESTS_S = 500
CORE = (
    "test_errors.py",
    "test_foreach_batch.py",
    "test_progress.py",
    "test_sql.py::test_insert_overwrite",
    "test_batch_write.py::test_rows_go_in_order_of_partitions",
    "test_limited_streams.py::test_columns_of_a_batch",
    "test_pushdown.py",
    "test_typed_logs.py::test_every_type_there_and_back",
    "test_typed_logs.py::test_metadata_and_columns",
    "test_batch_read.py::test_lists_and_patterns",
    "test_stream_write.py::test_stream_over_restarts",
)


@pytest.mark.prove  # what it runs again is tested in a classic session
def test_the_core_against_a_connect_server(tmp_path: Path) -> None:
    """Batch and stream, reading and writing, bytes and types, filters, `Trigger.AvailableNow`,
    repeated batches of `foreachBatch`, refused options, and the listener of progresses."""
    port = free_ports(1)
    settings = settings_in(tmp_path) | {"spark.connect.grpc.binding.port": str(port)}
    del settings["spark.log.level"]  # it tells that it has started on the level below
    confs = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    command = [
        str(SPARK_HOME / "bin" / "spark-submit"),
        "--master",
        "local[2,2]",
        "--class",
        SERVER,
    ]
    environment = spark_environment()
    with running(
        [*command, *confs],
        log=tmp_path / "server.log",
        environment={**environment, "SPARK_HOME": str(SPARK_HOME)},
        until="Spark Connect server started at",
    ):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"),
                "--full",
                *(str(ROOT / "tests" / "spark" / name) for name in CORE),
            ],
            env={**environment, "SPARK_REMOTE": f"sc://127.0.0.1:{port}"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=TESTS_S,
        )
    assert done.returncode == 0, done.stdout[-20_000:]
