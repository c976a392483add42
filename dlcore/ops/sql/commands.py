"""Commands of Flight SQL as values, and the tables that answer those about metadata; no I/O."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from dlcore.base.errors import ConfigurationError, UnsupportedError
from dlcore.base.proto import flight_sql_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from google.protobuf.message import Message

SQL_BYTES_MAX = 64 * 1024
CATALOG, SCHEMA, TABLE = "temp", "main", "TABLE"
"""The names under which each log is a table, with the log's name."""
PREPARE, CLOSE = "CreatePreparedStatement", "ClosePreparedStatement"
"""Actions: return the columns of a statement; forget it."""
_PREFIX = "type.googleapis.com/arrow.flight.protocol.sql."
_NAME, _VERSION, _READ_ONLY, _SQL, _SUBSTRAIT, _TRANSACTIONS, _CANCEL = 0, 1, 3, 4, 5, 8, 9
_NO_TRANSACTIONS = 0
_TEXT, _BOOL, _INT32 = 0, 1, 3
"""The types of values of `INFO`, by their numbers in its union."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A query."""

    sql: str


@dataclass(frozen=True, slots=True)
class Information:
    """Facts about the server, by their numbers; without any: all."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Catalogs:
    """The catalogs."""


@dataclass(frozen=True, slots=True)
class Schemas:
    """The schemas, in the sense of SQL."""

    catalog: str | None
    pattern: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables; with `columns` also theirs."""

    catalog: str | None
    schema_pattern: str | None
    pattern: str | None
    types: tuple[str, ...]
    columns: bool


@dataclass(frozen=True, slots=True)
class TableTypes:
    """The types of tables."""


Command: TypeAlias = Statement | Information | Catalogs | Schemas | Tables | TableTypes


def command_of(data: bytes) -> Command:
    """Return the command of a descriptor or of a ticket.

    Raises: ConfigurationError: it does not parse; UnsupportedError: it is another one.
    """
    with _parsing():
        return _parsed(*_unpacked(data))


def prepared_by(action: str, data: bytes) -> Statement | None:
    """Return the statement that an action prepares; None: it closes one, which takes nothing.

    Raises: ConfigurationError: it does not parse; UnsupportedError: it is another one.
    """
    if action not in {PREPARE, CLOSE}:
        raise UnsupportedError(f"the action {action!r}: expected {PREPARE} or {CLOSE}")
    with _parsing():
        name, value = _unpacked(data)
        if name != f"Action{action}Request":
            raise ConfigurationError(f"{name} for {action}: expected Action{action}Request")
        if action == CLOSE:
            pb.ActionClosePreparedStatementRequest.FromString(value)
            return None
        asked = pb.ActionCreatePreparedStatementRequest.FromString(value)
        return _query(asked.query, within=asked.HasField("transaction_id"))


def prepared_result(statement: Statement, columns: pa.Schema) -> bytes:
    """Return the answer to `PREPARE`.  The handle is the statement: a server remembers nothing."""
    inner = pb.ActionCreatePreparedStatementResult(
        prepared_statement_handle=statement.sql.encode(),
        dataset_schema=columns.serialize().to_pybytes(),
    )
    return _packed("ActionCreatePreparedStatementResult", inner)


@contextmanager
def _parsing() -> Iterator[None]:
    try:
        yield
    except (DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"a command of Flight SQL does not parse: {error}") from error


def _unpacked(data: bytes) -> tuple[str, bytes]:
    """Return the name of a message, and its bytes."""
    outer = AnyMessage.FromString(data)
    if not outer.type_url.startswith(_PREFIX):
        raise ConfigurationError(
            f"a command of type {outer.type_url!r}: expected one of Flight SQL; to read a log "
            "by Flight alone ask a proxy"
        )
    return outer.type_url.removeprefix(_PREFIX), outer.value


def _packed(name: str, message: Message) -> bytes:
    outer = AnyMessage(type_url=f"{_PREFIX}{name}", value=message.SerializeToString())
    return bytes(outer.SerializeToString())


def _query(sql: str, *, within: bool) -> Statement:
    if within:
        raise UnsupportedError("transactions: expected a query without one")
    return _statement(sql.encode())


def _parsed(name: str, data: bytes) -> Command:
    match name:
        case "CommandStatementQuery":
            query = pb.CommandStatementQuery.FromString(data)
            return _query(query.query, within=query.HasField("transaction_id"))
        case "CommandPreparedStatementQuery":
            prepared = pb.CommandPreparedStatementQuery.FromString(data)
            return _statement(prepared.prepared_statement_handle)
        case "TicketStatementQuery":
            return _statement(pb.TicketStatementQuery.FromString(data).statement_handle)
        case "CommandGetSqlInfo":
            return Information(tuple(pb.CommandGetSqlInfo.FromString(data).info))
        case "CommandGetCatalogs":
            return Catalogs()
        case "CommandGetDbSchemas":
            schemas = pb.CommandGetDbSchemas.FromString(data)
            return Schemas(
                _given(schemas, "catalog", schemas.catalog),
                _given(schemas, "db_schema_filter_pattern", schemas.db_schema_filter_pattern),
            )
        case "CommandGetTables":
            tables = pb.CommandGetTables.FromString(data)
            return Tables(
                catalog=_given(tables, "catalog", tables.catalog),
                schema_pattern=_given(
                    tables, "db_schema_filter_pattern", tables.db_schema_filter_pattern
                ),
                pattern=_given(
                    tables, "table_name_filter_pattern", tables.table_name_filter_pattern
                ),
                types=tuple(tables.table_types),
                columns=tables.include_schema,
            )
        case "CommandGetTableTypes":
            return TableTypes()
        case _:
            raise UnsupportedError(
                f"{name} of Flight SQL: expected a query, or a question about tables; nothing is "
                "changed here"
            )


