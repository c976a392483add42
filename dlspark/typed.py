"""Rows of typed logs in Spark: a log's columns as Spark's types, and a DataFrame's as a log's.

Columns of a typed log are the user's own.  Metadata of its records is available on request, in
columns with a leading underscore.  Spark has fewer types than a log.  Unsigned integers become the
next wider signed ones.  Times finer than microseconds are refused if they would be cut.

Writes to typed logs are prepared before their tasks: kind of log, schema, creation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import types as sql

from dlcore.base.errors import ConfigurationError, SchemaMismatchError
from dlspark.arrow import RowShape
from dlspark.schema import READ_SCHEMA, TYPED_KEY, WriteColumns, require_case
from dlspark.sessions import find_schemas, merge_schema, require_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql.types import StructType

    from dlspark.options import WriteOptions


METADATA_COLUMNS = {
    f"_{field.name}": field.dataType for field in READ_SCHEMA.fields if field.name != "value"
}
_LEAVES: tuple[tuple[Callable[[Any], bool], sql.DataType], ...] = (
    (pa.types.is_boolean, sql.BooleanType()),
    (pa.types.is_int8, sql.ByteType()),
    (pa.types.is_int16, sql.ShortType()),
    (pa.types.is_uint8, sql.ShortType()),
    (pa.types.is_int32, sql.IntegerType()),
    (pa.types.is_uint16, sql.IntegerType()),
    (pa.types.is_int64, sql.LongType()),
    (pa.types.is_uint32, sql.LongType()),
    # The largest of them has 20 digits.
    (pa.types.is_uint64, sql.DecimalType(20, 0)),
    (pa.types.is_float16, sql.FloatType()),
    (pa.types.is_float32, sql.FloatType()),
    (pa.types.is_float64, sql.DoubleType()),
    (pa.types.is_string, sql.StringType()),
    (pa.types.is_binary, sql.BinaryType()),
    (pa.types.is_fixed_size_binary, sql.BinaryType()),
    (pa.types.is_date, sql.DateType()),
    (pa.types.is_duration, sql.DayTimeIntervalType()),
    (pa.types.is_null, sql.NullType()),
)
_ARROW: tuple[tuple[type[sql.DataType], pa.DataType], ...] = (
    (sql.BooleanType, pa.bool_()),
    (sql.ByteType, pa.int8()),
    (sql.ShortType, pa.int16()),
    (sql.IntegerType, pa.int32()),
    (sql.LongType, pa.int64()),
    (sql.FloatType, pa.float32()),
    (sql.DoubleType, pa.float64()),
    (sql.StringType, pa.string()),
    (sql.BinaryType, pa.binary()),
    (sql.DateType, pa.date32()),
    (sql.TimestampType, pa.timestamp("us", "UTC")),
    (sql.TimestampNTZType, pa.timestamp("us")),
    (sql.DayTimeIntervalType, pa.duration("us")),
    (sql.NullType, pa.null()),
)
_TIME_TYPE: type[sql.DataType] | None = getattr(sql, "TimeType", None)
"""Type of times of day, since PySpark 4.1."""
_DECIMAL_DIGITS_MAX = 38


def spark_type(name: str, kind: Any) -> sql.DataType:
    """Return the type in Spark of a column of a log.

    Raises:
        SchemaMismatchError: Spark has no type for its values.
    """
    if pa.types.is_list(kind):
        return sql.ArrayType(spark_type(name, kind.value_type))
    if pa.types.is_map(kind):
        return sql.MapType(spark_type(name, kind.key_type), spark_type(name, kind.item_type))
    if pa.types.is_struct(kind):
        return sql.StructType(
            [sql.StructField(field.name, spark_type(name, field.type)) for field in kind]
        )
    if pa.types.is_timestamp(kind):
        return sql.TimestampNTZType() if kind.tz is None else sql.TimestampType()
    if pa.types.is_time(kind) and _TIME_TYPE is not None:
        return _TIME_TYPE()
    is_decimal = pa.types.is_decimal(kind)
    # Spark has no negative scales, and no scales above the precision.
    if is_decimal and 0 <= kind.scale <= kind.precision <= _DECIMAL_DIGITS_MAX:
        return sql.DecimalType(kind.precision, kind.scale)
    for is_kind, found in _LEAVES:
        if is_kind(kind):
            return found
    raise SchemaMismatchError(
        f"column {name!r} has the type {kind}, which this version of Spark does not support: name "
        "the columns to read with the option columns, without this one"
    )


def arrow_type(name: str, kind: sql.DataType) -> pa.DataType:
    """Return the Arrow type of a DataFrame's column, as Spark passes it on.

    Raises:
        ConfigurationError: Spark cannot pass it on, or a log cannot hold it.
    """
    if isinstance(kind, sql.ArrayType):
        return pa.list_(_part(name, "element", kind.elementType, kind.containsNull))
    # Keys are never null, so keys of the type of nulls have no value; such a map is refused below.
    if isinstance(kind, sql.MapType) and not isinstance(kind.keyType, sql.NullType):
        key = _part(name, "key", kind.keyType, False)
        return pa.map_(key, _part(name, "value", kind.valueType, kind.valueContainsNull))
    if isinstance(kind, sql.StructType):
        return pa.struct(
            [_part(name, field.name, field.dataType, field.nullable) for field in kind]
        )
    if isinstance(kind, sql.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if _TIME_TYPE is not None and isinstance(kind, _TIME_TYPE):
        return pa.time64("ns")
    if isinstance(kind, sql.UserDefinedType):
        return arrow_type(name, kind.sqlType())
    for spark, found in _ARROW:
        if isinstance(kind, spark):
            return found
    raise ConfigurationError(
        f"column {name!r} is {kind.simpleString()}, which no typed log holds: cast it to a number, "
        "a string or a struct of these, or drop it"
    )


def _part(name: str, part: str, kind: sql.DataType, nullable: bool) -> pa.Field:
    """Return a part of a column's type; one without a type, as of ``array()``, has only nulls."""
    found = arrow_type(name, kind)
    return pa.field(part, found, nullable or pa.types.is_null(found))


