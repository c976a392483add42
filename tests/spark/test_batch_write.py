"""Batch writes on a real session and cluster: all of a DataFrame, once and in order, or nothing.

Goal: a write is one atomic append, whatever fails.  Method: write with Spark, read with dlog's own
reader; failures are injected by subclasses of the source.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import TaskContext
from pyspark.sql import functions as F

from dlspark import DistributedLogDataSource
from dlspark.batch import DlogWriter
from tests.fixtures.lengths import sample
from tests.fixtures.spark import committed_version, list_staged, message_of
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]

TIDY_S = 60.0
"""How long what comes after an answer may take on a busy machine."""


def numbers(spark: SparkSession, count: int, partitions: int = 3) -> DataFrame:
    """Return `count` rows in order: txid n, value n as text."""
    return spark.range(0, count, 1, partitions).select(
        F.col("id").alias("txid"), F.col("id").cast("string").alias("value")
    )


def as_bytes(count: int) -> list[bytes]:
    """Return the payloads of `numbers`."""
    return [b"%d" % n for n in range(count)]


def test_rows_go_in_order_of_partitions(spark: SparkSession, logs: LogBench) -> None:
    """Values are strings, transaction ids those of the column; one segment holds them all."""
    log = logs.create()
    logs.save(numbers(spark, 30_000), log=log)
    records = logs.read(log)
    assert [record.payload for record in records] == as_bytes(30_000)
    assert [record.txid for record in records] == list(range(30_000))
    assert [record.sequence_id for record in records] == list(range(30_000))
    assert {record.dlsn.lssn for record in records} == {1}


def test_binary_values_and_assigned_txids(spark: SparkSession, logs: LogBench) -> None:
    """Without a column txid the commit assigns one, which never decreases."""
    log = logs.create()
    frame = numbers(spark, 100).select(F.col("value").cast("binary").alias("value"))
    logs.save(frame, log=log)
    logs.save(frame, log=log)
    records = logs.read(log)
    assert [record.payload for record in records] == as_bytes(100) * 2
    txids = [record.txid for record in records]
    assert txids == sorted(txids)
    assert txids[0] > 1_000_000_000_000, "epoch milliseconds"


def test_read_rows_are_written_back(spark: SparkSession, logs: LogBench) -> None:
    """Read-only columns are ignored; the option names the target, the column is passed over."""
    source, target = logs.create(), logs.create()
    logs.append(source, [(n, b"%d" % n) for n in range(50)])
    logs.save(logs.frame(log=source), log=target)
    assert logs.payloads(target) == as_bytes(50)
    assert logs.payloads(source) == as_bytes(50)
    logs.save(logs.frame(log=target).drop("txid"))
    assert logs.payloads(target) == as_bytes(50) * 2


def test_rows_choose_their_log(spark: SparkSession, logs: LogBench) -> None:
    """One write to several logs, each in order."""
    names = sorted(logs.create(letter) for letter in "ab")
    which = F.when(F.col("txid") % 2 == 0, names[0]).otherwise(names[1])
    logs.save(numbers(spark, 1000).withColumn("log", which))
    assert logs.payloads(names[0]) == [b"%d" % n for n in range(0, 1000, 2)]
    assert logs.payloads(names[1]) == [b"%d" % n for n in range(1, 1000, 2)]


def test_empty_frame(spark: SparkSession, logs: LogBench) -> None:
    """Nothing to write is not an error."""
    log = logs.create()
    logs.save(numbers(spark, 0), log=log)
    logs.save(spark.createDataFrame([], "value string"), log=log)
    assert logs.payloads(log) == []


@pytest.mark.parametrize(
    ("column", "words"),
    sample(
        [
            ("value", "'value' is null in 1 of"),
            ("txid", "'txid' is null in 1 of"),
            ("log", "'log' is null in 1 of"),
        ],
        1,
    ),
)
def test_null_is_refused_and_nothing_written(
    spark: SparkSession, logs: LogBench, column: str, words: str
) -> None:
    """Also what other tasks had staged is not there."""
    log = logs.create()
    frame = numbers(spark, 300).withColumn("log", F.lit(log))
    broken = frame.withColumn(column, F.when(F.col("txid") != 299, F.col(column)))
    assert words in message_of(lambda: logs.save(broken))
    assert logs.payloads(log) == []


def test_negative_txids_are_refused(spark: SparkSession, logs: LogBench) -> None:
    """No order makes them right, so the message does not advise to sort."""
    frame = numbers(spark, 9, 1).withColumn("txid", F.col("txid") - 5)
    message = message_of(lambda: logs.save(frame, log=logs.create()))
    assert "transaction id -5 is out of range" in message
    assert "orderBy" not in message


@pytest.mark.prove  # tests/dlspark has it without a session
@pytest.mark.parametrize("partitions", sample([3, 1], 1))
def test_unsorted_txids_are_refused(spark: SparkSession, logs: LogBench, partitions: int) -> None:
    """Within a task, and between tasks; the advice is to sort."""
    log = logs.create()
    frame = numbers(spark, 90, partitions).withColumn("txid", 100 - F.col("txid"))
    assert 'orderBy("txid")' in message_of(lambda: logs.save(frame, log=log))
    assert logs.payloads(log) == []
    logs.save(frame.orderBy("txid"), log=log)
    assert [record.txid for record in logs.read(log)] == list(range(11, 101))


def test_txids_below_those_in_the_log(spark: SparkSession, logs: LogBench) -> None:
    """The log's order holds across writes."""
    log = logs.create()
    logs.append(log, [(50, b"x")])
    text = message_of(lambda: logs.save(numbers(spark, 10), log=log))
    assert "txnAppId" in text
    assert "orderBy" not in text
    assert "50" in text
    assert logs.payloads(log) == [b"x"]


