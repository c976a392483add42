"""Short runs of the chaos of Spark: processes are killed, and not one record is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.chaos.services import REPOSITORY
from tests.chaos.test_chaos import processes_that_name
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.prove]
SEED = 1
SECONDS = 14
KEPT = "lost 0, doubled 0, out of order 0, never written 0, not in every channel 0"
COMMAND = [sys.executable, "-m", "tests.chaos_spark", "--watch-parent", "--seed", str(SEED)]


@pytest.mark.timeout(900)  # the run has bounds of its own, for a very busy machine
@pytest.mark.parametrize(
    "options",
    [(), ("--one-machine",), ("--secure",)],
    ids=["hosts", "one-machine", "secured"],
)
def test_every_record_once_and_in_order(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The run itself judges; here it is checked that it did what it should, and left nothing."""
    with subprocess.Popen(
        [*COMMAND, "--seconds", str(SECONDS), "--where", "local", *options],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        output = run.stdout.read()
    assert run.returncode == 0, output[-9000:]
    came = re.search(r"created (\d+), truncated (\d+), renamed (\d+), deleted (\d+)", output)
    assert came is not None
    assert min(map(int, came.groups())) >= 1, came[0]
    read = re.search(r"of these, read (\d+), gone before (\d+)", output)
    assert read is not None
    assert int(read[1]) > 100, read[0]
    assert output.count(KEPT) == 2  # of those that stay and of those that go
    assert "one machine" in output or "--one-machine" not in options
    kills = re.search(r"^kills (\d+); faults: (.*)$", output, re.MULTILINE)
    assert kills is not None
    assert int(kills[1]) >= 3, kills[2]
    records = re.search(r"records of the sources (\d+), checked in all (\d+)", output)
    assert records is not None
    assert int(records[2]) == 5 * int(records[1]) > 1000
    assert processes_that_name(tmp_path) == []
    assert list(tmp_path.glob("dlog-chaos-spark-*")) == []


STARTER = """
import subprocess, sys
run = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
run.wait()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [(), ("--one-machine",)], ids=["hosts", "one-machine"])
def test_a_run_ends_with_who_started_it(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Killed while Spark starts, a parent leaves neither the run nor a process of its."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, *COMMAND, "--seconds", "60", *options],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if "Spark starts" in line:
                break
        wait_until(lambda: "SparkSubmit" in str(processes_that_name(tmp_path)), timeout_s=100)
        parent.kill()
        assert parent.stdout.read().endswith("interrupted\n")  # and the run's end with it
    assert processes_that_name(tmp_path) == []
    assert list(tmp_path.glob("dlog-chaos-spark-*")) == []
