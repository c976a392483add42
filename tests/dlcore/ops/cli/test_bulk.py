"""Copying, purging and printing whole logs, on a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dlcore.ops.cli.app import EXIT_FAILED, EXIT_USAGE
from tests.fixtures.shell import Shell, lines_file
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration


def test_a_log_is_copied_once(shell: Shell, log: str, tmp_path: Path) -> None:
    """However often it is called: what came since follows; the target is made when that is said."""
    copy = f"{log}/copy"
    shell.text("log", "write", log, "--file", lines_file(tmp_path, b"a", b"b"))
    exit_code, _, err = shell.outcome("log", "copy", log, copy)
    assert (exit_code, f"{copy!r} does not exist" in err) == (EXIT_FAILED, True)
    output = shell.text("log", "copy", log, copy, "--create")
    assert output == f"copied 2 records of log {log} to {copy}\n"
    assert shell.json("log", "show", copy)["quorum"] == shell.json("log", "show", log)["quorum"]
    assert shell.json("log", "copy", log, copy) == {"log": log, "target": copy, "records": 0}
    shell.text("log", "write", log, "--file", lines_file(tmp_path, b"c"))
    assert shell.json("log", "copy", log, copy)["records"] == 1
    assert shell.text("log", "tail", copy, "--raw").split() == ["a", "b", "c"]
    exit_code, _, err = shell.outcome("--json", "log", "copy", log, log)
    assert exit_code == EXIT_USAGE
    assert '"kind": "ConfigurationError"' in err


def test_old_segments_are_purged(shell: Shell, log: str, tmp_path: Path) -> None:
    """Whole ones, and never the last; what will go is said, and needs consent."""
    for _ in range(3):
        path = lines_file(tmp_path, b"a", b"b")
        shell.text("log", "write", log, "--file", path)
    txids = [int(t) for t in shell.text("log", "tail", log, "--format", "{txid}").split()]
    exit_code, _, err = shell.outcome("log", "purge", log, str(txids[3]))
    assert (exit_code, "--yes is required" in err) == (EXIT_USAGE, True)
    exit_code, out, err = shell.outcome("log", "purge", log, str(txids[2]), "--yes")
    assert (exit_code, out) == (0, f"purged log {log}\n")
    assert f"Drop the 2 records of log {log} before segment 2" in err
    assert shell.text("log", "count", log) == "4\n"
    again = shell.json("log", "purge", log, str(txids[2]), "--yes")
    assert again == {"log": log, "txid": txids[2], "changed": False}
    output = shell.text("log", "purge", log, str(txids[2]), "--yes")
    assert output == f"log {log} has no segment that is older\n"


def test_bytes_go_in_and_come_out(shell: Shell, log: str, tmp_path: Path) -> None:
    """As a stream: of any size, with any bytes, from any position; written on where it ended."""
    path, data = tmp_path / "bytes", os.urandom(3_000_000)
    path.write_bytes(data)
    written = shell.json("log", "write", log, "--stream", "--file", str(path))
    assert written == {"log": log, "bytes": len(data), "position": len(data)}
    path.write_bytes(b"more")
    output = shell.text("log", "write", log, "--stream", "--file", str(path))
    assert output == f"wrote 4 bytes to log {log}, which ends at {len(data) + 4}\n"
    exit_code, _, err = shell.outcome("log", "write", log, "--stream", "--whole")
    assert (exit_code, "give one of" in err) == (EXIT_USAGE, True)
    cat = [sys.executable, "-m", "dlcore.ops.cli", "--uri", shell.uri, "log", "cat", log]
    for position in (0, 1_500_000, len(data), len(data) + 4):
        done = subprocess.run([*cat, "--position", str(position)], capture_output=True, check=True)
        assert done.stdout == (data + b"more")[position:]
    done = subprocess.run(cat, capture_output=True, check=True)
    assert done.stdout == data + b"more"


def test_a_stream_is_durable_while_its_input_pauses(shell: Shell, log: str) -> None:
    """The writer need not end it for others to read what came so far."""
    command = [sys.executable, "-m", "dlcore.ops.cli", "--uri", shell.uri, "log", "write", log]
    writer = subprocess.Popen([*command, "--stream"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert writer.stdin is not None
        writer.stdin.write(b"so far")
        writer.stdin.flush()
        wait_until(lambda: shell.outcome("log", "cat", log)[1] == "so far", timeout_s=60)
    finally:
        writer.send_signal(signal.SIGTERM)
        writer.communicate()
