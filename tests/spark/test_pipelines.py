"""The declarative pipeline of `examples/pipelines`, killed while it works, and run again.

Goal: its sink has each record once, whichever moment it died at.  Method: the example as it stands
over a cluster, ended by SIGKILL after some batches, and at last run to its end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from dlcore.base.records import LogRecord
from tests.fixtures.spark import ROOT, spark_environment
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import Namespace

pytestmark = [pytest.mark.spark, pytest.mark.integration]
RECORDS = 6_000
KILLED_AFTER = (1, 3_000)
"""Number of records in the sink's log when the pipeline is killed."""
TIMEOUT_S = 400.0
URI = "distributedlog://127.0.0.1:2181/dlog"
COMMAND = ("spark-pipelines", "run", "--conf", "spark.ui.enabled=false")


class Pipeline:
    """The example in a folder of its own, for a cluster."""

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        self._folder = folder / "pipeline"
        self._namespace = namespace
        shutil.copytree(ROOT / "examples" / "pipelines", self._folder)
        spec = self._folder / "spark-pipeline.yml"
        text = spec.read_text().replace("/tmp/clicks-pipeline", str(folder / "kept"))
        assert URI in text
        spec.write_text(text.replace(URI, namespace.uri))

    def append(self, numbers: range) -> None:
        """Append records to the log that it reads."""
        log = self._namespace.open_log("clicks", create_if_missing=True)
        with log, log.open_writer() as writer:
            writer.write_bulk(LogRecord(n, b"w%d" % n) for n in numbers)

    def written(self) -> list[bytes]:
        """Return the values in the log of its sink."""
        if "words" not in self._namespace.get_logs():
            return []
        with self._namespace.open_log("words") as log:
            return [bytes(each) for each in log.read().to_arrow()["value"].to_pylist()]

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in a group of processes of its own."""
        return subprocess.Popen(
            COMMAND,
            cwd=self._folder,
            env=spark_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> None:
        """Run it to its end."""
        done = subprocess.run(
            (*COMMAND, *arguments),
            cwd=self._folder,
            env=spark_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def kill_after(self, count: int) -> None:
        """Run it, and kill all of its processes when the sink has so many records."""
        process = self.start()
        try:
            wait_until(
                lambda: len(self.written()) >= count or process.poll() is not None,
                timeout_s=TIMEOUT_S,
            )
            assert process.poll() is None, "it ended by itself"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.prove
def test_a_killed_pipeline_writes_each_record_once(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    """The effect of a full refresh: the sink's log gets everything again, behind what it has."""
    from dlcore.sync import open_namespace

    with open_namespace(fresh_sandbox().uri) as namespace:
        pipeline = Pipeline(tmp_path, namespace)
        pipeline.append(range(RECORDS))
        for count in KILLED_AFTER:
            pipeline.kill_after(count)
        pipeline.run()
        expected = [b"W%d" % n for n in range(RECORDS)]
        assert pipeline.written() == expected
        pipeline.append(range(RECORDS, RECORDS + 10))
        pipeline.run()
        expected += [b"W%d" % n for n in range(RECORDS, RECORDS + 10)]
        assert pipeline.written() == expected
        pipeline.run("--full-refresh-all")
        assert pipeline.written() == expected + expected
