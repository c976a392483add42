"""A short run of the chaos: every kind of fault that is possible here, and not one record wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlcore.base.features import own_release
from tests.chaos.plan import KINDS, MIXED_KINDS
from tests.chaos.services import REPOSITORY
from tests.upgrade.releases import LAST, commit_of

SEED = 2
SECONDS = 22
COMMAND = [sys.executable, "-m", "tests.chaos", "--watch-parent", "--seed", str(SEED)]


@pytest.mark.integration
@pytest.mark.prove  # each kind of fault has a test of its own in tests/integration
@pytest.mark.timeout(900)  # the run has bounds of its own, for a very busy machine
@pytest.mark.parametrize(
    "options", [(), ("--secure",), ("--mixed",)], ids=["open", "secured", "mixed"]
)
def test_nothing_is_lost_doubled_or_out_of_order(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The run itself judges; here it is checked that it did what it should."""
    is_mixed = "--mixed" in options
    if is_mixed:
        commit_of(LAST)
    errors = tmp_path / "errors"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [*COMMAND, "--seconds", str(3 * SECONDS if is_mixed else SECONDS), *options],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as run,
    ):
        assert run.stdout is not None
        output = run.stdout.read()
    assert run.returncode == 0, output[-5000:] + errors.read_text()[-5000:]
    assert "lost 0, doubled 0, out of order 0\n" in output
    assert errors.read_text() == ""
    shown = r"^(faults|left out|not possible here): (.*)$"
    found = dict(re.findall(shown, output, re.MULTILINE))
    done = {kind for kind in MIXED_KINDS if re.search(rf"\b{kind} \d", found["faults"])}
    impossible = {kind for kind in KINDS if kind in found["not possible here"]}
    if is_mixed:  # where processes restart all the time, a fault may find nothing to break
        impossible |= {kind for kind in KINDS if kind in found["left out"]}
    assert done | impossible == set(MIXED_KINDS if is_mixed else KINDS)
    if is_mixed:
        (releases,) = re.findall(r"^most of a release at once: (.*)$", output, re.MULTILINE)
        assert all(f"bookie {each} " in releases for each in (LAST, own_release().version))
    counts = re.search(r"appended (\d+), acknowledged (\d+), read back (\d+)", output)
    assert counts is not None
    appended, acknowledged, read = map(int, counts.groups())
    assert appended >= read >= acknowledged > 100


@pytest.mark.prove
@pytest.mark.integration
@pytest.mark.parametrize("why", ["Ctrl-C", "its parent is gone"])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, why: str) -> None:
    """In the middle of faults: every process ends, and the folder is gone."""
    with subprocess.Popen(
        [*COMMAND, "--seconds", "60"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        for line in run.stdout:
            if "kill" in line or "pause" in line:
                break
        assert processes_that_name(tmp_path)
        if why == "Ctrl-C":
            run.send_signal(signal.SIGINT)
        else:
            run.stdin.close()
        assert run.stdout.read().endswith("interrupted\n")
    assert run.returncode == 130
    assert processes_that_name(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def processes_that_name(folder: Path) -> list[str]:
    """Return the command lines of processes that contain `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if str(folder) in command:
            found.append(command)
    return found
