"""Measures the cost of TLS and capabilities: an open and a secured cluster do the same in turn."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, Target, measure
from benchmarks.logs import (
    RECORD_BYTES,
    WRITE_BYTES,
    append_times,
    drop_log,
    record_batches,
    write_log,
)
from benchmarks.noop_source import VALUE_BYTES
from benchmarks.spark import CORES, READ_BYTES, read_rate, spark_session
from dlcore import TlsFiles
from dlcore.ops.sandbox.cluster import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

ROUNDS = 7
"""More than of other benchmarks: a tenth is little beside what a round differs by."""
_TARGET = Target(ratio=0.9, is_rate=True)
_APPENDS = 1000


@contextmanager
def secured_cluster(beside: Sandbox, folder: Path) -> Iterator[tuple[Sandbox, TlsFiles]]:
    """Run a cluster like the open one; yield it with the files of a client without certificate."""
    with Sandbox(
        bookies=len(beside.bookies),
        data_dir=folder / "secured",
        autorecovery=False,
        secure=True,
        bookie_options=("--tls-client-auth=or_capability",),
    ) as sandbox:
        assert sandbox.tls is not None
        yield sandbox, TlsFiles(ca=sandbox.tls.ca)


def secured_write(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """`core_write` with TLS and capabilities, beside the same without them."""
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)

    def rate(cluster: Sandbox, tls: TlsFiles | None) -> float:
        name, seconds = write_log(cluster.uri, batches, tls=tls)
        drop_log(cluster.uri, name, tls=cluster.tls)
        return WRITE_BYTES / 1e6 / seconds

    with secured_cluster(sandbox, folder) as (secured, tls):
        figure = measure(
            name="secured_write",
            unit="MB/s",
            target=_TARGET,
            value=lambda: rate(secured, tls),
            limit=lambda: rate(sandbox, None),
            rounds=ROUNDS,
        )
    return [figure]


def secured_batch_read(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """`spark_batch_read` with TLS and capabilities, beside the same without them."""
    batches = record_batches(total_bytes=READ_BYTES, record_bytes=VALUE_BYTES)
    rows = sum(batch.num_rows for batch in batches)
    with (
        secured_cluster(sandbox, folder) as (secured, tls),
        spark_session(folder) as spark,
    ):
        log, _ = write_log(sandbox.uri, batches)
        ours = _frame(spark, uri=sandbox.uri, log=log)
        secured_log, _ = write_log(secured.uri, batches, tls=tls)
        of_tls = {"tlsCa": tls.ca, "capabilities": "12h"}
        theirs = _frame(spark, uri=secured.uri, log=secured_log, **of_tls)
        assert ours.count() == theirs.count() == rows
        figure = measure(
            name="secured_batch_read",
            unit="records/s",
            target=_TARGET,
            value=lambda: read_rate(theirs, rows),
            limit=lambda: read_rate(ours, rows),
            rounds=ROUNDS,
        )
    return [figure]


def capability_append(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """One record at a time: a client with a capability beside one with a certificate."""
    with secured_cluster(sandbox, folder) as (secured, tls):

        def milliseconds(files: TlsFiles | None, *, capabilities: bool) -> float:
            times = append_times(secured.uri, _APPENDS, tls=files, capabilities=capabilities)
            return statistics.median(asyncio.run(times)) * 1000

        figure = measure(
            name="capability_append",
            unit="ms",
            target=Target(ratio=1.03, is_rate=False),
            value=lambda: milliseconds(tls, capabilities=True),
            limit=lambda: milliseconds(secured.tls, capabilities=False),
            rounds=ROUNDS,
        )
    return [figure]


def _frame(spark: SparkSession, **options: str) -> DataFrame:
    reader = spark.read.format("dlog").options(**options, minPartitions=str(CORES))
    return reader.load()
