"""Reading a partition in a task, when records vanish between planning and reading.

Goal: such a loss is reported with its option, or skipped no further than it reaches, and counted.
Method: scans of a log that is made up, and that changes while it is read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore import sync
from dlcore.base.errors import AlreadyTruncatedError, DLError, LedgerReadError, LogNotFoundError
from dlcore.base.ids import DLSN
from dlspark import reading
from dlspark.arrow import WRITE_SCHEMA_WITH_TXID
from dlspark.options import Mode, ReadOptions
from dlspark.planning import DlogPartition, end_sequence_id, first_sequence_id
from dlspark.reading import LogSnapshots, read_rows
from tests.fixtures.snapshots import RECORDS_PER_ENTRY, place_in, snapshot_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.sync import LogSnapshot, ScanRange, ScanRun

URI = "distributedlog://made-up:1/p"
PLANNED = snapshot_of((3,), (4,), (3,))
RECORDS = list(range(100))


@dataclass
class Changing:
    """The content of the log: `later`, None for nothing, once so many entries were read."""

    later: LogSnapshot | None
    entries_before: int
    error: DLError
    entries_read: int = 0

    @property
    def now(self) -> LogSnapshot | None:
        """The content now."""
        return PLANNED if self.entries_read < self.entries_before else self.later

    def take(self, logs: Sequence[str]) -> dict[str, LogSnapshot | None]:
        """Return it under its name, and nothing under others."""
        now = self.now
        return {log: now if now is not None and now.log == log else None for log in logs}

    def scan(self, scans: Sequence[ScanRange], *, uri: str, **files: object) -> Iterator[ScanRun]:
        """Yield the entries of a range, up to one that is gone."""
        assert uri == URI
        assert set(files.values()) == {None}
        for part in scans:
            before = PLANNED.segments[part.lssn - 1].start_sequence_id
            for entry_id in range(part.start.entry_id, part.end.entry_id):
                now = self.now
                if now is None or now.log != part.log or DLSN(part.lssn, entry_id, 9) < now.first:
                    raise self.error
                self.entries_read += 1
                first_slot = part.start.slot_id if entry_id == part.start.entry_id else 0
                first = before + entry_id * RECORDS_PER_ENTRY + first_slot
                numbers = list(range(first, first - first_slot + RECORDS_PER_ENTRY))
                entry = sync.ScanBatch(
                    batch=pa.record_batch(
                        [numbers, [b"x"] * len(numbers)], schema=WRITE_SCHEMA_WITH_TXID
                    ),
                    lssn=part.lssn,
                    entry_id=entry_id,
                    first_slot=first_slot,
                    sequence_id=first,
                    timestamp_ms=0,
                )
                yield sync.ScanRun.of(entry)


def read(
    monkeypatch: pytest.MonkeyPatch,
    log: Changing,
    parts: Sequence[ScanRange] = PLANNED.scans(DLSN.INITIAL, PLANNED.end),
    *,
    fail: bool = False,
    where: str = "log",
) -> list[int]:
    """Return the numbers of the records that a partition gives; each is its transaction id."""
    monkeypatch.setattr(sync, "scan_runs", log.scan)
    monkeypatch.setattr(LogSnapshots, "take", lambda _, logs: log.take(logs))
    monkeypatch.setattr(
        LogSnapshots, "find", lambda _, wanted: [place_in(at, key) for at, key in wanted]
    )
    given = {"uri": URI, "failOnDataLoss": str(fail), where: "clicks"}
    batches = read_rows(DlogPartition(parts), ReadOptions.parse(given, Mode.BATCH))
    return [txid for batch in batches for txid in batch.column("txid").to_pylist()]


def truncated(dlsn: str, entries_before: int = 0) -> Changing:
    """Return a log whose records before a position go once so many entries were read."""
    later = PLANNED.starting_at(DLSN.parse(dlsn))
    return Changing(later, entries_before, AlreadyTruncatedError("records are gone"))


@pytest.mark.parametrize(
    ("log", "lost", "said"),
    [
        (truncated("1:2:0"), range(20), "from 1:0:0 up to 1:2:0 (exclusive), 20 of them,"),
        (truncated("1:2:4"), range(24), "from 1:0:0 up to 1:2:4 (exclusive), 24 of them,"),
        (truncated("2:2:0", 4), range(40, 50), "from 2:0:10 up to 2:2:0 (exclusive), 10 of them,"),
        (truncated("3:1:0", 4), range(40, 80), "from 2:0:10 up to 2:4:0 (exclusive), 30 of them,"),
    ],
    ids=["entries", "within an entry", "while it is read", "several ranges"],
)
def test_a_loss_that_is_accepted_is_skipped_as_far_as_it_reaches(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    log: Changing,
    lost: range,
    said: str,
) -> None:
    """The rest of the range is read, and the warning counts the lost records."""
    with caplog.at_level(logging.WARNING):
        assert read(monkeypatch, replace(log)) == [n for n in RECORDS if n not in lost]
    assert f"log 'clicks': records {said}" in caplog.text
    assert "(exclusive); going on" in caplog.text
    assert "records are gone" in caplog.text
    with pytest.raises(AlreadyTruncatedError) as caught:
        read(monkeypatch, replace(log), fail=True)
    assert said in str(caught.value)
    first = log.later.first if log.later is not None else None
    assert f"it holds {first} … 3:3:0 (exclusive)" in str(caught.value)
    assert "set the option failOnDataLoss to false" in str(caught.value)


def test_a_log_that_is_deleted_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All that is left of it is lost, range by range; another log of its name is not read."""
    error = LogNotFoundError("it is not there")
    with caplog.at_level(logging.WARNING):
        assert read(monkeypatch, Changing(None, 4, error)) == list(range(40))
    assert [each.getMessage().split(" of them")[0] for each in caplog.records] == [
        "data loss: log 'clicks': records from 2:0:10 up to 2:4:0 (exclusive), 30",
        "data loss: log 'clicks': records from 3:0:0 up to 3:3:0 (exclusive), 30",
    ]
    assert "the log was deleted, or renamed to a name that is not read" in caplog.text
    other = replace(PLANNED, log_id="other", first=PLANNED.end)
    assert read(monkeypatch, Changing(other, 4, error)) == list(range(40))
    with pytest.raises(LogNotFoundError, match=r"was deleted.*failOnDataLoss"):
        read(monkeypatch, Changing(None, 4, error), fail=True)


