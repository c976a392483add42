"""Queries with state above the source, and checkpoints that Spark changes, over restarts.

Goal: each record counts once for Spark's stateful operators, for sources with names, and after the
state was given other partitions; progress that is stored late is refused, not silently wrong.
Method: a query reads a half of the records and ends; another one goes on from its checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
TIMEOUT_S = 300
since_4_2 = pytest.mark.skipif(
    not hasattr(DataStreamReader, "name"), reason="PySpark has it from 4.2 on"
)


def run(logs: LogBench, frame: DataFrame, target: str, checkpoint: Path) -> StreamingQuery:
    """Write what is there to a log, to the end of the query."""
    query = (
        frame.writeStream.format("dlog")
        .options(uri=logs.uri, log=target)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(TIMEOUT_S)
    return query


def append(logs: LogBench, log: str, numbers: range) -> None:
    """Append records with these values."""
    logs.append(log, [(0, b"%d" % n) for n in numbers])


def numbers_of(logs: LogBench, log: str) -> list[int]:
    """Return the numbers in a log, in ascending order."""
    return sorted(int(value) for value in logs.payloads(log))


@pytest.fixture
def rocksdb(spark: SparkSession) -> Iterator[None]:
    """State that the newer operators need."""
    key = "spark.sql.streaming.stateStore.providerClass"
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark.conf.set(key, provider)
    yield
    spark.conf.unset(key)


def test_duplicates_are_known_over_a_restart(logs: LogBench, tmp_path: Path) -> None:
    """Values that were written in the first run are left out in the second."""
    source, target = logs.create("in"), logs.create("out")
    for numbers in (range(20), range(10, 30)):
        append(logs, source, numbers)
        frame = logs.stream(log=source, startingOffsets="earliest")
        distinct = frame.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(
            ["value"]
        )
        run(logs, distinct.select("value"), target, tmp_path)
    assert numbers_of(logs, target) == list(range(30))


@pytest.mark.prove
def test_two_logs_are_joined_over_a_restart(logs: LogBench, tmp_path: Path) -> None:
    """A record finds its partner of the other log, whichever came a run before."""
    left, right, target = logs.create("left"), logs.create("right"), logs.create("out")
    for ours, theirs in ((range(20), range(10)), (range(20, 30), range(10, 30))):
        append(logs, left, ours)
        append(logs, right, theirs)
        sides = [
            logs.stream(log=log, startingOffsets="earliest")
            .withWatermark("timestamp", "1 hour")
            .select("value", "timestamp")
            .alias(log)
            for log in (left, right)
        ]
        one, other = (F.col(f"`{log}`.timestamp") for log in (left, right))
        near = other.between(one - F.expr("INTERVAL 1 HOUR"), one + F.expr("INTERVAL 1 HOUR"))
        same = F.col(f"`{left}`.value") == F.col(f"`{right}`.value")
        joined = sides[0].join(sides[1], same & near)
        run(logs, joined.select(F.col(f"`{left}`.value").alias("value")), target, tmp_path)
    assert numbers_of(logs, target) == list(range(30))


class Counting(StatefulProcessor):
    """Counts the records of a key, and tells the count of each batch."""

    def init(self, handle: Any) -> None:
        """Open the state."""
        self._count = handle.getValueState("count", "n bigint")

    def handleInputRows(
        self, key: Any, rows: Iterator[Any], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        """Add the rows of a batch."""
        import pandas as pd

        before = self._count.get()[0] if self._count.exists() else 0
        count = before + sum(len(each) for each in rows)
        self._count.update((count,))
        yield pd.DataFrame({"value": [f"{key[0]} {count}".encode()]})

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.prove
def test_state_of_a_processor_over_a_restart(logs: LogBench, tmp_path: Path, rocksdb: None) -> None:
    """`transformWithState` counts on."""
    source, target = logs.create("in"), logs.create("out")
    for numbers in (range(20), range(20, 50)):
        append(logs, source, numbers)
        number = F.col("value").cast("string").cast("bigint")
        frame = logs.stream(log=source, startingOffsets="earliest")
        keyed = frame.select((number % 2).alias("key"))
        counted = keyed.groupBy("key").transformWithStateInPandas(
            Counting(), "value binary", "Append", "None"
        )
        run(logs, counted, target, tmp_path)
    assert sorted(logs.payloads(target)) == [b"0 10", b"0 25", b"1 10", b"1 25"]


@since_4_2
@pytest.mark.prove
def test_state_with_other_partitions(
    spark: SparkSession, logs: LogBench, tmp_path: Path, rocksdb: None
) -> None:
    """Spark numbers a batch that the sink never sees; the next one is written, once."""
    source, target = logs.create("in"), logs.create("out")

    def distinct() -> DataFrame:
        frame = logs.stream(log=source, startingOffsets="earliest")
        known = frame.withWatermark("timestamp", "1 hour")
        return known.dropDuplicatesWithinWatermark(["value"]).select("value")

    append(logs, source, range(20))
    run(logs, distinct(), target, tmp_path)
    before = {each.name for each in (tmp_path / "commits").iterdir() if each.name.isdigit()}
    spark._streamingCheckpointManager.repartition(str(tmp_path), 3)
    after = {each.name for each in (tmp_path / "commits").iterdir() if each.name.isdigit()}
    assert len(after - before) == 1
    append(logs, source, range(10, 40))
    run(logs, distinct(), target, tmp_path)
    assert numbers_of(logs, target) == list(range(40))
    run(logs, distinct(), target, tmp_path)
    assert numbers_of(logs, target) == list(range(40))


@since_4_2
def test_sources_with_names_may_change(spark: SparkSession, logs: LogBench, tmp_path: Path) -> None:
    """In another order, with one more: each goes on at its own position."""
    settings = {
        "spark.sql.streaming.queryEvolution.enableSourceEvolution": "true",
        "spark.sql.streaming.offsetLog.formatVersion": "2",  # PySpark 4.2 does not choose it
    }
    sources = {name: logs.create(name) for name in ("one", "two", "three")}
    target = logs.create("out")

    def union(*names: str) -> DataFrame:
        frames = [
            spark.readStream.name(name)
            .format("dlog")
            .options(uri=logs.uri, log=sources[name], startingOffsets="earliest")
            .load()
            .select("value")
            for name in names
        ]
        whole = frames[0]
        for frame in frames[1:]:
            whole = whole.union(frame)
        return whole

    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        append(logs, sources["one"], range(10))
        append(logs, sources["two"], range(100, 110))
        run(logs, union("one", "two"), target, tmp_path)
        append(logs, sources["one"], range(10, 20))
        append(logs, sources["three"], range(200, 210))
        run(logs, union("three", "two", "one"), target, tmp_path)
    finally:
        for key in settings:
            spark.conf.unset(key)
    assert numbers_of(logs, target) == [*range(20), *range(100, 110), *range(200, 210)]


@pytest.mark.parametrize(
    "options",
    [
        {"asyncProgressTrackingEnabled": "true"},
        {
            "asyncProgressTrackingEnabled": "true",
            "_asyncProgressTrackingOverrideSinkSupportCheck": "true",
        },
    ],
    ids=["asked", "forced"],
)
def test_progress_that_is_stored_late_is_refused(
    logs: LogBench, tmp_path: Path, options: dict[str, str]
) -> None:
    """Else a batch would have another content when it is repeated, and the sink would skip it."""
    source, target = logs.create("in"), logs.create("out")
    append(logs, source, range(10))
    frame = logs.stream(log=source, startingOffsets="earliest").select("value")
    writer = frame.writeStream.format("dlog").options(uri=logs.uri, log=target, **options)

    def go() -> None:
        query = writer.option("checkpointLocation", str(tmp_path)).start()
        query.processAllAvailable()

    with pytest.raises(PySparkException, match=r"(?i)async ?progress ?tracking"):
        go()
    assert logs.payloads(target) == []
