"""Micro-batches under limits, and runs that end: driven as Spark drives a stream reader.

Goal: every record is in exactly one batch, no batch is larger than it may be, and a run with
Trigger.AvailableNow reads what was there when it began.  Method: logs that the test makes up, and a
loop that asks for one offset after another.
"""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from dlcore.base.errors import AlreadyTruncatedError, LogNotFoundError
from dlcore.base.ids import DLSN
from dlspark import reading, stream
from dlspark.lag import Lag, LagReport
from dlspark.options import Mode, ReadOptions
from dlspark.planning import DlogPartition
from dlspark.reading import LogSnapshots
from dlspark.stream import DlogStreamReader
from tests.fixtures.snapshots import place_in, snapshot_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql.datasource import InputPartition

    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.sync import LogSnapshot
    from dlspark.offsets import LogPosition


class MadeUpLogs(LogSnapshots):
    """Logs that hold what the test says."""

    def __init__(self, **logs: LogSnapshot | None) -> None:
        self.logs = logs
        self.sought = 0

    def take(self, logs: Iterable[str]) -> dict[str, LogSnapshot | None]:
        """Return what each log holds."""
        found = {log: self.logs.get(log) for log in logs}
        return {
            log: each and replace(each, log=log, log_id=log if each.log_id == "i" else each.log_id)
            for log, each in found.items()
        }

    def find(self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]) -> list[RecordPlace]:
        """Return where the records are."""
        self.sought += len(wanted)
        return [place_in(snapshot, key) for snapshot, key in wanted]

    def store_position(self, log: str, position: LogPosition, subscriber: str) -> bool:
        """Keep nothing."""
        return True


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> int:
        """Return nanoseconds."""
        return int(self.now_s * 10**9)


class Query:
    """A query over made-up logs, driven batch by batch, as Spark 4.2 does it."""

    def __init__(self, logs: MadeUpLogs, **options: str) -> None:
        self.clock = Clock()
        given = {"uri": "distributedlog://h:1/p", "startingOffsets": "earliest"}
        if "logsPattern" not in options:
            given["logs"] = ",".join(logs.logs)
        self.options = ReadOptions.parse(given | options, Mode.STREAM)
        self.logs = logs
        self.reader = DlogStreamReader(self.options, logs, self.clock)
        self.offset = self.reader.initialOffset()
        self.limit: Any = self.reader.getDefaultReadLimit()

    def restart(self) -> None:
        """Go on in another process from the last offset."""
        self.reader = DlogStreamReader(self.options, self.logs, self.clock)

    def batch(self) -> dict[str, list[int]]:
        """Run a batch; return the numbers of the records it reads, by log."""
        end = self.reader.latestOffset(self.offset, self.limit)
        if end == self.offset:
            return {}
        partitions = self.reader.partitions(self.offset, end)
        self.offset = end
        return numbers_in(self.logs, partitions)

    def run(self) -> list[dict[str, list[int]]]:
        """Run batches until nothing is left."""
        batches = []
        while found := self.batch():
            batches.append(found)
        return batches

    def lag(self) -> LagReport:
        """Return what the reader reports."""
        report = LagReport.parse(json.dumps(self.reader.reportLatestOffset()))
        assert report is not None
        return report


def numbers_in(logs: MadeUpLogs, partitions: Iterable[InputPartition]) -> dict[str, list[int]]:
    """Return the numbers of the records that partitions hold, by log."""
    found: dict[str, list[int]] = {}
    for partition in partitions:
        assert isinstance(partition, DlogPartition)
        for scan in partition.scans:
            snapshot = logs.logs[scan.log]
            assert snapshot is not None
            first, last = (place_in(snapshot, at).sequence_id for at in (scan.start, scan.end))
            found.setdefault(scan.log, []).extend(range(first, last))
    return found


def all_of(batches: list[dict[str, list[int]]], log: str) -> list[int]:
    """Return the numbers that a log gave, in order."""
    return [number for batch in batches for number in batch.get(log, [])]


def test_max_records_per_trigger_is_exact_and_loses_nothing() -> None:
    """Within entries, over extents and segments; the small log is read up in the first batch."""
    query = Query(
        MadeUpLogs(big=snapshot_of((4, 3), (1,), (9,)), small=snapshot_of((1,))),
        maxRecordsPerTrigger="33",
    )
    batches = query.run()
    assert all_of(batches, "big") == list(range(170))
    assert all_of(batches, "small") == list(range(10))
    sizes = [sum(len(numbers) for numbers in batch.values()) for batch in batches]
    assert sizes == [33] * 5 + [15]
    assert len(batches[0]["small"]) == 10


