"""Schemas of typed logs: their text form, and the common schema of several logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from dlcore.base.errors import ConfigurationError, SchemaMismatchError
from dlcore.log.entries.batches import read_schema
from dlcore.log.typed.arrow import columns_of, entry_schemas, schema_of, spelled
from dlcore.log.typed.schema import LogSchema, as_required, check_columns, describe, loosened
from dlcore.log.typed.text import parse_columns

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "byte_row_schema",
    "describe_schema",
    "merge_schemas",
    "require_fit",
    "schema_from_bytes",
    "schema_from_text",
    "with_nulls_of",
]

_ARROW_FILE, _ARROW_STREAM, _PARQUET = b"ARROW1", b"\xff\xff\xff\xff", b"PAR1"


def byte_row_schema() -> pa.Schema:
    """Return the columns of a byte log, which are the same in Spark and in every client."""
    return read_schema()


def schema_from_text(text: str) -> pa.Schema:
    """Return the Arrow schema of a text, for example ``city string, fare double``.

    Types have Arrow's names; `dlcore.log.typed.text` describes the form of columns.

    Raises:
        ConfigurationError: the text is no schema, or no log can have it.
    """
    columns = tuple(map(spelled, parse_columns(text)))
    check_columns(columns)
    return schema_of(columns)


def schema_from_bytes(content: bytes) -> pa.Schema:
    """Return the schema in a file: an Arrow file or stream, a Parquet file, or a text.

    Raises:
        ConfigurationError: the file has no schema, or its text is none.
    """
    try:
        if content.startswith(_ARROW_FILE):
            return pa.ipc.open_file(content).schema
        if content.startswith(_ARROW_STREAM):
            return pa.ipc.open_stream(content).schema
        if content.startswith(_PARQUET):
            from pyarrow import parquet

            return parquet.read_schema(pa.BufferReader(content))
        return schema_from_text(content.decode())
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "expected the text of a schema, or an Arrow or Parquet file; this begins with "
            f"{content[:20]!r}: {error}"
        ) from error


def describe_schema(schema: pa.Schema) -> str:
    """Return a schema as text, in the form that `schema_from_text` reads."""
    return describe(columns_of(schema))


def require_fit(log: str, schema: pa.Schema, rows: pa.Schema) -> None:
    """Raise unless rows with these columns can be written to a log with this schema.

    Raises:
        SchemaMismatchError: a column is unknown, or none of its values fits the log's column.
    """
    none = pa.RecordBatch.from_arrays([pa.array([], kind) for kind in rows.types], schema=rows)
    entry_schemas(LogSchema.first(columns_of(schema))).fit(log, none)


def with_nulls_of(known: pa.Schema, wanted: pa.Schema) -> pa.Schema:
    """Return columns that can be null if the column of that name in `known` can."""
    return schema_of(as_required(columns_of(known), columns_of(wanted)))


def merge_schemas(schemas: Mapping[str, pa.Schema | None]) -> pa.Schema | None:
    """Return columns that hold the columns of all logs; None if these are byte logs.

    Args:
        schemas: schema of each log by name, as `Namespace.get_schemas` returns them.

    Raises:
        SchemaMismatchError: no schema holds the columns of two logs, or only some are byte logs.
    """
    typed = {log: columns_of(schema) for log, schema in schemas.items() if schema is not None}
    if not typed:
        return None
    (first, columns), *others = typed.items()
    if len(typed) < len(schemas):
        plain = next(log for log, schema in schemas.items() if schema is None)
        raise SchemaMismatchError(
            f"log {first!r} is typed, log {plain!r} is one of bytes: read them apart"
        )
    merged = LogSchema.first(columns)
    for log, more in others:
        try:
            merged = merged.merged(first, more)
        except SchemaMismatchError as error:
            raise SchemaMismatchError(
                f"logs {first!r} and {log!r} cannot be read together: log {first!r} has "
                f"({describe(columns)}), log {log!r} has ({describe(more)})"
            ) from error
    latest = merged.latest
    for columns in typed.values():
        latest = loosened(latest, columns)
    return schema_of(latest)
