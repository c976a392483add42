"""Columns of a log's schema as Arrow types, and batches that fit them, a whole column at a time.

An entry of a typed log holds the record's transaction id, in the column `_txid`, and then the log's
columns.  Other representations of the same values (dictionaries, views of strings, large or
fixed-size lists) are stored in the plain one, so that any program can read what another one wrote.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from dlcore.base.errors import ConfigurationError, InvalidEntryError, SchemaMismatchError
from dlcore.log.typed.schema import (
    LIST,
    MAP,
    METADATA_COLUMNS,
    STRUCT,
    Column,
    LogSchema,
    describe,
    join_types,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

TXID = "_txid"
_ZONED = re.compile(r"timestamp\[(s|ms|us|ns), tz=(.+)\]")
_DECIMAL = re.compile(r"decimal(128|256)\((\d+), (-?\d+)\)")
_FIXED_BINARY = re.compile(r"fixed_size_binary\[(\d+)\]")


@cache
def _txid_field() -> pa.Field:
    return pa.field(TXID, pa.int64())


@cache
def _plain_types() -> dict[str, pa.DataType]:
    return {
        str(kind): kind
        for kind in (
            pa.null(),
            pa.bool_(),
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
            *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
            *(pa.float16(), pa.float32(), pa.float64()),
            *(pa.string(), pa.binary()),
            *(pa.date32(), pa.date64()),
            *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
            *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
            *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
            pa.month_day_nano_interval(),
        )
    }


@cache
def _exact_kinds() -> tuple[Callable[[pa.DataType], bool], ...]:
    """Return tests of kinds within which a value may be cast if that does not change it."""
    return (
        pa.types.is_integer,
        pa.types.is_decimal,
        pa.types.is_timestamp,
        pa.types.is_duration,
        pa.types.is_date,
        pa.types.is_time,
    )


# Types


def schema_from(schema: Any) -> pa.Schema:
    """Return an Arrow schema from one, or from an object that exports or describes one.

    Raises:
        ConfigurationError: it is no schema.
    """
    try:
        return pa.schema(schema)
    except (pa.ArrowInvalid, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"schema={schema!r:.200}: expected an Arrow schema, or names and types, like "
            f"{{'city': 'string', 'fare': 'double'}}: {error}"
        ) from error


def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """Return the columns for the fields of an Arrow schema.

    Raises:
        ConfigurationError: a log cannot hold values of a type.
    """
    return tuple(map(_column_of_field, schema))


def first_schema(schema: Any) -> LogSchema | None:
    """Return the schema of a new log from an Arrow schema or the like; None for None.

    Raises:
        ConfigurationError: a log cannot have these columns.
    """
    return None if schema is None else LogSchema.first(columns_of(schema_from(schema)))


def _column_of_field(field: pa.Field) -> Column:
    return _column_of(field.name, field.type, nullable=field.nullable)


def _column_of(name: str, kind: Any, *, nullable: bool = True) -> Column:
    # A program that reads the log may not know the extension, but it knows the storage.
    if isinstance(kind, pa.BaseExtensionType):
        return _column_of(name, kind.storage_type, nullable=nullable)
    types = pa.types
    if types.is_dictionary(kind):
        return _column_of(name, kind.value_type, nullable=nullable)
    if types.is_struct(kind):
        return Column(name, STRUCT, columns_of(pa.schema(list(kind))), nullable)
    if types.is_map(kind):
        key, item = _column_of("key", kind.key_type), kind.item_field
        value = _column_of("value", item.type, nullable=item.nullable)
        return Column(name, MAP, (key, value), nullable)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        part = kind.value_field
        return Column(
            name, LIST, (_column_of("item", part.type, nullable=part.nullable),), nullable
        )
    return Column(name, _leaf_of(name, kind), nullable=nullable)


def _leaf_of(name: str, kind: Any) -> str:
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return "binary"
    if pa.types.is_decimal(kind):
        return f"decimal{256 if kind.bit_width > 128 else 128}({kind.precision}, {kind.scale})"
    leaf = str(kind)
    if leaf in _plain_types() or _ZONED.fullmatch(leaf) or _FIXED_BINARY.fullmatch(leaf):
        return leaf
    raise ConfigurationError(f"column {name!r}: a log cannot hold values of the type {leaf}")


def type_of(column: Column) -> pa.DataType:
    """Return a column's Arrow type; nothing is lost for a stored column.

    Raises:
        InvalidEntryError: this release does not know the type.
    """
    if column.type == STRUCT:
        return pa.struct([_field_of(field) for field in column.fields])
    if column.type == LIST and len(column.fields) == 1:
        return pa.list_(_field_of(column.fields[0]))
    if column.type == MAP and len(column.fields) == 2:
        return pa.map_(type_of(column.fields[0]), _field_of(column.fields[1]))
    if column.type in _plain_types():
        return _plain_types()[column.type]
    if zoned := _ZONED.fullmatch(column.type):
        return pa.timestamp(zoned[1], zoned[2])
    if decimal := _DECIMAL.fullmatch(column.type):
        make = pa.decimal128 if decimal[1] == "128" else pa.decimal256
        return make(int(decimal[2]), int(decimal[3]))
    if fixed := _FIXED_BINARY.fullmatch(column.type):
        return pa.binary(int(fixed[1]))
    raise InvalidEntryError(
        f"column {column.name!r} has the type {column.type!r}, which this release does not know"
    )


def spelled(column: Column) -> Column:
    """Return a column that a person wrote as it is stored; `float64` becomes `double`.

    Raises:
        ConfigurationError: there is no such type.
    """
    if column.fields:
        return replace(column, fields=tuple(map(spelled, column.fields)))
    try:
        type_of(column)
    except (InvalidEntryError, pa.ArrowInvalid, ValueError):
        try:
            kind = pa.type_for_alias(column.type)
            return _column_of(column.name, kind, nullable=column.nullable)
        except ValueError as error:
            raise ConfigurationError(
                f"column {column.name!r} has the type {column.type!r}, expected one of "
                f"{', '.join(_plain_types())}, timestamp[us, tz=UTC], decimal128(10, 2), "
                "fixed_size_binary[16], list<…>, map<…, …>, struct<name …>"
            ) from error
    return column


def _field_of(column: Column) -> pa.Field:
    return pa.field(column.name, type_of(column), column.nullable)


def _plain_column(column: Column) -> Column:
    """Return a column of the same values that may hold nulls at any depth."""
    return replace(column, fields=tuple(map(_plain_column, column.fields)), nullable=True)


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """Return columns as an Arrow schema."""
    return pa.schema([_field_of(column) for column in columns])


# Batches


class EntrySchemas:
    """The Arrow schemas of the entries of one log, by the version of the log's schema."""

    def __init__(self, schema: LogSchema) -> None:
        self.stored = schema
        self.latest_id = schema.latest_id
        self._versions = [
            pa.schema([_txid_field(), *schema_of(columns)]) for columns in schema.versions
        ]
        # Values are cast to these types, because Arrow allows that with nulls anywhere; after that
        # it is checked whether a required value is null.
        self._plain = tuple(map(_plain_column, schema.latest))
        self._written = pa.schema([_txid_field(), *schema_of(self._plain)])
        self._kinds = self._written.types[1:]

    @property
    def columns(self) -> pa.Schema:
        """The log's columns."""
        return self.latest.remove(0)

    @property
    def latest(self) -> pa.Schema:
        """The schema of entries that are written now."""
        return self._versions[-1]

    def of(self, schema_id: int) -> pa.Schema:
        """Return the schema of entries that were written with a version.

        Raises:
            InvalidEntryError: there is no version of that number.
        """
        if not 1 <= schema_id <= self.latest_id:
            raise InvalidEntryError(
                f"an entry has schema {schema_id}, the log has 1 … {self.latest_id}"
            )
        return self._versions[schema_id - 1]

    def promote(
        self, batch: pa.RecordBatch, schema_id: int, columns: Set[str] | None = None
    ) -> pa.RecordBatch:
        """Return an entry's batch as if it had been written with the latest version.

        `columns` are the columns to return, which the batch has if its version does; None: all.
        """
        wanted = self.latest
        if columns is not None:
            known = [name for name in wanted.names[1:] if name in columns]
            if schema_id == self.latest_id:
                return batch.select([TXID, *known])
            wanted = pa.schema([wanted.field(name) for name in (TXID, *known)])
        return batch if schema_id == self.latest_id else conform(batch, wanted)

    def fit(self, log: str, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, bool]:
        """Return a batch to write as an entry holds it, and whether it has transaction ids.

        Columns are found by name; missing ones become null, if the schema allows that.  Values are
        not changed: types may be narrower than the log's, or wider if every value still fits.
        Metadata columns are ignored, except `_txid`.

        Raises:
            SchemaMismatchError: a column is unknown, or has values that its type cannot hold, or
                nulls that the schema does not allow.
        """
        given = dict(zip(batch.schema.names, batch.columns, strict=True))
        if len(given) < batch.num_columns:
            raise SchemaMismatchError(f"log {log!r}: {batch.schema.names} has a name twice")
        txids = given.get(TXID)
        unknown = [
            name
            for name in given
            if self.latest.get_field_index(name) < 0 and name not in METADATA_COLUMNS
        ]
        if unknown or given.keys() <= set(METADATA_COLUMNS):
            why = f"it has no column {unknown[0]!r}" if unknown else "the batch has none of them"
            raise SchemaMismatchError(
                f"log {log!r}: {why}; the log's columns are ({describe(self.stored.latest)}). "
                "update_schema adds columns"
            )
        arrays = [_txid_column(log, txids, batch.num_rows)]
        for column, plain, kind in zip(self.stored.latest, self._plain, self._kinds, strict=True):
            found = given.get(column.name)
            array = (
                pa.nulls(batch.num_rows, kind)
                if found is None
                else _fitted(log, found, plain, kind)
            )
            _require_values(log, array, column, is_missing=found is None)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self._written), txids is not None


