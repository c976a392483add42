"""The stream reader's planning, when a log is not what it was when the offset was made.

Goal: a batch that is replayed reads exactly its records, or says which of them are gone.  Method: a
source of snapshots that the test makes up.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from dlcore.base.errors import (
    AlreadyTruncatedError,
    ConfigurationError,
    LedgerReadError,
    LogNotFoundError,
)
from dlcore.base.ids import DLSN
from dlspark import stream
from dlspark.offsets import LogPosition, StreamOffset
from dlspark.options import Mode, ReadOptions
from dlspark.planning import DlogPartition
from dlspark.reading import LogSnapshots
from dlspark.stream import DlogStreamReader
from tests.fixtures.snapshots import place_in, snapshot_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.sync import LogSnapshot

LOG = "clicks"


class MadeUpSnapshots(LogSnapshots):
    """Gives one snapshot after another, the last one again and again, and finds records in them."""

    def __init__(self, *snapshots: LogSnapshot | None) -> None:
        self._next = itertools.chain(snapshots, itertools.repeat(snapshots[-1]))
        self.taken = 0

    def take(self, logs: Iterable[str]) -> dict[str, LogSnapshot | None]:
        """Return the next snapshot as that of the one log asked for."""
        self.taken += 1
        return dict.fromkeys(logs, next(self._next))

    def find(self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]) -> list[RecordPlace]:
        """Return where the records are."""
        return [place_in(snapshot, key) for snapshot, key in wanted]

    def store_position(self, log: str, position: LogPosition, subscriber: str) -> bool:
        """Keep nothing."""
        return True


def reader_of(source: MadeUpSnapshots, **options: str) -> DlogStreamReader:
    """Return a reader of one log."""
    given = {"uri": "distributedlog://h:1/p", "log": LOG} | options
    return DlogStreamReader(ReadOptions.parse(given, Mode.STREAM), source)


def offset(dlsn: str, *, log_id: str = "i", init: str = "") -> dict[str, Any]:
    """Return an offset of the log."""
    position = LogPosition(log_id=log_id, dlsn=DLSN.parse(dlsn))
    starts = {LOG: DLSN.parse(init)} if init else {}
    return StreamOffset(logs={LOG: position}, init=starts).to_json()


def as_text(partitions: Any) -> list[str]:
    """Return planned ranges in a readable form."""
    assert all(isinstance(partition, DlogPartition) for partition in partitions)
    return [f"{scan.start}-{scan.end}" for partition in partitions for scan in partition.scans]


def test_replay_of_the_first_batch() -> None:
    """The start comes from the end's own record of it."""
    reader = reader_of(MadeUpSnapshots(snapshot_of((5,), (5,))))
    found = reader.partitions(offset("2:5:0"), offset("2:3:0", init="1:2:0"))
    assert as_text(found) == ["1:2:0-1:5:0", "2:0:0-2:3:0"]


def test_a_run_of_a_query_over_a_growing_log() -> None:
    """Positions move on with the log; an unchanged log is not asked again to plan its batch."""
    source = MadeUpSnapshots(snapshot_of(()), snapshot_of((4,)), snapshot_of((4,), (3,)))
    reader = reader_of(source, startingOffsets="earliest")
    start = reader.initialOffset()
    first = reader.latestOffset(start)
    assert as_text(reader.partitions(start, first)) == ["1:0:0-1:4:0"]
    second = reader.latestOffset(first)
    assert as_text(reader.partitions(first, second)) == ["2:0:0-2:3:0"]
    assert source.taken == 3
    assert reader.latestOffset(second) == second
    assert second["seq"] == {LOG: 70}


def test_a_reader_is_stopped_before_it_reads() -> None:
    """Nothing is open then, nor opened in order to be closed; the same the second time."""
    given = {"uri": "distributedlog://h:1/p", "log": LOG}
    reader = DlogStreamReader(ReadOptions.parse(given, Mode.STREAM))
    reader.stop()
    reader.stop()
    assert reader.reportLatestOffset() is None


def test_older_spark_names_no_start() -> None:
    """Spark 4.1 passes none; what it mentioned last stands in, also after a restart."""
    source = MadeUpSnapshots(snapshot_of((4,)), snapshot_of((4,)), snapshot_of((6,)))
    reader = reader_of(source, startingOffsets="earliest")
    start = reader.initialOffset()
    first = reader.latestOffset()
    assert as_text(reader.partitions(start, first)) == ["1:0:0-1:4:0"]
    restarted = reader_of(source)
    assert restarted.partitions(first, first) == []
    second = restarted.latestOffset()
    assert as_text(restarted.partitions(first, second)) == ["1:4:0-1:6:0"]


def test_older_spark_asks_a_new_query_for_its_end_first() -> None:
    """The first question settles the meaning of "latest", whichever it is."""
    source = MadeUpSnapshots(snapshot_of((4,)), snapshot_of((6,)), snapshot_of((9,)))
    reader = reader_of(source, startingOffsets="latest")
    first = reader.latestOffset()
    start = reader.initialOffset()
    assert as_text(reader.partitions(start, first)) == ["1:4:0-1:6:0"]
    assert reader.initialOffset() == start


