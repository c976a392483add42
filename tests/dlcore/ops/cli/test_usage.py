"""The command line without a cluster: help, wrong use, and how failures reach the shell."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from dlcore.backends.direct import namespace
from dlcore.base.config import SESSION_TIMEOUT_S
from dlcore.base.errors import DLError
from dlcore.ops.cli.app import EXIT_FAILED, EXIT_USAGE, SECTIONS, dlog, run
from dlcore.ops.cli.output import payload_text, printable, time_text
from dlcore.ops.cli.rows import payload_json
from dlcore.ops.cli.times import EpochMs
from tests.fixtures.shell import leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

NOWHERE = "distributedlog://127.0.0.1:1/dlog"


@pytest.mark.parametrize("command", leaves())
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command explains itself and its options, and shows one line that works."""
    if command == "bookie run":  # takes the place of its process
        shown = subprocess.run(
            [sys.executable, "-m", "dlcore.ops.cli", *command.split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        text = shown.stdout
    else:
        assert run([*command.split(), "--help"]) == 0
        text = capsys.readouterr().out
        assert not [option.name for option in options_of(command) if not option.help]
    assert f"dlog {command}" in text.lower().split("example:")[1]


def groups(command: click.Command = dlog) -> Iterator[list[str]]:
    """Yield the names of each group of commands, that of the root first."""
    if isinstance(command, click.Group):
        yield []
        for name, each in command.commands.items():
            yield from ([name, *names] for names in groups(each))


@pytest.mark.parametrize("names", list(groups()), ids=" ".join)
def test_the_help_of_a_command_fits_its_line(
    names: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal of 80 columns nothing of it is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*names, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[1:] if line.endswith("...")] == []
    assert max(map(len, lines)) <= 80


def test_each_command_is_in_one_section_of_the_help() -> None:
    """One without would not be shown."""
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(dlog.commands)


def options_of(path: str) -> list[click.Option]:
    """Return the options of a command."""
    command: click.Command = dlog
    for name in path.split():
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return [each for each in command.params if isinstance(each, click.Option)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "Usage: dlog"),
        (["log"], "Usage: dlog log"),
        (["nonsense"], "error: No such command 'nonsense'"),
        (["log", "list"], "error: no namespace: give --uri or set DLOG_URI"),
        (["log", "show", "--uri", NOWHERE], "error: Missing argument 'LOG'"),
        (["log", "list", "--uri", "http://example.com"], "error: "),
        (["log", "truncate", "clicks", "3-17", "--uri", NOWHERE], "error: expected a DLSN like"),
        (["log", "truncate", "clicks", "--uri", NOWHERE], "error: expected a DLSN or --read"),
        (["console", "--address", "4180", "--uri", NOWHERE], "error: address='4180'"),
        (["console", "--address", "h:" + "9" * 5000, "--uri", NOWHERE], "error: address='h:9"),
        (["console", "--address", "h:99999", "--uri", NOWHERE], "error: address='h:99999'"),
        (
            ["console", "--address", "[::]:1", "--uri", NOWHERE],
            "error: host='::': expected the one",
        ),
        (["console", "--address", "h.example:1", "--uri", NOWHERE], "error: host='h.example'"),
        (
            ["log", "tail", "c", "--from-dlsn", "1:0:0", "--from-txid", "1"],
            "error: give one of --from",
        ),
        (
            ["log", "create", "c", "--replication-factor", "3", "--ensemble", "3"],
            "one or the other",
        ),
        (["log", "create", "c", "--write-quorum", "2", "--ack-quorum", "3"], "E >= Qw >= Qa"),
        (["log", "write", "c", "--txid", "yesterday"], "'now', 'line-number'"),
        (["ledger", "show", "-1"], "error: "),
        (["ledger", "check", "seventeen"], "error: "),
        (["bookie", "decommission", "--uri", NOWHERE], "error: Missing argument 'NAME'"),
        (
            ["autorecovery", "run", "--copy-bytes-per-s", "0", "--uri", NOWHERE],
            "error: copy_bytes_per_s=0.0: expected a number > 0",
        ),
        (
            ["autorecovery", "run", "--upkeep-interval-s", "0", "--uri", NOWHERE],
            "error: upkeep_interval_s=0.0: expected a number > 0",
        ),
        (["sandbox", "--bookies", "0"], "error: "),
        (["log", "settings", "c", "--set", "retention_s=soon", "--uri", NOWHERE], "error: retent"),
        (["log", "settings", "c", "--unset", "colour", "--uri", NOWHERE], "error: colour=None: "),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong command line changes nothing, says what is wrong on standard error, and ends in 2."""
    monkeypatch.delenv("DLOG_URI", raising=False)
    assert run(arguments) == EXIT_USAGE
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.out == ""
    if complaint.startswith("error:"):
        assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "log delete clicks",
        "log truncate clicks 1:0:0",
        "log seal clicks",
        "log subscriptions clicks --delete reader",
        "log repair clicks",
        "log retention clicks 1h",
        "log settings clicks --set retention_s=1",
        "log settings clicks --set explicit_truncation=false",
        "log settings clicks --unset retention_s",
        "bookie decommission bookie-3",
        "bookie collect bookie-3",
        "bookie cookie delete bookie-3",
        "ledger audit --delete",
        "staging clean --leftovers-days 3",
    ],
)
@pytest.mark.parametrize("stdin", ["a pipe", "closed"])
def test_destruction_needs_yes_where_no_one_can_be_asked(
    command: str, stdin: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is asked of the cluster."""
    if stdin == "closed":
        monkeypatch.setattr("sys.stdin", None)
    else:
        monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert run([*command.split(), "--uri", NOWHERE]) == EXIT_USAGE
    assert "--yes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["log", "list"], EXIT_USAGE),
        (["log", "show"], EXIT_USAGE),
        (["log", "truncate", "clicks", "3-17", "--yes", "--uri", NOWHERE], EXIT_USAGE),
        (["log", "seal", "clicks", "--uri", NOWHERE], EXIT_USAGE),
        (["log", "list", "--uri", "http://example.com"], EXIT_USAGE),
    ],
)
def test_errors_in_json(
    arguments: list[str],
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One object on standard error, whatever is wrong; no question, at a terminal neither."""
    monkeypatch.delenv("DLOG_URI", raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert run(["--json", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    output = json.loads(captured.err)
    assert output["exit_code"] == code
    assert output["error"]
    assert output["kind"].endswith(("Error", "Parameter"))
    assert output["retriable"] is False


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_no_input_at_all(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program is started that has closed it: reported before anything is asked."""
    monkeypatch.setattr("sys.stdin", None)
    assert run(["log", "write", "c", *flags, "--uri", NOWHERE]) == EXIT_USAGE
    assert "there is no standard input: give --file" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_log_lines_look_like_notes(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings and errors, from any thread: with --json nothing on standard error is no object."""
    monkeypatch.setattr(logging.root, "handlers", [])

    async def open_namespace(*_: object, **__: object) -> None:
        await asyncio.to_thread(logging.getLogger("dlcore").warning, "log %r waits", "clicks")
        logging.getLogger("dlcore").info("nothing to tell")
        raise DLError("gone")

    monkeypatch.setattr(namespace, "open_namespace", open_namespace)
    assert run([*flags, "log", "list", "--uri", NOWHERE]) == EXIT_FAILED
    output = capsys.readouterr().err.splitlines()
    if flags:
        logged, failed = map(json.loads, output)
        assert (logged, failed["error"]) == ({"note": "log 'clicks' waits"}, "gone")
    else:
        assert output == ["log 'clicks' waits", "error: gone"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the line that docs/operating.md names; its script asks as bash does here."""
    page = (Path(__file__).parents[4] / "docs/operating.md").read_text(encoding="utf-8")
    assert '`eval "$(_DLOG_COMPLETE=bash_source dlog)"`' in page
    monkeypatch.setenv("_DLOG_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit):
        run([])
    assert "_dlog_completion" in capsys.readouterr().out
    monkeypatch.setenv("_DLOG_COMPLETE", "bash_complete")
    for line, found in (("dlog log li", "list"), ("dlog autorecovery run --aud", "--audit-inter")):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        with pytest.raises(SystemExit):
            run([])
        assert capsys.readouterr().out.startswith(f"plain,{found}")


def test_texts_cannot_move_the_cursor() -> None:
    """Whatever a record or a name holds, a terminal shows it as text."""
    assert printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\\n"
    assert payload_text("grün".encode()) == "grün"
    assert payload_text(b"\xff\x00") == "b'\\xff\\x00'"


def test_json_payloads_lose_nothing() -> None:
    """Bytes that are no text travel as base64 under another key."""
    assert payload_json("grün\n".encode()) == {"value": "grün\n"}
    assert payload_json(b"\xff") == {"value_base64": "/w=="}


def test_times_that_no_calendar_has_are_numbers() -> None:
    """Record times come from a writer's clock, which may be wrong by any amount."""
    assert time_text(0) == "1970-01-01T00:00:00.000Z"
    assert time_text(2**62) == str(2**62)


@pytest.mark.parametrize(
    ("command", "patience"), [("log list", 2), ("log tail clicks", 0.4), ("log write clicks", 0.4)]
)
def test_no_answer_is_a_failure(
    command: str, patience: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """A namespace that is not served is exit code 1, in time; the error names the server."""
    began = time.monotonic()
    assert run([*command.split(), "--uri", NOWHERE, "--patience", str(patience)]) == EXIT_FAILED
    assert time.monotonic() - began < SESSION_TIMEOUT_S
    waited_s = 0.75 * patience
    output = f"error: no ZooKeeper answers at 127.0.0.1:1 (waited {waited_s:g} s)\n"
    assert capsys.readouterr().err == output


@pytest.mark.parametrize("words", ["bookie --help", "dlcore.ops.cli bookie run --help"])
def test_letters_that_the_output_cannot_have_are_spelled(words: str) -> None:
    """A locale with an encoding of its own, as of old machines, is no reason to fail."""
    done = subprocess.run(
        [sys.executable, "-m", *words.split()],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        check=False,
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2026" in done.stdout


@pytest.mark.parametrize(
    ("text", "age_ms"), [("-1h", 3_600_000), ("-90s", 90_000), ("-0.5m", 30_000)]
)
def test_a_time_may_be_given_by_its_age(text: str, age_ms: int) -> None:
    """As ages are; other numbers below 0 stay epoch milliseconds."""
    assert EpochMs(lambda: 10**12).convert(text, None, None) == 10**12 - age_ms
    assert EpochMs(lambda: 10**12).convert("-5", None, None) == -5
    for wrong in ("-1w", "9" * 5000, f"-{'9' * 400}d"):
        with pytest.raises(click.BadParameter, match="-1h"):
            EpochMs(lambda: 10**12).convert(wrong, None, None)
