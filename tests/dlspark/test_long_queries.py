"""Queries that run for long: what they keep, and moments that only long ones meet.

Goal: a query may run for years.  Method: a real cluster; this process does what Spark's driver and
tasks do, batch after batch.
"""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from dlcore import SharedStaging
from dlcore.base.errors import LogNotFoundError, MetadataConnectionError
from dlcore.base.records import LogRecord
from dlcore.metadata import one_node
from dlcore.sync import open_namespace
from dlspark import sessions
from dlspark.commit import AppendIdentity
from dlspark.options import Address, Mode, WriteOptions
from dlspark.schema import WriteColumns
from dlspark.sessions import close_shared_namespace
from dlspark.source import DistributedLogDataSource
from dlspark.staging import commit_staged, stage_rows
from tests.fixtures.lengths import amount
from tests.fixtures.spark import list_staged
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import Namespace
    from dlspark.commit import StagedTask

pytestmark = pytest.mark.integration
VALUES = WriteColumns(has_txid=False, has_log=False)
WAIT_S = 60


class LongQuery:
    """From log to log, with what a checkpoint keeps: the offset of the last batch."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        name = uuid4().hex
        self.source, self.target = f"long/{name}/in", f"long/{name}/out"
        for log in (self.source, self.target):
            namespace.create_log(log)
        self.writer = namespace.open_log(self.source).open_writer()
        source = DistributedLogDataSource(
            {"uri": namespace.uri, "log": self.source, "startingOffsets": "earliest"}
        )
        self.reader: Any = source.streamReader(source.schema())
        given = {"uri": namespace.uri, "log": self.target}
        self.options = WriteOptions.parse(given, Mode.BATCH)
        self.identity = f"stream:{name}"
        self.offset = self.reader.initialOffset()
        self.batches = 0

    def append_to_source(self) -> None:
        """Write the next record to the log that is read."""
        self.writer.write(LogRecord(self.batches, b"%d" % self.batches))
        self.writer.commit()  # what is durable may become readable a little later

    def plan(self) -> list[pa.RecordBatch]:
        """Take the next offset; return the rows of its batch."""
        end = self.reader.latestOffset(self.offset)
        parts = self.reader.partitions(self.offset, end)
        self.offset = end
        self.batches += 1
        return [batch.select(["value"]) for part in parts for batch in self.reader.read(part)]

    def stage(self, rows: Iterable[pa.RecordBatch]) -> StagedTask:
        """Stage rows as the task of the batch that was planned."""
        round_ = str(self.batches)
        append = AppendIdentity(
            identity=self.identity,
            version=self.batches,
            shared=SharedStaging(identity=self.identity, round=round_),
            is_stream=True,
            is_of_log=True,
        )
        options = self.options
        return stage_rows(rows, options=options, columns=VALUES, append=append, partition_id=0)

    def commit(self, *tasks: StagedTask) -> None:
        """Commit what they staged."""
        commit_staged(tasks, options=self.options)

    def payloads(self) -> list[bytes]:
        """Return what was written."""
        with self.namespace.open_log(self.target) as log, log.open_reader() as reader:
            return [record.payload for record in reader.read_bulk(10_000)]


@pytest.fixture
def query(namespace_uri: str) -> Iterator[LongQuery]:
    """A query; what this process opened for it is closed."""
    with open_namespace(namespace_uri) as namespace:
        made = LongQuery(namespace)
        yield made
        made.reader.stop()
    close_shared_namespace(Address(uri=namespace_uri))


def test_the_state_of_a_query_does_not_grow_with_its_batches(query: LongQuery) -> None:
    """Offsets, commit records, ledgers that are staged in, and what the processes remember."""
    batches = amount(600, sampled=60)
    seen = []
    for number in range(batches):
        query.append_to_source()
        query.commit(query.stage(query.plan()))
        if (number + 1) % (batches // 3) == 0:
            gc.collect()
            staged, _ = list_staged(query.namespace.uri, query.identity)
            seen.append((len(json.dumps(query.offset)), len(staged), len(gc.get_objects())))
    sizes, ledgers, objects = zip(*seen, strict=True)
    assert query.payloads() == [b"%d" % n for n in range(batches)]
    assert max(sizes) - min(sizes) <= 12, "a few digits"
    assert ledgers == (1, 1, 1)
    assert objects[2] - objects[1] < 2 * batches
    commits = [each for each in query.namespace.list_commits() if query.identity in each.identity]
    assert [(each.version, each.appends) for each in commits] == [(batches, 1)]


def after(barrier: threading.Barrier, rows: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task once all that wait here have begun."""
    barrier.wait(WAIT_S)
    yield from rows


