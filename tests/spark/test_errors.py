"""Mistakes of users of Spark are refused at once, in words that name them.

Goal: an error comes before any task runs, and says what was given and what is right.  Method: real
DataFrames with one mistake each; a cluster is asked only what kind of log is meant, once options
are right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.lengths import sample
from tests.fixtures.spark import message_of

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
NOWHERE = "distributedlog://127.0.0.1:1/dlog"
LOG = {"uri": NOWHERE, "log": "clicks"}


def rows(spark: SparkSession, columns: str = "'a' AS value") -> DataFrame:
    """Return one row."""
    return spark.sql(f"SELECT {columns}")


@pytest.mark.parametrize(
    ("options", "words"),
    sample(
        [
            (
                {"startingOffset": "earliest"},
                ["unknown option", "startingoffset", "startingOffsets?"],
            ),
            ({"startingOffsets": "3:17"}, ["startingOffsets='3:17'", "3:17:0"]),
            ({"logs": "a,b"}, ["exactly one", "log and logs"]),
            ({"failOnDataLoss": "1"}, ["failOnDataLoss='1'", "true or false"]),
            ({"uri": "zk://x"}, ["uri='zk://x'", "distributedlog://"]),
            ({"txnVersion": "1"}, ["txnversion", "for writing"]),
        ],
        2,
    ),
)
def test_wrong_read_option_at_load(
    spark: SparkSession, options: dict[str, str], words: list[str]
) -> None:
    """Both kinds of reads refuse it when they are described, before they run."""
    for reader in (spark.read, spark.readStream):
        # A Connect client asks for nothing before the schema is wanted.
        described = reader.format("dlog").options(**(LOG | options))
        text = message_of(lambda given=described: given.load().schema)  # type: ignore[misc]
        assert all(word in text for word in words), text


def test_path_is_not_a_log(spark: SparkSession) -> None:
    """`load("clicks")` hands over an option that a log source has no use for."""
    text = message_of(lambda: spark.read.format("dlog").options(uri=NOWHERE).load("clicks").schema)
    assert '.option("log", ' in text
    text = message_of(
        lambda: rows(spark).write.format("dlog").options(uri=NOWHERE).mode("append").save("clicks")
    )
    assert '.option("log", ' in text


def test_columns_that_divide_a_write(spark: SparkSession, logs: LogBench) -> None:
    """Spark refuses them in a batch; in a stream it drops them, as docs/spark.md says."""
    log = logs.create()
    for how in ("partitionBy", "clusterBy"):
        writer = rows(spark).write.format("dlog").options(uri=logs.uri, log=log).mode("append")
        assert "do not match" in message_of(getattr(writer, how)("value").save)
    assert logs.payloads(log) == []


def test_a_write_to_a_sealed_log(spark: SparkSession, logs: LogBench, tmp_path: Path) -> None:
    """It is refused before a task runs, and a query before its first batch has one."""
    log, of = logs.create(), logs.create()
    logs.append(of, [(1, b"a")])
    with logs.namespace.open_log(log) as manager:
        manager.mark_end_of_stream()
    given = {"uri": logs.uri, "log": log}
    failing = spark.sql("SELECT CAST(raise_error('a task ran') AS STRING) AS value")
    text = message_of(failing.write.format("dlog").options(**given).mode("append").save)
    assert f"log '{log}'" in text
    assert "is sealed: no record can follow" in text
    given["checkpointLocation"] = str(tmp_path)
    query = (
        logs.stream(log=of, startingOffsets="earliest")
        .select("value")
        .writeStream.format("dlog")
        .options(**given)
        .start()
    )
    assert "is sealed: no record can follow" in message_of(lambda: query.awaitTermination(60))


def test_other_schema_for_a_read(spark: SparkSession, logs: LogBench) -> None:
    """The schema is fixed; a part of it is not it."""
    reader = spark.read.format("dlog").options(uri=logs.uri, log=logs.create())
    frame = reader.schema("value STRING").load()
    assert "value string stands where log string belongs" in message_of(frame.collect)


def test_latest_start_of_a_batch(logs: LogBench) -> None:
    """Such a read would always be empty."""
    frame = logs.frame(log="clicks", startingOffsets="latest")
    assert "startingOffsets='latest' is not allowed" in message_of(frame.collect)


def test_end_of_a_stream(logs: LogBench, tmp_path: Path) -> None:
    """A stream has none."""
    frame = logs.stream(log="clicks", endingTxid="5")
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    assert "endingTxid='5' is not allowed here" in message_of(lambda: query.awaitTermination(60))


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    sample(
        [
            ("'a' AS key", {}, ["no column 'key'"]),
            ("1L AS txid", {}, ["'value' is missing"]),
            ("1 AS value", {}, ["'value' is int", "string or binary"]),
            ("'a' AS value, 1 AS txid", {}, ["'txid' is int", "bigint"]),
            ("'a' AS value, 'b' AS dlsn", {}, ["'dlsn' is string"]),
            ("'a' AS value", {"log": None}, ["the log to write to is missing", "column log"]),
            ("'a' AS value", {"txnAppId": "x"}, ["txnVersion is missing"]),
            ("'a' AS value", {"mergeSchemas": "true"}, ["unknown option mergeschemas"]),
        ],
        3,
    ),
)
def test_wrong_write(
    spark: SparkSession,
    logs: LogBench,
    columns: str,
    options: dict[str, str | None],
    words: list[str],
) -> None:
    """Columns and options are checked before a task runs."""
    given = {"uri": logs.uri, "log": logs.create()} | options
    given = {key: value for key, value in given.items() if value is not None}
    frame = rows(spark, columns)
    text = message_of(lambda: frame.write.format("dlog").options(**given).mode("append").save())
    assert all(word in text for word in words), text


def test_save_modes_that_spark_refuses(spark: SparkSession) -> None:
    """It refuses them to every Python source, and says which there are."""
    writer = rows(spark).write.format("dlog").options(**LOG)
    for mode in ("ignore", "errorifexists"):
        text = message_of(lambda mode=mode: writer.mode(mode).save())  # type: ignore[misc]
        assert "Append" in text or f"{mode} is not supported" in text  # the latter says Connect


def test_overwriting_logs_of_a_column_is_refused(spark: SparkSession) -> None:
    """Missing rows do not say which logs are meant."""
    writer = rows(spark, "'a' AS value, 'b' AS log").write.format("dlog").options(uri=NOWHERE)
    assert "write log by log" in message_of(lambda: writer.mode("overwrite").save())
