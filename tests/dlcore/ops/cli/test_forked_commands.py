"""`dlog` of the tests' shells is the command that the shells would have started themselves."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.forked_commands import environment_at
from tests.fixtures.ports import free_ports
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 60
REAL = Path(sys.prefix) / "bin" / "dlog"


def outcome(program: Path, script: str, folder: Path) -> tuple[int, str, str]:
    """Return how a script with `dlog` ended, and what it printed."""
    done = subprocess.run(
        ["bash", "-c", f'dlog() {{ "{program}" "$@"; }}\n{script}'],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        ("dlog --version", 0, "version"),
        ("dlog log nonsense", 2, "No such command 'nonsense'"),
        ("DLOG_PATIENCE=long dlog log list", 2, "'long' is not a valid float"),
        ("printf '{}' | dlog audit verify /dev/stdin", 2, "/dev/stdin: line 1: no line of"),
        ("echo x > here; dlog audit verify here", 2, "here: line 1: no line of"),
    ],
)
def test_it_does_what_the_command_does(
    dlog_program: Path, tmp_path: Path, script: str, status: int, reason: str
) -> None:
    """With the same words, variables, input, folder, output and status."""
    assert dlog_program.read_bytes() != REAL.read_bytes()
    found = outcome(dlog_program, script, tmp_path)
    assert found == outcome(REAL, script, tmp_path)
    assert found[0] == status
    assert reason in found[1] + found[2]


def test_a_process_that_cannot_be_forked_starts_as_always(
    dlog_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other variables of Python's it is the command itself."""
    monkeypatch.setenv("PYTHONVERBOSE", "1")
    _, output, errors = outcome(dlog_program, "dlog --version", tmp_path)
    assert "version" in output
    assert "dlcore.ops.cli" in errors, "a fork does not load it"


@contextmanager
def serving(program: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a command that lasts; yield its process as a shell sees it, and its port."""
    port = free_ports(1)
    command = [str(program), "metadata", "serve", "--data-dir", str(folder), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: is_open(port), timeout_s=WAIT_S)
            yield process, port
        finally:
            process.kill()


def is_open(port: int) -> bool:
    """Return whether a server is there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_signals_reach_it(
    dlog_program: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """It is terminated, and killed."""
    with serving(dlog_program, tmp_path) as (process, port):
        process.send_signal(number)
        assert process.wait(WAIT_S) == status
        wait_until(lambda: not is_open(port), timeout_s=WAIT_S)


def test_it_ends_by_the_signal_of_its_process(dlog_program: Path, tmp_path: Path) -> None:
    """As shells tell it."""
    with serving(dlog_program, tmp_path) as (process, _):
        found = subprocess.run(
            ["pgrep", "-f", f"dlcore.ops.cli metadata serve --data-dir {tmp_path} "],
            capture_output=True,
            check=True,
        )
        subprocess.run(["kill", "-KILL", found.stdout.decode().strip()], check=True)
        assert process.wait(WAIT_S) == -signal.SIGKILL


def test_an_environment_with_it(dlog_program: Path, tmp_path: Path) -> None:
    """Its Python finds all packages, and its `dlog` is the one that is forked."""
    environment_at(tmp_path, dlog_program)
    assert (tmp_path / ".venv/bin/dlog").resolve() == dlog_program
    output = subprocess.run(
        [tmp_path / ".venv/bin/python", "-c", "import sys, pyarrow; print(sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout == f"{tmp_path}/.venv\n"
