"""Typed logs from a real Spark: columns as they are, in batch and stream, read and written.

Goal: a DataFrame comes back as it was, with no parsing in between.  Method: rows of every type that
Arrow carries, through logs and back, compared by Spark itself.
"""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from tests.fixtures.spark import count_partitions, message_of

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
TIMEOUT_S = 120
EVERYTHING = """
    select
        id,
        cast(id as tinyint) as i8, cast(id as smallint) as i16, cast(id as int) as i32,
        cast(id as float) / 3 as f32, cast(id as double) / 7 as f64,
        cast(id as decimal(38, 18)) / 7 as dec, cast(id as decimal(3, 0)) as short_dec,
        concat('é', id) as text, cast(concat('b', id) as binary) as raw, id % 2 = 0 as even,
        date_add(date'2024-02-28', cast(id as int)) as day,
        timestamp'2024-03-31 01:30:00.123456 Europe/Paris'
            + make_dt_interval(0, cast(id as int)) as at,
        timestamp_ntz'2024-03-31 02:30:00.123456' as at_ntz,
        make_dt_interval(cast(id as int), -1, 2, 3.000004) as took,
        array(id, null, id + 1) as numbers, array(array('a'), array()) as nested,
        map('k', array(id), 'l', null) as by_name,
        named_struct('x', id / 3, 'in', named_struct('tags', array('t', null), 'y', null)) as place,
        array(named_struct('a', cast(id as decimal(9, 2)), 'b', date'2020-01-01')) as rows,
        cast(null as string) as none, if(id % 3 = 0, null, id) as some, null as nothing
    from range(0, 50, 1, 3)
"""


class Typed:
    """Names of logs that do not exist yet, and frames to and from them."""

    def __init__(self, spark: SparkSession, logs: LogBench) -> None:
        self.spark = spark
        self.uri = logs.uri
        self.log = f"typed/{uuid4().hex}"

    def save(self, frame: DataFrame, mode: str = "append", **options: str) -> None:
        """Write a frame, by default to a log that is created."""
        given = {"uri": self.uri, "log": self.log, "createLog": "true", **options}
        given = {key: value for key, value in given.items() if value}
        frame.write.format("dlog").options(**given).mode(mode).save()

    def load(self, **options: str) -> DataFrame:
        """Return the log as a frame."""
        given = {"uri": self.uri, "log": self.log, **options}
        given = {key: value for key, value in given.items() if value}
        return self.spark.read.format("dlog").options(**given).load()


@pytest.fixture
def typed(spark: SparkSession, logs: LogBench) -> Typed:
    """Return a log that a first write creates."""
    return Typed(spark, logs)


def test_every_type_there_and_back(typed: Typed) -> None:
    """In any session's time zone; what Spark reads has the types that it wrote."""
    frame = typed.spark.sql(EVERYTHING)
    typed.save(frame)
    found = typed.load()
    assert [f.dataType.simpleString() for f in found.schema] == [
        f.dataType.simpleString() for f in frame.schema
    ]
    assert found.columns == frame.columns
    plain = [c for c in frame.columns if c != "by_name"]
    expected = frame.orderBy("id").collect()
    assert found.orderBy("id").collect() == expected
    typed.spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        typed.save(frame)
        both = typed.load().select(*plain).groupBy("id", "at", "at_ntz", "day").count()
        assert {row["count"] for row in both.collect()} == {2}
    finally:
        typed.spark.conf.unset("spark.sql.session.timeZone")


def test_times_of_day_where_spark_is_set_to_have_them(typed: Typed, tmp_path: Path) -> None:
    """To the microsecond, by batch and stream; Spark has the type where a setting allows it."""
    setting = "spark.sql.timeType.enabled"
    typed.spark.conf.set(setting, "true")
    try:
        frame = typed.spark.sql(
            "select * from values (1, time'23:59:59.999999'), (2, time'00:00:00'), (3, null)"
            " as rows(id, at)"
        )
        typed.save(frame)
        copy = {"uri": typed.uri, "log": typed.log + "/copy", "createLog": "true"}
        stream = typed.spark.readStream.format("dlog").option("startingOffsets", "earliest")
        writer = stream.options(uri=typed.uri, log=typed.log).load().writeStream.format("dlog")
        writer = writer.options(**copy, checkpointLocation=str(tmp_path))
        assert writer.trigger(availableNow=True).start().awaitTermination(TIMEOUT_S)
        for found in (typed.load(), typed.load(log=copy["log"])):
            assert found.schema["at"].dataType.simpleString() == "time(6)"
            assert [row["at"] for row in found.orderBy("id").collect()] == [
                datetime.time(23, 59, 59, 999_999),
                datetime.time(0),
                None,
            ]
    finally:
        typed.spark.conf.unset(setting)


