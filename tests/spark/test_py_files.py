"""dlog shipped to Spark by ``--py-files``, as spark-conf/README.md advises.

Goal: where dlog cannot be installed, a job still reads and writes, by batch and by stream.  Method:
a Python that has everything but dlog, and a job that runs with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from tests.fixtures.spark import ROOT

if TYPE_CHECKING:
    from dlcore.sandbox.cluster import Sandbox

pytestmark = [pytest.mark.spark, pytest.mark.integration]

JOB = """
import json, sys
from pyspark.sql import SparkSession, functions as F

uri, log, folder = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
to = {"uri": uri, "log": log}
frame = spark.range(10).select(F.col("id").cast("string").alias("value"))
frame.write.format("dlog").options(**to, createLog="true").mode("append").save()
stream = spark.readStream.format("dlog").options(**to, startingOffsets="earliest").load()
query = (
    stream.select("value").writeStream.format("dlog")
    .options(uri=uri, log=f"{log}/copy", createLog="true", checkpointLocation=folder)
    .trigger(availableNow=True).start()
)
query.awaitTermination()

def place(_):
    import dlspark
    return [dlspark.__file__]

both = spark.read.format("dlog").options(uri=uri, logs=f"{log},{log}/copy").load()
where = spark.sparkContext.parallelize([0], 1).mapPartitions(place).first()
print("RESULT", json.dumps([both.count(), where]))
"""


def python_without_dlog(folder: Path) -> str:
    """Make an environment that finds this one's packages, but not those it links to."""
    venv.create(folder, with_pip=False)
    ours = sysconfig.get_path("purelib")
    theirs = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(theirs, "others.pth").write_text(ours + "\n", encoding="utf-8")
    return str(folder / "bin" / "python")


def test_a_wheel_that_is_called_zip_is_shipped(sandbox: Sandbox, tmp_path: Path) -> None:
    """Spark puts only .zip, .egg and .jar on the path; the wheel's own name would do nothing."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    package = wheel.rename(tmp_path / "dlog.zip")
    job = tmp_path / "job.py"
    job.write_text(JOB, encoding="utf-8")
    python = python_without_dlog(tmp_path / "python")
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {
        **kept,
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
    }
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    command = [submit, "--master", "local[2]", "--driver-memory", "768m"]
    command += ["--conf", "spark.log.level=ERROR", "--conf", "spark.ui.enabled=false"]
    command += ["--py-files", str(package), str(job)]
    command += [sandbox.uri, f"shipped-{tmp_path.name}", str(tmp_path / "checks")]
    done = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    count, place = json.loads(line.removeprefix("RESULT"))
    assert count == 20
    assert "dlog.zip/dlspark" in place
