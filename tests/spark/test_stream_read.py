"""Stream reads on a real session and cluster: every record in exactly one batch.

Goal: restarts, replays, new, deleted, truncated logs lose and double nothing, or stop the query.
Method: a sink that keeps each batch by its id, as an idempotent sink would; the log grows, the
query is stopped, fails, and starts again from its checkpoint.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from dlcore.base.ids import DLSN
from dlspark.offsets import OFFSET_VERSION
from tests.fixtures.spark import message_of
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
TIMEOUT_S = 120


class Sink:
    """Keeps the rows of each batch, a replayed batch in the place of its first run."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "checkpoint"
        self.batches: dict[int, list[tuple[str, int]]] = {}
        self.fails_at: int | None = None
        self._query: StreamingQuery | None = None

    def start(self, frame: DataFrame) -> StreamingQuery:
        """Start a query from the checkpoint."""
        self._query = (
            frame.writeStream.foreachBatch(self._take)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(processingTime="100 milliseconds")
            .start()
        )
        return self._query

    def _take(self, frame: DataFrame, batch_id: int) -> None:
        rows = [(row.log, int(bytes(row.value))) for row in frame.collect()]
        self.batches[batch_id] = rows
        if self.fails_at == batch_id:
            raise RuntimeError("the sink fails")

    @property
    def rows(self) -> list[tuple[str, int]]:
        """All rows, batch by batch."""
        return [row for batch_id in sorted(self.batches) for row in self.batches[batch_id]]

    @property
    def numbers(self) -> list[int]:
        """All payloads, batch by batch."""
        return [number for _, number in self.rows]

    def wait_for(self, count: int) -> None:
        """Wait until there are `count` rows, and Spark will not run their batches again."""
        assert self._query is not None
        wait_until(
            lambda: (len(self.rows) >= count and self._is_committed()) or not self._is_active(),
            timeout_s=TIMEOUT_S,
        )
        assert self._is_active(), self._query.exception()
        assert len(self.rows) == count

    def _is_committed(self) -> bool:
        """Whether Spark noted the last batch that came: without that a restart runs it again."""
        return (self.checkpoint / "commits" / str(max(self.batches))).exists()

    def wait_for_batch(self, batch_id: int) -> None:
        """Wait until a batch has been taken."""
        wait_until(lambda: batch_id in self.batches, timeout_s=TIMEOUT_S)

    def _is_active(self) -> bool:
        assert self._query is not None
        return self._query.isActive

    def stop(self) -> None:
        """Stop the query."""
        assert self._query is not None
        self._query.stop()

    def message_of_failure(self) -> str:
        """Wait until the query has failed; return why."""
        assert self._query is not None
        query = self._query
        return message_of(lambda: query.awaitTermination(TIMEOUT_S))


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[Sink]:
    """Return an empty sink with a checkpoint of its own; stop what a failed test left running."""
    found = Sink(tmp_path)
    yield found
    found.stop()


def append(logs: LogBench, log: str, numbers: range) -> None:
    """Append numbers as one segment."""
    logs.append(log, [(n, b"%d" % n) for n in numbers])


def test_restart_goes_on_where_it_was(logs: LogBench, sink: Sink) -> None:
    """From the earliest position, over a stop, in order; an idle query runs no batch."""
    log = logs.create()
    append(logs, log, range(100))
    frame = logs.stream(log=log, startingOffsets="earliest")
    query = sink.start(frame)
    sink.wait_for(100)
    append(logs, log, range(100, 150))
    sink.wait_for(150)
    batches = len(sink.batches)
    idle_from = query.lastProgress["batchId"] if query.lastProgress else 0
    wait_until(lambda: query.status["message"] == "Waiting for data to arrive", timeout_s=TIMEOUT_S)
    assert len(sink.batches) == batches, f"batches without data after {idle_from}"
    sink.stop()
    append(logs, log, range(150, 180))
    sink.start(frame)
    sink.wait_for(180)
    sink.stop()
    assert sink.numbers == list(range(180))


