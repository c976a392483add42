"""Commands that change how logs and bookies are kept, on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest

from dlcore.base.records import LogRecord
from dlcore.ops.cli.app import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from dlcore.ops.cli.times import AGE_S, age_text
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.shell import Shell

pytestmark = pytest.mark.integration


@pytest.fixture
def two_records(tmp_path: Path) -> str:
    """A file of two lines."""
    path = tmp_path / "two"
    path.write_bytes(b"a\nb\n")
    return str(path)


def test_a_log_is_renamed(shell: Shell, log: str, two_records: str) -> None:
    """Its records come along; its old name is free."""
    shell.text("log", "write", log, "--file", two_records)
    renamed = shell.json("log", "rename", log, f"{log}-new")
    assert (renamed["log"], renamed["old_name"]) == (f"{log}-new", log)
    assert shell.text("log", "tail", f"{log}-new", "--raw").split() == ["a", "b"]
    assert shell.outcome("log", "show", log)[0] == EXIT_FAILED
    shell.text("log", "create", log)
    assert shell.outcome("log", "rename", log, f"{log}-new")[0] == EXIT_FAILED


def test_settings_are_shown_and_changed(shell: Shell, log: str) -> None:
    """The error names the mistake, and right values."""
    settings = shell.json("log", "settings", log)
    assert settings.pop("mode") == "any"
    assert set(settings.values()) == {None, False}
    changed = shell.json(
        "log", "settings", log, "--set", "compression=zstd", "--set", "segment_bytes_max=1000000"
    )
    assert (changed["compression"], changed["segment_bytes_max"]) == ("zstd", 1_000_000)
    assert shell.json("log", "settings", log, "--unset", "compression")["compression"] is None
    of_log = ("log", "settings", log)
    assert "expected a tier of the log's own" in shell.outcome(*of_log, "--set", "table=delta")[2]
    for change in ("tier=file:///nowhere", "table=delta"):
        shell.text(*of_log, "--set", change)
    assert "expected a tier of the log's own" in shell.outcome(*of_log, "--unset", "tier")[2]
    shell.text(*of_log, "--unset", "table", "--unset", "tier")
    for wrong, reason in {
        "colour=red": "segment_bytes_max",
        "compression=zip": "none, lz4 or zstd",
        "segment_bytes_max=-1": "expected a number > 0",
        "segment_bytes_max": "expected KEY=VALUE",
    }.items():
        exit_code, _, err = shell.outcome("log", "settings", log, "--set", wrong)
        assert exit_code == EXIT_USAGE
        assert reason in err


def test_retention(shell: Shell, log: str, two_records: str) -> None:
    """It is shown, set and taken back; what will go is said."""
    shell.text("log", "write", log, "--file", two_records)
    assert shell.text("log", "retention", log) == f"log {log} keeps its records for ever\n"
    exit_code, out, err = shell.outcome("log", "retention", log, "7d", "--yes")
    assert (exit_code, out) == (0, f"log {log} keeps its records for 7d\n")
    assert f"Drop records of log {log} that are older than 7d: 0 are now" in err
    assert shell.json("log", "retention", log)["retention_s"] == 7 * 24 * 3600
    assert shell.json("log", "retention", log, "forever")["retention_s"] is None
    assert "--yes is required" in shell.outcome("log", "retention", log, "1h")[2]


def test_records_that_a_setting_removes_are_counted(
    shell: Shell, log: str, two_records: str
) -> None:
    """For each command that sets it, also for a log with explicit truncation."""
    shell.text("log", "write", log, "--file", two_records)

    def question(*arguments: str) -> str:
        exit_code, _, err = shell.outcome("log", *arguments, "--yes")
        assert exit_code == 0, err
        return err

    older = f"records of log {log} that are older than"
    assert question("settings", log, "--set", "retention_s=7200") == f"Drop {older} 2h: 0 are now\n"
    assert question("settings", log, "--set", "retention_s=7200") == ""
    assert question("settings", log, "--set", "explicit_truncation=true") == ""
    shown = shell.text("log", "retention", log)
    assert shown == f"log {log} keeps all its records, and truncated ones until they are 2h old\n"
    assert question("retention", log, "1h") == f"Drop the truncated {older} 1h\n"
    assert "--yes is required" in shell.outcome("log", "retention", log, "forever")[2]
    assert question("retention", log, "forever") == f"Drop the truncated records of log {log}\n"
    question("retention", log, "7d")
    err = question("settings", log, "--set", "explicit_truncation=false", "--json")
    assert json.loads(err)["note"] == f"Drop {older} 7d: 0 are now"


def test_a_ledger_that_is_written_is_closed_on_command(shell: Shell, log: str) -> None:
    """Its writer is fenced by that."""
    with open_namespace(shell.uri) as namespace, namespace.open_log(log) as manager:
        writer = manager.open_writer()
        writer.write(LogRecord(txid=1, payload=b"a"))
        writer.commit()
        ledger_id = str(manager.get_log_segments()[0].extents[0].ledger_id)
        assert "--yes is required" in shell.outcome("ledger", "recover", ledger_id)[2]
        exit_code, out, err = shell.outcome("ledger", "recover", ledger_id, "--yes")
        assert exit_code == 0
        assert f"ledger {ledger_id} of log {log}: a client that still writes it is fenced" in err
        assert f"ledger {ledger_id} is closed" in out
        writer.abort()


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("1.5h", 5400), ("7d", 604_800), ("forever", float("inf"))]
)
def test_ages(text: str, seconds: float) -> None:
    """A number and a unit."""
    assert AGE_S.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "0s", "nand", "1y"])
def test_texts_that_are_no_age(text: str) -> None:
    """It is refused."""
    with pytest.raises(click.BadParameter, match="is no age"):
        AGE_S.convert(text, None, None)


def test_ages_are_printed_in_the_largest_unit() -> None:
    """They are then short."""
    assert [age_text(s) for s in (0.5, 90, 7200, 86_400)] == ["0.5s", "90s", "2h", "1d"]


def test_a_bookie_is_held_read_only(shell: Shell, log: str) -> None:
    """It gets no new ledgers until the command ends that."""

    def states() -> dict[str, str]:
        return {row["name"]: row["state"] for row in shell.json("bookie", "list")}

    name = sorted(states())[-1]
    try:
        assert shell.text("bookie", "read-only", name) == f"bookie {name} is read-only\n"
        assert states()[name] == "read-only"
        assert shell.json("bookie", "read-only", name)["registered"]  # already
        exit_code, _, err = shell.outcome("log", "create", f"{log}/4", "--replication-factor", "4")
        assert exit_code == 0, err
        exit_code, _, err = shell.outcome(
            "log", "write", f"{log}/4", "--file", os.devnull, "--whole"
        )
        assert exit_code == 0, err  # nothing to write: no ledger
    finally:
        shell.text("bookie", "read-only", name, "--off")
    assert states()[name] == "writable"
    shell.text("bookie", "read-only", name, "--off")
    assert shell.outcome("bookie", "read-only", "unknown")[0] == EXIT_USAGE


def test_watching_a_log(sandbox: Sandbox, shell: Shell, log: str, two_records: str) -> None:
    """Each change is a line at once; the end of the log is the end."""
    command = [sys.executable, "-m", "dlcore.ops.cli", "log", "watch", log, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"DLOG_URI": sandbox.uri}
    ) as watcher:
        try:
            assert watcher.stdout is not None
            assert json.loads(watcher.stdout.readline())["event"] == "watching, 0 segments"
            shell.text("log", "write", log, "--file", two_records)
            seen: list[str] = []
            while not seen or "2 records final" not in seen[-1]:
                seen.append(json.loads(watcher.stdout.readline())["event"])
            assert "segment 1 started" in seen
            assert "segment 1 completed with 2 records" in seen
            shell.text("log", "truncate", log, "1:1:0", "--yes")
            reply = json.loads(watcher.stdout.readline())
            assert reply["event"] == "truncated before 2:0:0"
            shell.text("log", "seal", log, "--yes")
            assert json.loads(watcher.stdout.readline())["event"] == "sealed"
            shell.text("log", "delete", log, "--yes")
            assert json.loads(watcher.stdout.readline())["event"] == "deleted"
            assert watcher.wait(60) == 0
        finally:
            watcher.kill()


def test_watching_a_namespace(sandbox: Sandbox, shell: Shell, log: str) -> None:
    """Which logs there are, come and go."""
    command = [sys.executable, "-m", "dlcore.ops.cli", "namespace", "watch", log, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"DLOG_URI": sandbox.uri}
    ) as watcher:
        try:
            assert watcher.stdout is not None
            for arguments, event, name in (
                ([], "created", log),
                (["log", "create", f"{log}/a"], "created", f"{log}/a"),
                (["log", "rename", f"{log}/a", f"{log}/b"], "renamed", f"{log}/b"),
                (["log", "delete", f"{log}/b", "--yes"], "deleted", f"{log}/b"),
            ):
                if arguments:
                    shell.text(*arguments)
                reply = json.loads(watcher.stdout.readline())
                assert (reply["event"], reply["log"]) == (event, name)
        finally:
            watcher.kill()


def test_a_watch_is_interrupted(sandbox: Sandbox, log: str) -> None:
    """Ctrl-C ends it as any command."""
    command = [sys.executable, "-m", "dlcore.ops.cli", "log", "watch", log]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"DLOG_URI": sandbox.uri},
    ) as watcher:
        try:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == b"watching, 0 segments\n"
            watcher.send_signal(signal.SIGINT)
            assert watcher.wait(60) == EXIT_INTERRUPTED
            assert watcher.stderr is not None
            assert watcher.stderr.read().split(b"\n")[-2] == b"error: interrupted"
        finally:
            watcher.kill()
