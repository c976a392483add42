"""A short run of the chaos: every kind of fault that is possible here, and not one record wrong."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.chaos.plan import KINDS
from tests.chaos.services import REPOSITORY

SEED = 2
SECONDS = 22


@pytest.mark.integration
def test_nothing_is_lost_doubled_or_out_of_order() -> None:
    """The run itself judges; here it is checked that it did what it should."""
    command = [sys.executable, "-m", "tests.chaos", "--seed", str(SEED), "--seconds", str(SECONDS)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    assert "lost 0, doubled 0, out of order 0\n" in run.stdout
    assert run.stderr == ""
    told = dict(re.findall(r"^(faults|not possible here): (.*)$", run.stdout, re.MULTILINE))
    done = {kind for kind in KINDS if re.search(rf"\b{kind} \d", told["faults"])}
    impossible = {kind for kind in KINDS if kind in told["not possible here"]}
    assert done | impossible == set(KINDS)
    counts = re.search(r"appended (\d+), acknowledged (\d+), read back (\d+)", run.stdout)
    assert counts is not None
    appended, acknowledged, read = map(int, counts.groups())
    assert appended >= read >= acknowledged > 100
