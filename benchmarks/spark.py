"""Figures of the Spark data source: batch read, batch write, and what streams take."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql import SparkSession, functions as F

import dlspark
from benchmarks.figures import Figure, Target, measure
from benchmarks.limits import MIB
from benchmarks.logs import (
    CONFIG,
    WRITE_BYTES,
    drop_log,
    record_batches,
    write_limits,
    write_log,
)
from benchmarks.noop_source import VALUE_BYTES, NoopDataSource, ReadyDataSource
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace
from dlspark.arrow import ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from dlcore.ops.sandbox.cluster import Sandbox

CORES = 2
READ_BYTES = 200 * MIB
_BATCH_ROWS = (256, 1024, 4096, 16384)
_TRIES = 2
WRITE_RECORD_BYTES = 1024
_TRIGGERS = 20
_TRIGGERS_WARMING_UP = 3
_TRIGGER_ROUNDS = 3
_APPEND_INTERVAL_S = 0.02
_LATENCIES = 20
_STREAM_TIMEOUT_S = 1800.0  # of a query that hangs; a busy machine takes minutes
_POLL_S = 0.05


@contextmanager
def spark_session(folder: Path, *, class_path: str = "") -> Iterator[SparkSession]:
    """Run Spark in this process with two task slots, and with these jars if it is the first one."""
    os.environ["SPARK_LOCAL_DIRS"] = str(folder / "spark")
    os.environ["PYSPARK_PYTHON"] = sys.executable  # else workers are the python3 of the PATH
    builder = SparkSession.Builder().master(f"local[{CORES}]").appName("dlog benchmarks")
    settings = {
        "spark.driver.memory": "1g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    if class_path:
        settings["spark.driver.extraClassPath"] = class_path
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    # Stopping a query in the middle of a batch is logged as an error; real ones are raised as well.
    spark.sparkContext.setLogLevel("FATAL")
    dlspark.register(spark)  # Spark does not find it where the path of this Python has a blank
    spark.dataSource.register(NoopDataSource)
    spark.dataSource.register(ReadyDataSource)
    try:
        yield spark
    finally:
        spark.stop()


def batch_read(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """100-byte records from a log, beside a source that has its batches ready."""
    return _batch_read(sandbox, folder, "spark_batch_read", value_bytes=VALUE_BYTES, ratio=0.7)


def batch_read_1k(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """1 KB records from a log, beside a source that has its batches ready."""
    return _batch_read(sandbox, folder, "spark_batch_read_1k", value_bytes=1024, ratio=0.65)


def read_value(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """100-byte values alone from a log, beside a source that has batches of them ready."""
    return _batch_read(
        sandbox, folder, "spark_read_value", value_bytes=VALUE_BYTES, ratio=0.6, columns="value"
    )


def _batch_read(
    sandbox: Sandbox,
    folder: Path,
    name: str,
    *,
    value_bytes: int,
    ratio: float,
    columns: str = ",".join(ROW_SCHEMA.names),
) -> list[Figure]:
    batches = record_batches(total_bytes=READ_BYTES, record_bytes=value_bytes)
    rows = sum(batch.num_rows for batch in batches)
    log, _ = write_log(sandbox.uri, batches)
    del batches
    with spark_session(folder) as spark:
        # The same number of parts for both, one for each task slot.
        ours = (
            spark.read.format("dlog")
            .option("uri", sandbox.uri)
            .option("log", log)
            .option("columns", columns)
            .option("minPartitions", CORES)
            .load()
        )
        noop = spark.read.format("bench_noop").options(
            rows=rows, value_bytes=value_bytes, partitions=CORES, columns=columns
        )
        # The size of rows decides which setting suits Spark best: the limit is at its own best.
        bare = max(
            (noop.option("batch_rows", batch_rows).load() for batch_rows in _BATCH_ROWS),
            key=lambda frame: max(read_rate(frame, rows) for _ in range(_TRIES)),
        )
        assert ours.count() == rows
        figure = measure(
            name=name,
            unit="records/s",
            target=Target(ratio=ratio, is_rate=True),
            value=lambda: read_rate(ours, rows),
            limit=lambda: read_rate(bare, rows),
        )
    drop_log(sandbox.uri, log)
    return [figure]


def read_rate(frame: DataFrame, rows: int) -> float:
    """Return the rows per second of reading a frame that has so many, all columns of it."""
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return rows / (time.perf_counter() - started)


def batch_write(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """1 KB records into a log, beside what the disk or bare servers take, as for core_write."""
    with spark_session(folder) as spark, write_limits(folder) as (limits, _):
        rows = spark.range(0, WRITE_BYTES // WRITE_RECORD_BYTES, 1, CORES).select(
            F.repeat(F.lit("0123456789abcdef"), WRITE_RECORD_BYTES // 16).alias("value")
        )

        def value() -> float:
            name = f"bench/{uuid4().hex}"
            with open_namespace(sandbox.uri) as namespace:
                namespace.create_log(name, config=CONFIG)
                started = time.perf_counter()
                target = rows.write.format("dlog").option("uri", sandbox.uri).option("log", name)
                target.mode("append").save()
                seconds = time.perf_counter() - started
                with namespace.open_log(name) as log:
                    assert log.get_log_record_count() == WRITE_BYTES // WRITE_RECORD_BYTES
                namespace.delete_log(name)
            return WRITE_BYTES / 1e6 / seconds

        figure = measure(
            name="spark_batch_write",
            unit="MB/s",
            target=Target(ratio=0.85, is_rate=True),
            value=value,
            limit=limits,
        )
    return [figure]


def stream_trigger(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """Triggers with a few new records each, from log to log, beside a no-op source and sink."""
    with spark_session(folder) as spark, growing_log(sandbox.uri) as (log, copy):
        ours = spark.readStream.format("dlog").options(uri=sandbox.uri, log=log).load()
        noop = spark.readStream.format("bench_noop").load()
        sink = {"uri": sandbox.uri, "log": copy}
        figure = measure(
            name="stream_trigger",
            unit="ms",
            target=Target(ratio=1.15, is_rate=False),
            value=lambda: trigger_ms(ours, folder, "dlog", sink),
            limit=lambda: trigger_ms(noop, folder, "bench_noop", {}),
            rounds=_TRIGGER_ROUNDS,
        )
    return [figure]


@contextmanager
def growing_log(uri: str) -> Iterator[tuple[str, str]]:
    """Append to a new log, so that every trigger finds something; yield it and an empty one."""
    name = f"bench/{uuid4().hex}"
    copy = name + "/copy"
    with open_namespace(uri) as namespace:
        namespace.create_log(name, config=CONFIG)
        namespace.create_log(copy, config=CONFIG)
        with namespace.open_log(name) as log, log.open_writer() as writer:

            def write(value: bytes) -> None:
                writer.write(LogRecord(writer.last_txid + 1, value))
                writer.commit()

            with written_to(write):
                yield name, copy


@contextmanager
def written_to(write: Callable[[bytes], object]) -> Iterator[None]:
    """Write a value every now and then from a thread of its own."""
    stopped = threading.Event()

    def grow() -> None:
        while not stopped.wait(_APPEND_INTERVAL_S):
            write(b"x" * VALUE_BYTES)

    thread = threading.Thread(target=grow, name="grow")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def trigger_ms(source: DataFrame, folder: Path, kind: str, options: Mapping[str, str]) -> float:
    """Return the median time of triggers that write what is new to a sink of this kind."""
    checkpoint = tempfile.mkdtemp(dir=folder)
    query = (
        source.select("value")
        .writeStream.format(kind)
        .options(**options)
        .option("checkpointLocation", checkpoint)
        .start()
    )
    try:
        return statistics.median(_trigger_times(query))
    finally:
        query.stop()


def _trigger_times(query: StreamingQuery) -> list[int]:
    """Return the milliseconds of the triggers that had something to do, the first ones left out."""
    deadline = time.monotonic() + _STREAM_TIMEOUT_S
    while True:
        error = query.exception()
        if error is not None:
            raise error
        times = [
            int(progress["durationMs"]["triggerExecution"])
            for progress in query.recentProgress
            if int(progress["numInputRows"]) > 0
        ]
        if len(times) >= _TRIGGERS + _TRIGGERS_WARMING_UP:
            return times[_TRIGGERS_WARMING_UP:]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(times)} triggers in {_STREAM_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def stream_latency(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """A record from its write to `foreachBatch`, beside a source that has a row at once."""
    name = f"bench/{uuid4().hex}"
    with spark_session(folder) as spark, open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name, config=CONFIG)
        with namespace.open_log(name) as log, log.open_writer() as writer:

            def write() -> None:
                writer.write(LogRecord(writer.last_txid + 1, b"x"))
                writer.commit()

            row = folder / "rows"
            row.touch()

            def append() -> None:
                with row.open("ab") as file:
                    file.write(b"x")

            ours = spark.readStream.format("dlog").options(uri=sandbox.uri, log=name)
            noop = spark.readStream.format("bench_noop").options(path=str(row))
            figure = measure(
                name="stream_latency",
                unit="ms",
                target=Target(ratio=1.2, is_rate=False),
                value=lambda: _latency_ms(ours.load(), folder, write),
                limit=lambda: _latency_ms(noop.load(), folder, append),
                rounds=_TRIGGER_ROUNDS,
            )
        namespace.delete_log(name)
    return [figure]


def _latency_ms(frame: DataFrame, folder: Path, write: Callable[[], None]) -> float:
    """Return the median from a call of `write` until a query that rests has its row."""
    seen: SimpleQueue[float] = SimpleQueue()

    def note(batch: DataFrame, _: int) -> None:
        if batch.select("value").collect():
            seen.put(time.perf_counter())

    query = (
        frame.writeStream.foreachBatch(note)
        .option("checkpointLocation", tempfile.mkdtemp(dir=folder))
        .start()
    )
    try:
        query.processAllAvailable()
        times = []
        for _ in range(_TRIGGERS_WARMING_UP + _LATENCIES):
            started = time.perf_counter()
            write()
            times.append(seen.get(timeout=_STREAM_TIMEOUT_S) - started)
            query.processAllAvailable()
        return statistics.median(times[_TRIGGERS_WARMING_UP:]) * 1000
    finally:
        query.stop()
