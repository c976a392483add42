"""A standalone cluster: a master and workers, each with an executor of its own process.

Goal: dlog works on executors that share nothing with the driver but what was shipped, or the user
learns what is missing.  Method: one cluster for all ways of shipping; the same job, by batch and
by stream, with Pythons that have dlog, or only what it needs.
"""

from __future__ import annotations

import json
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from dlcore.sync import open_namespace
from tests.fixtures.deployment import (
    SPARK_HOME,
    deployed_environment,
    make_archive,
    make_python,
    make_zip,
    running,
    submit,
)
from tests.fixtures.java import archive_of_spark
from tests.fixtures.spark import OF_FEW_ROWS, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = [
    pytest.mark.spark,
    pytest.mark.integration,
    pytest.mark.prove,  # a cluster of processes for each way of shipping: with --full, as in CI
    pytest.mark.timeout(600),
]
SUBMIT_S = 280.0
CONF = ROOT / "spark-conf" / "standalone"
JOB = ROOT / "tests" / "deploying" / "job.py"
HOSTS = 2
BOTH = {"batch": [1000, 999], "stream": 1000, "executors": HOSTS, "pushes_filters": "true"}
MISSING = "No module named 'dlspark'"


class Standalone:
    """The cluster, and jobs for it, with the settings that spark-conf has for one."""

    def __init__(self, master: str, folder: Path, uri: str) -> None:
        self.uri = uri
        self.folder = folder
        self.without_dlog = make_python(folder / "without", with_dlog=False)
        self._master = master

    def run(
        self,
        python: Path,
        *arguments: str,
        artifacts: tuple[Path, ...] = (),
        unpacks: Path | None = None,
        registers: bool = False,
        **environment: str,
    ) -> dict[str, Any]:
        """Submit the job, from where an archive is unpacked if it has one; return its report."""
        log, place = f"deployed/{uuid4().hex}", self.folder / uuid4().hex
        place.mkdir()
        if unpacks is not None:
            with tarfile.open(unpacks) as archive:
                archive.extractall(place / "environment", filter="fully_trusted")
        with open_namespace(self.uri) as namespace:
            namespace.create_log(log)
        work = {
            "uri": self.uri,
            "log": log,
            "checkpoint": str(place / "checkpoint"),
            "artifacts": [str(path) for path in artifacts],
            "registers": registers,
        }
        for name in ("spark-defaults.conf", "spark-env.sh"):
            text = (CONF / name).read_text().replace("/opt/dlog/bin/python", str(python))
            (place / name).write_text(text.replace("spark://spark-master:7077", self._master))
        with (place / "spark-env.sh").open("a") as script:
            script.write("unset SPARK_CONF_DIR\n")  # as below, of the cluster
        settings = {
            **OF_FEW_ROWS,
            "spark.ui.enabled": "false",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.executor.extraJavaOptions": archive_of_spark(),
            "spark.sql.shuffle.partitions": "2",
            "spark.scheduler.minRegisteredResourcesRatio": "1",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{SUBMIT_S:g}s",
            "spark.sql.warehouse.dir": str(place / "warehouse"),
        }
        confs = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
        defaults = ["--properties-file", str(place / "spark-defaults.conf")]
        done = submit(
            [*defaults, *confs, *arguments, str(JOB), json.dumps(work)],
            environment={**deployed_environment(place), **environment},
            folder=place,
            timeout_s=SUBMIT_S,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        output: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return output


@pytest.fixture(scope="module")
def standalone(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A master and workers with one core each, on ports of their own."""
    folder = tmp_path_factory.mktemp("standalone")
    environment = deployed_environment(folder)
    del environment["SPARK_CONF_DIR"]  # is in the class path, by which an archive fits or not
    environment["SPARK_DAEMON_JAVA_OPTS"] = archive_of_spark()
    program = str(SPARK_HOME / "bin" / "spark-class")
    deploy = "org.apache.spark.deploy"
    where = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        output = stack.enter_context(
            running(
                [program, f"{deploy}.master.Master", *where],
                log=folder / "master.log",
                environment=environment,
                until="New state: ALIVE",
            )
        )
        master = "spark://" + output.partition("Starting Spark master at spark://")[2].split()[0]
        for number in range(HOSTS):
            work = [
                "--cores",
                "1",
                "--memory",
                "600m",
                "--work-dir",
                str(folder / f"work-{number}"),
            ]
            stack.enter_context(
                running(
                    [program, f"{deploy}.worker.Worker", *where, *work, master],
                    log=folder / f"worker-{number}.log",
                    environment=environment,
                    until="Successfully registered with master",
                )
            )
        yield Standalone(master, folder, sandbox.uri)


def test_installed_in_the_python_of_every_host(standalone: Standalone) -> None:
    """Nothing is shipped, nothing registered."""
    assert standalone.run(make_python(standalone.folder / "with", with_dlog=True)) == BOTH


def test_shipped_as_a_zip_file(standalone: Standalone) -> None:
    """With `PYTHONPATH` on the driver's host for the processes that Spark starts there."""
    shipped = make_zip(standalone.folder / "dlog.zip")
    output = standalone.run(
        standalone.without_dlog, "--py-files", str(shipped), PYTHONPATH=str(shipped)
    )
    assert output == BOTH


def test_shipped_by_py_files_alone(standalone: Standalone) -> None:
    """As an artifact: for batch jobs that register it, and not for the planners of a stream."""
    shipped = make_zip(standalone.folder / "alone.zip")
    output = standalone.run(standalone.without_dlog, "--py-files", str(shipped), registers=True)
    assert output["batch"] == BOTH["batch"]
    assert MISSING in output["stream"]


def test_shipped_as_an_archive_of_an_environment(standalone: Standalone) -> None:
    """Executors unpack it; on the driver's host it lies unpacked under the same relative path."""
    archive = make_archive(standalone.folder)
    output = standalone.run(
        Path("environment/bin/python"), "--archives", f"{archive}#environment", unpacks=archive
    )
    assert output == BOTH


def test_shipped_as_an_artifact(standalone: Standalone) -> None:
    """Tasks find it, and batch jobs that register it; queries are refused in the module's name."""
    shipped = make_zip(standalone.folder / "artifact.zip")
    output = standalone.run(standalone.without_dlog, artifacts=(shipped,), registers=True)
    assert output["batch"] == BOTH["batch"]
    assert MISSING in output["stream"]