def test_max_bytes_per_trigger_always_advances() -> None:
    """Records of 100 bytes: as many as fit, and one where none does."""
    query = Query(MadeUpLogs(a=snapshot_of((5,))), maxBytesPerTrigger="1200")
    assert [len(batch["a"]) for batch in query.run()] == [12, 12, 12, 12, 2]
    query = Query(MadeUpLogs(a=snapshot_of((1,)), b=snapshot_of((1,))), maxBytesPerTrigger="1")
    assert [{log: len(n) for log, n in batch.items()} for batch in query.run()] == [
        {"a": 1, "b": 1}
    ] * 10


@pytest.mark.parametrize("start", ["1:0:0", "1:2:0", "1:4:0", "1:4:9", "2:0:0"])
def test_a_limit_is_exact_wherever_a_query_starts(start: str) -> None:
    """From the first, a middle or the last entry of a ledger on, or its last record."""
    logs = MadeUpLogs(a=snapshot_of((5,), (5,)))
    query = Query(logs, startingOffsets=f'{{"a": "{start}"}}', maxRecordsPerTrigger="7")
    whole = logs.logs["a"]
    assert whole is not None
    first = place_in(whole, DLSN.parse(start)).sequence_id
    batches = query.run()
    assert all_of(batches, "a") == list(range(first, 100))
    assert {len(batch["a"]) for batch in batches[:-1]} == {7}


def test_a_log_that_is_new_has_its_share_of_the_next_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much the others still have."""
    logs = MadeUpLogs(a=snapshot_of((9,)))
    monkeypatch.setattr(stream, "list_selected", lambda *_: list(logs.logs))
    query = Query(logs, maxRecordsPerTrigger="20", logsPattern=".")
    batches = [query.batch()]
    logs.logs |= {"b": snapshot_of((9,)), "c": snapshot_of((0,), (1,))}
    batches += query.run()
    assert {log: len(numbers) for log, numbers in batches[1].items()} == {"a": 7, "b": 7, "c": 6}
    assert [len(all_of(batches, log)) for log in "abc"] == [90, 90, 10]


def test_a_batch_that_was_not_committed_is_the_same_though_logs_were_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is read again after a restart, by what its offsets say; the new log is for the next."""
    logs = MadeUpLogs(a=snapshot_of((4,)))
    monkeypatch.setattr(stream, "list_selected", lambda *_: list(logs.logs))
    query = Query(logs, maxRecordsPerTrigger="15", logsPattern=".")
    query.reader.prepareForTriggerAvailableNow()
    before, failed = query.offset, query.batch()
    logs.logs["b"] = snapshot_of((1,))
    for _ in range(2):
        query.restart()
        query.reader.prepareForTriggerAvailableNow()
        again = query.reader.partitions(query.reader.initialOffset(), query.offset)
        assert numbers_in(query.logs, again) == failed == {"a": [*range(15)]}
    assert query.offset != before
    batches = query.run()
    assert all_of(batches, "a") == list(range(15, 40))
    assert all_of(batches, "b") == list(range(10))


def test_start_within_an_entry_is_counted() -> None:
    """The number of a record is asked for once; then offsets know it."""
    logs = MadeUpLogs(a=snapshot_of((5,), (5,)))
    query = Query(logs, startingOffsets='{"a": "1:2:7"}', maxRecordsPerTrigger="10")
    assert query.batch()["a"] == list(range(27, 37))
    assert query.offset["seq"] == {"a": 37}
    sought = logs.sought
    assert query.batch()["a"] == list(range(37, 47))
    assert logs.sought == sought + 1  # the end of the batch
    assert all_of(query.run(), "a") == list(range(47, 100))


def test_min_records_per_trigger_and_max_trigger_delay() -> None:
    """Held back until there is enough, or it has taken too long; not the first batch of a run."""
    logs = MadeUpLogs(a=snapshot_of((1,)))
    query = Query(logs, minRecordsPerTrigger="25", maxTriggerDelay="60s")
    assert query.batch()["a"] == list(range(10))
    logs.logs["a"] = snapshot_of((1,), (2,))
    query.clock.now_s += 59
    assert query.batch() == {}
    assert query.lag().behind.records == 20
    query.clock.now_s += 1
    assert query.batch()["a"] == list(range(10, 30))
    logs.logs["a"] = snapshot_of((1,), (2,), (3,))
    assert query.batch()["a"] == list(range(30, 60))
    logs.logs["a"] = snapshot_of((1,), (2,), (4,))
    assert query.batch() == {}
    query.restart()
    assert query.batch()["a"] == list(range(60, 70))


def test_trigger_once_ignores_limits() -> None:
    """Spark then asks for all there is."""
    query = Query(MadeUpLogs(a=snapshot_of((9,))), maxRecordsPerTrigger="5")
    query.limit = ReadAllAvailable()
    assert query.batch()["a"] == list(range(90))


