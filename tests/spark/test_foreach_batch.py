"""Writes in `foreachBatch` in a classic session, and over Spark Connect with no JVM in reach.

Goal: a batch that is repeated is never written twice: it is recognised, or refused with what works.
Method: a function that fails once after its writes; a file remembers that it did, since over
Connect it runs in a process of the server's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dlspark import in_batch
from dlspark.admission import has_admission_control
from tests.fixtures.spark import committed_version, message_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
TIMEOUT_S = 120
IS_REMOTE = "SPARK_REMOTE" in os.environ


def save(batch: DataFrame, **options: str) -> None:
    """Append rows."""
    batch.write.format("dlog").options(**options).mode("append").save()


def fail_once(marker: Path) -> None:
    """Raise unless a file is there, and leave it."""
    if not marker.exists():
        marker.touch()
        raise RuntimeError("after the writes")


def run(frame: DataFrame, take: Callable[[DataFrame, int], None], folder: Path) -> None:
    """Hand what is there to a function, in one run of a query."""
    writer = frame.writeStream.foreachBatch(take).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    assert query.awaitTermination(TIMEOUT_S)


@pytest.fixture
def filled(logs: LogBench) -> str:
    """Return a log of ten records."""
    log = logs.create("in")
    logs.append(log, [(n, b"%d" % n) for n in range(10)])
    return log


@pytest.mark.prove  # tests/dlspark has it without a session, `test_batch_write` with one
def test_transactions_of_the_users_own(logs: LogBench, filled: str, tmp_path: Path) -> None:
    """The batch id as `txnVersion`: each log has the batch once, and later ones too."""
    uri, marker = logs.uri, tmp_path / "failed"
    targets = [logs.create(letter) for letter in "ab"]
    frame = logs.stream(log=filled, startingOffsets="earliest")

    def take(batch: DataFrame, batch_id: int) -> None:
        for log in targets:
            save(batch, uri=uri, log=log, txnAppId="job", txnVersion=str(batch_id))
        fail_once(marker)

    assert "after the writes" in message_of(lambda: run(frame, take, tmp_path))
    run(frame, take, tmp_path)
    logs.append(filled, [(n, b"%d" % n) for n in range(10, 15)])
    run(frame, take, tmp_path)
    for log in targets:
        assert logs.payloads(log) == [b"%d" % n for n in range(15)]


@pytest.mark.prove  # tests/dlspark has it without a session
@pytest.mark.parametrize("steps", [0, 2, 4])
def test_a_repeated_batch_is_never_doubled(
    logs: LogBench, filled: str, tmp_path: Path, steps: int
) -> None:
    """A classic session tells of which batch rows are; over Connect the write is refused."""
    uri, marker, target = logs.uri, tmp_path / "failed", logs.create("out")
    frame = logs.stream(log=filled, startingOffsets="earliest")

    def take(batch: DataFrame, batch_id: int) -> None:
        rows = batch
        for _ in range(steps):
            rows = rows.selectExpr("value", "txid")
        save(rows, uri=uri, log=target)
        fail_once(marker)

    if IS_REMOTE:
        message = message_of(lambda: run(frame, take, tmp_path))
        assert "txnAppId of its own and the batch id as txnVersion" in message
        assert logs.payloads(target) == []
        return
    assert "after the writes" in message_of(lambda: run(frame, take, tmp_path))
    run(frame, take, tmp_path)
    assert logs.payloads(target) == [b"%d" % n for n in range(10)]


@pytest.mark.prove  # `test_limited_streams` has it with more to it
def test_available_now_in_limited_batches(logs: LogBench, filled: str, tmp_path: Path) -> None:
    """Through the sink, which over Connect works in the server as ever."""
    target = logs.create("out")
    frame = logs.stream(log=filled, startingOffsets="earliest", maxRecordsPerTrigger="4")
    writer = frame.writeStream.format("dlog").options(uri=logs.uri, log=target)
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert query.awaitTermination(TIMEOUT_S)
    count, last = (10, 2) if has_admission_control() else (4, 0)
    assert logs.payloads(target) == [b"%d" % n for n in range(count)]
    with logs.namespace.open_log(target) as log:
        assert committed_version(logs.uri, f"stream:{query.id}><{log.log_id}>") == last


@pytest.mark.prove  # tests/dlspark has the refusal, `test_stream_write` what works elsewhere
def test_in_batch(logs: LogBench, filled: str, tmp_path: Path) -> None:
    """Over Connect it says what to do there."""
    uri, target = logs.uri, logs.create("out")
    frame = logs.stream(log=filled, startingOffsets="earliest")

    def take(batch: DataFrame, batch_id: int) -> None:
        in_batch(save, batch.sparkSession)(batch, uri=uri, log=target)

    if IS_REMOTE:
        assert "in_batch is for classic sessions" in message_of(lambda: run(frame, take, tmp_path))
    else:
        run(frame, take, tmp_path)
        assert len(logs.payloads(target)) == 10
