"""Conditions on rows: parsed or refused with a reason, and true for the right rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.log.typed import conditions
from dlcore.log.typed.conditions import Condition, Literal, Matcher, parse_conditions

COLUMNS = pa.schema(
    [
        ("user_id", pa.int64()),
        ("name", pa.string()),
        ("user id", pa.int32()),
        ("fare", pa.float64()),
        ("paid", pa.bool_()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("cost", pa.decimal128(10, 2)),
        ("raw", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("lasted", pa.duration("s")),
        ("nothing", pa.null()),
    ]
)
ROWS = pa.RecordBatch.from_pydict(
    {
        "user_id": [1, 42, None, 42],
        "name": ["Ann", "it's", None, ""],
        "user id": [1, 2, 3, None],
        "fare": [1.5, float("nan"), None, -3.0],
        "paid": [True, False, None, True],
        "at": [0, 1_767_225_600_000_000, None, 5],
        "cost": [None, "1.25", "7", "8"],
        "raw": [b"a", b"b", None, b""],
        "tags": [["x"], [], None, ["y"]],
        "lasted": [1, 2, None, 3],
        "nothing": [None] * 4,
    },
    schema=pa.schema(
        [(each.name, pa.string()) if each.name == "cost" else each for each in COLUMNS]
    ),
).cast(COLUMNS)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("user_id = 42", [1, 3]),
        ("user_id == 42 AND name = ''", [3]),
        ("user_id != 42", [0]),
        ("user_id <> 42", [0]),
        ("user_id < 42 and user_id >= 1", [0]),
        ("user_id > 41 and user_id <= 42", [1, 3]),
        ("name = 'it''s'", [1]),
        ("name in ('Ann', '')", [0, 3]),
        ('"user id" = 2', [1]),
        ("fare = -3", [3]),
        ("fare >= 1e0", [0]),
        ("paid = true", [0, 3]),
        ("paid = FALSE", [1]),
        ("at >= '2026-01-01T00:00:00Z'", [1]),
        ("cost = 1.25", [1]),
        ("cost > '7'", [3]),
        ("raw = 'b'", [1]),
        ("tags is null", [2]),
        ("lasted is not null and user_id Is Not Null", [0, 1, 3]),
        ("nothing is null and user_id in (1,2)", [0]),
    ],
)
def test_the_right_rows_are_found(text: str, rows: list[int]) -> None:
    """Goal: each operator and kind of literal; null fulfils no comparison."""
    mask = Matcher("clicks", parse_conditions(text), COLUMNS).mask(ROWS)
    assert mask.null_count == 0
    assert [index for index, found in enumerate(mask.to_pylist()) if found] == rows


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "found the end, expected the name of a column"),
        ("user_id", "found the end, expected =, !=, <"),
        ("user_id = ", "expected a number, true, false, or a text in single quotes"),
        ("user_id = name", "expected a number, true, false, or a text in single quotes"),
        ("user_id = 4 or name = 'x'", "found \"or name = 'x'\" at character 13, expected `and`"),
        ("user_id = 4; drop", "found '; drop' at character 12, expected a column, a literal"),
        ("user_id in 4", "expected `(`"),
        ("user_id in (4", "expected `)`"),
        ("user_id in ()", "expected a number"),
        ("user_id is 4", "expected `null`"),
        ("null is null", "expected the name of a column"),
        ("42 = user_id", "expected the name of a column"),
        ("user_id ( 4", "expected =, !=, <"),
        ("missing = 4", "log 'clicks' has no column 'missing': expected one of user_id, name"),
        (
            "user_id = 42.5",
            "column 'user_id' of log 'clicks' has the type int64: expected literals",
        ),
        ("user_id = 9223372036854775808", "has the type int64: expected literals"),
        ("name = 42", "has the type string: expected literals of that type, not 42"),
        ("name in ('a', 42)", "has the type string: expected literals of that type, not 'a', 42"),
        ("tags = 'x'", "which `=` cannot compare: only `is null` and `is not null` can"),
        ("nothing = 4", "which `=` cannot compare"),
        ("lasted = '3'", "which `=` cannot compare"),
    ],
)
def test_a_mistake_is_named_in_the_error(text: str, reason: str) -> None:
    """Goal: the error names the place, the column and its type, and what would be right."""
    with pytest.raises(ConfigurationError) as raised:
        Matcher("clicks", parse_conditions(text), COLUMNS)
    assert reason in str(raised.value)


def test_the_shape_of_a_condition_has_no_literal() -> None:
    """Goal: it can be kept, for it says nothing of a person."""
    text = "user_id = 42 and name in ('Ann','Bob') and \"user id\" is null and fare is not null"
    shapes = [each.shape for each in parse_conditions(text)]
    assert shapes == ["user_id = ?", "name in (?, ?)", '"user id" is null', "fare is not null"]
    assert parse_conditions("a=-.5")[0] == Condition("a", "=", (Literal("-.5", is_text=False),))


def test_conditions_and_literals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a text of any length costs no more than so much."""
    monkeypatch.setattr(conditions, "CONDITIONS_MAX", 2)
    monkeypatch.setattr(conditions, "LITERALS_MAX", 2)
    assert len(parse_conditions("a = 1 and b in (1, 2)")) == 2
    with pytest.raises(ConfigurationError, match="more than 2 conditions"):
        parse_conditions("a = 1 and b = 2 and c = 3")
    with pytest.raises(ConfigurationError, match="more than 2 literals"):
        parse_conditions("a in (1, 2, 3)")
