"""Stream writes on a real session and cluster: each batch once, whatever fails in between.

Goal: exactly once over restarts, failing tasks and commits, with the sink and in foreachBatch.
Method: a stream from one log into another; failures are injected by subclasses of the source.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import TaskContext
from pyspark.sql import functions as F

from dlcore.base.records import LogRecord
from dlspark import DistributedLogDataSource, in_batch
from dlspark.stream import DlogStreamWriter
from tests.fixtures.lengths import amount, sample
from tests.fixtures.spark import committed_version, list_staged, message_of
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
TIMEOUT_S = 120


def append(logs: LogBench, log: str, numbers: range) -> None:
    """Append numbers as one segment."""
    logs.append(log, [(n, b"%d" % n) for n in numbers])


def as_bytes(numbers: range) -> list[bytes]:
    """Return the payloads of numbers."""
    return [b"%d" % n for n in numbers]


def start(
    logs: LogBench, frame: DataFrame, checkpoint: Path, *, source: str = "dlog", **options: str
) -> StreamingQuery:
    """Start a stream into a log."""
    return (
        frame.writeStream.format(source)
        .options(uri=logs.uri, checkpointLocation=str(checkpoint), **options)
        .trigger(processingTime="50 milliseconds")
        .start()
    )


def start_each(
    frame: DataFrame, take: Callable[[DataFrame, int], None], checkpoint: Path
) -> StreamingQuery:
    """Start a stream into a function."""
    writer = frame.writeStream.foreachBatch(take)
    return writer.option("checkpointLocation", str(checkpoint)).start()


def wait_for(logs: LogBench, query: StreamingQuery, log: str, count: int) -> None:
    """Wait until the log holds `count` records."""

    def is_done() -> bool:
        return len(logs.payloads(log)) >= count or not query.isActive

    wait_until(is_done, timeout_s=TIMEOUT_S)
    assert query.isActive, query.exception()


def stop(query: StreamingQuery) -> None:
    """Stop a query and wait for its end."""
    query.stop()
    query.awaitTermination(TIMEOUT_S)


def message_of_failure(query: StreamingQuery) -> str:
    """Wait until a query has failed; return why."""
    return message_of(lambda: query.awaitTermination(TIMEOUT_S))


def ledgers_of(logs: LogBench, log: str) -> set[int]:
    """Return the ledgers that a log's segments are made of."""
    with logs.namespace.open_log(log) as manager:
        return {
            extent.ledger_id for segment in manager.get_log_segments() for extent in segment.extents
        }


def test_stream_over_restarts(logs: LogBench, tmp_path: Path) -> None:
    """Batch after batch in order, over a stop; ledgers and segments do not grow with batches."""
    source, target = logs.create("in"), logs.create("out")
    frame = logs.stream(log=source, startingOffsets="earliest")
    query = start(logs, frame, tmp_path, log=target)
    batches = amount(8, sampled=3)
    for batch in range(batches):
        append(logs, source, range(batch * 10, batch * 10 + 10))
        wait_for(logs, query, target, batch * 10 + 10)
    stop(query)
    records_count = batches * 10 + 20
    append(logs, source, range(batches * 10, records_count))
    query = start(logs, frame, tmp_path, log=target)
    wait_for(logs, query, target, records_count)
    stop(query)
    records = logs.read(target)
    assert [record.payload for record in records] == as_bytes(range(records_count))
    assert [record.txid for record in records] == list(range(records_count))
    assert {record.dlsn.lssn for record in records} == {1}
    # Each worker process keeps its ledger open: at most one for each of two cores and each run.
    assert len(ledgers_of(logs, target)) <= 4


def test_values_as_strings_to_several_logs(logs: LogBench, tmp_path: Path) -> None:
    """The column log says where; one batch commits to all of them."""
    source = logs.create("in")
    names = sorted(logs.create(letter) for letter in "ab")
    append(logs, source, range(20))
    frame = logs.stream(log=source, startingOffsets="earliest").select(
        F.concat(F.lit("n"), F.col("value").cast("string")).alias("value"),
        F.when(F.col("txid") < 15, names[0]).otherwise(names[1]).alias("log"),
    )
    query = start(logs, frame, tmp_path)
    wait_for(logs, query, names[1], 5)
    stop(query)
    assert logs.payloads(names[0]) == [b"n%d" % n for n in range(15)]
    assert logs.payloads(names[1]) == [b"n%d" % n for n in range(15, 20)]


