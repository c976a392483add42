"""Streams into many logs: a worker process stages for all of them and all batches in one ledger.

Goal: ledgers grow with neither targets nor batches.  Method: several batches into each of many
logs; the ledgers that hold their records are counted after each batch.
"""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F

from dlcore import open_namespace
from dlspark import in_batch
from tests.fixtures.lengths import amount
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
TIMEOUT_S = 200
BATCHES = 2
LEDGERS_MAX = 4
"""Two worker processes, and as many should Spark replace those that were idle for a minute."""


def create_many(logs: LogBench, count: int) -> list[str]:
    """Create logs, at once."""
    prefix = f"many-{uuid.uuid4().hex[:8]}"
    names = [f"{prefix}/{number:04}" for number in range(count)]

    async def create() -> None:
        async with await open_namespace(logs.uri) as namespace:
            await asyncio.gather(*(namespace.create_log(name) for name in names))

    asyncio.run(create())
    return names


def ledgers_of(logs: LogBench, names: Sequence[str], *, batches: int) -> set[int]:
    """Return the ledgers that hold the records of the logs, of which each has one per batch."""
    ledgers = set()
    for name, snapshot in logs.namespace.get_snapshots(names, fresh=True).items():
        assert snapshot is not None
        extents = [e for scan in snapshot.scans(snapshot.first, snapshot.end) for e in scan.extents]
        assert sum(extent.record_count for extent in extents) == batches, name
        ledgers |= {extent.ledger_id for extent in extents}
    return ledgers


def wait_for_batch(query: StreamingQuery, checkpoint: Path, number: int) -> None:
    """Wait until Spark has noted a batch as done."""
    done = checkpoint / "commits" / str(number)
    wait_until(lambda: done.exists() or not query.isActive, timeout_s=TIMEOUT_S)
    assert query.isActive, query.exception()


@pytest.mark.timeout(600)
def test_a_batch_written_to_a_hundred_logs(logs: LogBench, tmp_path: Path) -> None:
    """Each write of `foreachBatch` is an append of its own; their records share ledgers."""
    source, targets = logs.create("in"), create_many(logs, amount(100, sampled=3))

    def take(batch: DataFrame, batch_id: int) -> None:
        def write(log: str) -> None:
            if batch_id % 2:
                logs.save(batch.drop("txid"), log=log)
            else:
                transaction = {"txnAppId": source, "txnVersion": str(batch_id)}
                logs.save(batch.drop("txid"), log=log, **transaction)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(in_batch(write, batch.sparkSession), targets))

    frame = logs.stream(log=source, startingOffsets="earliest")
    logs.append(source, [(0, b"0")])
    writer = frame.writeStream.foreachBatch(take)
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    for batch in range(BATCHES):
        wait_for_batch(query, tmp_path, batch)
        assert len(ledgers_of(logs, targets, batches=batch + 1)) <= LEDGERS_MAX
        logs.append(source, [(batch + 1, b"more")])
    query.stop()


@pytest.mark.timeout(600)
def test_rows_that_choose_among_a_thousand_logs(logs: LogBench, tmp_path: Path) -> None:
    """A batch with a row for each of them is one append."""
    source, targets = logs.create("in"), create_many(logs, amount(1000, sampled=20))
    prefix = targets[0][:-4]
    number = F.explode(F.sequence(F.lit(0), F.lit(len(targets) - 1)))
    rows = logs.stream(log=source, startingOffsets="earliest").select("value", number.alias("n"))
    log = F.concat(F.lit(prefix), F.lpad(F.col("n").cast("string"), 4, "0"))
    logs.append(source, [(0, b"0")])
    query = (
        rows.select("value", log.alias("log"))
        .writeStream.format("dlog")
        .options(uri=logs.uri, checkpointLocation=str(tmp_path))
        .start()
    )
    for batch in range(BATCHES):
        wait_for_batch(query, tmp_path, batch)
        assert len(ledgers_of(logs, targets, batches=batch + 1)) <= LEDGERS_MAX
        logs.append(source, [(batch + 1, b"more")])
    query.stop()