@lru_cache(maxsize=256)
def entry_schemas(schema: LogSchema) -> EntrySchemas:
    """Return the Arrow schemas of a log's schema."""
    return EntrySchemas(schema)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch of the same values with the columns of a schema.

    Raises:
        SchemaMismatchError: a value is null, which a later version of the log's schema allows and
            this one does not.
    """
    arrays = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        arrays.append(
            pa.nulls(batch.num_rows, field.type)
            if index < 0
            else _conformed(batch.column(index), batch.schema.field(index), field)
        )
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _conformed(array: Any, known: pa.Field, field: pa.Field) -> Any:
    if known.type == field.type and known.nullable <= field.nullable:
        return array
    wanted = _column_of_field(field)
    plain = array.cast(type_of(_plain_column(wanted)))
    null = _null_in(plain, wanted)
    if null is not None:
        raise SchemaMismatchError(
            f"column {null} was {wanted} when this read began, and has nulls since the log's "
            "schema was changed: begin a new read"
        )
    # Arrow casts no nullable part to a required one, even without nulls: only the type changes.
    return plain if plain.type == field.type else pa.array(_Retyped(plain, field.type))


class _Retyped:
    """The memory of an array with another type, which differs only in what may be null."""

    def __init__(self, array: Any, kind: Any) -> None:
        self._array = array
        self._kind = kind

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        """Return the type and the memory for Arrow's PyCapsule interface."""
        return self._kind.__arrow_c_schema__(), self._array.__arrow_c_array__()[1]


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the same columns with nulls allowed at any depth."""
    return schema_of(tuple(map(_plain_column, columns_of(schema))))


def null_in(batch: pa.RecordBatch, schema: pa.Schema) -> str | None:
    """Return the name of a null in a batch of `plain_schema` that `schema` does not allow."""
    found = (_null_in(batch.column(each.name), each) for each in columns_of(schema))
    return next((name for name in found if name is not None), None)


def _require_values(log: str, array: Any, column: Column, *, is_missing: bool) -> None:
    """Raise `SchemaMismatchError` if a value is null that must not be."""
    if is_missing and not column.nullable:
        raise SchemaMismatchError(
            f"log {log!r}: column {column} is missing, and it cannot be null: give its values"
        )
    null = _null_in(array, column)
    if null is not None:
        raise SchemaMismatchError(
            f"log {log!r}: column {null} is null in some rows, and the log has {column}: give its "
            "values, or make the column nullable with update_schema"
        )


def _null_in(array: Any, column: Column) -> str | None:
    """Return the name of a value in a plain column that is null and must not be, else None."""
    if not column.nullable and array.null_count:
        return column.name
    if not column.has_required or len(array) == 0:
        return None
    if array.null_count:
        array = array.drop_null()  # values below a null do not count
    children = [array.field(n) for n in range(len(column.fields))] if column.type == STRUCT else []
    if column.type in (LIST, MAP):
        # The child array of a slice still has the values of all rows.
        ends = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)
        values = array.values if column.type == LIST else array.items
        children = [values.slice(int(ends[0]), int(ends[-1] - ends[0]))]
    # From the end, because the keys of a map, its first part, are never null and are no child here.
    for child, part in zip(reversed(children), reversed(column.fields), strict=False):
        found = _null_in(child, part)
        if found is not None:
            return f"{column.name}.{found}"
    return None


def _txid_column(log: str, given: Any, count: int) -> Any:
    if given is None:
        zeros = pa.py_buffer(np.zeros(count, np.int64))
        return pa.Array.from_buffers(_txid_field().type, count, [None, zeros])
    if given.null_count or not pa.types.is_integer(given.type):
        raise SchemaMismatchError(
            f"log {log!r}: column {TXID} has {given.null_count} nulls and the type {given.type}, "
            "expected integers"
        )
    return given if given.type == pa.int64() else given.cast(pa.int64())


def _fitted(log: str, array: Any, column: Column, kind: Any) -> Any:
    if array.type == kind:
        return array
    array = _plain(array)
    if array.type == kind:
        return array
    given = _plain_column(_column_of(column.name, array.type))
    if _may_hold(column, given):
        try:
            return array.cast(kind)
        except pa.ArrowInvalid as error:
            raise SchemaMismatchError(
                f"log {log!r}: column {column} cannot hold all values of {given}: {error}"
            ) from error
    raise SchemaMismatchError(f"log {log!r}: column {column} cannot hold {given}")


def _plain(array: Any) -> Any:
    """Return an array in the representation in which a log stores its values."""
    kind = type_of(_plain_column(_column_of("", array.type)))
    return array if array.type == kind else array.cast(kind)


def _may_hold(column: Column, given: Column) -> bool:
    """Return whether values of a type can be stored in a column without a change."""
    if join_types(column, given) == column:
        return True
    if column.type != given.type:
        leaves = not column.fields and not given.fields
        return leaves and _are_of_a_kind(type_of(column), type_of(given))
    if column.type == STRUCT:
        known = {field.name: field for field in column.fields}
        return all(
            field.name in known and _may_hold(known[field.name], field) for field in given.fields
        )
    pairs = zip(column.fields, given.fields, strict=True)
    return bool(column.fields) and all(_may_hold(*pair) for pair in pairs)


@cache
def _are_of_a_kind(first: Any, second: Any) -> bool:
    # A time with a zone is an instant, one without is not: no cast between them is exact.
    if pa.types.is_timestamp(first) and pa.types.is_timestamp(second):
        return (first.tz is None) == (second.tz is None)
    if pa.types.is_fixed_size_binary(second):
        return bool(pa.types.is_binary(first))
    return any(is_kind(first) and is_kind(second) for is_kind in _exact_kinds())