def test_spark_knows_whether_batches_are_limited() -> None:
    """It passes the same back, or asks for everything."""

    def default(**options: str) -> object:
        return Query(MadeUpLogs(a=snapshot_of((1,))), **options).reader.getDefaultReadLimit()

    assert default() == ReadAllAvailable()
    assert default(maxRecordsPerTrigger="5", maxBytesPerTrigger="1k") == ReadMaxRows(5)
    assert default(maxBytesPerTrigger="1k") == ReadMaxBytes(1024)
    assert default(minRecordsPerTrigger="7") == ReadMinRows(7)
    assert default(minRecordsPerTrigger="7", maxBytesPerTrigger="1k") == ReadMaxBytes(1024)
    assert issubclass(DlogStreamReader, SupportsTriggerAvailableNow)
    assert len(inspect.signature(DlogStreamReader.latestOffset).parameters) == 3


def test_available_now_ends_where_the_logs_ended_when_it_began() -> None:
    """In several batches; what comes meanwhile is for the next run, and in it."""
    logs = MadeUpLogs(a=snapshot_of((4,)), b=snapshot_of((1,)))
    query = Query(logs, maxRecordsPerTrigger="20")
    query.reader.prepareForTriggerAvailableNow()
    batches = [query.batch()]
    logs.logs["a"] = snapshot_of((4,), (5,))
    batches += query.run()
    assert all_of(batches, "a") == list(range(40))
    assert all_of(batches, "b") == list(range(10))
    assert len(batches) == 3
    assert query.lag().behind.records == 50
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    batches = query.run()
    assert all_of(batches, "a") == list(range(40, 90))
    assert [len(batch["a"]) for batch in batches] == [20, 20, 10]


def test_available_now_does_not_wait_for_min_records() -> None:
    """No one would come to end the wait."""
    query = Query(MadeUpLogs(a=snapshot_of((3,))), minRecordsPerTrigger="25")
    query.reader.prepareForTriggerAvailableNow()
    assert all_of(query.run(), "a") == list(range(30))


def test_available_now_over_a_restart_in_the_middle() -> None:
    """A new run goes on from the last batch, to where the logs end then."""
    logs = MadeUpLogs(a=snapshot_of((4,)))
    query = Query(logs, maxRecordsPerTrigger="15")
    query.reader.prepareForTriggerAvailableNow()
    first = query.batch()
    logs.logs["a"] = snapshot_of((4,), (1,))
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    assert all_of([first, *query.run()], "a") == list(range(50))


def test_available_now_goes_on_without_a_log_that_vanishes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It reads the others to their ends, tells of the loss once and ends; or it stops there."""
    logs = MadeUpLogs(a=snapshot_of((4,)), b=snapshot_of((4,)))
    query = Query(logs, maxRecordsPerTrigger="20", failOnDataLoss="false")
    strict = Query(logs, maxRecordsPerTrigger="20")
    for each in (query, strict):
        each.reader.prepareForTriggerAvailableNow()
    batches = [query.batch()]
    strict.batch()
    logs.logs["b"] = None
    with caplog.at_level(logging.WARNING):
        batches += query.run()
    assert all_of(batches, "a") == list(range(40))
    assert all_of(batches, "b") == list(range(10))
    assert caplog.text.count("log 'b': it was deleted") == 1
    with pytest.raises(LogNotFoundError, match=r"'b': it was deleted.*failOnDataLoss"):
        strict.batch()


def test_losses_are_reported_once_and_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That of a deleted log, which each look finds, and those of one that loses ever more."""
    monkeypatch.setattr(stream, "LOSSES_KEPT_MAX", 3)
    logs = MadeUpLogs(a=snapshot_of((1,)), b=snapshot_of((1,)))
    query = Query(logs, failOnDataLoss="false")
    query.batch()
    logs.logs["b"] = None
    with caplog.at_level(logging.WARNING):
        for number in range(1, 6):
            whole = snapshot_of((1 + 2 * number,))
            logs.logs["a"] = replace(whole, first=DLSN(1, 2 * number, 0))
            query.batch()
    assert caplog.text.count("log 'b': it was deleted") == 1
    assert caplog.text.count("log 'a': records from") == 5
    assert (query.lag().skipped_records, query.lag().losses) == (50, 6)
    assert len(query.reader._losses.known) == 3


