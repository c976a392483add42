"""Preparation of writes to typed logs, before their tasks: kind of log, schema, creation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError, SchemaMismatchError
from dlspark.schema import WriteColumns, require_case
from dlspark.sessions import find_schemas, merge_schema, require_logs
from dlspark.typed import METADATA_COLUMNS, log_schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from dlspark.options import WriteOptions

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