def test_missing_log(spark: SparkSession, logs: LogBench) -> None:
    """By option before a task runs, by column from the task; with what would create it."""
    words = "create it with: dlog log create absent"
    assert words in message_of(lambda: logs.save(numbers(spark, 3), log="absent"))
    log = logs.create()
    which = F.when(F.col("txid") < 2, log).otherwise("absent")
    assert words in message_of(lambda: logs.save(numbers(spark, 3, 1).withColumn("log", which)))
    assert logs.payloads(log) == []


@pytest.mark.prove  # typed logs have it in small
def test_users_own_transaction_is_written_once(spark: SparkSession, logs: LogBench) -> None:
    """A version not above the last one is skipped; another application or log is another matter."""
    log, second = logs.create(), logs.create()
    app = f"job-{log}"
    for version in ("1", "1", "0", "2"):
        frame = numbers(spark, 2).select(F.lit(version).alias("value"))
        logs.save(frame, log=log, txnAppId=app, txnVersion=version)
    other = numbers(spark, 1).select(F.lit("o").alias("value"))
    logs.save(other, log=log, txnAppId=f"{app}2", txnVersion="1")
    assert logs.payloads(log) == [b"1", b"1", b"2", b"2", b"o"]
    logs.save(other, log=second, txnAppId=app, txnVersion="1")
    assert logs.payloads(second) == [b"o"]


class FlakyWriter(DlogWriter):
    """Fails as `plan` says: every first attempt after staging, all of them, or the commit."""

    def __init__(self, inner: DlogWriter, folder: str, plan: str) -> None:
        self.__dict__.update(inner.__dict__)
        self._folder = folder
        Path(folder, "token").write_text(self._token)
        self._plan = plan

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage, then fail where planned."""
        message = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        Path(self._folder, f"{context.partitionId()}-{context.attemptNumber()}").touch()
        is_first = context.attemptNumber() == 0
        if self._plan == "always" or (self._plan == "stage" and is_first):
            raise RuntimeError("failed after staging")
        return message

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit, then fail where planned."""
        super().commit(messages)
        if self._plan == "commit":
            raise RuntimeError("failed after committing")


class FlakyDataSource(DistributedLogDataSource):
    """The source with a writer that fails."""

    @classmethod
    def name(cls) -> str:
        """Return a name of its own."""
        return "dlog_flaky_batch"

    def writer(self, schema: StructType, overwrite: bool) -> DlogWriter:
        """Return the failing writer; its options are not dlog's."""
        folder, plan = self.options.pop("folder"), self.options.pop("plan")
        return FlakyWriter(super().writer(schema, overwrite), folder, plan)


def save_flaky(frame: DataFrame, logs: LogBench, folder: Path, plan: str, log: str) -> None:
    """Write with `FlakyDataSource`."""
    frame.sparkSession.dataSource.register(FlakyDataSource)
    writer = frame.write.format("dlog_flaky_batch").options(uri=logs.uri, log=log)
    writer.options(folder=str(folder), plan=plan).mode("append").save()


def test_failed_attempts_leave_nothing(spark: SparkSession, logs: LogBench, tmp_path: Path) -> None:
    """Each task fails once after staging: the second attempts' records are there, once."""
    log = logs.create()
    save_flaky(numbers(spark, 600, 2), logs, tmp_path, "stage", log)
    assert {path.name for path in tmp_path.glob("?-?")} == {"0-0", "0-1", "1-0", "1-1"}
    identity = f"write:{(tmp_path / 'token').read_text()}"
    wait_until(lambda: not list_staged(logs.uri, identity)[0], timeout_s=TIDY_S)
    # No one will ask: nothing is kept.
    wait_until(lambda: committed_version(logs.uri, identity) is None, timeout_s=TIDY_S)
    assert logs.payloads(log) == as_bytes(600)


def test_failed_write_leaves_nothing(spark: SparkSession, logs: LogBench, tmp_path: Path) -> None:
    """All attempts of a task fail: no record, and the next write works."""
    log = logs.create()
    assert "failed after staging" in message_of(
        lambda: save_flaky(numbers(spark, 600, 1), logs, tmp_path, "always", log)
    )
    assert logs.payloads(log) == []
    identity = f"write:{(tmp_path / 'token').read_text()}"
    wait_until(lambda: not list_staged(logs.uri, identity)[0], timeout_s=TIDY_S)
    logs.save(numbers(spark, 20), log=log)
    assert logs.payloads(log) == as_bytes(20)


@pytest.mark.prove  # `test_failed_commit_is_retried_once` has it of a stream
def test_abort_after_a_commit_undoes_nothing(
    spark: SparkSession, logs: LogBench, tmp_path: Path
) -> None:
    """Spark aborts a write whose commit raised, though the append is done: it stays."""
    log = logs.create()
    assert "failed after committing" in message_of(
        lambda: save_flaky(numbers(spark, 600), logs, tmp_path, "commit", log)
    )
    assert logs.payloads(log) == as_bytes(600)
