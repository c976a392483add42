"""Batch reads on a real session and cluster: every record of the range, once, in order.

Goal: Spark sees what the log holds, however the read is bounded, divided or described.  Method:
logs written with dlog's own writer; frames compared with chispa, positions with dlog's own reader.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import pytest
from chispa import assert_df_equality
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlspark.schema import READ_SCHEMA
from tests.fixtures.lengths import sample
from tests.fixtures.spark import message_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
SEGMENTS = 3
PER_SEGMENT = 500
TXID_STEP = 10


@pytest.fixture(scope="module")
def numbers(logs: LogBench) -> str:
    """A log of three segments: payload n, txid 10 n."""
    log = logs.create("numbers")
    for segment in range(SEGMENTS):
        first = segment * PER_SEGMENT
        logs.append(
            log, [(n * TXID_STEP, str(n).encode()) for n in range(first, first + PER_SEGMENT)]
        )
    return log


def numbers_of(frame: DataFrame) -> list[int]:
    """Return the payloads in the order in which Spark got them."""
    return [int(bytes(row.value)) for row in frame.select("value").collect()]


def test_frame_is_what_was_written(spark: SparkSession, logs: LogBench, numbers: str) -> None:
    """Schema, order and every column; positions and times are those of dlog's own reader."""
    frame = logs.frame(log=numbers)
    assert frame.schema == READ_SCHEMA
    schema = StructType(
        [
            StructField("log", StringType()),
            StructField("txid", LongType()),
            StructField("sequence_id", LongType()),
            StructField("value", BinaryType()),
        ]
    )
    expected = spark.createDataFrame(
        [
            (numbers, n * TXID_STEP, n, bytearray(str(n).encode()))
            for n in range(SEGMENTS * PER_SEGMENT)
        ],
        schema,
    )
    assert_df_equality(frame.select("log", "txid", "sequence_id", "value"), expected)
    found = frame.select("dlsn.*", F.unix_millis("timestamp").alias("ms")).collect()
    read = logs.read(numbers)
    assert [DLSN(row.lssn, row.entry, row.slot) for row in found] == [r.dlsn for r in read]
    assert [row.ms for row in found] == [r.timestamp_ms for r in read]


def test_one_partition_per_segment(logs: LogBench, numbers: str) -> None:
    """Unless asked for more, or for smaller ones."""
    assert logs.frame(log=numbers).rdd.getNumPartitions() == SEGMENTS
    limited = logs.frame(log=numbers, maxRecordsPerPartition="1000000")
    assert limited.rdd.getNumPartitions() == SEGMENTS


def test_big_segments_are_split(logs: LogBench) -> None:
    """By entries, in order, nothing lost, whatever the number of partitions."""
    log = logs.create("wide")
    with logs.namespace.open_log(log) as manager, manager.open_writer() as writer:
        for entry in range(20):
            writer.write_bulk(
                LogRecord(entry * 10 + n, b"%d" % (entry * 10 + n)) for n in range(10)
            )
            writer.flush()
    for options, least in [
        ({"minPartitions": "7"}, 7),
        ({"maxRecordsPerPartition": "25"}, 8),
        ({"maxRecordsPerPartition": "1"}, 10),
        ({"minPartitions": "3", "maxRecordsPerPartition": "100"}, 3),
    ]:
        frame = logs.frame(log=log, **options)
        assert frame.rdd.getNumPartitions() >= least
        assert numbers_of(frame) == list(range(200))


@pytest.mark.parametrize(
    ("options", "expected"),
    sample(
        [
            ({"startingOffsets": "earliest", "endingOffsets": "latest"}, range(1500)),
            ({"startingOffsets": "2:0:0"}, range(500, 1500)),
            ({"startingOffsets": "2:0:7", "endingOffsets": "2:0:9"}, range(507, 509)),
            ({"endingOffsets": "2:0:0"}, range(500)),
            ({"startingOffsets": "9:0:0"}, range(0)),
            ({"startingOffsets": "1:0:0", "endingOffsets": "9:0:0"}, range(1500)),
            ({"startingTxid": "7010"}, range(701, 1500)),
            ({"startingTxid": "7011"}, range(702, 1500)),
            ({"startingTxid": "0", "endingTxid": "30"}, range(3)),
            ({"startingTxid": "990000"}, range(0)),
            ({"endingTxid": "990000"}, range(1500)),
            ({"startingTxid": "50", "endingOffsets": "1:0:7"}, range(5, 7)),
            ({"startingTxid": "5000", "endingOffsets": "1:0:7"}, range(0)),
            ({"startingTimestamp": "0"}, range(1500)),
            ({"startingTimestamp": "2100-01-01"}, range(0)),
            ({"endingTimestamp": "2100-01-01T00:00:00Z"}, range(1500)),
            ({"endingTimestamp": "0"}, range(0)),
        ],
        6,
    ),
)
def test_start_and_end(
    logs: LogBench, numbers: str, options: dict[str, str], expected: range
) -> None:
    """By edge, position, transaction id and time; starts are inclusive, ends exclusive."""
    assert numbers_of(logs.frame(log=numbers, **options)) == list(expected)