def read_schema(
    log_schema: pa.Schema, columns: Sequence[str] | None, *, include_metadata: bool
) -> sql.StructType:
    """Return the schema of typed logs' rows with these columns.

    Raises:
        ConfigurationError: there is no such column.
        SchemaMismatchError: Spark has no type for one.
    """
    columns = list(log_schema.names if columns is None else columns)
    if include_metadata:
        columns += [name for name in METADATA_COLUMNS if name not in columns]
    fields = []
    for name in columns:
        if name in METADATA_COLUMNS:
            fields.append(sql.StructField(name, METADATA_COLUMNS[name]))
        elif log_schema.get_field_index(name) >= 0:
            field = log_schema.field(name)
            fields.append(sql.StructField(name, spark_type(name, field.type), field.nullable))
        else:
            raise ConfigurationError(
                f"option columns={','.join(columns)!r}: the log has no column {name!r}, it has "
                f"{', '.join(log_schema.names)}, and {', '.join(METADATA_COLUMNS)}"
            )
    first = fields[0]
    # On the first field, because a schema of Spark has no metadata of its own.
    marked = sql.StructField(first.name, first.dataType, first.nullable, {TYPED_KEY: True})
    return sql.StructType([marked, *fields[1:]])


def shape_of(schema: sql.StructType) -> RowShape:
    """Return the shape of rows that Spark expects with this schema."""
    fields = [
        pa.field(field.name, arrow_type(field.name, field.dataType), field.nullable)
        for field in schema.fields
    ]
    return RowShape.of_typed(pa.schema(fields))


def as_nullable(kind: sql.DataType) -> sql.DataType:
    """Return a type of Spark in which everything can be null, except keys of maps."""
    if isinstance(kind, sql.ArrayType):
        return sql.ArrayType(as_nullable(kind.elementType))
    if isinstance(kind, sql.MapType):
        return sql.MapType(kind.keyType, as_nullable(kind.valueType))
    if isinstance(kind, sql.StructType):
        return sql.StructType([sql.StructField(f.name, as_nullable(f.dataType)) for f in kind])
    if isinstance(kind, sql.UserDefinedType):
        return as_nullable(kind.sqlType())
    return kind