@pytest.mark.prove  # the next test replays one too
def test_latest_start_is_kept_by_a_failed_first_batch(logs: LogBench, sink: Sink) -> None:
    """A first batch that fails is replayed over the same records, not from the new latest."""
    log = logs.create()
    append(logs, log, range(10))
    frame = logs.stream(log=log)
    sink.fails_at = 0
    sink.start(frame)
    assert "the sink fails" in sink.message_of_failure()
    append(logs, log, range(10, 30))
    sink.fails_at = 1
    sink.start(frame)
    assert "the sink fails" in sink.message_of_failure()
    append(logs, log, range(30, 35))
    sink.fails_at = None
    sink.start(frame)
    sink.wait_for(25)
    sink.stop()
    assert sink.batches[0] == []
    assert sink.batches[1] == [(log, n) for n in range(10, 30)]
    assert sink.numbers == list(range(10, 35))


def test_failed_first_batch_with_records_is_replayed_exactly(logs: LogBench, sink: Sink) -> None:
    """The start by transaction id is resolved once; the offset in the checkpoint is readable."""
    log = logs.create()
    append(logs, log, range(10))
    frame = logs.stream(log=log, startingTxid="4")
    sink.fails_at = 0
    sink.start(frame)
    assert "the sink fails" in sink.message_of_failure()
    first = sink.batches[0]
    offset = json.loads((sink.checkpoint / "offsets" / "0").read_text().splitlines()[2])
    assert offset["v"] == 2
    assert offset["init"] == {log: "1:0:4"}
    assert offset["logs"] == {log: "1:1:0"}
    append(logs, log, range(10, 12))
    sink.fails_at = None
    sink.start(frame)
    sink.wait_for(8)
    sink.stop()
    assert sink.batches[0] == first == [(log, n) for n in range(4, 10)]
    assert sink.numbers == list(range(4, 12))


@pytest.mark.prove  # tests/dlspark has it without a session
@pytest.mark.parametrize(
    "start", [{"startingTxid": "10"}, {"startingTimestamp": "2100-01-01"}], ids=["txid", "time"]
)
def test_start_beyond_the_end_is_refused(logs: LogBench, sink: Sink, start: dict[str, str]) -> None:
    """The next record may be below it; the error says how far the log is."""
    log = logs.create()
    append(logs, log, range(10))
    sink.start(logs.stream(log=log, **start))
    text = sink.message_of_failure()
    assert f"option {next(iter(start))}=" in text
    assert f"log '{log}' has not reached this" in text


def test_pattern_finds_new_logs(logs: LogBench, sink: Sink) -> None:
    """From none at all; each new log from its beginning, each record once."""
    prefix = f"{logs.create('family')}/"
    frame = logs.stream(logsPattern=f"{prefix}.*")
    sink.start(frame)
    sink.wait_for_batch(0)
    names = [f"{prefix}{letter}" for letter in "ab"]
    for position, name in enumerate(names):
        logs.namespace.create_log(name)
        append(logs, name, range(5))
        sink.wait_for(5 * (position + 1))
    append(logs, names[0], range(5, 8))
    sink.wait_for(13)
    sink.stop()
    assert [row for row in sink.rows if row[0] == names[0]] == [(names[0], n) for n in range(8)]
    assert [row for row in sink.rows if row[0] == names[1]] == [(names[1], n) for n in range(5)]


@pytest.mark.prove  # tests/dlspark has it without a session
def test_deleted_log(logs: LogBench, sink: Sink) -> None:
    """The query stops and names the log and the option; or goes on with the others."""
    kept, gone = logs.create("kept"), logs.create("gone")
    append(logs, kept, range(3))
    append(logs, gone, range(3))
    options = {"logs": f"{kept},{gone}", "startingOffsets": "earliest"}
    sink.start(logs.stream(**options))
    sink.wait_for(6)
    logs.namespace.delete_log(gone)
    message = sink.message_of_failure()
    assert f"log '{gone}': it was deleted" in message
    assert "failOnDataLoss" in message
    sink.start(logs.stream(**options, failOnDataLoss="false"))
    append(logs, kept, range(3, 5))
    sink.wait_for(8)
    logs.namespace.create_log(gone)
    append(logs, gone, range(70, 72))
    sink.wait_for(10)
    sink.stop()
    assert [n for log, n in sink.rows if log == kept] == list(range(5))
    assert [n for log, n in sink.rows if log == gone] == [0, 1, 2, 70, 71]


