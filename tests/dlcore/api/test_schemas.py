"""Schemas as people write them.

Goal: what the command shows can be given back to it, and an error names the place of the mistake.
Method: every type that a log can hold, drawn nestings, and spellings that people use.
"""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from pyarrow import parquet

from dlcore.api.schemas import describe_schema, schema_from_bytes, schema_from_text
from dlcore.base.errors import ConfigurationError
from dlcore.log.typed.schema import Column, describe
from dlcore.log.typed.text import parse_columns
from tests.dlcore.log.test_typed_arrow import ALL_TYPES
from tests.dlcore.log.test_typed_schema import column


@given(column("a"), column("b"))
def test_the_shown_text_is_read_back(first: Column, second: Column) -> None:
    """Nested types too."""
    columns = (first, second)
    assert parse_columns(describe(columns)) == columns


def test_every_type_is_read_back() -> None:
    """In the spelling of logs, and in Arrow's, a line for each column."""
    assert schema_from_text(describe_schema(ALL_TYPES)) == ALL_TYPES
    lines = "\n".join(f"{field.name}: {field.type}," for field in ALL_TYPES)
    assert schema_from_text(lines) == ALL_TYPES


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ("a float64", [("a", pa.float64())]),
        (" a: utf8 ,b:int8\n\tc date32[day]", [("a", "string"), ("b", "int8"), ("c", "date32")]),
        ("tags list<str>", [("tags", pa.list_(pa.string()))]),
        ("a int8 NOT  NULL, not null", [pa.field("a", pa.int8(), False), ("not", pa.null())]),
        (
            "m map<string not null, int8 not null> not null",
            [pa.field("m", pa.map_("string", pa.field("value", pa.int8(), False)), False)],
        ),
    ],
)  # fmt: skip
def test_other_spellings(text: str, schema: list[tuple[str, pa.DataType]]) -> None:
    """Names that Arrow has for the same types, spaces and lines."""
    assert schema_from_text(text) == pa.schema(schema)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected a name at ''"),
        ("city", "expected the type of city at ''"),
        ("city string fare double", "expected a comma, and a name and a type at 'fare double'"),
        ("tags list<string", "expected a comma or >"),
        ("tags list<string, int8>", "list<…> of 1, not 2"),
        ("tags map<string>", "map<…> of 2, not 1"),
        ("tags set<string>", "list, map or struct before <…>, not set,"),
        ("a " + "list<" * 60, "at most 50 types"),
        ("city varchar(3)", "the type 'varchar(3)', expected one of null, bool, int8"),
        ("cents decimal128(99, 2)", "the type 'decimal128(99, 2)', expected"),
        ("a int8, a int8", "the name 'a' twice"),
        ("a int8 not nullable", "expected a comma, and a name and a type at 'not nullable'"),
        ("_txid int64", "a column cannot be called '_txid'"),
    ],
)
def test_a_mistake_is_named_in_the_error(text: str, reason: str) -> None:
    """With the text and where in it."""
    with pytest.raises(ConfigurationError) as raised:
        schema_from_text(text)
    assert reason in str(raised.value)


def test_files() -> None:
    """Files of Arrow, Parquet and text; the error shows any other one."""
    schema = pa.schema([("city", pa.string()), ("fare", pa.float64())])
    table = schema.empty_table()
    contents = [b"city string, fare double\n", schema.serialize().to_pybytes()]
    for write in (pa.ipc.new_file, pa.ipc.new_stream):
        sink = pa.BufferOutputStream()
        with write(sink, schema) as writer:
            writer.write_table(table)
        contents.append(sink.getvalue().to_pybytes())
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink)
    contents.append(sink.getvalue().to_pybytes())
    for content in contents:
        assert schema_from_bytes(content) == schema
    for wrong in (b"\xc3\x28", b"ARROW1 and no more", b"PAR1", b"\xff\xff\xff\xff"):
        with pytest.raises(ConfigurationError, match="expected the text of a schema"):
            schema_from_bytes(wrong)
