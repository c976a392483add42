"""Tables about the system, read without Spark on a real cluster.

Goal: each table says what the namespace says.  Method: logs of known shape; rows compared with
dlog's own answers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from dlcore.backends.direct.namespace import open_namespace as open_async
from dlcore.base.errors import ConfigurationError, LogNotFoundError
from dlcore.base.records import LogRecord
from dlcore.metadata.port import ANY_VERSION
from dlcore.sync import open_namespace
from dlspark import metadata
from dlspark.options import Address
from dlspark.sessions import close_shared_namespace
from dlspark.source import DistributedLogDataSource
from tests.fixtures.spark import arrow_schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.sync import Namespace

pytestmark = pytest.mark.integration


@pytest.fixture
def namespace(namespace_uri: str) -> Iterator[Namespace]:
    """Open the shared cluster; what this process opened for the source is closed."""
    with open_namespace(namespace_uri) as found:
        yield found
    close_shared_namespace(Address(uri=namespace_uri))


def rows(namespace: Namespace, **options: str) -> list[dict[str, Any]]:
    """Return a table as Spark would get it, with Spark's schema checked against Arrow's."""
    source = DistributedLogDataSource({"uri": namespace.uri, **options})
    schema = source.schema()
    reader: Any = source.reader(schema)
    (part,) = reader.partitions()
    batches = list(reader.read(part))
    for batch in batches:
        assert batch.schema == arrow_schema_of(schema)
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.fixture
def log(namespace: Namespace) -> str:
    """A log of two segments of a writer, and one that was appended to."""
    name = f"metadata/{uuid4().hex}"
    namespace.create_log(name)
    for start in (0, 5):
        with namespace.open_log(name) as manager, manager.open_writer() as writer:
            writer.write_bulk(LogRecord(txid, b"%d" % txid) for txid in range(start, start + 5))
    with namespace.begin_append(f"metadata:{name}", 3) as append:
        append.write_batch(name, pa.record_batch({"value": [b"x"] * 4}))
        append.commit()
    return name


def test_logs_segments_and_extents(namespace: Namespace, log: str) -> None:
    """Their counts agree with each other and with the snapshot."""
    namespace.create_log(f"{log}/empty")
    both = rows(namespace, metadata="logs", logsPattern=f"{log}.*")
    full, empty = sorted(both, key=lambda row: row["log"])
    (snapshot,) = namespace.get_snapshots([log]).values()
    assert snapshot is not None
    assert (full["log_id"], full["end_dlsn"]) == (snapshot.log_id, str(snapshot.end))
    assert (full["records"], full["segments"], full["sealed"]) == (
        14,
        len(snapshot.segments),
        False,
    )
    assert (full["first_txid"], full["first_dlsn"]) == (0, "1:0:0")
    assert (empty["records"], empty["first_txid"], empty["last_timestamp"]) == (0, None, None)
    segments = rows(namespace, metadata="segments", log=log)
    extents = rows(namespace, metadata="extents", log=log)
    for key in ("records", "size_bytes"):
        assert sum(row[key] for row in segments) == sum(row[key] for row in extents) == full[key]
    assert [row["lssn"] for row in segments] == [s.lssn for s in snapshot.segments]
    assert segments[1]["first_sequence_id"] == 5
    ledgers = {row["ledger_id"]: row for row in rows(namespace, metadata="ledgers")}
    for extent in extents:
        ledger = ledgers[extent["ledger_id"]]
        assert ledger["state"] in ("OPEN", "CLOSED")
        assert len(ledger["bookies"]) == ledger["ensemble_size"]
    assert any(row["log"] == log for row in rows(namespace, metadata="logs"))


@pytest.mark.parametrize("table", ["logs", "segments", "extents"])
def test_a_damaged_log_is_a_row_of_its_own(namespace: Namespace, log: str, table: str) -> None:
    """With its name and the error; the others are there."""
    damaged = f"{log}/damaged"
    namespace.create_log(damaged)

    async def damage() -> None:
        async with await open_async(namespace.uri) as opened:
            context = opened.log_context
            head = context.logs.paths_of(await context.logs.find(damaged)).head
            await context.store.put(head, b"no head", version=ANY_VERSION)

    asyncio.run(damage())
    try:
        found = rows(namespace, metadata=table, logsPattern=f"{log}.*")
        (failed,) = (row for row in found if row["error"] is not None)
        assert failed["log"] == damaged
        assert "LogHead at" in failed["error"]
        assert [key for key, value in failed.items() if value is not None] == ["log", "error"]
        assert {row["log"] for row in found} == {log, damaged}
    finally:
        namespace.delete_log(damaged, damaged=True)


def test_a_damaged_ledger_is_a_row_of_its_own(namespace: Namespace, log: str) -> None:
    """With its id and the error; the others are there."""
    before = rows(namespace, metadata="ledgers")
    ledger_id = before[-1]["ledger_id"]

    async def put(value: bytes) -> bytes:
        async with await open_async(namespace.uri) as opened:
            store, path = opened.log_context.store, opened.log_context.paths.ledger(ledger_id)
            node = await store.get(path, fresh=True)
            assert node is not None
            await store.put(path, value, version=node.version)
            return node.value

    was = asyncio.run(put(b"no ledger"))
    try:
        *others, failed = rows(namespace, metadata="ledgers")
        assert others == before[:-1]
        assert "LedgerMetadata at" in failed["error"]
        failure = {key: value for key, value in failed.items() if value is not None}
        assert failure == {"ledger_id": ledger_id, "error": failed["error"]}
    finally:
        asyncio.run(put(was))


def test_ledgers_come_in_pages(
    namespace: Namespace, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, in order, whatever a page holds."""
    whole = [row["ledger_id"] for row in rows(namespace, metadata="ledgers")]
    monkeypatch.setattr(metadata, "ROWS_PER_BATCH", 1)
    paged = [row["ledger_id"] for row in rows(namespace, metadata="ledgers")]
    assert paged == sorted(set(paged))
    assert set(whole) & set(paged)


def test_bookies_and_commits(namespace: Namespace, log: str) -> None:
    """Those that are registered; the last version of each appender."""
    bookies = rows(namespace, metadata="bookies")
    assert {row["bookie"] for row in bookies} == {i.bookie.name for i in namespace.get_bookies()}
    commits = {row["identity"]: row for row in rows(namespace, metadata="commits")}
    found = commits[f"metadata:{log}"]
    assert (found["version"], found["appends"]) == (3, 1)
    assert found["committed"].year >= 2024


def test_a_table_about_the_system_has_a_fixed_schema(namespace: Namespace) -> None:
    """And is not a stream."""
    source = DistributedLogDataSource({"uri": namespace.uri, "metadata": "commits"})
    with pytest.raises(ConfigurationError, match="expected struct<identity:string"):
        source.reader(StructType([StructField("x", LongType())]))
    with pytest.raises(ConfigurationError, match="metadata='commits' is for tables about"):
        source.streamReader(StructType([StructField("x", StringType())]))


@pytest.mark.parametrize("table", ["logs", "segments", "extents"])
def test_a_log_that_does_not_exist_is_an_error(namespace: Namespace, log: str, table: str) -> None:
    """By its name; a pattern may match none."""
    missing = f"{log}/missing"
    with pytest.raises(LogNotFoundError, match=f"there is no log '{missing}'"):
        rows(namespace, metadata=table, logs=f"{log},{missing}")
    assert rows(namespace, metadata=table, logsPattern=missing) == []
