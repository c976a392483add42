"""Commands of Flight SQL: what is read from their bytes, what is refused, and their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from dlcore.base.errors import ConfigurationError, UnsupportedError
from dlcore.base.proto import flight_sql_pb2 as pb
from dlcore.ops.sql import commands
from dlcore.ops.sql.commands import (
    CLOSE,
    PREPARE,
    Catalogs,
    Information,
    Schemas,
    Statement,
    Tables,
    TableTypes,
    are_wanted,
    command_of,
    information_table,
    matches,
    prefix_of,
    prepared_by,
    prepared_result,
    schemas_table,
    tables_table,
    ticket_of,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message

ALL = Tables(catalog=None, schema_pattern=None, pattern=None, types=(), columns=False)


def packed(message: Message, name: str = "") -> bytes:
    """Return a command as clients send it."""
    kind = f"type.googleapis.com/arrow.flight.protocol.sql.{name or type(message).__name__}"
    return AnyMessage(type_url=kind, value=message.SerializeToString()).SerializeToString()


@pytest.mark.parametrize(
    ("message", "command"),
    [
        (pb.CommandStatementQuery(query="SELECT 1"), Statement("SELECT 1")),
        (
            pb.CommandPreparedStatementQuery(prepared_statement_handle=b"SELECT 1"),
            Statement("SELECT 1"),
        ),
        (pb.CommandGetSqlInfo(info=[8, 3]), Information((8, 3))),
        (pb.CommandGetCatalogs(), Catalogs()),
        (pb.CommandGetDbSchemas(), Schemas(None, None)),
        (
            pb.CommandGetDbSchemas(catalog="", db_schema_filter_pattern="m%"),
            Schemas("", "m%"),
        ),
        (pb.CommandGetTables(), ALL),
        (
            pb.CommandGetTables(
                catalog="temp",
                db_schema_filter_pattern="main",
                table_name_filter_pattern="a%",
                table_types=["TABLE"],
                include_schema=True,
            ),
            Tables(
                catalog="temp", schema_pattern="main", pattern="a%", types=("TABLE",), columns=True
            ),
        ),
        (pb.CommandGetTableTypes(), TableTypes()),
    ],
)
def test_commands(message: Message, command: commands.Command) -> None:
    """The ticket of each is a command that says the same."""
    data = packed(message)
    assert command_of(data) == command
    assert command_of(ticket_of(command, data)) == command


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff", "does not parse"),
        (b'{"log": "clicks"}', "parse|expected one of Flight SQL"),
        (AnyMessage(type_url="x/y").SerializeToString(), "type 'x/y': expected one of Flight SQL"),
        (
            packed(pb.CommandStatementQuery(query="x" * 65_537)),
            "65,537 bytes: expected at most 65,536",
        ),
        (packed(pb.TicketStatementQuery(statement_handle=b"\xff")), "does not parse"),
    ],
)
def test_bytes_that_are_no_command(data: bytes, reason: str) -> None:
    """The error says what would be right."""
    with pytest.raises(ConfigurationError, match=reason):
        command_of(data)


def test_calls_that_are_not_offered() -> None:
    """Nothing is changed, or part of a transaction."""
    for name in (
        "CommandStatementUpdate",
        "CommandPreparedStatementUpdate",
        "CommandGetXdbcTypeInfo",
    ):
        with pytest.raises(UnsupportedError, match=f"{name} of Flight SQL: expected a query"):
            command_of(packed(pb.CommandGetCatalogs(), name))
    with pytest.raises(UnsupportedError, match="expected a query without one"):
        command_of(packed(pb.CommandStatementQuery(query="SELECT 1", transaction_id=b"1")))


def test_a_statement_is_prepared() -> None:
    """Its handle is itself, so that any server knows it; to close it takes nothing."""
    asked = pb.ActionCreatePreparedStatementRequest(query="SELECT 1")
    statement = prepared_by(PREPARE, packed(asked))
    assert statement == Statement("SELECT 1")
    columns = pa.schema([("a", pa.int32())])
    outer = AnyMessage.FromString(prepared_result(statement, columns))
    found = pb.ActionCreatePreparedStatementResult.FromString(outer.value)
    assert outer.type_url.endswith(".sql.ActionCreatePreparedStatementResult")
    assert pa.ipc.read_schema(pa.py_buffer(found.dataset_schema)) == columns
    handle = found.prepared_statement_handle
    query = pb.CommandPreparedStatementQuery(prepared_statement_handle=handle)
    assert command_of(packed(query)) == statement
    close = pb.ActionClosePreparedStatementRequest(prepared_statement_handle=handle)
    assert prepared_by(CLOSE, packed(close)) is None


def test_statements_that_cannot_be_prepared() -> None:
    """Another action or message, a transaction, bytes that are none, and a long statement."""
    asked = pb.ActionCreatePreparedStatementRequest(query="SELECT 1", transaction_id=b"1")
    with pytest.raises(UnsupportedError, match="expected a query without one"):
        prepared_by(PREPARE, packed(asked))
    with pytest.raises(UnsupportedError, match="'BeginTransaction': expected CreatePrepared"):
        prepared_by("BeginTransaction", packed(asked))
    with pytest.raises(ConfigurationError, match="for ClosePreparedStatement: expected ActionClo"):
        prepared_by(CLOSE, packed(asked))
    with pytest.raises(ConfigurationError, match="does not parse"):
        prepared_by(PREPARE, b"\xff")
    long = pb.ActionCreatePreparedStatementRequest(query="x" * 65_537)
    with pytest.raises(ConfigurationError, match="expected at most 65,536"):
        prepared_by(PREPARE, packed(long))


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        (None, "x", True),
        ("%", "team/trips", True),
        ("team/_rips", "team/trips", True),
        ("team", "team/trips", False),
        ("t.ips", "trips", False),
        ("t%s", "trips\n", False),
    ],
)
def test_patterns(pattern: str | None, name: str, fits: bool) -> None:
    """% is anything, _ one letter, and all else itself."""
    assert matches(pattern, name) == fits


def test_beginnings_of_patterns() -> None:
    """Fewer logs are listed."""
    assert [prefix_of(each) for each in (None, "%", "team/%", "a_b", "a")] == [
        "",
        "",
        "team/",
        "a",
        "a",
    ]


def test_which_tables_are_wanted() -> None:
    """Those of another catalog, schema or type are none."""
    assert are_wanted(ALL)
    for field, value in (
        ("catalog", "other"),
        ("schema_pattern", "other"),
        ("types", ("VIEW",)),
    ):
        facts = {
            "catalog": "temp", "schema_pattern": "%", "pattern": None, "types": ("TABLE",),
            "columns": False,
        }  # fmt: skip
        assert are_wanted(Tables(**facts))  # type: ignore[arg-type]
        assert not are_wanted(Tables(**facts | {field: value}))  # type: ignore[arg-type]


def test_tables_about_tables() -> None:
    """In the form that Flight SQL demands."""
    assert commands.catalogs_table().to_pylist() == [{"catalog_name": "temp"}]
    assert schemas_table(Schemas(None, None)).to_pylist() == [
        {"catalog_name": "temp", "db_schema_name": "main"}
    ]
    assert schemas_table(Schemas("", None)).num_rows == 0
    assert schemas_table(Schemas("temp", "x%")).num_rows == 0
    assert commands.table_types_table().to_pylist() == [{"table_type": "TABLE"}]
    columns = pa.schema([("fare", pa.float64())])
    found = tables_table({"b": columns, "a": None}, with_columns=True)
    assert found["table_name"].to_pylist() == ["a", "b"]
    schemas = [pa.ipc.read_schema(pa.py_buffer(each)) for each in found["table_schema"].to_pylist()]
    assert schemas == [pa.schema([]), columns]
    assert not found.schema.field("table_name").nullable
    found = tables_table({"b": None}, with_columns=False)
    assert found.to_pylist() == [
        {"catalog_name": "temp", "db_schema_name": "main", "table_name": "b", "table_type": "TABLE"}
    ]


def test_facts_about_the_server() -> None:
    """Those that are asked for and known, or all."""
    reported = information_table([], version="1.2").to_pylist()
    assert {each["info_name"]: each["value"] for each in reported} == {
        0: "dlog", 1: "1.2", 3: True, 4: True, 5: False, 8: 0, 9: False,
    }  # fmt: skip
    reported = information_table([8, 12_345], version="1.2").to_pylist()
    assert reported == [{"info_name": 8, "value": 0}]