@pytest.mark.prove  # tests/dlspark has it without a session
def test_wrong_sinks_stop_the_query(logs: LogBench, tmp_path: Path) -> None:
    """A missing log, a wrong column, an option that is not for streams."""
    source = logs.create("in")
    frame = logs.stream(log=source)
    for number, (wrong, options, words) in enumerate(
        [
            (frame, {"log": "absent"}, "dlog log create absent"),
            (frame.withColumn("key", F.lit(1)), {"log": source}, "no column 'key'"),
            (frame, {"log": source, "txnAppId": "a", "txnVersion": "1"}, "batch id"),
        ]
    ):
        query = start(logs, wrong, tmp_path / str(number), **options)
        assert words in message_of_failure(query)


class FlakyStreamWriter(DlogStreamWriter):
    """Fails once, after staging or after committing; a file remembers that it did."""

    def __init__(self, inner: DlogStreamWriter, folder: str, plan: str) -> None:
        self.__dict__.update(inner.__dict__)
        self._marker = Path(folder, plan)
        self._plan = plan

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage, then fail where planned."""
        message = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        if self._plan == "stage" and context.attemptNumber() == 0:
            self._marker.touch()
            raise RuntimeError("failed after staging")
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit, then fail where planned."""
        if self._plan == "before" and not self._marker.exists():
            self._marker.touch()
            raise RuntimeError("failed before committing")
        super().commit(messages, batchId)
        if self._plan == "after" and not self._marker.exists():
            self._marker.touch()
            raise RuntimeError("failed after committing")


class FlakyStreamDataSource(DistributedLogDataSource):
    """The source with a writer that fails."""

    @classmethod
    def name(cls) -> str:
        """Return a name of its own."""
        return "dlog_flaky_stream"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DlogStreamWriter:
        """Return the failing writer; its options are not dlog's."""
        folder, plan = self.options["folder"], self.options["plan"]
        own = {key: value for key, value in self.options.items() if key not in ("folder", "plan")}
        inner = DistributedLogDataSource(own).streamWriter(schema, overwrite)
        return FlakyStreamWriter(inner, folder, plan)


@pytest.mark.parametrize("plan", sample(["after", "before"], 1))
def test_failed_commit_is_retried_once(
    spark: SparkSession, logs: LogBench, tmp_path: Path, plan: str
) -> None:
    """Spark aborts and the query ends; its restart replays the batch, which is there once."""
    spark.dataSource.register(FlakyStreamDataSource)
    source, target = logs.create("in"), logs.create("out")
    append(logs, source, range(50))
    frame = logs.stream(log=source, startingOffsets="earliest")
    options = {"source": "dlog_flaky_stream", "log": target, "folder": str(tmp_path), "plan": plan}
    query = start(logs, frame, tmp_path / "checkpoint", **options)
    assert f"failed {plan} committing" in message_of_failure(query)
    assert len(logs.payloads(target)) == (50 if plan == "after" else 0)
    append(logs, source, range(50, 60))
    query = start(logs, frame, tmp_path / "checkpoint", **options)
    wait_for(logs, query, target, 60)
    stop(query)
    assert logs.payloads(target) == as_bytes(range(60))


@pytest.mark.prove  # `test_failed_attempts_leave_nothing` has it of a batch
def test_task_that_fails_after_staging(spark: SparkSession, logs: LogBench, tmp_path: Path) -> None:
    """Only what the second attempt staged is committed."""
    spark.dataSource.register(FlakyStreamDataSource)
    source, target = logs.create("in"), logs.create("out")
    for segment in range(2):
        append(logs, source, range(segment * 50, segment * 50 + 50))
    frame = logs.stream(log=source, startingOffsets="earliest")
    query = start(
        logs,
        frame,
        tmp_path / "checkpoint",
        source="dlog_flaky_stream",
        log=target,
        folder=str(tmp_path),
        plan="stage",
    )
    wait_for(logs, query, target, 100)
    stop(query)
    assert (tmp_path / "stage").exists()
    assert logs.payloads(target) == as_bytes(range(100))


