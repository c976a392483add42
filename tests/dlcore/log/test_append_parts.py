"""Goal: the parts of a log's writer by themselves.  Method: short histories, exact results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.config import LogConfig
from dlcore.base.ids import DLSN
from dlcore.log.metadata.changes import SegmentLimits, plan_start
from dlcore.log.writing.append import (
    CompleteSegment,
    Ending,
    Ends,
    KnownLog,
    Overtaken,
    RecoverLog,
    Report,
)
from dlcore.log.writing.transmit import OwnExtent, Transmitter
from tests.fixtures.appenders import EMPTY, FENCED, PATHS, appender, opened_by_another

if TYPE_CHECKING:
    from dlcore.log.metadata.values import VersionedHead

LIMITS = SegmentLimits.of(LogConfig(segment_bytes_max=1000, segment_age_max_s=1.0))


def extent(now_ms: int = 0) -> OwnExtent:
    """Return the first extent of a log, over ledger 1."""
    return OwnExtent.opened(1, plan_start(PATHS, EMPTY, ledger_id=1, now_ms=now_ms).after.head)


def known(at: VersionedHead = EMPTY, *, is_stamped: bool = False) -> KnownLog:
    """Return what a writer knows that begins at this head."""
    return KnownLog(at, is_stamped=is_stamped)


def test_ends_are_done_in_the_order_of_the_calls() -> None:
    """The last one says whether the writer closes, any one whether the log is sealed."""
    ends: Ends[str] = Ends()
    assert (bool(ends), ends.is_closing, ends.is_sealing, ends.is_paused) == (False,) * 4
    ends.ask(Ending.PAUSE, "pause")
    ends.ask(Ending.SEAL, "seal")
    ends.ask(Ending.CLOSE, "close")
    assert (bool(ends), ends.is_closing, ends.is_sealing, ends.is_paused) == (True,) * 4
    assert (ends.first, ends.take()) == (Ending.PAUSE, (Ending.PAUSE, "pause"))
    assert (ends.clear(), bool(ends), ends.is_paused) == (["seal", "close"], False, True)


def test_an_overtaken_change_is_counted_until_one_is_made() -> None:
    """Another writer's segment is to be completed, unless our own is open."""
    log = known()
    theirs = opened_by_another(EMPTY)
    assert (log.overtaken(theirs), log.overtaken(theirs)) == (None, None)
    assert (log.attempts, log.must_recover, log.at) == (2, True, theirs)
    log.recovered(EMPTY)
    assert (log.attempts, log.must_recover) == (2, False)
    ours = opened_by_another(EMPTY, ledger_id=1)
    log.started(1, ours)
    assert (log.attempts, log.at) == (0, ours)
    assert log.overtaken(ours) is None
    assert (log.attempts, log.must_recover) == (1, False)
    log.completed(EMPTY)
    assert (log.attempts, log.segment, log.at) == (0, None, EMPTY)


def test_only_a_writer_of_stamps_minds_what_others_wrote() -> None:
    """It knows the producers of its head and of no other."""
    theirs = opened_by_another(EMPTY)
    assert "another writer wrote" in str(known(is_stamped=True).read(theirs))
    assert known(is_stamped=True).read(EMPTY) is None
    assert known().read(theirs) is None
    log = known()
    log.started(7, opened_by_another(EMPTY, ledger_id=7))
    assert "recovered ledger 7" in str(log.read(theirs))


def test_records_that_were_given_up_are_reported_until_a_caller_knows() -> None:
    """`lost` stays."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=100)
    report = Report(transmitter)
    transmitter.add_record(1, b"a", "a")
    assert str(report.unwritten) == str(report.lost) == "1 record, transaction id 1"
    report.give_up(FENCED)
    report.failure_was_reported()
    assert (report.unwritten, str(report.lost)) == (None, "1 record, transaction id 1")


def test_positions_and_sequence_ids_follow_the_entries() -> None:
    """Each acknowledged entry moves the end of the segment."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=100)
    report, segment = Report(transmitter), extent()
    assert extent().end is None
    for txid in range(3):
        transmitter.add_record(txid, b"a", "a")
        transmitter.next_group()
        report.acknowledge(segment)
    assert (report.last_dlsn, segment.end) == (DLSN(1, 2, 0), DLSN(1, 3, 0))
    assert [report.sequence_id_of(DLSN(1, entry, 0)) for entry in range(4)] == [0, 1, 2, None]


def test_a_segment_is_full_by_its_bytes_or_its_age() -> None:
    """Never without an entry; it is nearly full before."""
    segment = extent()
    assert not segment.is_full(LIMITS, now_ms=5000)
    segment.run.entry_count, segment.run.size_bytes = 1, 10
    assert not segment.is_full(LIMITS, now_ms=999)
    assert segment.is_full(LIMITS, now_ms=1000)
    assert not segment.is_nearly_full(LIMITS, now_ms=700)
    assert segment.is_nearly_full(LIMITS, now_ms=800)
    segment.run.size_bytes = 1000
    assert segment.is_full(LIMITS, now_ms=0)


def test_a_seal_completes_what_another_left_open_first() -> None:
    """Its records stay in the log."""
    machine = appender()
    machine.end_with(Ending.SEAL, "seal")
    assert machine.next_step(now_ms=0) == CompleteSegment(EMPTY, None, seal=True)
    assert machine.feed(Overtaken(opened_by_another(EMPTY), 0)) == []
    assert machine.next_step(now_ms=0) == RecoverLog(machine.log.at)