def test_metadata_and_columns(typed: Typed) -> None:
    """The log's metadata of its records is there on request, and finds records by filters."""
    frame = typed.spark.range(0, 30, 1, 3).selectExpr("id", "id + 1000 as _txid", "'x' as txid")
    typed.save(frame)
    typed.save(frame.selectExpr("id + 30 as id", "_txid + 30 as _txid"))
    assert typed.load().columns == ["id", "txid"]
    everything = typed.load(includeMetadata="true")
    assert everything.columns == [
        "id", "txid", "_log", "_dlsn", "_txid", "_sequence_id", "_timestamp"
    ]  # fmt: skip
    rows = everything.orderBy("_sequence_id").collect()
    assert [row.id for row in rows] == [row["_sequence_id"] for row in rows] == list(range(60))
    assert [row["_txid"] for row in rows] == list(range(1000, 1060))
    assert {row["_log"] for row in rows} == {typed.log}
    assert [row.txid for row in rows] == ["x"] * 30 + [None] * 30
    some = typed.load(columns="_sequence_id,id")
    assert some.columns == ["_sequence_id", "id"]
    assert typed.load(columns="_log,_sequence_id").count() == 60
    typed.spark.conf.set(PUSHDOWN, "true")
    try:
        few = typed.load(includeMetadata="true").where("_txid between 1005 and 1007 and txid = 'x'")
        assert [row.id for row in few.orderBy("id").collect()] == [5, 6, 7]
        assert count_partitions(few) == 1
        late = typed.load(includeMetadata="true").where("_sequence_id >= 55 and id < 58")
        assert sorted(row.id for row in late.collect()) == [55, 56, 57]
    finally:
        typed.spark.conf.unset(PUSHDOWN)
    back = typed.load(includeMetadata="true").where("_sequence_id < 3")
    copy = typed.log + "/copy"
    typed.save(back, log=copy)
    assert typed.load(log=copy, columns="id,_txid").orderBy("id").collect() == [
        (0, 1000), (1, 1001), (2, 1002)
    ]  # fmt: skip
    typed.load().createOrReplaceTempView("trips")
    assert typed.spark.sql("select max(id), count(txid) from trips").collect() == [(59, 30)]


def test_streams_of_typed_logs(typed: Typed, tmp_path: Path) -> None:
    """From one to another, through the sink and through foreachBatch; a restart goes on."""
    frame = typed.spark.sql(EVERYTHING).drop("nothing", "by_name")
    typed.save(frame.where("id < 20"))
    seen: list[int] = []

    def run() -> None:
        stream = (
            typed.spark.readStream.format("dlog")
            .options(uri=typed.uri, log=typed.log, startingOffsets="earliest")
            .load()
        )
        assert stream.schema == typed.load().schema
        to_log = (
            stream.writeStream.format("dlog")
            .options(
                uri=typed.uri, log=typed.log + "/copy", createLog="true",
                checkpointLocation=str(tmp_path / "sink"),
            )
            .trigger(availableNow=True)
            .start()
        )  # fmt: skip
        assert to_log.awaitTermination(TIMEOUT_S)

        def each(batch: DataFrame, number: int) -> None:
            seen.append(number)
            typed.save(batch.withColumn("batch", F.lit(number)), log=typed.log + "/each")

        to_batches = (
            stream.writeStream.foreachBatch(each)
            .option("checkpointLocation", str(tmp_path / "each"))
            .trigger(availableNow=True)
            .start()
        )
        assert to_batches.awaitTermination(TIMEOUT_S)

    run()
    typed.save(frame.where("id >= 20"))
    run()
    expected = frame.orderBy("id").collect()
    assert typed.load(log=typed.log + "/copy").orderBy("id").collect() == expected
    each = typed.load(log=typed.log + "/each")
    assert each.drop("batch").orderBy("id").collect() == expected
    assert each.where("batch = 1").count() == 30
    assert seen == [0, 1]