def test_a_log_that_is_renamed_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under another of the selected names it is read on, and nothing is lost."""
    monkeypatch.setattr(reading, "list_selected", lambda *_: ["views"])
    renamed = Changing(replace(PLANNED, log="views"), 4, LogNotFoundError("it is not there"))
    found = read(monkeypatch, renamed, fail=True, where="logsPattern")
    assert found == RECORDS
    assert not caplog.records


def test_a_loss_that_cannot_be_counted_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The records before an entry in the middle of an extent are known only to its reader."""
    (segment,) = PLANNED.scans(DLSN(2, 0, 0), DLSN(2, 4, 0))
    first, second = segment.split(2)
    assert (first_sequence_id(first), end_sequence_id(first)) == (30, None)
    assert (first_sequence_id(second), end_sequence_id(second)) == (None, None)
    assert (first_sequence_id(segment), end_sequence_id(segment)) == (30, 70)
    with caplog.at_level(logging.WARNING):
        assert read(monkeypatch, truncated("2:3:0"), [second]) == list(range(60, 70))
    assert "from 2:2:0 up to 2:3:0 (exclusive), about 10 of them, are gone" in caplog.text


def test_a_range_that_is_refused_though_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no loss to skip, and not asked for again and again."""
    log = truncated("1:0:0")
    monkeypatch.setattr(log, "error", AlreadyTruncatedError("a mistake"))

    def refuse(scans: Sequence[ScanRange], **_: object) -> Iterator[ScanRun]:
        raise log.error

    monkeypatch.setattr(log, "scan", refuse)
    with pytest.raises(AlreadyTruncatedError, match="a mistake"):
        read(monkeypatch, log)


def test_a_task_that_knows_less_than_was_planned_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another proxy may lag behind: what it does not know of yet is to be asked for again."""
    lagging = snapshot_of((3,), (2,)).starting_at(DLSN.parse("2:1:0"))
    log = Changing(lagging, 3, AlreadyTruncatedError("records are gone"))
    with pytest.raises(LedgerReadError, match=r"up to 2:4:0 were readable .* up to 2:2:0: read"):
        read(monkeypatch, log)


def test_a_failed_read_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bookies that do not answer fail the task whatever the option says."""
    with pytest.raises(LedgerReadError, match="no answer"):
        read(monkeypatch, Changing(None, 4, LedgerReadError("no answer")))
