"""One name and one type for each thing, through whichever door a log is read.

Goal: code that knows the columns of one door knows those of all.  Method: one log of bytes and one
typed log are read through every door, and names, types and values compared; the table of
docs/python.md says which names these are.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dlcore
import dlcore.sync
from dlcore.api.schemas import byte_row_schema
from dlcore.base.records import LogRecord
from tests.fixtures.proxies import proxy_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from dlcore.sync import DistributedLogManager
    from tests.fixtures.shell import Shell
    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]

PAGE = Path(__file__).resolve().parents[2] / "docs/python.md"
RECORDS = [(5, b"a"), (6, b"\xff"), (6, b"")]
KNOWN = ["_log", "_dlsn", "_txid", "_sequence_id", "_timestamp"]
OWN = pa.schema([("city", pa.string()), ("fare", pa.float64())])


@pytest.fixture(scope="module")
def endpoint(logs: LogBench) -> Iterator[str]:
    """Where a proxy serves the logs."""
    with proxy_thread(logs.uri) as serving:
        yield serving.server.location


@pytest.fixture
def log(logs: LogBench) -> Iterator[DistributedLogManager]:
    """A log of bytes."""
    name = logs.create("vocabulary")
    logs.append(name, RECORDS)
    with logs.namespace.open_log(name) as opened:
        yield opened


@pytest.fixture
def typed(logs: LogBench) -> Iterator[DistributedLogManager]:
    """A typed log."""
    name = logs.create("vocabulary") + "-typed"
    logs.namespace.create_log(name, schema=OWN)
    with logs.namespace.open_log(name) as opened:
        with opened.open_writer() as writer:
            writer.write_table(pa.table({"city": ["Paris", None], "fare": [12.5, 7.0]}))
        yield opened


def got(endpoint: str, **ticket: Any) -> pa.Table:
    """Return what plain Flight gives for a ticket."""
    with flight.connect(endpoint) as client:
        return client.do_get(flight.Ticket(json.dumps(ticket).encode())).read_all()


async def read_async(uri: str, endpoint: str, name: str, columns: Any) -> dict[str, pa.Table]:
    """Return a range through the async faces, over bookies and over an endpoint."""
    async with await dlcore.open_namespace(uri) as namespace:
        core = await (await (await namespace.open_log(name)).read(columns=columns)).to_arrow()
    async with await dlcore.open_namespace(endpoint) as remote:
        opened = await remote.open_log(name)
        return {"core": core, "remote": await (await opened.read(columns=columns)).to_arrow()}


def ranges(
    log: DistributedLogManager, uri: str, endpoint: str, columns: list[str] | None = None
) -> dict[str, pa.Table]:
    """Return all of a log as a table, through each door that gives one to Python."""
    asked = {} if columns is None else {"columns": columns}
    found = log.read(columns=columns)
    with dlcore.sync.open_namespace(endpoint) as namespace:
        remote = namespace.open_log(log.name).read(columns=columns)
        tables = {"remote": remote.to_arrow(), "remote stream": pa.table(remote)}
    return {
        "range": found.to_arrow(),
        "stream of a range": pa.table(found),
        "batches of a range": pa.Table.from_batches(list(found)),
        "Flight": got(endpoint, log=log.name, **asked),
        **asyncio.run(read_async(uri, endpoint, log.name, columns)),
        **tables,
    }


def readers(log: DistributedLogManager, endpoint: str) -> dict[str, pa.Table]:
    """Return the batches of readers, over bookies and over an endpoint."""
    with (
        dlcore.sync.open_namespace(endpoint) as namespace,
        log.open_reader() as core,
        namespace.open_log(log.name).open_reader() as remote,
    ):
        return {
            "reader": pa.Table.from_batches(list(core.batches())),
            "remote reader": pa.Table.from_batches(list(remote.batches())),
        }


def test_logs_of_bytes(log: DistributedLogManager, logs: LogBench, endpoint: str) -> None:
    """The columns of Spark's source, in their order, and the same rows."""
    spark = logs.frame(log=log.name).toArrow()
    assert spark.schema == byte_row_schema()
    assert spark["value"].to_pylist() == [payload for _, payload in RECORDS]
    found = {**ranges(log, logs.uri, endpoint), **readers(log, endpoint)}
    assert {door: table.schema for door, table in found.items()} == dict.fromkeys(
        found, spark.schema
    )
    assert {door: table.to_pylist() for door, table in found.items()} == dict.fromkeys(
        found, spark.to_pylist()
    )