@pytest.mark.prove  # the next test replays a batch of several writes
def test_foreach_batch_writes_once(logs: LogBench, tmp_path: Path) -> None:
    """A batch whose function fails after the write is replayed, and its write skipped."""
    source, target = logs.create("in"), logs.create("out")
    append(logs, source, range(30))
    frame = logs.stream(log=source, startingOffsets="earliest")
    failures = ["after the write"]

    def take(batch: DataFrame, batch_id: int) -> None:
        logs.save(batch, log=target)
        if failures:
            raise RuntimeError(failures.pop())

    assert "after the write" in message_of_failure(start_each(frame, take, tmp_path))
    assert logs.payloads(target) == as_bytes(range(30))
    append(logs, source, range(30, 40))
    query = start_each(frame, take, tmp_path)
    wait_for(logs, query, target, 40)
    stop(query)
    assert logs.payloads(target) == as_bytes(range(40))


@pytest.mark.parametrize("survived", sample([3, 1], 1))
def test_writes_to_one_log_in_a_batch(
    spark: Any, logs: LogBench, tmp_path: Path, survived: int
) -> None:
    """All are kept, once, wherever the batch failed; a write to another log does not count.

    Whether they are in a job group of the user's, or in none, changes nothing.
    """
    source, target, other = logs.create("in"), logs.create("out"), logs.create("other")
    append(logs, source, range(10))
    frame = logs.stream(log=source, startingOffsets="earliest")
    failures = [f"after {survived} writes"]

    def take(batch: DataFrame, batch_id: int) -> None:
        rows = batch.drop("txid")
        writes = [
            (rows.withColumn("value", F.lit(f"a{batch_id}")), target),
            (rows, other),
            (rows.filter("false"), target),
            (rows.withColumn("value", F.lit(f"b{batch_id}")), target),
        ]
        spark.sparkContext.setJobGroup("mine", "the same in each run")
        for number, (frame, log) in enumerate(writes):
            if failures and number == survived:
                raise RuntimeError(failures.pop())
            logs.save(frame, log=log)
            spark.sparkContext._jsc.sc().clearJobGroup()

    assert f"after {survived} writes" in message_of_failure(start_each(frame, take, tmp_path))
    assert len(logs.payloads(target)) == 10
    append(logs, source, range(10, 12))
    query = start_each(frame, take, tmp_path)
    wait_for(logs, query, target, 24)
    stop(query)
    assert logs.payloads(target) == [b"a0"] * 10 + [b"b0"] * 10 + [b"a1"] * 2 + [b"b1"] * 2
    assert logs.payloads(other) == as_bytes(range(12))


@pytest.mark.prove  # the test before it has a group of the user's, too
def test_job_groups_of_the_user_change_nothing(spark: Any, logs: LogBench, tmp_path: Path) -> None:
    """Neither a group of the user's nor none: the replay after a crash is recognised."""
    source, target = logs.create("in"), logs.create("out")
    append(logs, source, range(10))
    frame = logs.stream(log=source, startingOffsets="earliest")
    failures = ["second time", "first time"]

    def take(batch: DataFrame, batch_id: int) -> None:
        context = spark.sparkContext
        context.setJobGroup("mine", "the same in each run")
        logs.save(batch.drop("txid"), log=target)
        context._jsc.sc().clearJobGroup()
        logs.save(batch.drop("txid"), log=target)
        if failures:
            raise RuntimeError(failures.pop())

    for which in ("first", "second"):
        assert f"{which} time" in message_of_failure(start_each(frame, take, tmp_path))
        assert logs.payloads(target) == as_bytes(range(10)) * 2
    append(logs, source, range(10, 15))
    query = start_each(frame, take, tmp_path)
    wait_for(logs, query, target, 30)
    stop(query)
    assert logs.payloads(target) == as_bytes(range(10)) * 2 + as_bytes(range(10, 15)) * 2


