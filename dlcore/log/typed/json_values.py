"""Conversion of values of typed logs to JSON and back, by whole Arrow columns.

    null, boolean, numbers, text    the same in JSON
    binary                          text, in base64
    decimal                         text, because programs round numbers
    date, time, timestamp           text in ISO 8601, with all digits of their unit; in UTC if the
                                    type has a zone
    duration                        a whole number, of its unit
    month_day_nano_interval         {"months": 1, "days": -2, "nanoseconds": 3}
    list, struct                    a list, an object
    map                             a list of {"key": …, "value": …}: keys may be of any type

NaN and infinities, which JSON lacks, are written as in Python and JavaScript.
"""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERVAL = {"months": "int32", "days": "int32", "nanoseconds": "int64"}


def json_type(kind: pa.DataType, *, is_shown: bool = False) -> pa.DataType:
    """Return the type that Arrow reads from JSON for a type, or shows as JSON.

    Arrow reads timestamps itself, also those without a zone.  It cannot read nulls without a type
    in a list.
    """
    types, part = pa.types, partial(json_type, is_shown=is_shown)
    if types.is_list(kind):
        return pa.list_(part(kind.value_type))
    if types.is_map(kind):
        pair = [("key", part(kind.key_type)), ("value", part(kind.item_type))]
        return pa.list_(pa.struct(pair))
    if types.is_struct(kind):
        return pa.struct([(field.name, part(field.type)) for field in kind])
    if types.is_interval(kind):
        return pa.struct([(name, pa.type_for_alias(number)) for name, number in _INTERVAL.items()])
    if types.is_duration(kind):
        return pa.int64()
    if types.is_float16(kind):
        return pa.float32()
    if types.is_null(kind) and not is_shown:
        return pa.bool_()
    if types.is_timestamp(kind) and not is_shown:
        return kind
    return pa.string() if _is_binary(kind) or types.is_temporal(kind) else kind


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind))


def json_rows(batch: pa.RecordBatch) -> list[str]:
    """Return the rows of a batch as JSON objects."""
    columns = [to_json(column) for column in batch.columns]
    rows = pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
    # Only decimals need `str`.
    return [json.dumps(row, ensure_ascii=False, default=str) for row in rows]


def to_json(column: pa.Array) -> pa.Array:
    """Return a column of a log as JSON values; the caller must convert decimals to text."""
    return _changed(column, json_type(column.type, is_shown=True), _to_json)


def from_json(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the column of a log from the result of `to_json`.

    Raises:
        ValueError, pa.ArrowInvalid: a value does not belong to the type.
    """
    return _changed(column, kind, _from_json)


def _changed(
    column: pa.Array, kind: pa.DataType, leaf: Callable[[pa.Array, pa.DataType], pa.Array]
) -> pa.Array:
    """Convert the leaves of a column, and return it as another type with the same structure."""
    types = pa.types
    if column.type == kind:
        return column
    if types.is_interval(column.type) or types.is_interval(kind):
        return leaf(column, kind)
    if types.is_struct(kind):
        parts = [
            _changed(part, field.type, leaf)
            for part, field in zip(column.flatten(), kind, strict=True)
        ]
        nulls = column.is_null() if column.null_count else None
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=nulls)
    if types.is_list(kind) or types.is_map(kind):
        # A map is stored as a list of pairs.
        values = _changed(column.values, kind.field(0).type, leaf)
        if types.is_map(kind) and values.field(0).null_count:
            raise ValueError("a key is null")
        places = column.buffers()[:2]
        count, offset = len(column), column.offset
        return pa.Array.from_buffers(kind, count, places, offset=offset, children=[values])
    return leaf(column, kind)


def _to_json(column: pa.Array, kind: pa.DataType) -> pa.Array:
    types = pa.types
    if types.is_interval(column.type):
        values = column.to_pylist()
        parts = [
            None if each is None else dict(zip(_INTERVAL, each, strict=True)) for each in values
        ]
        return pa.array(parts, kind)
    if _is_binary(column.type):
        texts = [None if each is None else base64.b64encode(each) for each in column.to_pylist()]
        return pa.array(texts, pa.binary()).cast(kind)
    if types.is_timestamp(column.type) and column.type.tz is not None:
        # Arrow drops the seconds of an offset, which zones had before they were standard.
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    shown = column.cast(kind)
    # Arrow separates date and time by a space.
    return pc.replace_substring(shown, " ", "T") if types.is_timestamp(column.type) else shown


def _from_json(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_null(kind):
        if column.null_count < len(column):
            raise ValueError(f"{column.drop_null()[0]}: expected null")
        return pa.nulls(len(column))
    if pa.types.is_interval(kind):
        return pa.array(
            [None if each is None else _interval(**each) for each in column.to_pylist()], kind
        )
    if _is_binary(kind):
        values = [
            None if text is None else base64.b64decode(text, validate=True)
            for text in column.to_pylist()
        ]
        return pa.array(values, kind)
    if pa.types.is_time(kind):  # Arrow does not convert text to this type
        moments = pc.binary_join_element_wise("1970-01-01T", column, "")
        return moments.cast(pa.timestamp(kind.unit)).cast(kind)
    return column.cast(kind)


def _interval(**parts: int | None) -> pa.MonthDayNano:
    return pa.MonthDayNano([parts[name] or 0 for name in _INTERVAL])