def test_typed_logs(typed: DistributedLogManager, logs: LogBench, endpoint: str) -> None:
    """Their own columns; what the log says of its records has the names and types of bytes."""
    own = ranges(typed, logs.uri, endpoint)
    assert {door: table.schema for door, table in own.items()} == dict.fromkeys(own, OWN)
    columns = [*OWN.names, *KNOWN]
    spark = logs.frame(log=typed.name, includeMetadata="true").toArrow()
    assert spark.schema.names == columns
    bare = [byte_row_schema().field(name[1:]).with_name(name) for name in KNOWN]
    assert list(spark.schema)[len(OWN) :] == bare
    found = ranges(typed, logs.uri, endpoint, columns)
    assert {door: table.schema for door, table in found.items()} == dict.fromkeys(
        found, spark.schema
    )
    assert {door: table.to_pylist() for door, table in found.items()} == dict.fromkeys(
        found, spark.to_pylist()
    )
    (batch,) = readers(typed, endpoint)["reader"].to_batches()
    assert list(batch.schema) == [*bare[1:], *OWN]


def test_frames(log: DistributedLogManager, logs: LogBench) -> None:
    """Columns of pandas, Polars and DuckDB: the same names, and parts of a position by theirs."""
    names = byte_row_schema().names
    pandas, polars = log.read().to_pandas(), log.read().to_polars()
    with duckdb.connect() as connection:
        scanned = connection.from_arrow(pa.RecordBatchReader.from_stream(log.read()))
        duck = scanned.select("*, dlsn.slot as slot").pl()
    assert list(pandas) == polars.columns == duck.columns[:-1] == names
    assert [str(pandas[name].dtype) for name in ("txid", "sequence_id", "timestamp")] == [
        *("int64", "int64"),
        "datetime64[us, UTC]",
    ]
    slots = [row["dlsn"]["slot"] for row in log.read().to_arrow().to_pylist()]
    assert pandas["dlsn"].struct.field("slot").tolist() == slots
    assert polars["dlsn"].struct.field("slot").to_list() == duck["slot"].to_list() == slots
    assert (
        duck.drop("slot")
        .with_columns(pl.col("timestamp").dt.convert_time_zone("UTC"))
        .equals(polars)
    )
    assert list(logs.frame(log=log.name).toPandas()) == names


def test_rows_that_are_read_are_written_back(
    log: DistributedLogManager, logs: LogBench, endpoint: str, spark: SparkSession
) -> None:
    """Rows of one door go through each other one, by the names that they have."""
    rows = log.read(columns=["value"]).to_arrow()
    with dlcore.sync.open_namespace(endpoint) as namespace:
        name = logs.create("vocabulary-remote")
        with namespace.open_log(name).open_writer() as remote:
            remote.write_table(rows)
        assert logs.payloads(name) == rows["value"].to_pylist()
    name = logs.create("vocabulary-core")
    with logs.namespace.open_log(name) as opened, opened.open_writer() as writer:
        writer.write_table(log.read().to_arrow())  # what it does not take it passes over
    logs.save(spark.createDataFrame(rows), log=name)
    assert logs.payloads(name) == rows["value"].to_pylist() * 2


def test_the_command_line(log: DistributedLogManager, shell: Shell) -> None:
    """JSON and formats have the bytes as value."""
    names = ["dlsn", "txid", "sequence_id", "timestamp_ms"]
    first, second, _ = map(json.loads, shell.text("log", "tail", log.name, "--json").splitlines())
    assert list(first) == [*names, "value"]
    assert first["value"] == "a"
    assert list(second) == [*names, "value_base64"]
    assert second["value_base64"] == "/w=="
    line = "{dlsn} {txid} {value} {value_hex}"
    assert shell.outcome("log", "tail", log.name, "--format", line)[2] == ""


def test_the_page_has_these_names(log: DistributedLogManager) -> None:
    """Its table has a row for each column, and each door's name for it."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## One name for each thing\n")[2]
    rows = re.findall(r"^\| (.*) \|$", text.partition("\n#")[0], re.MULTILINE)[1:]
    cells = [[re.findall(r"`([\w.]+)`", cell) for cell in row.split(" | ")] for row in rows]
    assert [cell[0] for _, cell, *_ in cells] == byte_row_schema().names
    assert [each[0] for _, _, each, *_ in cells[:-1]] == KNOWN
    with log.open_reader() as reader:
        record = next(iter(reader))
        for _, _, _, named, _ in cells:
            owner, _, attribute = named[0].partition(".")
            assert hasattr({"record": record, "reader": reader}[owner], attribute)
    assert LogRecord(1, b"x").payload == b"x"
    shown = [each[0] for *_, each in cells[1:]]
    assert shown == ["dlsn", "txid", "sequence_id", "timestamp_ms", "value"]
