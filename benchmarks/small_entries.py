"""The same rows in many small entries and in one append: what a sink leaves that writes often."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure, Target, measure
from benchmarks.logs import drop_log
from benchmarks.spark import spark_session
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from dlcore.ops.sandbox.cluster import Sandbox

_ROWS, _APPENDS = 18_000, 6_000
_READS = 5
_VALUE = b"x" * 100


def small_entries(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """18,000 rows of 6,000 appends, beside those of one; as bytes, and with columns."""
    numbers = np.arange(_ROWS)
    plain = pa.record_batch({"txid": numbers, "value": [_VALUE] * _ROWS})
    typed = pa.record_batch(
        {"number": numbers, "name": [f"name {n}" for n in range(_ROWS)], "share": numbers / 7}
    )
    figures = []
    with spark_session(folder) as spark:
        for name, rows in (("small_entries", plain), ("small_entries_typed", typed)):
            logs = [
                _write(sandbox.uri, rows, appends, is_typed=rows is typed)
                for appends in (_APPENDS, 1)
            ]
            many, one = (
                spark.read.format("dlog").options(uri=sandbox.uri, log=log).load() for log in logs
            )
            assert many.count() == one.count() == _ROWS
            figures.append(
                measure(
                    name=name,
                    unit="ms",
                    target=Target(ratio=2, is_rate=False),
                    value=lambda frame=many: _read_ms(frame),  # type: ignore[misc]
                    limit=lambda frame=one: _read_ms(frame),  # type: ignore[misc]
                )
            )
            for log in logs:
                drop_log(sandbox.uri, log)
    return figures


def _write(uri: str, rows: pa.RecordBatch, appends: int, *, is_typed: bool) -> str:
    """Write rows to a new log in so many entries; return its name."""
    name = f"bench/{uuid4().hex}"
    size = rows.num_rows // appends
    with open_namespace(uri) as namespace:
        namespace.create_log(name, schema=rows.schema if is_typed else None)
        with namespace.open_log(name) as log, log.open_writer() as writer:
            for start in range(0, rows.num_rows, size):
                writer.write_batch(rows.slice(start, size))
                writer.flush()
    return name


def _read_ms(frame: DataFrame) -> float:
    """Return what a read takes, of several the shortest."""
    times = []
    for _ in range(_READS):
        started = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        times.append(time.perf_counter() - started)
    return min(times) * 1000