@pytest.mark.prove  # tests/dlspark has it without a session
def test_a_copied_checkpoint_with_another_target(logs: LogBench, tmp_path: Path) -> None:
    """The writes of a batch to one log say nothing of another."""
    source, first, second = logs.create("in"), logs.create("out"), logs.create("other")
    append(logs, source, range(10))
    frame = logs.stream(log=source, startingOffsets="earliest")
    query = start(logs, frame, tmp_path / "checkpoint", log=first)
    wait_for(logs, query, first, 10)
    wait_until((tmp_path / "checkpoint" / "commits" / "0").exists, timeout_s=TIMEOUT_S)
    stop(query)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    for log, records, checkpoint in ((first, 20, "checkpoint"), (second, 10, "copy")):
        if log == first:
            append(logs, source, range(10, 20))
        query = start(logs, frame, tmp_path / checkpoint, log=log)
        wait_for(logs, query, log, records)
        stop(query)
    assert logs.payloads(first) == as_bytes(range(20))
    assert logs.payloads(second) == as_bytes(range(10, 20))


@pytest.mark.prove  # tests/dlspark has it without a session
def test_a_checkpoint_that_is_not_the_latest(logs: LogBench, tmp_path: Path) -> None:
    """Its batches have numbers that are taken to other records: an error, not a loss in silence."""
    source, first, second = logs.create("in"), logs.create("out"), logs.create("other")
    frame = logs.stream(log=source, startingOffsets="earliest").select("value")
    to_first, to_second = (frame.withColumn("log", F.lit(log)) for log in (first, second))
    checkpoint, copy = tmp_path / "checkpoint", tmp_path / "copy"
    for batch in range(3):
        append(logs, source, range(batch * 10, batch * 10 + 10))
        query = start(logs, to_first, checkpoint)
        wait_for(logs, query, first, batch * 10 + 10)
        wait_until((checkpoint / "commits" / str(batch)).exists, timeout_s=TIMEOUT_S)
        stop(query)
        if batch == 0:
            shutil.copytree(checkpoint, copy)
        if batch == 1:
            shutil.copytree(copy, tmp_path / "another copy")
            message = message_of_failure(start(logs, to_second, tmp_path / "another copy"))
            assert f"nothing of it to {second!r}" in message
            assert "start with a new checkpoint" in message
    append(logs, source, range(30, 40))
    assert "version 2 was committed before" in message_of_failure(start(logs, to_first, copy))
    assert logs.payloads(first) == as_bytes(range(30))
    assert logs.payloads(second) == []


@pytest.mark.prove  # tests/dlspark has it without a session
def test_a_sink_waits_for_a_writer(logs: LogBench, tmp_path: Path) -> None:
    """As long as its option says; then it names the owner, and goes on after a restart."""
    source, target = logs.create("in"), logs.create("out")
    append(logs, source, range(10))
    frame = logs.stream(log=source, startingOffsets="earliest")
    with logs.namespace.open_log(target) as manager, manager.open_writer() as writer:
        writer.write(LogRecord(txid=0, payload=b"first"))
        writer.commit()
        query = start(logs, frame, tmp_path, log=target, lockTimeoutMs="700")
        message = message_of_failure(query)
        assert f"{socket.gethostname()}" in message
        assert "waited 0.7 s" in message
        assert "lockTimeoutMs" in message
        query = start(logs, frame, tmp_path, log=target, lockTimeoutMs="120000")
        wait_until(lambda: list_staged(logs.uri, f"stream:{query.id}")[0], timeout_s=TIMEOUT_S)
    wait_for(logs, query, target, 11)
    stop(query)
    assert logs.payloads(target) == [b"first", *as_bytes(range(10))]


HOLDING_WRITER = """
import signal, sys
from dlcore import LogRecord
from dlcore.sync import open_namespace
writer = open_namespace(sys.argv[1]).open_log(sys.argv[2]).open_writer()
writer.write(LogRecord(txid=0, payload=b"first"))
writer.commit()
print("owns the log", flush=True)
signal.pause()
"""


