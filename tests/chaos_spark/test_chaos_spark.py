"""A short run of the chaos of Spark: processes are killed, and not one record is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.chaos.services import REPOSITORY
from tests.chaos.test_chaos import processes_that_name

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.integration]
SEED = 1
SECONDS = 14


@pytest.mark.timeout(900)  # the run has bounds of its own, for a very busy machine
def test_every_record_once_and_in_order(tmp_path: Path) -> None:
    """The run itself judges; here it is checked that it did what it should, and left nothing."""
    command = [sys.executable, "-m", "tests.chaos_spark", "--seed", str(SEED)]
    run = subprocess.run(
        [*command, "--seconds", str(SECONDS), "--where", "local"],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    assert "\nlost 0, doubled 0, out of order 0, never written 0, not in every channel 0" in (
        run.stdout
    )
    kills = re.search(r"^kills (\d+); faults: (.*)$", run.stdout, re.MULTILINE)
    assert kills is not None
    assert int(kills[1]) >= 3, kills[2]
    records = re.search(r"records of the sources (\d+), checked in all (\d+)", run.stdout)
    assert records is not None
    assert int(records[2]) == 5 * int(records[1]) > 1000
    assert processes_that_name(tmp_path) == []
    assert list(tmp_path.glob("dlog-chaos-spark-*")) == []
