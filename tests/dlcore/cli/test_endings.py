"""How commands end when their output, their input or the cluster is gone: a line and a code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dlcore.cli.app import EXIT_FAILED
from tests.fixtures.lengths import sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.sandbox.cluster import Sandbox
    from tests.fixtures.shell import Shell

DLOG = f"{sys.executable} -m dlcore.cli"
LIMIT_S = 60
COMMANDS_AT_ONCE = 12
SAMPLE = 8
COMMANDS = (
    *("namespace show", "namespace create", "namespace list", "namespace watch"),
    *("log create other", "log list", "log show clicks", "log count clicks", "log tail clicks"),
    *("log write clicks", "log write clicks --stream", "log cat clicks", "log dump clicks"),
    *("log copy clicks other", "log purge clicks 1 --yes", "log truncate clicks 1:0:0 --yes"),
    *("log position clicks --txid 1", "log seal clicks --yes", "log rename clicks other"),
    *("log settings clicks", "log retention clicks", "log subscriptions clicks", "log inspect"),
    "log schema clicks",
    *("log repair clicks --yes", "log space", "log lag clicks", "log watch clicks"),
    *("log delete clicks --yes", "log delete clicks --damaged --yes", "segment list clicks"),
    *("bookie list", "bookie read-only b", "bookie collect b --yes", "bookie cookie list"),
    *("bookie cookie delete b --yes", "bookie decommission b --yes", "ledger list"),
    *("ledger show 1", "ledger read 1 --raw", "ledger check 1", "ledger recover 1"),
    *("ledger audit", "staging list", "staging clean --leftovers-days 3 --yes"),
    *("autorecovery status", "autorecovery pause", "autorecovery run"),
)
"""Every command but those that run a cluster."""


def in_bash(script: str, uri: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script with `dlog` in it; it may not take long."""
    return subprocess.run(
        ["bash", "-c", f'dlog() {{ {DLOG} "$@"; }}; {script}'],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"DLOG_URI": uri},
        check=False,
    )


def start_dlog(command: str, uri: str) -> subprocess.Popen[str]:
    """Start a command of little patience, which has no input."""
    return subprocess.Popen(
        [sys.executable, "-m", "dlcore.cli", "--uri", uri, "--patience", "5", *command.split()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("command", ["--help", "log --help", "--version"])
def test_a_full_disk_under_help(command: str) -> None:
    """Without a cluster."""
    done = in_bash(f"dlog {command} >/dev/full")
    assert done.returncode == EXIT_FAILED
    assert done.stderr == "error: cannot write the output: No space left on device\n"


@pytest.mark.integration
def test_outputs_that_are_gone(sandbox: Sandbox, shell: Shell, log: str, tmp_path: Path) -> None:
    """A full disk is told, a reader that left is not; neither leaves a traceback."""
    path = tmp_path / "records"
    path.write_bytes(b"x" * 200 + b"\n")
    path.write_bytes(path.read_bytes() * 5000)
    shell.text("log", "write", log, "--file", str(path))
    for command in ("log list", f"log dump {log} --raw", f"log dump {log}", "--json bookie list"):
        done = in_bash(f"dlog {command} >/dev/full", sandbox.uri)
        assert done.returncode == EXIT_FAILED
        (line,) = done.stderr.splitlines()
        assert "cannot write the output: No space left on device" in line
        if "--json" in command:
            assert json.loads(line)["kind"] == "OSError"
    for command in (f"log dump {log} --raw", f"log dump {log}", f"log tail {log} -n 5000 --json"):
        done = in_bash(f"dlog {command} | head -n 1; exit ${{PIPESTATUS[0]}}", sandbox.uri)
        assert done.returncode == EXIT_FAILED
        assert done.stderr == ""
        assert len(done.stdout.splitlines()) == 1
    assert in_bash("dlog log list >&- <&-", sandbox.uri).returncode in (0, EXIT_FAILED)


@pytest.mark.integration
@pytest.mark.parametrize("how", ["killed", "paused"])
def test_a_cluster_that_does_not_answer(how: str, fresh_sandbox: Callable[..., Sandbox]) -> None:
    """Each command ends within its patience, with one line that names the namespace's servers."""
    sandbox = fresh_sandbox(3)
    in_bash("dlog log create clicks; echo a | dlog log write clicks", sandbox.uri)
    (bookie, *_) = sandbox.bookies
    for each in sandbox.bookies:
        each.kill()
    if how == "killed":
        done = in_bash("dlog log tail clicks", sandbox.uri)
        assert done.returncode == EXIT_FAILED
        (line,) = [each for each in done.stderr.splitlines() if each.startswith("error: ")]
        assert bookie.name in line
        sandbox.zookeeper.kill()
    else:
        sandbox.zookeeper.pause()
    try:
        commands = sample(COMMANDS, SAMPLE)
        for start in range(0, len(commands), COMMANDS_AT_ONCE):
            some = commands[start : start + COMMANDS_AT_ONCE]
            for command, process in [(each, start_dlog(each, sandbox.uri)) for each in some]:
                _, errors = process.communicate(timeout=LIMIT_S)
                assert process.returncode == EXIT_FAILED, (command, errors)
                line = errors.splitlines()[-1]
                assert line.startswith("error: "), (command, errors)
                assert "Traceback" not in errors, (command, errors)
                assert sandbox.zookeeper.servers in line, command
    finally:
        if how == "paused":
            sandbox.zookeeper.resume()