@pytest.mark.prove  # tests/dlspark has it without a session
def test_a_sink_outlasts_a_killed_writer(logs: LogBench, tmp_path: Path) -> None:
    """By its default it waits longer than a dead writer's session lasts."""
    source, target = logs.create("in"), logs.create("out")
    append(logs, source, range(10))
    command = [sys.executable, "-c", HOLDING_WRITER, logs.uri, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdout is not None
        assert holding.stdout.readline() == "owns the log\n"
        holding.kill()
    frame = logs.stream(log=source, startingOffsets="earliest")
    query = start(logs, frame, tmp_path, log=target)
    wait_for(logs, query, target, 11)
    stop(query)
    assert logs.payloads(target) == [b"first", *as_bytes(range(10))]


@pytest.mark.prove  # `test_many_targets` writes with threads as well, and nothing fails
def test_threads_write_to_logs_of_their_own(logs: LogBench, tmp_path: Path) -> None:
    """With `in_batch` they are part of the batch: each log has it once, also after a failure."""
    source = logs.create("in")
    targets = [logs.create(letter) for letter in "ab"]
    append(logs, source, range(10))
    frame = logs.stream(log=source, startingOffsets="earliest")
    failures = ["after both"]

    def take(batch: DataFrame, batch_id: int) -> None:
        def write(log: str) -> None:
            logs.save(batch, log=log)

        with ThreadPoolExecutor() as pool:
            list(pool.map(in_batch(write, batch.sparkSession), targets))
        if failures:
            raise RuntimeError(failures.pop())

    assert "after both" in message_of_failure(start_each(frame, take, tmp_path))
    append(logs, source, range(10, 20))
    query = start_each(frame, take, tmp_path)
    for target in targets:
        wait_for(logs, query, target, 20)
    stop(query)
    for target in targets:
        assert logs.payloads(target) == as_bytes(range(20))


@pytest.mark.prove  # tests/dlcore/log/test_staging.py has it without a session
@pytest.mark.parametrize("threads", sample([2, 1], 1))
def test_threads_that_write_to_one_log(logs: LogBench, tmp_path: Path, threads: int) -> None:
    """Their writes have no order: the query fails, and so does each repetition of the batch.

    Whether they overlap makes no difference: the order could be another one the next time.
    """
    source, target = logs.create("in"), logs.create("out")
    append(logs, source, range(10))
    frame = logs.stream(log=source, startingOffsets="earliest")

    def take(batch: DataFrame, batch_id: int) -> None:
        def write(number: int) -> None:
            logs.save(batch.drop("txid"), log=target)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(in_batch(write, batch.sparkSession), range(2)))

    for _ in range(2):
        message = message_of_failure(start_each(frame, take, tmp_path))
        assert "have no order" in message
        assert "txnAppId" in message
        assert logs.payloads(target) == as_bytes(range(10))


@pytest.mark.prove  # tests/dlspark has it without a session
def test_a_thread_that_knows_of_no_batch(logs: LogBench, tmp_path: Path) -> None:
    """Its write could not be recognised in a replay: it is refused, with what to do."""
    source, target = logs.create("in"), logs.create("out")
    append(logs, source, range(10))
    frame = logs.stream(log=source, startingOffsets="earliest")

    def take(batch: DataFrame, batch_id: int) -> None:
        def write() -> None:
            batch.sparkSession.createDataFrame([(1,)], "n int")  # makes the format known there
            logs.save(batch, log=target)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(write).result()

    for _ in range(2):
        message = message_of_failure(start_each(frame, take, tmp_path))
        assert "dlspark.in_batch" in message
        assert logs.payloads(target) == []


def test_empty_batches_are_recorded(logs: LogBench, tmp_path: Path) -> None:
    """A batch without rows writes nothing, but is known to be done."""
    source, target = logs.create("in"), logs.create("out")
    query = start(logs, logs.stream(log=source), tmp_path, log=target)
    wait_until((tmp_path / "commits" / "0").exists, timeout_s=TIMEOUT_S)
    stop(query)
    with logs.namespace.open_log(target) as log:
        identity = f"stream:{query.id}><{log.log_id}>"
    assert committed_version(logs.uri, identity) == 0
    assert logs.payloads(target) == []
