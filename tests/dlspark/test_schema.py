"""Schemas: what may be read and written, and the words for what may not.

Goal: a DataFrame that a log cannot take is refused before anything is written.  Method: tables.
"""

from __future__ import annotations

import json

import pytest
from pyspark.sql.types import StructField, StructType, TimestampNTZType

from dlcore.base.errors import ConfigurationError
from dlspark.arrow import ROW_SCHEMA
from dlspark.schema import (
    READ_SCHEMA,
    WriteColumns,
    check_read_schema,
    check_write_schema,
    options_of,
    with_options,
)
from tests.fixtures.spark import arrow_schema_of


def schema_of(text: str) -> StructType:
    """Parse a schema that has simple types only, without a session."""
    fields = [part.strip().split(" ", 1) for part in text.split(",")]
    return StructType([StructField(name, _SIMPLE[kind]) for name, kind in fields])


_SIMPLE = {
    field.dataType.simpleString().split("<")[0]: field.dataType for field in READ_SCHEMA.fields
}
_SIMPLE["timestamp_ntz"] = TimestampNTZType()


def test_arrow_schema_is_sparks() -> None:
    """Spark compares them exactly, names, types, order, nullability and time zone."""
    assert arrow_schema_of(READ_SCHEMA).equals(ROW_SCHEMA)


def test_the_read_schema_is_fixed() -> None:
    """A schema given by the user is accepted if it is the same, else the difference is named."""
    check_read_schema(StructType.fromJson(READ_SCHEMA.jsonValue()), READ_SCHEMA)
    fewer = StructType(READ_SCHEMA.fields[:-1])
    with pytest.raises(ConfigurationError, match="5 columns instead of 6"):
        check_read_schema(fewer, READ_SCHEMA)
    other = StructType([*READ_SCHEMA.fields[:-1], StructField("value", _SIMPLE["string"])])
    with pytest.raises(ConfigurationError, match="value string stands where value binary belongs"):
        check_read_schema(other, READ_SCHEMA)
    strict = StructType([StructField("log", _SIMPLE["string"], nullable=False)])
    with pytest.raises(ConfigurationError, match="log string not null"):
        check_read_schema(strict, READ_SCHEMA)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("value binary", WriteColumns(has_txid=False, has_log=False)),
        ("value string", WriteColumns(has_txid=False, has_log=False)),
        ("txid bigint,value binary", WriteColumns(has_txid=True, has_log=False)),
        ("value string,log string", WriteColumns(has_txid=False, has_log=True)),
        (
            "value binary,sequence_id bigint,timestamp timestamp",
            WriteColumns(has_txid=False, has_log=False),
        ),
    ],
)
def test_columns_to_write(text: str, columns: WriteColumns) -> None:
    """The columns that a log takes, in any order."""
    assert check_write_schema(schema_of(text), needs_log=False) == columns


def test_read_rows_can_be_written() -> None:
    """All columns of a read are accepted."""
    assert check_write_schema(READ_SCHEMA, needs_log=True) == WriteColumns(
        has_txid=True, has_log=True
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("txid bigint", ["'value' is missing", "found txid"]),
        ("value bigint", ["'value' is bigint", "string or binary"]),
        ("value binary,txid string", ["'txid' is string", "bigint"]),
        ("value binary,log binary", ["'log' is binary", "expected string"]),
        ("value binary,key binary", ["no column 'key'", "to_json"]),
        ("value binary,Value binary", ["'Value' differs from 'value' by case only", "rename it"]),
        ("VALUE binary", ["'VALUE' differs from 'value' by case only"]),
        ("value binary,TXID bigint", ["'TXID' differs from 'txid'"]),
        ("value binary,Sequence_ID bigint", ["'Sequence_ID' differs from 'sequence_id'"]),
        ("value binary,value binary", ["'value'", "more than once"]),
        ("value binary,timestamp timestamp_ntz", ["'timestamp' is timestamp_ntz", "rename it"]),
        ("value binary,dlsn string", ["'dlsn' is string", "struct<lssn:bigint"]),
    ],
)
def test_columns_that_a_log_does_not_take(text: str, words: list[str]) -> None:
    """The message names the column and its type."""
    with pytest.raises(ConfigurationError) as caught:
        check_write_schema(schema_of(text), needs_log=False)
    for word in words:
        assert word in str(caught.value)


def test_a_log_must_be_named_somewhere() -> None:
    """By the option or by a column."""
    with pytest.raises(ConfigurationError, match="string column log"):
        check_write_schema(schema_of("value binary"), needs_log=True)
    check_write_schema(schema_of("value binary,log string"), needs_log=True)


def test_a_schema_carries_the_options_of_a_table_of_the_catalog() -> None:
    """Spark drops them, and keeps the schema; a read that names a namespace is of no table."""
    made = {"provider": "dlog", "option.uri": "u", "option.log": "clicks"}
    stored = with_options(READ_SCHEMA, made)
    again = StructType.fromJson(json.loads(stored.json()))
    check_read_schema(again, READ_SCHEMA)
    assert options_of(again, {}) == {"option.uri": "u", "option.log": "clicks"}
    assert options_of(again, {"startingTxid": "5"})["startingTxid"] == "5"
    for place in ("URI", "endpoint"):
        given = {place: "other", "log": "views"}
        assert options_of(again, given) == given
    assert with_options(READ_SCHEMA, given) is READ_SCHEMA
    assert options_of(READ_SCHEMA, {}) == {}
    assert options_of(StructType([]), {}) == {}