def test_columns_are_added_and_widened(typed: Typed) -> None:
    """Refused unless it is asked for; a read that was made before keeps to its columns."""
    first = typed.spark.range(5).selectExpr("cast(id as int) as id", "'a' as name")
    typed.save(first)
    before = typed.load()
    more = typed.spark.range(5, 10).selectExpr("id + 3000000000 as id", "array(id) as tags")
    message = message_of(lambda: typed.save(more))
    assert "has no column 'tags': it has (id int32, name string), the DataFrame has" in message
    typed.save(more, mergeSchema="true")
    typed.save(first.select("name"))
    rows = typed.load().orderBy(F.col("id").asc_nulls_last()).collect()
    assert typed.load().dtypes == [("id", "bigint"), ("name", "string"), ("tags", "array<bigint>")]
    assert [row.id for row in rows[:6]] == [0, 1, 2, 3, 4, 3000000005]
    assert [row.tags for row in rows[:6]] == [None] * 5 + [[5]]
    assert before.columns == ["id", "name"]
    assert "start the query again" in message_of(before.collect)
    text = typed.spark.range(3).selectExpr("cast(id as string) as id")
    assert "column id int64 cannot hold id string" in message_of(lambda: typed.save(text))
    assert "cannot become id string" in message_of(lambda: typed.save(text, mergeSchema="true"))


@pytest.mark.prove  # tests/dlspark has it without a session
def test_several_logs_in_one_read(typed: Typed, logs: LogBench) -> None:
    """Their columns together; what no columns hold is refused with both shown."""
    base = typed.log
    typed.save(typed.spark.range(3).selectExpr("cast(id as int) as id"), log=base + "-a")
    typed.save(typed.spark.range(3, 6).selectExpr("id", "'b' as name"), log=base + "-b")
    both = typed.load(log="", logsPattern=f"{base}-[ab]", includeMetadata="true")
    assert both.dtypes[:2] == [("id", "bigint"), ("name", "string")]
    rows = both.orderBy("id").collect()
    assert [(row.id, row.name, row["_log"][-1]) for row in rows] == [
        *((n, None, "a") for n in range(3)), *((n, "b", "b") for n in range(3, 6))
    ]  # fmt: skip
    typed.save(typed.spark.range(3).selectExpr("cast(id as string) as id"), log=base + "-c")
    message = message_of(lambda: typed.load(log="", logs=f"{base}-a,{base}-c"))
    assert "has (id int32), log" in message
    assert "has (id string)" in message
    plain = logs.create()
    assert "is one of bytes: read them apart" in message_of(
        lambda: typed.load(log="", logs=f"{base}-a,{plain}")
    )


@pytest.mark.prove  # tests/dlspark has it without a session
def test_rows_choose_their_typed_log(typed: Typed) -> None:
    """By the column _log; one commit for all of them."""
    frame = typed.spark.range(20).selectExpr(
        "id", "id * 1.5 as fare", f"concat('{typed.log}/', id % 3) as _log"
    )
    typed.save(frame, log="")
    for n in range(3):
        found = typed.load(log=f"{typed.log}/{n}").orderBy("id").collect()
        assert [row.id for row in found] == list(range(n, 20, 3))
        assert found[0].asDict().keys() == {"id", "fare"}


@pytest.mark.prove  # tests/dlspark has it without a session
def test_the_kind_of_log_that_is_created(typed: Typed, logs: LogBench) -> None:
    """A column value makes it one of bytes, unless the option typed says otherwise."""
    values = typed.spark.range(3).selectExpr("cast(id as string) as value")
    typed.save(values, log=typed.log + "/plain")
    assert typed.load(log=typed.log + "/plain").columns[0] == "log"
    typed.save(values, typed="true")
    assert typed.load().columns == ["value"]
    typed.save(values)
    assert typed.load(columns="value").count() == 6
    assert "exists, and is one of bytes" in message_of(
        lambda: typed.save(values, log=typed.log + "/plain", typed="true")
    )
    wide = typed.spark.range(3).selectExpr("id", "'x' as value")
    assert "which the options createLog and typed create" in message_of(
        lambda: typed.save(wide, log=typed.log + "/wide")
    )
    months = typed.spark.sql("select make_ym_interval(1, 2) as span")
    assert "column 'span' is interval year to month" in message_of(
        lambda: typed.save(months, log=typed.log + "/months")
    )
    twice = typed.spark.range(1).selectExpr("id", "id as _timestamp_", "id as a")
    typed.save(twice.where("false"), log=typed.log + "/empty")
    assert typed.load(log=typed.log + "/empty").collect() == []
    assert "the log has no column 'fares', it has value, and _log" in message_of(
        lambda: typed.load(columns="fares")
    )
    assert "there is no log" in message_of(lambda: typed.load(log=typed.log + "/none").collect())