def log_schema_of(schema: sql.StructType) -> pa.Schema:
    """Return the columns of a log that holds a DataFrame's rows.

    All columns can be null, as in files that Spark writes.  Spark declares a column not null
    because of how its rows were made, for example by ``range`` or a literal.  It does not mean that
    later rows must not have a null.

    Raises:
        ConfigurationError: no log can hold one of them, or there are only metadata columns.
    """
    return pa.schema(
        [
            pa.field(field.name, arrow_type(field.name, as_nullable(field.dataType)))
            for field in schema.fields
            if field.name not in METADATA_COLUMNS
        ]
    )


_LOG = "_log"


def writes_typed(
    options: WriteOptions, names: Sequence[str], found: Mapping[str, pa.Schema | None]
) -> bool:
    """Return whether a DataFrame with columns of these names goes to typed logs.

    `found` has the schema of the log, if that exists.

    An existing log decides by its kind.  A log that is to be created is typed if the options say
    so, or if there is no column ``value``.

    Raises:
        ConfigurationError: the deciding column exists in another case.
        SchemaMismatchError: the log is of the other kind than the options ask for.
    """
    wanted = options.typed
    if wanted is None and options.log not in found:
        require_case(names, (_LOG if options.log is None else "value",))
    if options.log is None:
        return _LOG in names if wanted is None else wanted
    if options.log not in found:
        return (options.create_log and "value" not in names) if wanted is None else wanted
    is_typed = found[options.log] is not None
    if wanted is not None and wanted is not is_typed:
        raise SchemaMismatchError(
            f"option typed={str(wanted).lower()}: log {options.log!r} exists, and is "
            f"{'typed' if is_typed else 'one of bytes'}: leave the option out, or write to another "
            "log"
        )
    return is_typed


def prepare_typed(
    options: WriteOptions, schema: StructType, found: Mapping[str, pa.Schema | None]
) -> WriteColumns:
    """Check the columns of a DataFrame for typed logs; create the log, or extend its schema.

    Raises:
        ConfigurationError: a log cannot have one of the columns, or there is no log to write to.
        LogNotFoundError: the log does not exist, and is not to be created.
        SchemaMismatchError: the log lacks a column, or cannot get it.
    """
    names = schema.fieldNames()
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"the column {twice!r} occurs more than once")
    known = found.get(options.log or "")
    require_case(names, (*METADATA_COLUMNS, *(() if known is None else known.names)))
    wanted = log_schema_of(schema)
    if options.log is not None:
        if options.log not in found:
            require_logs(options.address, [options.log], create=options.create_log, schema=wanted)
            # Another process may have been faster.
            found = find_schemas(options.address, [options.log])
        _fit_log(options, options.log, wanted, found.get(options.log))
    elif _LOG not in names:
        raise ConfigurationError(
            'the log to write to is missing: give .option("log", NAME) or a string column _log'
        )
    elif options.merge_schema:
        raise ConfigurationError("option mergeSchema=true: name the log with the option log")
    return WriteColumns(has_txid="_txid" in names, has_log=_LOG in names, typed=schema)


def _fit_log(options: WriteOptions, log: str, wanted: pa.Schema, known: pa.Schema | None) -> None:
    from dlcore.api.schemas import require_fit, with_nulls_of

    if options.merge_schema:
        # Whether a DataFrame's columns can be null does not say what the log has to accept.
        merge_schema(
            options.address, log, wanted if known is None else with_nulls_of(known, wanted)
        )
        return
    if known is None:
        return
    both = f"it has ({_text(known)}), the DataFrame has ({_text(wanted)})"
    missing = [name for name in wanted.names if known.get_field_index(name) < 0]
    if missing:
        raise SchemaMismatchError(
            f"log {log!r} has no column {missing[0]!r}: {both}. The option mergeSchema adds columns"
        )
    try:
        require_fit(log, known, wanted)
    except SchemaMismatchError as error:
        raise SchemaMismatchError(
            f"{error}: {both}. Cast the column; the option mergeSchema widens types "
            "where nothing is lost"
        ) from error


def _text(schema: pa.Schema) -> str:
    required = {field.name: "" if field.nullable else " not null" for field in schema}
    return ", ".join(f"{field.name} {field.type}{required[field.name]}" for field in schema)
