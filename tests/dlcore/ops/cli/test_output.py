"""Output of commands: tables on a terminal, columns in a pipe, JSON for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
import pytest

from dlcore.ledger.metadata.values import Ensemble
from dlcore.ops.autorecovery.check import Fragment, ReplicaCheck
from dlcore.ops.cli.ledger import _check_row
from dlcore.ops.cli.output import cell, show_done, show_fields, show_rows
from dlcore.wire.port import EntryRange
from tests.fixtures.ledgers import bookie, bookies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROWS = [
    {"log": "a", "records_kept": 5, "sealed": None, "more": [1]},
    {"log": "[b]", "records_kept": 1_000, "sealed": True, "more": []},
]
COLUMNS = ("log", "records_kept", "sealed")


@pytest.fixture
def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, str]]:
    """Run something as a command does; return what it prints to standard output and error."""

    def run(
        action: Callable[[], None], *, is_json: bool, is_terminal: bool, is_quiet: bool = False
    ) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
        with click.Context(click.Command("test"), obj={"json": is_json, "names": is_quiet}):
            action()
        captured = capsys.readouterr()
        return click.unstyle(captured.out), captured.err

    return run


def show(rows: Sequence[dict[str, object]]) -> Callable[[], None]:
    """Return what shows rows."""
    return lambda: show_rows(rows, columns=COLUMNS, empty="there is none")


def test_a_terminal_gets_a_table(printed: Callable[..., tuple[str, str]]) -> None:
    """Numbers to the right; brackets of a name are no markup."""
    out, _ = printed(show(ROWS), is_json=False, is_terminal=True)
    head, _, *lines = [line.split() for line in out.splitlines() if line.strip()]
    assert head == ["log", "records", "kept", "sealed"]
    assert lines == [["a", "5", "-"], ["[b]", "1000", "yes"]]
    first, second = [line for line in out.splitlines() if " 5 " in line or "1000" in line]
    assert first.index("5") == second.index("1000") + 3


def test_a_pipe_gets_columns_and_a_program_all_fields(
    printed: Callable[..., tuple[str, str]],
) -> None:
    """Whether a terminal is there or not does not change JSON."""
    out, _ = printed(show(ROWS), is_json=False, is_terminal=False)
    assert out.splitlines() == [
        "log  records kept  sealed",
        "a               5       -",
        "[b]          1000     yes",
    ]
    out, _ = printed(show(ROWS), is_json=True, is_terminal=True)
    assert json.loads(out) == ROWS


def test_quiet_prints_names_alone(printed: Callable[..., tuple[str, str]]) -> None:
    """No head that a loop would take for a name, on a terminal neither; JSON has all, as ever."""
    for is_terminal in (False, True):
        output = printed(show(ROWS), is_json=False, is_terminal=is_terminal, is_quiet=True)
        assert output == ("a\n[b]\n", "")
    assert printed(show([]), is_json=False, is_terminal=False, is_quiet=True) == ("", "")
    out, _ = printed(show(ROWS), is_json=True, is_terminal=False, is_quiet=True)
    assert json.loads(out) == ROWS


def test_nothing_to_show_is_said_beside_the_output(
    printed: Callable[..., tuple[str, str]],
) -> None:
    """A program gets an empty list."""
    assert printed(show([]), is_json=False, is_terminal=True) == ("", "there is none\n")
    assert printed(show([]), is_json=True, is_terminal=False) == ("[]\n", "")


def test_single_things_are_fields(printed: Callable[..., tuple[str, str]]) -> None:
    """Names with spaces for people, as they are for programs."""
    fields = {"last_entry": None, "state": "closed"}
    out, _ = printed(lambda: show_fields(fields), is_json=False, is_terminal=False)
    assert out.splitlines() == ["last entry  -", "state       closed"]
    out, _ = printed(lambda: show_done("done", fields), is_json=False, is_terminal=False)
    assert out == "done\n"
    for action in (lambda: show_fields(fields), lambda: show_done("done", fields)):
        out, _ = printed(action, is_json=True, is_terminal=False)
        assert json.loads(out) == fields


def test_cells() -> None:
    """Long lists are cut, with how many are left."""
    assert [cell(value) for value in (None, False, 3, "a\tb")] == ["-", "no", "3", "a\\tb"]
    assert cell([1, None, "x"]) == "1, -, x"
    assert cell(range(3)) == "range(0, 3)"
    assert cell(tuple(range(7))) == "0, 1, 2, 3, 4, … 2 more"


def check_of(missing: int, *, unknown: str | None = None) -> ReplicaCheck:
    """Return a check of a replica that misses every other entry of the first ones."""
    fragment = Fragment(ensemble=Ensemble(0, bookies("ABC")), last_entry_id=99, is_final=True)
    ranges = tuple(EntryRange(first_entry_id=2 * i, last_entry_id=2 * i) for i in range(missing))
    return ReplicaCheck(
        fragment=fragment, position=1, bookie=bookie("B"), missing=ranges, unknown=unknown
    )


@pytest.mark.parametrize(
    ("check", "state", "missing", "detail"),
    [
        (check_of(0), "holds", 0, None),
        (check_of(2), "misses", 2, "0-0, 2-2"),
        (check_of(8), "misses", 8, "0-0, 2-2, 4-4, 6-6, 8-8, … 3 more ranges"),
        (check_of(0, unknown="it was not asked"), "unknown", None, "it was not asked"),
    ],
)
def test_the_entries_of_a_replica(
    check: ReplicaCheck, state: str, missing: int | None, detail: str | None
) -> None:
    """No answer is not the same as an entry that is missing."""
    row = _check_row(check)
    assert (row["state"], row["missing_entries"], row["detail"]) == (state, missing, detail)
    assert (row["first_entry"], row["last_entry"], row["position"]) == (0, 99, 1)