def test_start_and_end_by_timestamp_between_records(logs: LogBench, numbers: str) -> None:
    """The time of a record starts with it, and ends before it."""
    times = [record.timestamp_ms for record in logs.read(numbers)]
    middle = times[700]
    after = [n for n, time_ms in enumerate(times) if time_ms >= middle]
    before = [n for n, time_ms in enumerate(times) if time_ms < middle]
    assert numbers_of(logs.frame(log=numbers, startingTimestamp=str(middle))) == after
    assert numbers_of(logs.frame(log=numbers, endingTimestamp=str(middle))) == before
    moment = datetime.datetime.fromtimestamp(middle / 1000, datetime.UTC).isoformat()
    assert numbers_of(logs.frame(log=numbers, startingTimestamp=moment)) == after


def test_lists_and_patterns(logs: LogBench) -> None:
    """Several logs, each with its own start; a pattern takes whole names only."""
    prefix = logs.create("many")
    names = [f"{prefix}/{letter}" for letter in "abc"]
    for position, name in enumerate(names):
        logs.namespace.create_log(name)
        logs.append(name, [(n, b"%d" % (position * 10 + n)) for n in range(3)])
    two = logs.frame(logs=f"{names[0]},{names[2]}")
    assert sorted(numbers_of(two)) == [0, 1, 2, 20, 21, 22]
    assert {row.log for row in two.select("log").distinct().collect()} == {names[0], names[2]}
    assert sorted(numbers_of(logs.frame(logsPattern=f"{prefix}/[ab]"))) == [0, 1, 2, 10, 11, 12]
    starts = f'{{"{names[0]}": "1:0:2", "{names[1]}": "earliest"}}'
    own = logs.frame(logs=f"{names[0]},{names[1]}", startingOffsets=starts)
    assert sorted(numbers_of(own)) == [2, 10, 11, 12]


def test_missing_logs_are_named(logs: LogBench) -> None:
    """With what would create them."""
    log = logs.create()
    text = message_of(lambda: logs.frame(logs=f"{log},absent").collect())
    assert "no log 'absent'" in text
    assert "dlog log create absent" in text
    text = message_of(lambda: logs.frame(logsPattern="nothing.like.it").collect())
    assert "logsPattern='nothing.like.it'" in text


def test_empty_log_and_reuse_of_a_frame(logs: LogBench) -> None:
    """Spark plans a loaded source once, at its first action; to see what came since, load again."""
    log = logs.create()
    assert numbers_of(logs.frame(log=log)) == []
    logs.append(log, [(1, b"1")])
    frame = logs.frame(log=log)
    options = f"(uri '{logs.uri}', log '{log}')"
    frame.sparkSession.sql(f"CREATE OR REPLACE TEMPORARY VIEW once USING dlog OPTIONS {options}")
    view = frame.sparkSession.table("once")
    assert numbers_of(frame) == numbers_of(view) == [1]
    logs.append(log, [(2, b"2")])
    assert numbers_of(frame) == numbers_of(frame.sparkSession.table("once")) == [1]
    assert numbers_of(logs.frame(log=log)) == [1, 2]
    assert logs.frame(log=log).where("txid >= 2").count() == 1


def test_log_that_is_being_written(logs: LogBench) -> None:
    """The open segment is read up to what is durable, while its writer goes on."""
    log = logs.create()
    with logs.namespace.open_log(log) as manager, manager.open_writer() as writer:
        writer.write_bulk(LogRecord(n, b"%d" % n) for n in range(10))
        writer.commit()
        assert numbers_of(logs.frame(log=log)) == list(range(10))
        writer.write(LogRecord(10, b"10"))
        writer.commit()
        assert numbers_of(logs.frame(log=log)) == list(range(11))


def test_truncated_records(logs: LogBench) -> None:
    """A start that was truncated away is data loss; `earliest` is not."""
    log = logs.create()
    for segment in range(2):
        logs.append(log, [(n, b"%d" % n) for n in range(segment * 5, segment * 5 + 5)])
    with logs.namespace.open_log(log) as manager:
        manager.truncate(DLSN(1, 0, 3))
    assert numbers_of(logs.frame(log=log)) == list(range(3, 10))
    lossy = {"log": log, "startingOffsets": "1:0:1"}
    text = message_of(lambda: logs.frame(**lossy).collect())
    assert f"log '{log}': records from 1:0:1 up to 1:0:3" in text
    assert "failOnDataLoss" in text
    assert numbers_of(logs.frame(**lossy, failOnDataLoss="false")) == list(range(3, 10))
