"""Figures of the Spark data source: batch read, batch write, the time of a streaming trigger."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql import SparkSession, functions as F

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
from benchmarks.noop_source import VALUE_BYTES, NoopDataSource
from dlcore.records import LogRecord
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from dlcore.sandbox.cluster import Sandbox

CORES = 2
READ_BYTES = 200 * MIB
_BATCH_ROWS = (256, 1024, 4096, 16384)
_TRIES = 2
WRITE_RECORD_BYTES = 1024
_TRIGGERS = 20
_TRIGGERS_WARMING_UP = 3
_TRIGGER_ROUNDS = 3
_APPEND_INTERVAL_S = 0.02
_STREAM_TIMEOUT_S = 1800.0  # of a query that hangs; a busy machine takes minutes
_POLL_S = 0.05


@contextmanager
def spark_session(folder: Path) -> Iterator[SparkSession]:
    """Run Spark in this process with two task slots."""
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
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    # Stopping a query in the middle of a batch is logged as an error; real ones are raised as well.
    spark.sparkContext.setLogLevel("FATAL")
    spark.dataSource.register(NoopDataSource)
    try:
        yield spark
    finally:
        spark.stop()


def batch_read(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """100-byte records from a log, beside a source that has its batches ready."""
    return _batch_read(sandbox, folder, "spark_batch_read", value_bytes=VALUE_BYTES, ratio=0.65)


def batch_read_1k(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """1 KB records from a log, beside a source that has its batches ready."""
    return _batch_read(sandbox, folder, "spark_batch_read_1k", value_bytes=1024, ratio=0.5)


def _batch_read(
    sandbox: Sandbox, folder: Path, name: str, *, value_bytes: int, ratio: float
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
            .option("minPartitions", CORES)
            .load()
        )
        noop = spark.read.format("bench_noop").options(
            rows=rows, value_bytes=value_bytes, partitions=CORES
        )
        # What suits Spark best depends on the size of rows: the limit is at its own best.
        bare = max(
            (noop.option("batch_rows", batch_rows).load() for batch_rows in _BATCH_ROWS),
            key=lambda frame: max(_read_rate(frame, rows) for _ in range(_TRIES)),
        )
        assert ours.count() == rows
        figure = measure(
            name=name,
            unit="records/s",
            target=Target(ratio=ratio, is_rate=True),
            value=lambda: _read_rate(ours, rows),
            limit=lambda: _read_rate(bare, rows),
        )
    drop_log(sandbox.uri, log)
    return [figure]


def _read_rate(frame: DataFrame, rows: int) -> float:
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
            target=Target(ratio=0.5, is_rate=True),
            value=value,
            limit=limits,
        )
    return [figure]


def stream_trigger(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """Triggers with a few new records each, from log to log, beside a no-op source and sink."""
    with spark_session(folder) as spark, _growing_log(sandbox.uri) as log:
        figure = measure(
            name="stream_trigger",
            unit="ms",
            target=Target(ratio=1.3, is_rate=False),
            value=lambda: _trigger_ms(spark, folder, "dlog", {"uri": sandbox.uri, "log": log}),
            limit=lambda: _trigger_ms(spark, folder, "bench_noop", {}),
            rounds=_TRIGGER_ROUNDS,
        )
    return [figure]


@contextmanager
def _growing_log(uri: str) -> Iterator[str]:
    """Append to a new log from a thread, so that every trigger finds something."""
    name = f"bench/{uuid4().hex}"
    stopped = threading.Event()
    with open_namespace(uri) as namespace:
        namespace.create_log(name, config=CONFIG)
        namespace.create_log(name + "/copy", config=CONFIG)

        def grow() -> None:
            with namespace.open_log(name) as log, log.open_writer() as writer:
                txid = 0
                while not stopped.wait(_APPEND_INTERVAL_S):
                    writer.write(LogRecord(txid, b"x" * VALUE_BYTES))
                    writer.commit()
                    txid += 1

        thread = threading.Thread(target=grow, name="grow")
        thread.start()
        try:
            yield name
        finally:
            stopped.set()
            thread.join()


def _trigger_ms(spark: SparkSession, folder: Path, kind: str, options: dict[str, str]) -> float:
    source = spark.readStream.format(kind).options(**options).load().select("value")
    sink_options = options | ({"log": options["log"] + "/copy"} if "log" in options else {})
    checkpoint = tempfile.mkdtemp(dir=folder)
    query = (
        source.writeStream.format(kind)
        .options(**sink_options)
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
