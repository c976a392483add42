"""Long work tells on a terminal how far it is, and says nothing where no person looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.ops.cli import output
from tests.fixtures.shell import Shell, lines_file

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

SHOWN = {
    "log copy {log} {other}": "records copied: 4",
    "log write {log} --file {file}": "records: 2",
    "log write {other} --file {file} --stream": "bytes: 4",
    "log inspect {log} --entries": "segments read of log {log}: 0 of 2",
    "log inspect {other}": "logs inspected: 0 of 1",
    "log space {log}": "logs: 0 of 2",
    "log truncate {log} 2:0:0 --yes": "truncating: 0 s",
    "log purge {log} 1 --yes": "purging: 0 s",
    "log delete {log} --yes": "deleting: 0 s",
    "staging clean --leftovers-days 3 --yes": "cleaning: 0 s",
    "ledger list": "ledgers: ",
    "bookie decommission no-such-bookie --yes": "ledgers looked at: ",
}
"""Commands that are at it for long, and what they tell; of those that print, below."""
PRINTING = {
    "log dump {log}": "records: ",
    "log dump {log} --entries": "entries: 1:0:0",
    "log tail {log} --from-dlsn 1:0:0 -n 2": "records: 2 of 2",
    "log cat {other}": "bytes: 4",
    "ledger read {ledger}": "entries: 1",
}
"""Those that print what they read: where that can be seen it is enough."""


def look_at(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    """Let a stream be a terminal to which everything is written at once."""
    monkeypatch.setattr(output, "_PROGRESS_INTERVAL_MS", 0)
    monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)


@pytest.fixture
def names(shell: Shell, log: str, tmp_path: Path) -> dict[str, str]:
    """A log of two segments, one of bytes of a stream or for records, and a file of two lines."""
    path = lines_file(tmp_path, b"a", b"b")
    for _ in range(2):
        shell.text("log", "write", log, "--file", path)
    ledger = str(shell.json("segment", "list", log)[0]["ledgers"][0])
    other = f"{log}/other"
    shell.text("log", "create", other)
    return {"log": log, "other": other, "file": path, "ledger": ledger}


@pytest.mark.parametrize(("command", "reason"), SHOWN.items())
def test_long_work_tells_how_far_it_is(
    command: str, reason: str, shell: Shell, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one line, which is cleared at the end; never beside JSON."""
    look_at(monkeypatch, "stderr")
    arguments = command.format(**names).split()
    _, _, err = shell.outcome(*arguments)
    assert f"\r{reason.format(**names)}" in err
    assert "\r\x1b[K" in err
    _, _, err = shell.outcome("--json", *arguments)
    assert "\r" not in err


@pytest.mark.parametrize(("command", "reason"), PRINTING.items())
def test_printed_output_is_progress_enough(
    command: str, reason: str, shell: Shell, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if a person sees it; if it goes to a file, the progress is shown."""
    shell.text("log", "write", names["other"], "--file", names["file"], "--stream")
    look_at(monkeypatch, "stderr")
    arguments = command.format(**names).split()
    _, _, err = shell.outcome(*arguments)
    assert f"\r{reason}" in err
    look_at(monkeypatch, "stdout")
    assert shell.outcome(*arguments)[2] == ""


def test_no_progress_is_shown_without_a_terminal(shell: Shell, names: dict[str, str]) -> None:
    """A file of errors has errors."""
    for command in ("log copy {log} {other}", "log dump {log}", "log truncate {log} 2:0:0 --yes"):
        _, _, err = shell.outcome(*command.format(**names).split())
        assert "\r" not in err
