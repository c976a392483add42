"""Rows of typed logs in and out of the command line, as JSON objects."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pytest
from hypothesis import example, given, settings, strategies as st

from dlcore.api.schemas import schema_from_text
from dlcore.base.errors import ConfigurationError
from dlcore.log.typed.json_values import json_rows
from dlcore.ops.cli.app import EXIT_USAGE
from dlcore.ops.cli.rows import batch_of_json
from tests.fixtures.lengths import amount
from tests.fixtures.proxies import proxy_thread
from tests.fixtures.shell import lines_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.shell import Shell

_S_MAX = 10**11
"""Times have years of four digits, as in ISO 8601."""
_DAY_S = 86_400
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _ints(least: int, most: int) -> st.SearchStrategy[Any]:
    return st.integers(max(least, -(2**63)), min(most, 2**63 - 1))


LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    (pa.int8(), _ints(-(2**7), 2**7 - 1)),
    (pa.int64(), _ints(-(2**63), 2**63)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float16(), st.floats(width=16, allow_nan=False)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(width=64, allow_nan=False)),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal128(10, 2), st.decimals(-(10**7), 10**7, places=2)),
    (pa.decimal256(60, 0), st.integers(-(10**59), 10**59).map(Decimal)),
    (pa.date32(), st.dates()),
    (pa.date64(), st.dates()),
    *((pa.time32(unit), st.integers(0, _DAY_S * _UNITS[unit] - 1)) for unit in ("s", "ms")),
    *((pa.time64(unit), st.integers(0, _DAY_S * _UNITS[unit] - 1)) for unit in ("us", "ns")),
    *(
        (pa.timestamp(unit, zone), _ints(-_S_MAX // 2 * per_s, _S_MAX * per_s))
        for unit, per_s in _UNITS.items()
        for zone in (None, "UTC", "Europe/Paris")
    ),
    *((pa.duration(unit), _ints(-(2**63), 2**63)) for unit in _UNITS),
    (
        pa.month_day_nano_interval(),
        st.tuples(*(_ints(-(2**bits), 2**bits - 1) for bits in (31, 31, 63))).map(pa.MonthDayNano),
    ),
]


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = inner.filter(lambda key: not pa.types.is_null(key[0]))
    return (
        inner.map(lambda item: (pa.list_(item[0]), st.lists(st.none() | item[1], max_size=3)))
        | st.tuples(keys, inner).map(
            lambda pair: (
                pa.map_(pair[0][0], pair[1][0]),
                st.lists(st.tuples(pair[0][1], st.none() | pair[1][1]), max_size=3),
            )
        )
        | st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: (
                pa.struct([(f"f{n}", kind) for n, (kind, _) in enumerate(parts)]),
                st.fixed_dictionaries(
                    {f"f{n}": st.none() | part for n, (_, part) in enumerate(parts)}
                ),
            )
        )
    )


_types = st.recursive(st.sampled_from(LEAVES), _nested, max_leaves=4)


@st.composite
def _columns(draw: st.DrawFn) -> pa.Array:
    kind, values = draw(_types)
    rows = draw(st.lists(st.none() | values, min_size=1, max_size=4))
    return pa.array(rows, kind).slice(draw(st.integers(0, len(rows) - 1)))


@settings(max_examples=amount(400, sampled=60))
@given(_columns())
@example(pa.array([-(2**31)], pa.timestamp("s", "Europe/Paris")))  # 9 min 21 s east of UTC then
def test_the_shown_rows_are_read_again(column: pa.Array) -> None:
    """Columns of any type, one in another, also parts of what was read."""
    batch = pa.record_batch({"it": column})
    lines = [line.encode() for line in json_rows(batch)]
    assert batch_of_json(lines, batch.schema, written=0).equals(batch)


def test_how_values_are_shown() -> None:
    """Each type as `dlcore.log.typed.json_values` says."""
    values = {
        "number": (pa.int64(), 2**60),
        "half": (pa.float16(), 1.5),
        "text": (pa.string(), "\u00e4\n\U0001f600"),
        "data": (pa.binary(), b"\xff\0"),
        "price": (pa.decimal128(10, 2), Decimal("-1.50")),
        "day": (pa.date32(), date(2026, 1, 31)),
        "at": (pa.time64("ns"), 1),
        "time": (pa.timestamp("us", "UTC"), datetime(2026, 1, 31, 12, 30, 0, 5, tzinfo=UTC)),
        "local": (pa.timestamp("s"), 0),
        "took": (pa.duration("ms"), timedelta(seconds=1.5)),
        "span": (pa.month_day_nano_interval(), pa.MonthDayNano([1, -2, 3])),
        "days": (pa.list_(pa.date32()), [date(2026, 1, 31), None]),
        "spot": (pa.struct([("x", pa.int8()), ("key", pa.binary(2))]), {"x": 1, "key": b"ab"}),
        "map": (pa.map_(pa.string(), pa.binary()), [("k", b"v")]),
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in values.items()])
    row = {name: value for name, (_, value) in values.items()}
    (shown,) = json_rows(pa.RecordBatch.from_pylist([row], schema))
    assert json.loads(shown) == {
        "number": 2**60,
        "half": 1.5,
        "text": "\u00e4\n\U0001f600",
        "data": "/wA=",
        "price": "-1.50",
        "day": "2026-01-31",
        "at": "00:00:00.000000001",
        "time": "2026-01-31T12:30:00.000005Z",
        "local": "1970-01-01T00:00:00",
        "took": 1500,
        "span": {"months": 1, "days": -2, "nanoseconds": 3},
        "days": ["2026-01-31", None],
        "spot": {"x": 1, "key": "YWI="},
        "map": [{"key": "k", "value": "dg=="}],
    }
    found = batch_of_json([shown.encode(), b"{}"], schema, written=0)
    assert found.to_pylist() == [
        row | {"at": time(), "local": datetime(1970, 1, 1)},  # noqa: DTZ001  # without a zone
        dict.fromkeys(row),
    ]


EVERYTHING = pa.schema(
    [
        ("number", pa.int64()),
        ("text", pa.string()),
        ("day", pa.date32()),
        ("data", pa.binary()),
        ("map", pa.map_(pa.string(), pa.int8())),
        ("span", pa.month_day_nano_interval()),
        ("none", pa.list_(pa.null())),
    ]
)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            b'{"number": "x"}',
            r"line 9: .*Column\(/number\) changed from number to string: expected",
        ),
        (b'{"speed": 1, "number": 1}', "line 9: column 'speed': expected .*number int64, text"),
        (b'{"map": {"k": 1}}', r"line 9: .*Column\(/map\) changed from array to object"),
        (b'{"map": [{"value": 1}]}', "line 9: column 'map': a key is null"),
        (b'{"map": [null]}', "line 9: column 'map': a key is null"),
        (b'{"span": {"days": 4294967296}}', "line 9: Failed to convert JSON to int32"),
        (b'{"none": [true]}', "line 9: column 'none': True: expected null"),
        (b'{"data": "###"}', "line 9: column 'data': Only base64 data is allowed"),
        (b'{"day": "tomorrow"}', "line 9: column 'day': .*'tomorrow'"),
        (b"", "line 9: Empty JSON file"),
        (b"{}{}", "line 9: it holds no object, or several"),
        (b"[1]", "line 9: JSON parse error"),
        (b"a,b", "line 9: JSON parse error.*; the first 7 lines were written"),
    ],
)
def test_lines_that_are_no_row(line: bytes, problem: str) -> None:
    """The error tells which line, what is wrong with it, and which columns there are."""
    with pytest.raises(ConfigurationError, match=problem):
        batch_of_json([b'{"number": 1}', line], EVERYTHING, written=7)


def test_a_null_that_cannot_be() -> None:
    """The line that has it is named, whether it says so or leaves the column out."""
    schema = schema_from_text("id int64 not null, tags list<string not null>, day date32[day]")
    good = b'{"id": 1, "tags": ["a"]}'
    rows = batch_of_json([good, b'{"id": 2}'], schema, written=0)
    assert rows["id"].to_pylist() == [1, 2]
    for line, reason in {
        b'{"id": null}': "'id' is null, and cannot be: expected .*id int64 not null",
        b"{}": "'id' is null, and cannot be",
        b'{"id": 3, "tags": ["a", null]}': "'tags.item' is null, and cannot be",
    }.items():
        with pytest.raises(ConfigurationError, match=f"line 6: column {reason}"):
            batch_of_json([good, line], schema, written=4)


@pytest.mark.integration
@pytest.mark.parametrize("by_proxy", [False, True], ids=["bookies", "a proxy"])
def test_rows_of_a_typed_log(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_proxy: bool
) -> None:
    """Written by lines, shown for people, programs and pipes; also through a proxy."""
    log = f"cli/{uuid4().hex}"
    shell.text("log", "create", log, "--schema", "city string not null, fare double")
    with proxy_thread(shell.uri) as proxy:
        if by_proxy:
            monkeypatch.setenv("DLOG_ENDPOINT", proxy.server.location)
        _check_rows(shell, log, tmp_path)


def _check_rows(shell: Shell, log: str, folder: Path) -> None:
    lines = [json.dumps({"city": f"c{n}", "fare": n / 2}).encode() for n in range(3)]
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
    null = lines_file(folder, lines[0], b'{"fare": 1}')
    exit_code, _, err = shell.outcome("log", "write", log, "--file", null)
    assert exit_code == EXIT_USAGE
    assert "line 2: column 'city' is null, and cannot be" in err
    assert shell.json("log", "show", log)["schema"] == "city string not null, fare double"
    empty = lines_file(folder)
    shell.text("log", "write", log, "--file", empty)