def test_earlier_knowledge_is_not_enough_for_a_later_end() -> None:
    """A batch of an earlier run may end after the last snapshot of this one."""
    source = MadeUpSnapshots(snapshot_of((2,)), snapshot_of((5,)))
    reader = reader_of(source)
    reader.latestOffset(offset("1:0:0"))
    found = reader.partitions(offset("1:0:0"), offset("1:5:0"))
    assert as_text(found) == ["1:0:0-1:5:0"]


@pytest.mark.parametrize(
    ("option", "reached", "words"),
    [
        ("startingTxid", 50, "=51: log 'clicks' .* its highest is 50"),
        ("startingTimestamp", 70, "=71: log 'clicks' .* its highest is 70"),
    ],
)
def test_start_that_the_log_has_not_come_to(option: str, reached: int, words: str) -> None:
    """Records below it would follow, and a stream has nothing that filters them."""
    written = with_highest(snapshot_of((2,), (2,)), txid=50, timestamp_ms=70)
    reader_of(MadeUpSnapshots(written), **{option: str(reached)}).initialOffset()
    with pytest.raises(ConfigurationError, match=option + words):
        reader_of(MadeUpSnapshots(written), **{option: str(reached + 1)}).initialOffset()
    empty = snapshot_of(())
    with pytest.raises(ConfigurationError, match=f"{option}=1: .* holds no record"):
        reader_of(MadeUpSnapshots(empty), **{option: "1"}).initialOffset()
    reader_of(MadeUpSnapshots(empty), **{option: "0"}).initialOffset()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("startingOffsetsByTimestamp", '{"clicks": "2100-01-01"}'),
        ("startingTimestamp", "2100-01-01"),
        ("startingTxid", "9000"),
    ],
)
def test_start_by_timestamp_strategy_latest(option: str, value: str) -> None:
    """A stream that asks for what is not there yet starts at the end, if an option says that."""
    source = MadeUpSnapshots(snapshot_of((2,), (2,)))
    latest = {"startingOffsetsByTimestampStrategy": "latest"}
    start = reader_of(source, **{option: value}, **latest).initialOffset()
    assert start["logs"] == {LOG: "2:2:0"}
    with pytest.raises(ConfigurationError, match=f"{option}=.*to latest"):
        reader_of(source, **{option: value}).initialOffset()


def with_highest(snapshot: LogSnapshot, *, txid: int, timestamp_ms: int) -> LogSnapshot:
    """Return the snapshot with these values at the end of its last extent."""
    *before, last = snapshot.segments
    extent = structs.replace(last.extents[-1], last_txid=txid, last_timestamp_ms=timestamp_ms)
    return replace(snapshot, segments=(*before, replace(last, extents=(extent,))))


def test_missing_log_at_the_start() -> None:
    """With what would create it."""
    with pytest.raises(LogNotFoundError, match="dlog log create clicks"):
        reader_of(MadeUpSnapshots(None)).initialOffset()


def test_start_equal_to_end_takes_no_snapshot() -> None:
    """Spark does this for batches without data."""
    source = MadeUpSnapshots(None)
    assert reader_of(source).partitions(offset("2:5:0"), offset("2:5:0")) == []
    assert source.taken == 0


def test_log_deleted_before_its_batch_is_planned() -> None:
    """An error by default, else nothing of it."""
    arguments = (offset("1:0:0"), offset("1:5:0"))
    with pytest.raises(LogNotFoundError, match=r"deleted.*failOnDataLoss"):
        reader_of(MadeUpSnapshots(None)).partitions(*arguments)
    reader = reader_of(MadeUpSnapshots(None), failOnDataLoss="false")
    assert reader.partitions(*arguments) == []


def test_recreated_log_is_not_read_by_old_positions() -> None:
    """It has records there, but others."""
    arguments = (offset("1:0:0"), offset("1:5:0"))
    source = MadeUpSnapshots(snapshot_of((9,), log_id="j"))
    with pytest.raises(LogNotFoundError, match="created again"):
        reader_of(source).partitions(*arguments)
    assert reader_of(source, failOnDataLoss="false").partitions(*arguments) == []


@pytest.mark.parametrize(
    ("first", "left"), [("1:3:0", ["1:3:0-1:5:0"]), ("2:0:0", [])], ids=["part", "all"]
)
def test_records_truncated_before_their_batch_is_planned(
    first: str, left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An error by default, else the rest, and one warning however often it is found."""
    arguments = (offset("1:1:0"), offset("1:5:0"))
    source = MadeUpSnapshots(replace(snapshot_of((5,), (5,)), first=DLSN.parse(first)))
    with pytest.raises(AlreadyTruncatedError, match=f"1:1:0 up to {first}"):
        reader_of(source).partitions(*arguments)
    reader = reader_of(source, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert as_text(reader.partitions(*arguments)) == left
    assert len(caplog.records) == 1
    assert f"up to {first}" in caplog.text


def test_end_that_is_not_readable_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """While bookies are away less is known to be confirmed: wait, and never read less."""
    monkeypatch.setattr(stream, "REGRESSED_END_DELAYS_S", (0.0, 0.0))
    arguments = (offset("1:0:0"), offset("1:5:0"))
    short, whole = snapshot_of((3,)), snapshot_of((5,))
    reader = reader_of(MadeUpSnapshots(short, short, whole))
    assert as_text(reader.partitions(*arguments)) == ["1:0:0-1:5:0"]
    with pytest.raises(LedgerReadError, match=r"up to 1:5:0 .*only up to 1:3:0"):
        reader_of(MadeUpSnapshots(short)).partitions(*arguments)
