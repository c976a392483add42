"""Cold segments: what it costs to make them, Spark's reading of them, and adds beside readers.

The tier is a folder on the disk of the benchmarks, so that no network decides.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

import dlspark
from benchmarks.figures import ROUNDS, Figure, Target, measure
from benchmarks.limits import MIB
from benchmarks.logs import (
    KEEPS_NOTHING,
    RECORD_BYTES,
    CpuCost,
    append_times,
    drop_log,
    record_batches,
    restarted,
)
from benchmarks.put_clients import Put, one_record
from benchmarks.spark import spark_session
from demo.flights import load_flights
from dlcore.backends.direct.namespace import open_namespace as open_namespace_async
from dlcore.base.config import LogConfig, LogSettings, QuorumConfig
from dlcore.log.cold.stores import sync_file
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.worker import LogUpkeep
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame

    from dlcore.ops.sandbox.cluster import Sandbox

COLD_BYTES = 256 * MIB
"""The size of the log that is caught up, of random bytes."""
FLIGHTS = 8
"""How often the flights are in the log that is tiered and scanned: 2.7 million rows."""
_SEGMENT_BYTES = 64 * MIB
_APPENDS = 500
CONFIG = LogConfig(quorum=QuorumConfig.of_replication_factor(3), segment_bytes_max=_SEGMENT_BYTES)
"""The size of the logs that are tiered."""
_UPKEEP = UpkeepConfig(tier_bytes_per_s=1e12, merged_grace_s=0, tier_grace_s=0)
QUESTION = ("carrier", "dep_delay", "distance")
"""The columns of the flights that the question of `scans` needs."""


def tiering(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """Flights from bookies to objects, beside `pyarrow.parquet.write_table` of the same rows.

    MB/s of what bookies have.  Bookies are read, objects written, synced, read back, decoded and
    compared; `write_table` has the rows in memory, and writes and syncs one file.
    """
    table = many_flights()
    cost, plain = CpuCost([each.pid for each in sandbox.bookies]), CpuCost([])
    written: list[int] = []

    def tier() -> float:
        log, tier_url = f"bench/{uuid4().hex}", f"file://{folder}/{uuid4().hex}"
        size_bytes = _write(sandbox.uri, log, table, tier_url)
        written.append(size_bytes)
        seconds = asyncio.run(tier_all(sandbox.uri, cost))
        drop_log(sandbox.uri, log)
        return size_bytes / 1e6 / seconds

    def write_table() -> float:
        path = folder / f"{uuid4().hex}.parquet"
        started = time.perf_counter()
        with plain.counted():
            pq.write_table(table, path, compression="zstd", row_group_size=100_000)
            sync_file(path)
        seconds = time.perf_counter() - started
        path.unlink()
        return (written[-1] if written else 0) / 1e6 / seconds

    figure = measure(
        name="tiering",
        unit="MB/s",
        target=Target(ratio=0.25, is_rate=True),
        value=tier,
        limit={"write_table": write_table},
    )
    worker, bookies = cost.per_gb(written[-1])
    write_s, _ = plain.per_gb(written[-1])
    return [
        Figure(
            name=figure.name,
            unit=figure.unit,
            value=figure.value,
            limit=figure.limit,
            target=figure.target,
            cpu_s_per_gb={"worker": worker, "bookies": bookies, "write_table": write_s},
        )
    ]


def cold_scan(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """Three of the flights' columns by `dlspark.table`, beside `spark.read.parquet` of the objects.

    The first figure is of a question asked again of the same table; the second has the call of
    `dlspark.table`, which opens the log, and that of `spark.read.parquet`, which reads a footer.
    """
    table, log, tier = many_flights(), f"bench/{uuid4().hex}", folder / "tier"
    _write(sandbox.uri, log, table, f"file://{tier}")
    asyncio.run(tier_all(sandbox.uri, CpuCost([])))
    paths = [str(each) for each in tier.glob("*/*/*/*.parquet")]
    with spark_session(folder) as spark:

        def ours() -> DataFrame:
            return dlspark.table(spark, sandbox.uri, log)

        def plain() -> DataFrame:
            return spark.read.parquet(*paths)

        figures = scans("cold_scan", ours, plain, rows=table.num_rows, ratio=0.95)
    drop_log(sandbox.uri, log)
    return figures


def scans(
    name: str,
    ours: Callable[[], DataFrame],
    limit: Callable[[], DataFrame],
    *,
    rows: int,
    ratio: float,
    alike: bool = True,
) -> list[Figure]:
    """Return how fast two frames are scanned: made before, and made each time.

    They have the same rows, unless they are not `alike`.
    """
    assert not alike or _answer_of(ours()) == _answer_of(limit())
    our_frame, limit_frame = ours(), limit()
    return [
        measure(
            name=each,
            unit="records/s",
            target=Target(ratio=ratio, is_rate=True),
            value=partial(_scan_rate, our_way, rows),
            limit=partial(_scan_rate, limit_way, rows),
        )
        for each, our_way, limit_way in (
            (name, lambda: our_frame, lambda: limit_frame),
            (f"{name}_opened", ours, limit),
        )
    ]


def cold_beside_adds(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """A record at a time, while the same client reads a cold log again and again; ms.

    Beside the same client alone, and while it reads as much from bookies: the share of the
    processor that any reader takes is in both.
    """
    cold, hot = _logs_to_read(sandbox, folder)

    def times(log: str | None) -> list[float]:
        return asyncio.run(_append_beside(sandbox.uri, log))

    return _beside("cold_beside_adds", {"alone": None, "cold": cold, "from bookies": hot}, times)


def proxy_cold_beside_adds(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """A record at a time through a proxy, while another client reads a cold log through it; ms."""
    cold, hot = _logs_to_read(sandbox, folder)
    location = sandbox.proxies[0].location

    def times(log: str | None) -> list[float]:
        with _reading(location, log):
            return _proxy_appends(location, sandbox)

    with restarted(sandbox, **KEEPS_NOTHING):
        return _beside(
            "proxy_cold_beside_adds", {"alone": None, "cold": cold, "from bookies": hot}, times
        )


def _beside(
    name: str, logs: dict[str, str | None], times: Callable[[str | None], list[float]]
) -> list[Figure]:
    """Return the median and the 99th of a hundred appends, beside each of the logs in turn."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(ROUNDS + 1):
        for which, log in logs.items():
            each = sorted(times(log))
            if number:  # the first one warmed up
                runs = found.setdefault(which, {"p50": [], "p99": []})
                runs["p50"].append(statistics.median(each) * 1000)
                runs["p99"].append(each[len(each) * 99 // 100] * 1000)
    medians = {
        which: {what: statistics.median(each) for what, each in runs.items()}
        for which, runs in found.items()
    }
    return [
        Figure(
            name=f"{name}_{what}",
            unit="ms",
            value=medians["cold"][what],
            limit=medians["from bookies"][what],
            target=Target(ratio=1.1, is_rate=False),
            limits={which: each[what] for which, each in medians.items() if which != "cold"},
        )
        for what in ("p50", "p99")
    ]


def many_flights() -> pa.Table:
    """Return the flights, `FLIGHTS` times."""
    table = pa.Table.from_pandas(load_flights().drop(columns=["txid"]), preserve_index=False)
    return pa.concat_tables([table] * FLIGHTS).combine_chunks()


def _write(uri: str, log: str, table: pa.Table, tier: str) -> int:
    """Write a table to a new log with a tier; return how many bytes bookies have."""
    with open_namespace(uri) as namespace:
        settings = LogSettings(tier=tier, tier_after_s=0)
        namespace.create_log(log, config=CONFIG, schema=table.schema, settings=settings)
        with namespace.open_log(log, config=CONFIG).open_writer() as writer:
            writer.write_table(table)
        segments = namespace.open_log(log).get_log_segments()
        return sum(extent.size_bytes for each in segments for extent in each.extents)


async def tier_all(uri: str, cost: CpuCost) -> float:
    """Tier all that is due; return the seconds."""
    async with await open_namespace_async(uri) as namespace:
        upkeep = LogUpkeep.of(namespace, _UPKEEP)
        started = time.perf_counter()
        with cost.counted():
            while await upkeep.tier():
                pass
        return time.perf_counter() - started


def _answer_of(frame: DataFrame) -> list[tuple[object, ...]]:
    """Ask for three columns of the flights."""
    key, *summed = QUESTION
    grouped = frame.groupBy(key).agg(F.count("*"), *map(F.sum, summed))
    return sorted(tuple(row) for row in grouped.collect())


def _scan_rate(frame: Callable[[], DataFrame], rows: int) -> float:
    """Return how many rows a second it takes to make a frame, and to answer the question."""
    started = time.perf_counter()
    _answer_of(frame())
    return rows / (time.perf_counter() - started)


def _logs_to_read(sandbox: Sandbox, folder: Path) -> tuple[str, str]:
    """Return a cold log, and one of as many bytes on bookies."""
    batches = record_batches(total_bytes=COLD_BYTES, record_bytes=RECORD_BYTES)
    names = []
    for tier in (f"file://{folder}/tier", None):
        names.append(f"bench/{uuid4().hex}")
        with open_namespace(sandbox.uri) as namespace:
            settings = LogSettings(tier=tier, tier_after_s=0)
            namespace.create_log(names[-1], config=CONFIG, settings=settings)
            with namespace.open_log(names[-1], config=CONFIG).open_writer() as writer:
                for batch in batches:
                    writer.write_batch(batch)
    asyncio.run(tier_all(sandbox.uri, CpuCost([])))
    return names[0], names[1]


async def _append_beside(uri: str, log: str | None) -> list[float]:
    async with await open_namespace_async(uri) as namespace:
        reading = None if log is None else asyncio.ensure_future(_read_on(namespace, log))
        try:
            return await append_times(uri, _APPENDS)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])


async def _read_on(namespace: object, log: str) -> None:
    """Read a log again and again, until cancelled."""
    while True:
        async for _ in await (await namespace.open_log(log)).read():  # type: ignore[attr-defined]
            pass


def _proxy_appends(location: str, sandbox: Sandbox) -> list[float]:
    log, batch, times = f"bench/{uuid4().hex}", one_record(), []
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(log, config=CONFIG)
    put = Put(location, log, batch.schema)
    put.write(batch, in_flight_max=0)
    for _ in range(_APPENDS):
        started = time.perf_counter()
        put.write(batch, in_flight_max=0)
        times.append(time.perf_counter() - started)
    put.close()
    return times


@contextmanager
def _reading(location: str, log: str | None) -> Iterator[None]:
    """Let a process read a log through a proxy meanwhile."""
    if log is None:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.cold_reader", location, log]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"reading\n"
            yield
        finally:
            process.kill()