def test_overwriting_and_exactly_once(typed: Typed) -> None:
    """The sink's promises hold for typed logs."""
    frame = typed.spark.range(10).selectExpr("id", "id * 2 as twice")
    for _ in range(2):
        typed.save(frame, txnAppId="job", txnVersion="1")
    assert typed.load().count() == 10
    typed.save(frame.where("id < 3"), mode="overwrite")
    assert typed.load().orderBy("id").collect() == [(0, 0), (1, 2), (2, 4)]


@pytest.mark.prove  # tests/dlspark has it without a session
def test_logs_that_python_wrote(typed: Typed, logs: LogBench) -> None:
    """Types that Spark does not have become those that hold their values, or are named."""
    schema = pa.schema(
        [
            ("u8", pa.uint8()), ("u32", pa.uint32()), ("u64", pa.uint64()), ("f16", pa.float16()),
            ("day", pa.date64()), ("ns", pa.timestamp("ns", "Asia/Tokyo")), ("id", pa.binary(2)),
            ("s", pa.timestamp("s")), ("word", pa.dictionary(pa.int8(), pa.string())),
        ]
    )  # fmt: skip
    namespace = logs.namespace
    namespace.create_log(typed.log, schema=schema)
    day = datetime.date(2024, 1, 2)
    time = datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC)
    row = {
        "u8": 255, "u32": 2**32 - 1, "u64": 2**64 - 1, "f16": 1.5, "day": day, "ns": time,
        "id": b"ab", "s": time.replace(tzinfo=None), "word": "a",
    }  # fmt: skip
    log = namespace.open_log(typed.log)
    with log.open_writer() as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([row], schema=schema))
    (found,) = typed.load().collect()
    assert found.u64 == Decimal(2**64 - 1)
    assert (found.u8, found.u32, found.f16, found.day) == (255, 2**32 - 1, 1.5, day)
    assert (bytes(found.id), found.s, found.word) == (b"ab", row["s"], "a")
    assert typed.load().selectExpr("unix_seconds(ns)").collect() == [(int(time.timestamp()),)]
    with log.open_writer() as writer:
        fine = pa.array([1], pa.timestamp("ns", "UTC"))
        writer.write_batch(pa.record_batch({"ns": fine}))
    assert "column 'ns' is timestamp[ns" in message_of(typed.load().collect)
    assert typed.load(columns="u8").count() == 2
    log.update_schema([("span", pa.month_day_nano_interval())], merge=True)
    assert "column 'span' has the type month_day_nano_interval" in message_of(typed.load)
    assert typed.load(columns="u8").count() == 2


@pytest.mark.prove  # tests/dlspark has it without a session
def test_a_schema_that_a_user_gives(typed: Typed) -> None:
    """It is that of the log, or refused; tables of the catalog keep theirs."""
    typed.save(typed.spark.range(3).selectExpr("id", "'x' as name"))

    def load(schema: str) -> DataFrame:
        reader = typed.spark.read.format("dlog").options(uri=typed.uri, log=typed.log)
        return reader.schema(schema).load()

    assert load("id bigint, name string").count() == 3
    assert "the schema of a dlog read is fixed" in message_of(load("id int").collect)
    table = "typed_" + uuid4().hex
    typed.spark.sql(
        f"CREATE TABLE {table} USING dlog OPTIONS (uri '{typed.uri}', log '{typed.log}')"
    )
    try:
        assert typed.spark.table(table).columns == ["id", "name"]
        assert typed.spark.sql(f"select sum(id) from {table}").collect() == [(3,)]
    finally:
        typed.spark.sql(f"DROP TABLE {table}")
