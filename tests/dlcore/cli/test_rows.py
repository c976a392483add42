"""Rows of typed logs in and out of the command line, as JSON objects."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.cli.app import EXIT_USAGE
from dlcore.cli.rows import batch_of_json, json_of
from dlcore.errors import ConfigurationError
from tests.fixtures.proxies import proxy_thread
from tests.fixtures.shell import lines_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.shell import Shell

EVERYTHING = pa.schema(
    [
        ("number", pa.int64()),
        ("text", pa.string()),
        ("day", pa.date32()),
        ("time", pa.timestamp("us", "UTC")),
        ("data", pa.binary()),
        ("key", pa.binary(2)),
        ("price", pa.decimal128(10, 2)),
        ("list", pa.list_(pa.struct([("x", pa.int8())]))),
        ("map", pa.map_(pa.string(), pa.int8())),
        ("days", pa.list_(pa.date32())),
    ]
)


def test_what_is_shown_is_read_again() -> None:
    """Of each type that JSON rows have; of others none are read."""
    row = {
        "number": 2**60,
        "text": "ä\n😀",
        "day": date(2026, 1, 31),
        "time": datetime(2026, 1, 31, 12, 30, 0, 5, tzinfo=UTC),
        "data": b"\xff\0",
        "key": b"ab",
        "price": Decimal("-1.50"),
        "list": [{"x": 1}, None],
    }
    lines = [json_of(row | {"map": None, "days": None}).encode(), b"{}"]
    found = batch_of_json(lines, EVERYTHING, written=0)
    assert found.to_pylist() == [row, dict.fromkeys(row)]
    assert json.loads(json_of({"map": [("k", 1)], "float": math.pi})) == {
        "map": [["k", 1]],
        "float": math.pi,
    }


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            b'{"number": "x"}',
            r"line 9: .*Column\(/number\) changed from number to string: expected",
        ),
        (b'{"speed": 1, "number": 1}', "line 9: column 'speed': expected .*number int64, text"),
        (b'{"map": {"k": 1}}', "line 9: column 'map': expected"),
        (b'{"data": "###"}', "line 9: Only base64 data is allowed"),
        (b'{"day": "tomorrow"}', "line 9: .*'tomorrow'"),
        (b"", "line 9: Empty JSON file"),
        (b"{}{}", "line 9: it holds no object, or several"),
        (b"[1]", "line 9: JSON parse error"),
        (b"a,b", "line 9: JSON parse error.*; the first 7 lines were written"),
    ],
)
def test_what_is_no_row(line: bytes, problem: str) -> None:
    """The error tells which line, what is wrong with it, and which columns there are."""
    with pytest.raises(ConfigurationError, match=problem):
        batch_of_json([b'{"number": 1}', line], EVERYTHING, written=7)


@pytest.mark.integration
@pytest.mark.parametrize("by_proxy", [False, True], ids=["bookies", "a proxy"])
def test_rows_of_a_typed_log(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_proxy: bool
) -> None:
    """Written by lines, shown for people, programs and pipes; also through a proxy."""
    log = f"cli/{uuid4().hex}"
    shell.text("log", "create", log, "--schema", "city string, fare double")
    with proxy_thread(shell.uri) as proxy:
        if by_proxy:
            monkeypatch.setenv("DLOG_ENDPOINT", proxy.server.location)
        _check_rows(shell, log, tmp_path)


def _check_rows(shell: Shell, log: str, folder: Path) -> None:
    lines = [json_of({"city": f"c{n}", "fare": n / 2}).encode() for n in range(3)]
    path = lines_file(folder, *lines)
    shell.text("log", "write", log, "--file", path, "--txid", "line-number")
    rows = [json.loads(line) for line in shell.text("log", "tail", log, "--json").splitlines()]
    assert [(row["dlsn"], row["txid"], row["row"]["fare"]) for row in rows] == [
        ("1:0:0", 1, 0.0),
        ("1:0:1", 2, 0.5),
        ("1:0:2", 3, 1.0),
    ]
    raw = "".join(line.decode() + "\n" for line in lines)
    assert shell.text("log", "dump", log, "--raw") == raw
    shown = shell.text("log", "tail", log, "--from-txid", "2", "-n", "1").split(maxsplit=3)
    assert shown[:2] == ["1:0:1", "2"]
    assert json.loads(shown[3]) == {"city": "c1", "fare": 0.5}
    assert shell.text("log", "tail", log, "-n", "1", "--format", "{dlsn}") == "1:0:2\n"
    shell.text("log", "write", log, "--file", path)
    assert shell.text("log", "count", log) == "6\n"
    bad = lines_file(folder, lines[0], b'{"speed": 1}')
    exit_code, _, err = shell.outcome("log", "write", log, "--file", bad)
    assert exit_code == EXIT_USAGE
    assert "line 2: column 'speed': expected a JSON object" in err
    assert "the first 0 lines were written" in err
    assert shell.text("log", "count", log) == "6\n"
    empty = lines_file(folder)
    shell.text("log", "write", log, "--file", empty)
