"""The black box: its faults, its own tests in Go, and a short run that must find nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from tests.blackbox.nemesis import KINDS, faults
from tests.blackbox.programs import SOURCE, ProgramError, build
from tests.chaos.services import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

HISTORIES = 60


@pytest.fixture
def go() -> str:
    """The command; a machine without it leaves the test out."""
    found = shutil.which("go")
    if found is None:
        pytest.skip("go is not installed, which the black box needs")
    return found


@pytest.mark.parametrize("sort", KINDS)
def test_the_faults_of_a_seed(sort: str) -> None:
    """They are the same each time, of every kind, and meet every process."""
    found = list(islice(faults(7, sort, 3), 100))
    assert found == list(islice(faults(7, sort, 3), 100))
    assert found != list(islice(faults(8, sort, 3), 100))
    assert {each.kind for each in found} == set(KINDS[sort])
    assert {each.target for each in found} == {0, 1, 2}


def test_without_go_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not begin."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramError, match="go is not installed"):
        build(tmp_path)


@pytest.mark.prove
@pytest.mark.timeout(900)  # the first time all modules are compiled
def test_the_checker(go: str) -> None:
    """It accepts what a log may do, and histories of a cluster; it rejects all that is spoiled."""
    for command in ("vet", "test"):
        result = subprocess.run(
            [go, command, "./..."], cwd=SOURCE, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.prove
@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("go")
def test_a_short_run_finds_nothing() -> None:
    """And the same histories, spoiled, are all rejected."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.blackbox", "--histories", str(HISTORIES), "--seed", "1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    count = re.search(r"^(\d+) histories, 0 rejected$", result.stdout, re.MULTILINE)
    assert count is not None
    assert int(count[1]) >= HISTORIES  # more with clients in Java
    assert re.search(r"[1-9]\d* wrong histories, 0 accepted", result.stdout)
    assert re.search(r"faults: .*\d", result.stdout)
    for kind in ("append", "conditional append", "append of a producer", "begin", "read", "tail"):
        assert re.search(rf"[1-9]\d*  {kind}: done", result.stdout)
