"""Figures of the Spark data source beside Spark's connector to Kafka, with the same rows.

Everything has three copies, all of which are acknowledged.  Kafka's are on their way to the disk,
ours have reached it; where a figure says synced, Kafka's have as well.  Both are read in as many
parts as there are task slots.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from pyspark.sql import functions as F

from benchmarks.figures import Figure, Target, measure
from benchmarks.limits import MIB
from benchmarks.logs import CONFIG, drop_log
from benchmarks.noop_source import VALUE_BYTES
from benchmarks.peers.kafka import Kafka, connector_class_path, running_kafka
from benchmarks.spark import (
    CORES,
    READ_BYTES,
    WRITE_RECORD_BYTES,
    growing_log,
    read_rate,
    spark_session,
    trigger_ms,
    written_to,
)
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from dlcore.ops.sandbox.cluster import Sandbox

_ROUNDS = 3
_WRITE_BYTES = 128 * MIB
_LARGE_BATCHES = {
    "kafka.batch.size": str(MIB - 4096),  # a request of one must fit into what it may have: 1 MiB
    "kafka.linger.ms": "20",
}


def read(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """100-byte records read by Spark as a batch, beside Kafka."""
    return _read(sandbox, folder, "peers_read", value_bytes=VALUE_BYTES, ratio=3)


def read_1k(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """1 KB records read by Spark as a batch, beside Kafka."""
    return _read(sandbox, folder, "peers_read_1k", value_bytes=WRITE_RECORD_BYTES, ratio=2)


def _read(
    sandbox: Sandbox, folder: Path, name: str, *, value_bytes: int, ratio: float
) -> list[Figure]:
    with _beside_kafka(sandbox, folder, _LARGE_BATCHES) as (spark, logs, kafka):
        rows = _rows(spark, READ_BYTES, value_bytes)
        written = _digest(rows)
        ours, theirs = (side.read(_written(side, rows)) for side in (logs, kafka))
        assert _digest(ours) == _digest(theirs) == written
        figure = measure(
            name=name,
            unit="records/s",
            target=Target(ratio=ratio, is_rate=True),
            value=lambda: read_rate(ours, written.records),
            limit=lambda: read_rate(theirs, written.records),
            rounds=_ROUNDS,
        )
    return [figure]


def write(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """100-byte records written by Spark as a batch, beside Kafka and its connector's defaults."""
    return _write(sandbox, folder, "peers_write", value_bytes=VALUE_BYTES, ratio=2.5)


def write_1k_synced(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """1 KB records written by Spark as a batch, beside Kafka that syncs its batches of 1 MiB."""
    name, value_bytes = "peers_write_1k_synced", WRITE_RECORD_BYTES
    return _write(sandbox, folder, name, value_bytes=value_bytes, ratio=1.5, is_synced=True)


def _write(
    sandbox: Sandbox,
    folder: Path,
    name: str,
    *,
    value_bytes: int,
    ratio: float,
    is_synced: bool = False,
) -> list[Figure]:
    producer = _LARGE_BATCHES if is_synced else {}
    with _beside_kafka(sandbox, folder, producer, is_synced=is_synced) as (spark, logs, kafka):
        rows = _rows(spark, _WRITE_BYTES, value_bytes)
        written = _digest(rows)

        def rate(side: Logs | Kafka) -> float:
            target = side.create()
            started = time.perf_counter()
            side.write(rows, target)
            seconds = time.perf_counter() - started
            assert _digest(side.read(target)) == written
            side.drop(target)
            return written.records / seconds

        figure = measure(
            name=name,
            unit="records/s",
            target=Target(ratio=ratio, is_rate=True),
            value=lambda: rate(logs),
            limit=lambda: rate(kafka),
            rounds=_ROUNDS,
        )
    return [figure]


def trigger(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """Triggers with a few new records each, from log to log, beside Kafka from topic to topic.

    A second figure is Spark's own share: triggers of a Python source and sink that do nothing.
    """
    with (
        _beside_kafka(sandbox, folder, {}) as (spark, _, kafka),
        growing_log(sandbox.uri) as (log, log_copy),
        _growing_topic(kafka) as (topic, topic_copy),
    ):
        ours = spark.readStream.format("dlog").options(uri=sandbox.uri, log=log).load()
        noop = spark.readStream.format("bench_noop").load()
        theirs = spark.readStream.format("kafka").options(**kafka.options, subscribe=topic).load()
        log_sink = {"uri": sandbox.uri, "log": log_copy}
        topic_sink = kafka.options | {"topic": topic_copy}
        times = {
            "peers_trigger": lambda: trigger_ms(ours, folder, "dlog", log_sink),
            "peers_trigger_noop": lambda: trigger_ms(noop, folder, "bench_noop", {}),
        }
        return [
            measure(
                name=name,
                unit="ms",
                target=Target(ratio=1.2, is_rate=False),
                value=value,
                limit=lambda: trigger_ms(theirs, folder, "kafka", topic_sink),
                rounds=_ROUNDS,
            )
            for name, value in times.items()
        ]


@contextmanager
def _growing_topic(kafka: Kafka) -> Iterator[tuple[str, str]]:
    """Append to a new topic; yield it and an empty one."""
    topic, copy = kafka.create(), kafka.create()
    with kafka.producing(topic) as write, written_to(write):
        yield topic, copy


@contextmanager
def _beside_kafka(
    sandbox: Sandbox, folder: Path, producer: Mapping[str, str], *, is_synced: bool = False
) -> Iterator[tuple[SparkSession, Logs, Kafka]]:
    """Run a Kafka, and Spark with its connector; `producer` are options of writes to it."""
    class_path = connector_class_path()
    with (
        running_kafka(folder / "kafka", is_synced=is_synced) as servers,
        spark_session(folder, class_path=class_path) as spark,
    ):
        yield spark, Logs(spark, sandbox.uri), Kafka(spark, servers, producer)


@dataclass(frozen=True, slots=True)
class Logs:
    """The measurements of `Kafka`, with logs."""

    spark: SparkSession
    uri: str

    def create(self) -> str:
        """Create a log and return its name."""
        name = f"bench/{uuid4().hex}"
        with open_namespace(self.uri) as namespace:
            namespace.create_log(name, config=CONFIG)
        return name

    def drop(self, name: str) -> None:
        """Delete a log, so that rounds do not fill the disk."""
        drop_log(self.uri, name)

    def write(self, rows: DataFrame, name: str) -> None:
        """Append rows as a batch."""
        rows.write.format("dlog").options(uri=self.uri, log=name).mode("append").save()

    def read(self, name: str) -> DataFrame:
        """Return all of a log, with all columns."""
        options = {"uri": self.uri, "log": name, "minPartitions": str(CORES)}
        return self.spark.read.format("dlog").options(**options).load()


def _written(side: Logs | Kafka, rows: DataFrame) -> str:
    target = side.create()
    side.write(rows, target)
    return target


def _rows(spark: SparkSession, total_bytes: int, value_bytes: int) -> DataFrame:
    """Return values that differ, of one size, which cost little to make."""
    value = F.lpad(F.col("id").cast("string"), value_bytes, "x").cast("binary")
    return spark.range(0, total_bytes // value_bytes, 1, CORES).select(value.alias("value"))


class _Digest(NamedTuple):
    """How many values there are, and one number of all of them, in any order."""

    records: int
    mixed: int


def _digest(rows: DataFrame) -> _Digest:
    (found,) = rows.agg(F.count("value"), F.bit_xor(F.xxhash64("value"))).collect()
    return _Digest(*found)
