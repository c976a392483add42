"""Typed logs beside JSON in logs of bytes, and beside a source that has the columns in memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import functions as F

from benchmarks.figures import Figure, Target, measure
from benchmarks.logs import drop_log
from benchmarks.spark import CORES, spark_session
from demo.flights import load_flights
from dlcore.sync import open_namespace
from dlspark.arrow import ROWS_PER_BATCH

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from dlcore.ops.sandbox.cluster import Sandbox

_QUESTION = ("carrier", "dep_delay", "distance")
_QUESTION_SCHEMA = "carrier string, dep_delay bigint, distance bigint"


def typed_read(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """Three of the flights' columns aggregated, beside `from_json`, and beside ready batches.

    The second figure says how much of what Spark itself allows of a Python source the first has.
    """
    flights = load_flights().drop(columns=["txid"])
    logs = [f"bench/{uuid4().hex}" for _ in range(2)]
    typed, plain = logs
    texts = flights.to_json(orient="records", lines=True).encode().splitlines()
    with open_namespace(sandbox.uri) as namespace:
        table = pa.Table.from_pandas(flights, preserve_index=False)
        namespace.create_log(typed, schema=table.schema)
        namespace.create_log(plain)
        with namespace.open_log(typed).open_writer() as writer:
            writer.write_table(table)
        with namespace.open_log(plain).open_writer() as writer:
            zeros = pa.array([0] * len(texts), pa.int64())
            writer.write_table({"txid": zeros, "value": pa.array(texts, pa.binary())})
    path, asked = str(folder / "flights.arrow"), table.select(_QUESTION)
    with pa.ipc.new_file(path, asked.schema) as file:
        file.write_table(asked, max_chunksize=ROWS_PER_BATCH)
    with spark_session(folder) as spark:

        def load(log: str, columns: str) -> DataFrame:
            options = {"uri": sandbox.uri, "log": log, "columns": columns}
            reader = spark.read.format("dlog").options(**options)
            return reader.option("minPartitions", CORES).load()

        ours = load(typed, ",".join(_QUESTION))
        parsed = F.from_json(F.col("value").cast("string"), _QUESTION_SCHEMA)
        json = load(plain, "value").select(parsed.alias("flight")).select("flight.*")
        ready = spark.read.format("bench_ready").options(path=path, partitions=CORES).load()
        assert _answer(ours) == _answer(json) == _answer(ready)
        beside_json = measure(
            name="typed_read",
            unit="records/s",
            target=Target(ratio=10, is_rate=True),
            value=lambda: _rate(ours, len(texts)),
            limit=lambda: _rate(json, len(texts)),
        )
        beside_ready = measure(
            name="typed_read_ready",
            unit="records/s",
            target=Target(ratio=0.7, is_rate=True),
            value=lambda: _rate(ours, len(texts)),
            limit=lambda: _rate(ready, len(texts)),
        )
    for log in logs:
        drop_log(sandbox.uri, log)
    return [beside_json, beside_ready]


def _answer(frame: DataFrame) -> list[tuple[object, ...]]:
    grouped = frame.groupBy("carrier").agg(F.count("*"), F.sum("dep_delay"), F.sum("distance"))
    return sorted(tuple(row) for row in grouped.collect())


def _rate(frame: DataFrame, records: int) -> float:
    started = time.perf_counter()
    _answer(frame)
    return records / (time.perf_counter() - started)