@pytest.mark.prove  # tests/dlspark has it without a session
def test_another_log_on_the_checkpoint(logs: LogBench, sink: Sink) -> None:
    """The query stops and names both; or goes on, and then needs no leave any more."""
    one, other = logs.create("one"), logs.create("other")
    append(logs, one, range(3))
    append(logs, other, range(70, 72))
    sink.start(logs.stream(log=one, startingOffsets="earliest"))
    sink.wait_for(3)
    sink.stop()
    append(logs, one, range(3, 5))
    for start in ("earliest", "latest"):
        sink.start(logs.stream(log=other, startingOffsets=start))
        message = sink.message_of_failure()
        assert f"log '{one}': the query's checkpoint has it, read up to 1:1:0" in message
        assert f"the option log='{other}' does not choose it" in message
    sink.start(logs.stream(log=other, failOnDataLoss="false"))
    sink.wait_for(5)
    sink.stop()
    append(logs, other, range(72, 74))
    sink.start(logs.stream(log=other))
    sink.wait_for(7)
    sink.stop()
    sink.start(logs.stream(logs=f"{one},{other}"))
    sink.wait_for(9)
    sink.stop()
    assert [n for log, n in sink.rows if log == one] == list(range(5))
    assert [n for log, n in sink.rows if log == other] == list(range(70, 74))


@pytest.mark.prove  # tests/dlspark has it without a session
def test_truncated_log(logs: LogBench, sink: Sink) -> None:
    """Records that were not read yet are lost: the query stops, or goes on after them."""
    log = logs.create()
    append(logs, log, range(5))
    options = {"log": log, "startingOffsets": "earliest"}
    sink.start(logs.stream(**options))
    sink.wait_for(5)
    sink.stop()
    append(logs, log, range(5, 10))
    append(logs, log, range(10, 15))
    with logs.namespace.open_log(log) as manager:
        manager.truncate(DLSN(2, 0, 2))
    sink.start(logs.stream(**options))
    message = sink.message_of_failure()
    assert f"log '{log}': records from 1:1:0 up to 2:0:2" in message
    sink.start(logs.stream(**options, failOnDataLoss="false"))
    sink.wait_for(13)
    sink.stop()
    assert sink.numbers == [*range(5), *range(7, 15)]


@pytest.mark.prove  # tests/dlspark has it without a session
def test_truncating_what_was_read_is_no_loss(logs: LogBench, sink: Sink) -> None:
    """A log that is cleaned up behind its reader goes on, though the position's segment is gone."""
    log = logs.create()
    append(logs, log, range(5))
    frame = logs.stream(log=log, startingOffsets="earliest")
    sink.start(frame)
    sink.wait_for(5)
    sink.stop()
    append(logs, log, range(5, 10))
    with logs.namespace.open_log(log) as manager:
        manager.truncate(DLSN(2, 0, 0))
    sink.start(frame)
    sink.wait_for(10)
    sink.stop()
    assert sink.numbers == list(range(10))


@pytest.mark.prove  # tests/dlspark has it without a session
def test_missing_log_stops_a_new_query(logs: LogBench, sink: Sink) -> None:
    """With what would create it."""
    sink.start(logs.stream(log="absent"))
    assert "dlog log create absent" in sink.message_of_failure()


@pytest.mark.prove  # tests/dlspark has it without a session
def test_checkpoint_of_a_newer_version_is_refused(logs: LogBench, sink: Sink) -> None:
    """By its version."""
    log = logs.create()
    append(logs, log, range(5))
    frame = logs.stream(log=log, startingOffsets="earliest")
    sink.start(frame)
    sink.wait_for(5)
    sink.stop()
    last = max((sink.checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    text, changes = re.subn(rf'"v": ?{OFFSET_VERSION}\b', '"v": 7', last.read_text())
    assert changes == 1
    last.write_text(text)
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    sink.start(frame)
    assert "version 7" in sink.message_of_failure()
