"""The rows of a byte log in Spark: the columns of a read, and of a DataFrame to write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from dlcore.base.errors import ConfigurationError
from dlspark.option_table import CATALOG_PREFIX

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

DLSN_TYPE = StructType(
    [
        StructField("lssn", LongType()),
        StructField("entry", LongType()),
        StructField("slot", LongType()),
    ]
)
READ_SCHEMA = StructType(
    [
        StructField("log", StringType()),
        StructField("dlsn", DLSN_TYPE),
        StructField("txid", LongType()),
        StructField("sequence_id", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("value", BinaryType()),
    ]
)
"""All fields are nullable: Spark compares the Arrow schema of a batch with this one exactly."""

_OPTIONS_KEY = "dlog.options"
TYPED_KEY = "dlog.typed"
"""Key in a field's metadata that marks the columns of typed logs; Spark returns it with the schema.
"""
_READ_ONLY = ("dlsn", "sequence_id", "timestamp")
_WRITTEN: dict[str, tuple[type[DataType], ...]] = {
    "value": (StringType, BinaryType),
    "txid": (LongType,),
    "log": (StringType,),
}
_EXPECTED = "expected value string or binary, and optionally txid bigint and log string"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteColumns:
    """The optional columns of a DataFrame to write."""

    has_txid: bool
    has_log: bool
    typed: StructType | None = None
    """The columns of a write to typed logs."""


def read_schema_of(columns: Sequence[str]) -> StructType:
    """Return the part of `READ_SCHEMA` with these columns, in their order."""
    return StructType([READ_SCHEMA[column] for column in columns])


def with_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Add the options of a table in Spark's catalog to its schema, if it is one.

    Spark stores the schema and returns it with each read, but does not pass the options to a Python
    source.
    """
    found = {key: value for key, value in options.items() if key.startswith(CATALOG_PREFIX)}
    if not found:
        return schema
    first, *others = schema.fields
    metadata = {**first.metadata, _OPTIONS_KEY: json.dumps(found)}
    carrier = StructField(first.name, first.dataType, first.nullable, metadata)
    return StructType([carrier, *others])


def options_of(schema: StructType, options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of a read, with those of its table in Spark's catalog.

    A read that names a namespace is no read of a table, although the schema may contain a table's
    options.
    """
    if any(key.lower() in ("uri", "endpoint") for key in options) or not schema.fields:
        return options
    stored = json.loads(schema.fields[0].metadata.get(_OPTIONS_KEY, "{}"))
    return {**stored, **options}


def check_read_schema(schema: StructType, expected: StructType) -> None:
    """Raise `ConfigurationError` unless `schema`, perhaps given by the user, is `expected`.

    For typed logs, a column that cannot be null may be declared nullable.
    """
    if is_of_typed(expected):
        loose = {field.name for field in schema.fields if field.nullable}
        expected = StructType(
            [StructField(f.name, f.dataType, f.nullable or f.name in loose) for f in expected]
        )
    schema, expected = _bare(schema), _bare(expected)
    if schema == expected:
        return
    for given, right in zip(schema.fields, expected.fields, strict=False):
        if given != right:
            difference = f"{_describe(given)} stands where {_describe(right)} belongs"
            break
    else:
        difference = f"{len(schema.fields)} columns instead of {len(expected.fields)}"
    raise ConfigurationError(
        "the schema of a dlog read is fixed: leave .schema(...) out, and the columns of CREATE "
        f"TABLE, and choose columns with the option columns; {difference}; expected "
        f"{expected.simpleString()}"
    )


def _bare(schema: StructType) -> StructType:
    return StructType([StructField(f.name, f.dataType, f.nullable) for f in schema.fields])


def is_of_typed(schema: StructType) -> bool:
    """Return whether a schema was found in typed logs, perhaps by way of Spark's catalog."""
    return bool(schema.fields) and TYPED_KEY in schema.fields[0].metadata


def is_of_bytes(schema: StructType, columns: Sequence[str] | None) -> bool:
    """Return whether byte logs, read with `columns`, can have rows with this schema.

    None stands for all columns.
    """
    names = READ_SCHEMA.fieldNames() if columns is None else columns
    known = set(names) <= set(READ_SCHEMA.fieldNames())
    return known and _bare(schema) == read_schema_of(names)


def require_case(names: Sequence[str], known: Collection[str]) -> None:
    """Raise `ConfigurationError` for a name that equals another one except for the case.

    The other name may be one of `known`.  Spark takes ``VALUE`` and ``value`` for the same column.
    If a log had both, Spark could not tell them apart.
    """
    as_meant = {name.lower(): name for name in (*names, *known)}
    for name in names:
        meant = as_meant[name.lower()]
        if name not in known and name != meant:
            raise ConfigurationError(
                f"column {name!r} differs from {meant!r} by case only, so that Spark takes them "
                "for the same, and a log does not: rename it"
            )


def check_write_schema(schema: StructType, *, needs_log: bool) -> WriteColumns:
    """Check the columns of a DataFrame to write; columns are found by their exact names.

    Columns that only a read fills in are accepted with their exact types and ignored, so that rows
    that were read can be written back.

    Raises:
        ConfigurationError: a column is missing, unknown, duplicate, or of another type.
    """
    names = schema.fieldNames()
    require_case(names, READ_SCHEMA.fieldNames())
    for field in schema.fields:
        if names.count(field.name) > 1:
            raise ConfigurationError(f"the column {field.name!r} occurs more than once")
        _check_field(field)
    if "value" not in names:
        raise ConfigurationError(
            f"the column 'value' is missing: {_EXPECTED}; found "
            + (", ".join(names) or "no column")
        )
    if needs_log and "log" not in names:
        raise ConfigurationError(
            'the log to write to is missing: give .option("log", NAME) or a string column log'
        )
    return WriteColumns(has_txid="txid" in names, has_log="log" in names)


def _check_field(field: StructField) -> None:
    if field.name in _WRITTEN:
        if not isinstance(field.dataType, _WRITTEN[field.name]):
            expected = " or ".join(kind.typeName() for kind in _WRITTEN[field.name])
            raise ConfigurationError(
                f"column {field.name!r} is {field.dataType.simpleString()}, expected {expected}"
                f"{' (bigint)' if field.name == 'txid' else ''}"
            )
    elif field.name in _READ_ONLY:
        if _nullable(field.dataType) != READ_SCHEMA[field.name].dataType:
            raise ConfigurationError(
                f"column {field.name!r} is {field.dataType.simpleString()}; it is filled in by the "
                f"log and ignored in a write, but only as "
                f"{READ_SCHEMA[field.name].dataType.simpleString()}: drop or rename it"
            )
    else:
        raise ConfigurationError(
            f"a log of bytes has no column {field.name!r}: {_EXPECTED}; write to a typed log, "
            "which the options createLog and typed create, or pack the other columns into value, "
            "for example with to_json(struct(...))"
        )


def _nullable(kind: DataType) -> DataType:
    # Expressions may have made parts of a struct non-nullable.  For an ignored column this does not
    # matter.
    if not isinstance(kind, StructType):
        return kind
    return StructType([StructField(f.name, _nullable(f.dataType)) for f in kind.fields])


def _describe(field: StructField) -> str:
    return f"{field.name} {field.dataType.simpleString()}{'' if field.nullable else ' not null'}"
