"""The form of a log's Delta table: its columns, and the statistics of its files.

Delta keeps the table's position as the version of an application's transaction, an integer that
outlives checkpoints, under the id of the log.  Nothing here does I/O.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from dlcore.base.errors import UnsupportedError
from dlcore.log.cold.parquet import POSITIONS
from dlcore.log.cold.table_format import Field, TableFile, TableForm, file_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ID, _ARROW_ID = "parquet.field.id", b"PARQUET:field_id"
# Characters in names of columns that Delta allows only if it maps columns to other names.
_NO_NAME = re.compile(r"[ ,;{}()\n\t=]")
_OF_VERSION = re.compile(r"(\d{20})\.")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(\..+)?\.parquet")
_PLAIN = {
    "bool": "boolean",
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    # Delta has no unsigned numbers: the next larger type has all values.
    "uint8": "short",
    "uint16": "integer",
    "uint32": "long",
    "halffloat": "float",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date32[day]": "date",
}
_TEXT_MAX = 32
"""Bounds of longer texts are left out of statistics, which every reader of the table reads."""

# Columns


def fields_of(columns: pa.Schema) -> tuple[Field, ...]:
    """Return the fields of a table: positions, then a log's own columns, each with its field id.

    Own columns allow nulls, which costs nothing and never needs to change.

    Raises:
        UnsupportedError: Delta has no such column, or not all readers of its tables do.
    """
    return (
        *(_field(each) for each in POSITIONS),
        *({**_field(each), "nullable": True} for each in columns),
    )


def _field(field: pa.Field) -> Field:
    if _NO_NAME.search(field.name):
        raise UnsupportedError(
            f"a Delta table cannot have a column called {field.name!r}: expected a name without "
            "space, comma, semicolon, equals sign and brackets"
        )
    metadata = field.metadata or {}
    number = metadata.get(_ARROW_ID)
    return {
        "name": field.name,
        "type": _type_of(field),
        "nullable": field.nullable,
        "metadata": {} if number is None else {_ID: int(number)},
    }


def _type_of(field: pa.Field) -> str | Field:
    kind = field.type
    types = pa.types
    if types.is_struct(kind):
        return {"type": "struct", "fields": [{**_field(each), "nullable": True} for each in kind]}
    if types.is_list(kind):
        return {
            "type": "array",
            "elementType": _type_of(kind.value_field),
            "containsNull": True,
        }
    if types.is_map(kind):
        return {
            "type": "map",
            "keyType": _type_of(kind.key_field),
            "valueType": _type_of(kind.item_field),
            "valueContainsNull": True,
        }
    if types.is_timestamp(kind) and kind.unit != "ns":
        return "timestamp_ntz" if kind.tz is None else "timestamp"
    if types.is_decimal128(kind) and kind.scale >= 0:
        return f"decimal({kind.precision},{kind.scale})"
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return "binary"
    if str(kind) not in _PLAIN:
        raise UnsupportedError(
            f"column {field.name!r} has the type {kind}, which readers of Delta tables do not all "
            "have; dlog log settings --unset table, or a log with another type"
        )
    return _PLAIN[str(kind)]


def missing_fields(known: Sequence[Field], wanted: Sequence[Field]) -> list[Field]:
    """Return the wanted fields that a table lacks, whole or in part.

    Raises:
        UnsupportedError: it has one of another type, which Delta does not change.
    """
    by_name = {each["name"]: each for each in known}
    missing = []
    for field in wanted:
        there = by_name.get(field["name"])
        if there is None or not _holds(there["type"], field["type"], may_grow=False):
            if there is not None and not _holds(there["type"], field["type"], may_grow=True):
                raise UnsupportedError(
                    f"column {field['name']!r} of the table has the type "
                    f"{_text(there['type'])}, which cannot become {_text(field['type'])}; to have "
                    "the table made again from the log's beginning, delete its folder _delta_log"
                )
            missing.append(field)
    return missing


def _text(kind: str | Field) -> str:
    return kind if isinstance(kind, str) else msgspec.json.encode(kind).decode()


def _parts(kind: Field) -> list[str | Field]:
    if kind["type"] == "array":
        return [kind["elementType"]]
    return [kind["keyType"], kind["valueType"]]


def _holds(known: str | Field, wanted: str | Field, *, may_grow: bool) -> bool:
    """Return whether a type has all parts of another one, perhaps by more fields of structs."""
    if known == wanted:
        return True
    if isinstance(known, str) or isinstance(wanted, str) or known["type"] != wanted["type"]:
        return False
    if known["type"] != "struct":
        pairs = zip(_parts(known), _parts(wanted), strict=True)
        return all(_holds(a, b, may_grow=may_grow) for a, b in pairs)
    there = {each["name"]: each["type"] for each in known["fields"]}
    return all(
        may_grow
        if each["name"] not in there
        else _holds(there[each["name"]], each["type"], may_grow=may_grow)
        for each in wanted["fields"]
    )


# History


def before_last_checkpoint(names: Iterable[str]) -> list[str]:
    """Return the files of a table's log that belong to versions before its last checkpoint.

    Once a checkpoint has all of a version, no earlier commit or checkpoint is needed to read it.
    """
    known = list(names)
    checkpoints = [int(found[1]) for each in known if (found := _CHECKPOINT.fullmatch(each))]
    last = max(checkpoints, default=0)
    return [each for each in known if (found := _OF_VERSION.match(each)) and int(found[1]) < last]


# Statistics


def statistics_of(metadata: Any, end_entry: int) -> str:
    """Return the statistics of an object's columns, by its footer, as Delta's JSON has them.

    Bounds are those of whole numbers, dates and short texts.  Floats have none: Parquet leaves
    NaN out of its bounds, and Delta's readers do not.  `end_entry` is the entry after the
    last one, whose maximum tells where the object ends.
    """
    bounds: dict[str, list[tuple[Any, Any]]] = {}
    nulls: dict[str, int] = {}
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for number in range(metadata.num_columns):
        chunks = [group.column(number) for group in groups]
        name = chunks[0].path_in_schema
        statistics = [each.statistics for each in chunks]
        if "." in name or metadata.schema.column(number).max_repetition_level:
            continue  # a part of a column
        if any(each is None for each in statistics):
            continue
        nulls[name] = sum(each.null_count for each in statistics)
        found = [(each.min, each.max) for each in statistics if each.has_min_max]
        if len(found) == sum(each.num_values > 0 for each in statistics) and found:
            bounds[name] = found
    least = {name: _bound(min(low for low, _ in each), up=False) for name, each in bounds.items()}
    most = {name: _bound(max(high for _, high in each), up=True) for name, each in bounds.items()}
    known = [name for name in bounds if None not in (least[name], most[name])]
    assert most["_entry"] == end_entry - 1
    return msgspec.json.encode(
        {
            "numRecords": metadata.num_rows,
            "minValues": {name: least[name] for name in known},
            "maxValues": {name: most[name] for name in known},
            "nullCount": nulls,
        }
    ).decode()


def _bound(value: Any, *, up: bool) -> int | str | None:
    """Return a bound as Delta writes it; None for one that is left out."""
    match value:
        case bool():
            return None
        case int():
            return value
        case str():
            return value if len(value) <= _TEXT_MAX else None
        case datetime() if value.tzinfo is not None:
            # Delta's have milliseconds.
            rest = value.microsecond % 1000
            moved = timedelta(microseconds=1000 - rest if up and rest else -rest)
            return (value.astimezone(UTC) + moved).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        case datetime():
            return None
        case date():
            return value.isoformat()
        case _:
            return None


COLUMNS_OF_FILES = ("path", "size_bytes", "max._entry", "num_records")
"""The columns of add actions that `files_of` needs."""


def files_of(rows: Iterable[Mapping[str, Any]]) -> tuple[TableFile, ...]:
    """Return the files of a table by its add actions.

    Raises:
        TableError: a file is not one that dlog made.
    """
    return tuple(
        file_of(row["path"], row["size_bytes"], row.get("max._entry"), row["num_records"], DELTA)
        for row in rows
    )


DELTA = TableForm(
    kind="delta",
    folder="_delta_log",
    remake="delete its folder _delta_log",
    away="move its folder _delta_log away",
    fields_of=fields_of,
    missing_fields=missing_fields,
)
"""Delta, by the library deltalake."""