def _given(message: Message, field: str, value: str) -> str | None:
    return value if message.HasField(field) else None


def _statement(data: bytes) -> Statement:
    if len(data) > SQL_BYTES_MAX:
        raise ConfigurationError(
            f"a statement of {len(data):,} bytes: expected at most {SQL_BYTES_MAX:,}"
        )
    return Statement(data.decode())


def ticket_of(command: Command, data: bytes) -> bytes:
    """Return the ticket for a command that came as `data`; it needs no memory of the server."""
    if not isinstance(command, Statement):
        return data
    inner = pb.TicketStatementQuery(statement_handle=command.sql.encode())
    return _packed("TicketStatementQuery", inner)


def matches(pattern: str | None, name: str) -> bool:
    """Return whether a name fits a pattern of SQL, with % and _; None fits all."""
    if pattern is None:
        return True
    parts = {"%": ".*", "_": "."}
    regex = "".join(parts.get(letter) or re.escape(letter) for letter in pattern)
    return re.fullmatch(regex, name, re.DOTALL) is not None


def prefix_of(pattern: str | None) -> str:
    """Return the beginning of all names that fit a pattern."""
    return re.split("[%_]", pattern or "%", maxsplit=1)[0]


def are_wanted(tables: Tables) -> bool:
    """Return whether any log can be among these tables."""
    return (
        _is_in(tables.catalog, CATALOG)
        and matches(tables.schema_pattern, SCHEMA)
        and (not tables.types or TABLE in tables.types)
    )


def _is_in(wanted: str | None, name: str) -> bool:
    return wanted is None or wanted == name


_CATALOG = pa.field("catalog_name", pa.string())
_SCHEMA = pa.field("db_schema_name", pa.string())


def catalogs_table() -> pa.Table:
    """Return the catalogs."""
    return pa.table([[CATALOG]], schema=pa.schema([_CATALOG.with_nullable(False)]))


def schemas_table(asked: Schemas) -> pa.Table:
    """Return the schemas, in the sense of SQL."""
    is_wanted = _is_in(asked.catalog, CATALOG) and matches(asked.pattern, SCHEMA)
    names = [SCHEMA] if is_wanted else []
    schema = pa.schema([_CATALOG, _SCHEMA.with_nullable(False)])
    return pa.table([[CATALOG] * len(names), names], schema=schema)


def table_types_table() -> pa.Table:
    """Return the types of tables."""
    return pa.table([[TABLE]], schema=pa.schema([pa.field("table_type", pa.string(), False)]))


def tables_table(columns_of: Mapping[str, pa.Schema | None], *, with_columns: bool) -> pa.Table:
    """Return the tables, by name with their columns."""
    names = sorted(columns_of)
    fields = [
        _CATALOG,
        _SCHEMA,
        pa.field("table_name", pa.string(), False),
        pa.field("table_type", pa.string(), False),
    ]
    values: list[list[str | bytes]] = [
        [CATALOG] * len(names), [SCHEMA] * len(names), [*names], [TABLE] * len(names),
    ]  # fmt: skip
    if with_columns:
        fields.append(pa.field("table_schema", pa.binary(), False))
        schemas = (columns_of[name] or pa.schema([]) for name in names)
        values.append([each.serialize().to_pybytes() for each in schemas])
    return pa.table(values, schema=pa.schema(fields))


def information_table(numbers: Collection[int], *, version: str) -> pa.Table:
    """Return facts about the server; those that it does not know are left out."""
    known: dict[int, tuple[int, str | bool | int]] = {
        _NAME: (_TEXT, "dlog"),
        _VERSION: (_TEXT, version),
        _READ_ONLY: (_BOOL, True),
        _SQL: (_BOOL, True),
        _SUBSTRAIT: (_BOOL, False),
        _TRANSACTIONS: (_INT32, _NO_TRANSACTIONS),
        _CANCEL: (_BOOL, False),
    }
    listed = [number for number in sorted(known) if not numbers or number in numbers]
    kinds = [known[number][0] for number in listed]
    types = {
        "string_value": pa.string(),
        "bool_value": pa.bool_(),
        "bigint_value": pa.int64(),
        "int32_bitmask": pa.int32(),
        "string_list": pa.list_(pa.string()),
        "int32_to_int32_list_map": pa.map_(pa.int32(), pa.list_(pa.int32())),
    }
    children = [
        pa.array([value for each, value in map(known.__getitem__, listed) if each == kind], type_)
        for kind, type_ in enumerate(types.values())
    ]
    offsets = [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
    values = pa.UnionArray.from_dense(
        pa.array(kinds, pa.int8()), pa.array(offsets, pa.int32()), children, [*types]
    )
    schema = pa.schema(
        [pa.field("info_name", pa.uint32(), False), pa.field("value", values.type, False)]
    )
    return pa.table([pa.array(listed, pa.uint32()), values], schema=schema)