def test_tasks_that_run_twice_at_once_are_committed_once(query: LongQuery) -> None:
    """As by speculation: now the first attempt counts and now the second, whichever is done."""
    batches = 6
    with ThreadPoolExecutor(2) as tasks:
        for number in range(batches):
            query.append_to_source()
            rows, both_began = query.plan(), threading.Barrier(2)
            running = [tasks.submit(query.stage, after(both_began, rows)) for _ in range(2)]
            attempts = [task.result(WAIT_S) for task in running]
            ledgers = {extent.ledger_id for task in attempts for extent in task.extents}
            assert len(ledgers) == 2, "each has a writer of its own"
            query.commit(attempts[number % 2])
            assert query.payloads() == [b"%d" % n for n in range(number + 1)]
    # Ledgers that did not count go soon after the answer to a commit.
    wait_until(
        lambda: len(list_staged(query.namespace.uri, query.identity)[0]) <= 2, timeout_s=WAIT_S
    )


def test_a_log_that_is_deleted_and_created_anew_within_a_trigger(
    query: LongQuery, caplog: pytest.LogCaptureFixture
) -> None:
    """Between its end and its plan: the old one is lost, the new one read from its beginning."""
    given = {"uri": query.namespace.uri, "logsPattern": query.source}
    given |= {"startingOffsets": "earliest"}
    readers: list[Any] = []
    for fail in ("true", "false"):
        source = DistributedLogDataSource(given | {"failOnDataLoss": fail})
        readers.append(source.streamReader(source.schema()))
    strict, lenient = readers
    query.append_to_source()
    start = strict.initialOffset()
    end = strict.latestOffset(start)
    assert lenient.latestOffset(start)["logs"] == end["logs"]
    query.writer.close()
    query.namespace.delete_log(query.source)
    query.namespace.create_log(query.source)
    with query.namespace.open_log(query.source) as log, log.open_writer() as writer:
        writer.write_bulk(LogRecord(n, b"new-%d" % n) for n in range(3))
    later = lenient.latestOffset(end)
    with pytest.raises(LogNotFoundError, match=r"created again.*failOnDataLoss"):
        strict.latestOffset(end)
    for reader in readers:  # as after a restart, in which the batch is planned once more
        reader._snapshots = {}
    with pytest.raises(LogNotFoundError, match=r"created again.*failOnDataLoss"):
        strict.partitions(start, end)
    assert lenient.partitions(start, end) == []
    parts = lenient.partitions(end, later)
    rows = [batch for part in parts for batch in lenient.read(part)]
    assert [value for batch in rows for value in batch["value"].to_pylist()] == [
        b"new-0",
        b"new-1",
        b"new-2",
    ]
    assert lenient.latestOffset(later) == later
    assert caplog.text.count("created again") == 1


@pytest.mark.prove  # it waits for unanswered requests
def test_zookeeper_is_away_for_longer_than_anybody_waits(
    fresh_sandbox: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query meanwhile gets an error, and loses nothing: the same processes go on afterwards."""
    monkeypatch.setattr(one_node, "RETRY_DELAYS_S", (0.1,))
    cluster = fresh_sandbox()
    address = Address(uri=cluster.uri)
    sessions._kept.namespaces[address] = open_namespace(cluster.uri, session_timeout_s=4)
    try:
        with open_namespace(cluster.uri) as namespace:
            query = LongQuery(namespace)
            query.append_to_source()
            query.commit(query.stage(query.plan()))
            query.append_to_source()
            staged = query.stage(query.plan())
            before = query.offset
            query.writer.close()
            cluster.metadata_server.kill()
            with pytest.raises(MetadataConnectionError):
                query.reader.latestOffset(before)
            with pytest.raises(MetadataConnectionError):
                query.commit(staged)
            cluster.metadata_server.start()
            wait_until(lambda: bool(namespace.get_logs()), timeout_s=WAIT_S)
            query.commit(staged)
            assert query.reader.latestOffset(before) == before
            query.writer = namespace.open_log(query.source).open_writer()
            query.append_to_source()
            query.commit(query.stage(query.plan()))
            assert query.payloads() == [b"0", b"1", b"2"]
            query.reader.stop()
    finally:
        close_shared_namespace(address)
