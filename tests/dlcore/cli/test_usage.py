"""The command line without a cluster: help, wrong use, and how failures reach the shell."""

from __future__ import annotations

import json

import click
import pytest

from dlcore.cli.app import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, dlog, run
from dlcore.cli.output import payload_json, payload_text, printable, time_text

NOWHERE = "distributedlog://127.0.0.1:1/dlog"
COMMANDS = [
    "log create",
    "log list",
    "log show",
    "log delete",
    "log truncate",
    "log write",
    "log tail",
    "log count",
    "segment list",
    "autorecovery pause",
    "autorecovery run",
    "autorecovery status",
    "bookie collect",
    "bookie decommission",
    "bookie list",
    "ledger check",
    "ledger recover",
    "ledger show",
    "sandbox",
    "staging clean",
    "staging list",
]


def leaves(group: click.Group, path: str = "") -> list[str]:
    """Return the names of all commands that do something."""
    found = []
    for name, command in group.commands.items():
        here = f"{path} {name}".strip()
        found += leaves(command, here) if isinstance(command, click.Group) else [here]
    return found


def test_the_commands_are_those_of_the_manual() -> None:
    """A command that is missing, or new and not tested below, shows up here."""
    assert sorted(leaves(dlog)) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command explains itself and shows one line that works."""
    assert run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"dlog {command}" in text.split("Example: ")[1]


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
        (["log", "tail", "c", "--from-dlsn", "1:0:0", "--from-txid", "1"], "error: give --from"),
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
        (["sandbox", "--bookies", "0"], "error: "),
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
        "bookie decommission bookie-3",
        "bookie collect bookie-3",
        "staging clean --leftovers-days 3",
    ],
)
def test_what_destroys_asks_people_and_needs_yes_from_others(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal there is nobody to ask; on one, anything but yes changes nothing."""
    arguments = [*command.split(), "--uri", NOWHERE]
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert run(arguments) == EXIT_USAGE
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    questions: list[str] = []

    def say_no(question: str) -> str:
        questions.append(question)
        return "n"

    monkeypatch.setattr("click.termui.visible_prompt_func", say_no)
    assert run(arguments) == EXIT_INTERRUPTED
    (question,) = questions
    named = command.split()[3 if "--" in command else 2]
    assert named in question + capsys.readouterr().err


def test_texts_cannot_move_the_cursor() -> None:
    """Whatever a record or a name holds, a terminal shows it as text."""
    assert printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\\n"
    assert payload_text("grün".encode()) == "grün"
    assert payload_text(b"\xff\x00") == "b'\\xff\\x00'"


def test_json_payloads_lose_nothing() -> None:
    """Bytes that are no text travel as base64 under another key."""
    assert payload_json("grün\n".encode()) == {"payload": "grün\n"}
    assert json.dumps(payload_json(b"\xff")) == '{"payload_base64": "/w=="}'


def test_times_that_no_calendar_has_are_numbers() -> None:
    """Record times come from a writer's clock, which may be wrong by any amount."""
    assert time_text(0) == "1970-01-01T00:00:00.000Z"
    assert time_text(2**62) == str(2**62)


def test_no_answer_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A namespace that nobody serves is exit code 1, without a traceback."""
    assert run(["log", "list", "--uri", NOWHERE]) == EXIT_FAILED
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