def test_available_now_leaves_a_recreated_log_for_the_next_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It came after the run began."""
    logs = MadeUpLogs(a=snapshot_of((4,)))
    query = Query(logs, maxRecordsPerTrigger="15", failOnDataLoss="false")
    query.reader.prepareForTriggerAvailableNow()
    query.batch()
    logs.logs["a"] = snapshot_of((2,), log_id="j")
    assert query.run() == []
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    with caplog.at_level(logging.WARNING):
        assert all_of(query.run(), "a") == list(range(20))
    assert "created again" in caplog.text


def test_a_log_that_is_renamed_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read to where the run ends, once, and its lag is what it is under its new name."""
    logs = MadeUpLogs(a=snapshot_of((4,)), b=snapshot_of((1,)))
    monkeypatch.setattr(stream, "list_selected", lambda *_: list(logs.logs))
    monkeypatch.setattr(reading, "list_selected", lambda *_: list(logs.logs))
    query = Query(logs, maxRecordsPerTrigger="20", logsPattern=".")
    query.reader.prepareForTriggerAvailableNow()
    first, before = query.batch(), query.offset
    logs.logs["c"] = replace(snapshot_of((4,), (1,)), log_id="a")
    del logs.logs["a"]
    replayed: list[Any] = query.reader.partitions(query.reader.initialOffset(), before)
    assert sum(scan.record_count_estimate for part in replayed for scan in part.scans) == 20
    batches = query.run()
    assert all_of([first], "a") + all_of(batches, "c") == list(range(40))
    assert (query.lag().behind.records, query.lag().losses) == (10, 0)
    query.restart()
    assert all_of(query.run(), "c") == list(range(40, 50))


def test_records_lost_under_a_limit_are_counted_and_nothing_is_doubled() -> None:
    """Truncated in the middle of a segment: it goes on there; the error names how many went."""
    logs = MadeUpLogs(a=snapshot_of((4,), (4,)))
    query = Query(logs, maxRecordsPerTrigger="15", failOnDataLoss="false")
    strict = Query(logs, maxRecordsPerTrigger="15")
    batches = [query.batch()]
    strict.batch()
    whole = snapshot_of((4,), (4,))
    logs.logs["a"] = replace(whole, first=DLSN(1, 2, 3))
    batches += query.run()
    assert all_of(batches, "a") == [*range(15), *range(23, 80)]
    assert [len(batch["a"]) for batch in batches] == [15] * 4 + [12], "what is gone takes no room"
    assert (query.lag().skipped_records, query.lag().losses) == (8, 1)
    words = r"records from 1:1:5 up to 1:2:3 \(exclusive\), 8 of them, .*1:2:3 … 2:4:0.*failOnData"
    with pytest.raises(AlreadyTruncatedError, match=words):
        strict.batch()


def test_lag_is_what_a_batch_leaves() -> None:
    """Records, bytes, and seconds between the next record and the last one; none when caught up."""
    snapshot = snapshot_of((4,), (6,))
    last = snapshot.segments[1]
    extent = structs.replace(last.extents[0], last_timestamp_ms=99_000)
    written = replace(snapshot, segments=(snapshot.segments[0], replace(last, extents=(extent,))))
    query = Query(MadeUpLogs(a=written, b=snapshot_of((1,))), maxRecordsPerTrigger="40")
    assert query.reader.reportLatestOffset() is None
    query.batch()
    report = query.lag()
    assert report.logs == {"a": Lag(records=70, size_bytes=7000, seconds=98.97)}
    assert report.behind == report.logs["a"]
    assert report.ends == {"a": "2:6:0", "b": "1:1:0"}
    query.run()
    assert query.lag().behind == Lag()
    assert query.lag().losses == 0
    unlimited = Query(MadeUpLogs(a=written))
    unlimited.batch()
    assert (unlimited.lag().logs, unlimited.lag().ends) == ({}, {"a": "2:6:0"})


def test_lag_at_the_end_of_a_log_is_none() -> None:
    """Also where the end is not known as such, but asked for."""
    snapshot = snapshot_of((2,))
    assert Lag.of(snapshot, place_in(snapshot, snapshot.end)) == Lag()


def test_lag_of_another_source_is_none() -> None:
    """A progress shows sources of all kinds."""
    for text in (None, "", "5", "{}", '{"clicks": {"0": 5}}', '{"behindByLog": 3, "logs": {}}'):
        assert LagReport.parse(text) is None


def test_older_spark_limits_batches_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PySpark 4.1 names no limit, and makes one batch of Trigger.AvailableNow."""
    monkeypatch.setattr(stream, "has_admission_control", lambda: False)
    query = Query(MadeUpLogs(a=snapshot_of((4,))), maxRecordsPerTrigger="15")
    with caplog.at_level(logging.WARNING):
        ends = [query.reader.latestOffset()["seq"]["a"] for _ in range(4)]
    assert ends == [15, 30, 40, 40]
    assert caplog.text.count("or use PySpark 4.2") == 1
    assert "Trigger.Once" in caplog.text
