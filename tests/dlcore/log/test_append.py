"""The writer's machine: exact steps and answers for each event."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dlcore.base.config import LogConfig
from dlcore.base.errors import (
    AlreadyClosedError,
    EndOfStreamError,
    LogNotReadyError,
    OverCapacityError,
    OwnershipAcquireFailedError,
    TransactionIdOutOfOrderError,
    WriteCancelledError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.log.entries.batcher import RECORD_TICKET_BYTES
from dlcore.log.entries.body import batch_of, decode_entry_header, stamp_of
from dlcore.log.entries.stamp import Mark, decode_stamp
from dlcore.log.metadata.changes import plan_complete, plan_truncate
from dlcore.log.metadata.values import LogHead, VersionedHead
from dlcore.log.proxied.producers import Producers
from dlcore.log.writing.append import (
    Abort,
    Acknowledge,
    CloseLedger,
    Completed,
    CompleteSegment,
    Ended,
    Ending,
    Fail,
    HeadChanged,
    LedgerClosed,
    Overtaken,
    Recovered,
    RecoverLog,
    Refuse,
    Resumed,
    SegmentStarted,
    StartSegment,
    Suspended,
    WriterState,
)
from tests.fixtures.appenders import (
    EMPTY,
    FENCED,
    PATHS,
    SMALL,
    Stepped,
    appender,
    closed,
    completed_by_another,
    opened_by_another,
    sent,
    started,
    state_of,
    writing,
)
from tests.fixtures.lengths import for_each

if TYPE_CHECKING:
    from dlcore.log.writing.append import Step


def test_the_first_record_starts_a_segment_and_leaves_alone() -> None:
    """Records that come while it is in flight wait, and share an entry."""
    machine = appender()
    assert machine.next_step(now_ms=0) is None
    assert machine.last_txid == -1
    assert (machine.report.last_dlsn, machine.log.end) == (None, None)
    machine.add_record(4, b"a", "a")
    assert machine.next_step(now_ms=0) == StartSegment(EMPTY, None)
    started(machine)
    assert state_of(machine) is WriterState.OPEN
    assert sent(machine) == 1
    machine.add_batch(batch_of([4, 5], [b"b", b"c"]), "c")
    machine.add_record(5, b"d", "d")
    assert machine.next_step(now_ms=0) is None
    assert (machine.log.end, machine.last_txid) == (None, 5)
    assert machine.durable() == [Acknowledge(1, 0, [0], ["a"])]
    assert machine.log.end == DLSN(1, 1, 0)
    assert sent(machine) == 3
    assert machine.transmitter.pending_bytes > 0
    assert machine.durable() == [Acknowledge(1, 1, [1, 2], ["c", "d"])]
    assert machine.report.last_dlsn == DLSN(1, 1, 2)
    assert (machine.last_txid, machine.transmitter.pending_bytes, machine.report.unwritten) == (
        5,
        0,
        None,
    )
    assert repr(machine) == "<LogAppender 'clicks' OPEN segment=1>"


@pytest.mark.parametrize("why", ["size", "age"])
def test_a_segment_that_is_full_or_old_is_completed_with_the_next_start(why: str) -> None:
    """Not before all of it is answered; the extent says the same as callers learned."""
    machine = writing()
    machine.add_record(2, b"b" * (5000 if why == "size" else 1), "b")
    assert sent(machine) == 1
    machine.add_record(3, b"c" * 300, "c")  # complete by itself
    assert machine.flush("flush")
    now_ms = 0 if why == "size" else 1000
    assert machine.next_step(now_ms=now_ms) is None
    assert state_of(machine) is WriterState.ROLLING
    assert machine.next_entry(now_ms=now_ms) is None
    assert machine.durable() == [Acknowledge(1, 1, [0], ["b"])]
    step = closed(machine, 1, now_ms=now_ms)
    assert isinstance(step, StartSegment)
    assert step.closing is not None
    assert (step.closing.entry_count, step.closing.record_count) == (2, 2)
    assert (step.closing.first_txid, step.closing.last_txid) == (1, 2)
    assert machine.next_step(now_ms=now_ms) == step  # until it is answered
    started(machine, 2, now_ms=now_ms)
    assert sent(machine, now_ms=now_ms) == 1
    assert machine.durable() == [Acknowledge(2, 0, [0, 0], ["c", "flush"])]
    assert machine.log.at.head.next_sequence_id == 2
    known = [
        machine.report.sequence_id_of(DLSN(*each)) for each in ((1, 0, 0), (1, 1, 0), (2, 0, 0))
    ]
    assert known == [0, 1, 2]
    assert machine.report.sequence_id_of(DLSN(2, 1, 0)) is None
    assert not machine.flush("nothing is left")


def test_the_seal_and_the_close() -> None:
    """Each waits for what was accepted before it, and refuses what comes after."""
    machine = writing()
    machine.add_record(2, b"b", "b")
    assert sent(machine) == 1
    machine.end_with(Ending.SEAL, "seal")
    with pytest.raises(EndOfStreamError, match="is sealed"):
        machine.add_record(3, b"", "c")
    machine.end_with(Ending.CLOSE, "close")
    assert machine.is_closing
    with pytest.raises(AlreadyClosedError):
        machine.flush("flush")
    with pytest.raises(AlreadyClosedError):
        machine.end_with(Ending.CLOSE, "again")
    assert machine.next_step(now_ms=0) is None
    machine.durable()
    step = closed(machine, 1)
    assert isinstance(step, CompleteSegment)
    assert step.seal
    after = plan_complete(PATHS, step.at, now_ms=0, closing=step.closing, seal=True).after
    assert machine.feed(Completed(after, 0)) == [Ended("seal"), Ended("close")]
    assert state_of(machine) is WriterState.CLOSED
    assert machine.next_step(now_ms=0) is None
    assert machine.is_over
    assert machine.is_closing
    assert repr(machine) == "<LogAppender 'clicks' CLOSED no segment>"


def test_an_idle_writer_closes_and_seals_without_a_segment() -> None:
    """To close it needs no change, to seal it does."""
    idle = appender()
    idle.end_with(Ending.CLOSE, "close")
    assert idle.accept() == [Ended("close")]
    sealing = appender()
    sealing.end_with(Ending.SEAL, "seal")
    assert sealing.next_step(now_ms=0) == CompleteSegment(EMPTY, None, seal=True)
    sealing.feed(Completed(plan_complete(PATHS, EMPTY, now_ms=0, closing=None, seal=True).after, 0))
    assert state_of(sealing) is WriterState.SEALED
    with pytest.raises(EndOfStreamError):
        sealing.end_with(Ending.SEAL, "again")
    assert not sealing.flush("flush")
    assert sealing.next_step(now_ms=0) is None


def test_a_segment_without_an_entry_is_not_completed() -> None:
    """Its start may take longer than a segment may last."""
    machine = appender()
    machine.add_record(1, b"a", "a")
    started(machine, now_ms=0)
    assert sent(machine, now_ms=5000) == 1


def test_nothing_follows_the_seal_while_suspended() -> None:
    """The lock may be lost after it."""
    machine = appender()
    machine.end_with(Ending.SEAL, "seal")
    machine.feed(Completed(plan_complete(PATHS, EMPTY, now_ms=0, closing=None, seal=True).after, 0))
    machine.feed(Suspended())
    with pytest.raises(EndOfStreamError):
        machine.add_record(1, b"a", "a")


def test_nothing_is_acknowledged_while_suspended() -> None:
    """Records that became durable meanwhile are acknowledged in order, or fail when denied."""
    for is_denied in (False, True):
        machine = writing()
        machine.add_record(2, b"b" * 300, "b")
        sent(machine)
        machine.add_record(3, b"c" * 300, "c")
        machine.add_record(4, b"d", "d")
        sent(machine)
        machine.feed(Suspended())
        machine.feed(Suspended())
        assert state_of(machine) is WriterState.SUSPENDED
        assert machine.durable() == machine.durable() == []
        assert machine.next_step(now_ms=0) is None
        assert machine.next_entry(now_ms=0) is None
        if is_denied:
            refused = machine.feed(Fail(FENCED))
            assert [each.tickets for each in refused if isinstance(each, Refuse)] == [
                ["b", "c"],
                ["d"],
            ]
            assert machine.feed(Resumed(0)) == []
        else:
            assert machine.feed(Resumed(0)) == [
                Acknowledge(1, 1, [0], ["b"]),
                Acknowledge(1, 2, [0], ["c"]),
            ]
            assert machine.feed(Resumed(0)) == []
            assert sent(machine) == 1


def test_answers_to_steps_may_come_while_suspended() -> None:
    """The state after them is taken up when ownership is back."""
    machine = appender()
    machine.add_record(1, b"a", "a")
    assert isinstance(machine.next_step(now_ms=0), StartSegment)
    machine.feed(Suspended())
    machine.feed(SegmentStarted(1, opened_by_another(EMPTY, 1), 0))
    assert state_of(machine) is WriterState.SUSPENDED
    assert machine.feed(Resumed(0)) == []
    assert state_of(machine) is WriterState.OPEN


@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_a_batch_of_which_rows_were_sent_is_not_called_never_sent(is_acknowledged: bool) -> None:
    """Its first rows may be in the log: it fails with the error, and what follows is cancelled."""
    machine = writing()
    machine.add_batch(batch_of([2, 2, 2], [b"b" * 150, b"c" * 150, b"d" * 150]), "batch")
    machine.add_record(3, b"e" * 150, "record")
    assert sent(machine) == 1
    if is_acknowledged:
        assert machine.durable() == [Acknowledge(1, 1, [], [])]
    failed, cancelled = machine.feed(Fail(FENCED))
    assert failed == Refuse(["batch"], FENCED)
    assert isinstance(cancelled, Refuse)
    assert cancelled.tickets == ["record"]
    assert isinstance(cancelled.error, WriteCancelledError)


def test_the_first_failure_is_the_last_word() -> None:
    """In flight: the error.  Never sent: cancelled.  Ends: the error.  Later: nothing."""
    machine = writing()
    machine.add_record(2, b"b", "b")
    sent(machine)
    machine.add_record(3, b"c", "c")
    machine.end_with(Ending.CLOSE, "close")
    in_flight, queued, ends = machine.feed(Fail(FENCED))
    assert (in_flight, ends) == (Refuse(["b"], FENCED), Refuse(["close"], FENCED))
    assert isinstance(queued, Refuse)
    assert queued.tickets == ["c"]
    assert isinstance(queued.error, WriteCancelledError)
    assert queued.error.__cause__ is FENCED
    assert (
        machine.feed(Fail(WriteError("later")))
        == machine.durable()
        == machine.feed(Resumed(0))
        == []
    )
    machine.feed(Suspended())
    machine.feed(LedgerClosed(9, 0, 0))
    assert machine.feed(Completed(machine.log.at, 0)) == []
    assert machine.next_step(now_ms=0) is None
    assert state_of(machine) is WriterState.FAILED
    assert str(machine.report.unwritten) == "2 records, transaction ids 2 to 3"
    match = "failed and takes no more records: LedgerFenced"
    with pytest.raises(WriteError, match=match):
        machine.add_record(4, b"", "d")
    with pytest.raises(WriteError, match=match):
        machine.require_usable()
    assert machine.report.unwritten is None  # it was reported
    assert machine.feed(Abort(FENCED)) == []
    assert state_of(machine) is WriterState.CLOSED
    assert machine.error is FENCED


def test_an_unsent_write_fails_with_the_reason() -> None:
    """Nothing was in flight: the first in the queue is what failed, the others never left."""
    machine = appender()
    machine.add_record(1, b"a" * 300, "a")
    machine.add_record(2, b"b" * 300, "b")
    first, others = machine.feed(Fail(FENCED))
    assert first == Refuse(["a"], FENCED)
    assert isinstance(others, Refuse)
    assert others.tickets == ["b"]


def test_an_abort_closes_at_once() -> None:
    """Nothing comes after it, whatever was under way."""
    machine = appender()
    machine.add_record(1, b"a", "a")
    assert isinstance(machine.next_step(now_ms=0), StartSegment)
    aborted = WriteCancelledError("aborted")
    assert machine.feed(Abort(aborted)) == [Refuse(["a"], aborted)]
    machine.feed(SegmentStarted(1, opened_by_another(EMPTY, 1), 0))
    assert state_of(machine) is WriterState.CLOSED
    assert machine.feed(Fail(FENCED)) == []
    with pytest.raises(AlreadyClosedError):
        machine.add_record(2, b"", "b")


def test_too_much_is_refused() -> None:
    """And so is a record that cannot follow; the writer stays usable."""
    machine = appender(config=replace(SMALL, pending_bytes_max=1000))
    machine.add_record(7, b"a" * 2000, "a")
    with pytest.raises(
        OverCapacityError, match="1 records are pending, the limits are 1000 bytes and"
    ):
        machine.add_record(7, b"", "b")
    assert [machine.has_room] == [False]
    machine.configure(replace(SMALL, pending_records_max=1))
    with pytest.raises(OverCapacityError, match="2268 bytes in 1 records"):
        machine.add_batch(batch_of([7], [b""]), "b")
    machine.configure(SMALL)
    assert [machine.has_room] == [True]
    with pytest.raises(TransactionIdOutOfOrderError, match="6 is lower than 7"):
        machine.add_batch(batch_of([6], [b""]), "b")
    machine.add_record(7, b"", "b")


@for_each(range(20))
def test_limits_are_kept_to_the_record(seed: int) -> None:
    """However records and batches come: one is taken while less is pending than the limits say."""
    rng = random.Random(seed)
    bytes_max, records_max = rng.randrange(1, 8000), rng.randrange(1, 40)
    limits = LogConfig(
        entry_bytes=200, pending_bytes_max=bytes_max, pending_records_max=records_max
    )
    machine = appender(config=limits)
    machine.add_record(1, b"", "first")
    assert isinstance(machine.next_step(now_ms=0), StartSegment)
    started(machine)
    waiting = [(12 + RECORD_TICKET_BYTES, 1)]  # bytes and records of what is not sent
    in_flight: list[list[tuple[int, int]]] = []
    for _ in range(300):
        pending = [*waiting, *(each for entry in in_flight for each in entry)]
        is_full = sum(size for size, _ in pending) > bytes_max
        is_full |= sum(count for _, count in pending) >= records_max
        size = rng.randrange(150)
        try:
            if rng.random() < 0.8:
                machine.add_record(1, b"x" * size, "record")
                cost = (size + 12 + RECORD_TICKET_BYTES, 1)
            else:
                machine.add_batch(batch_of([1, 1], [b"x" * size, b""]), "batch")
                cost = (size + 24, 2)
        except OverCapacityError:
            assert is_full
        else:
            assert not is_full
            waiting.append(cost)
        if rng.random() < 0.3 and machine.transmitter.has_next:
            left = sent(machine)
            in_flight.append([])
            while left > 0:
                left -= waiting[0][1]
                in_flight[-1].append(waiting.pop(0))
            assert left == 0
        if rng.random() < 0.2 and in_flight:
            machine.durable()
            in_flight.pop(0)


def test_a_start_that_was_overtaken_is_planned_again() -> None:
    """From the log as it is now; another's open segment is recovered first."""
    machine = appender()
    machine.add_record(1, b"a", "a")
    theirs = opened_by_another(EMPTY)
    assert machine.feed(Overtaken(theirs, 0)) == []
    assert machine.next_step(now_ms=0) == RecoverLog(theirs)
    done = plan_complete(PATHS, theirs, now_ms=6, closing=None, empty_ledger_id=77).after
    machine.feed(Recovered(done, 0))
    assert machine.next_step(now_ms=0) == StartSegment(done, None)


def test_a_start_gives_up_when_its_first_record_cannot_follow_any_more() -> None:
    """Another wrote a higher transaction id meanwhile, or overtook us again and again."""
    machine = appender()
    machine.add_record(1, b"a", "a")
    head = LogHead(max_lssn=1, end=(1, 1), max_txid=2)
    machine.accept()
    (refused,) = machine.feed(Overtaken(VersionedHead(log=EMPTY.log, head=head, version=9), 0))
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, TransactionIdOutOfOrderError)
    unlucky = appender()
    unlucky.add_record(1, b"a", "a")
    for _ in range(19):
        assert isinstance(unlucky.next_step(now_ms=0), StartSegment)
        assert unlucky.feed(Overtaken(EMPTY, 0)) == []
    (refused,) = unlucky.feed(Overtaken(EMPTY, 0))
    assert isinstance(refused, Refuse)
    assert "20 attempts to start a segment were overtaken" in str(refused.error)


@pytest.mark.parametrize("ending", [None, Ending.SEAL, Ending.CLOSE])
def test_another_may_complete_our_segment_at_the_same_end(ending: Ending | None) -> None:
    """Nothing was lost: the next change leaves it as it is."""
    machine = writing()
    if ending is None:
        machine.add_record(2, b"b", "b")
        assert isinstance(closed(machine, 0, now_ms=1000), StartSegment)
    else:
        machine.end_with(ending, "end")
        assert isinstance(closed(machine, 0), CompleteSegment)
    after = completed_by_another(machine)
    answers = machine.feed(Overtaken(after, 0))
    assert answers == ([Ended("end")] if ending is Ending.CLOSE else [])
    assert state_of(machine) is (
        WriterState.CLOSED if ending is Ending.CLOSE else WriterState.OPENING
    )
    wanted: dict[Any, Step | None] = {
        None: StartSegment(after, None),
        Ending.SEAL: CompleteSegment(after, None, seal=True),
        Ending.CLOSE: None,
    }
    assert machine.next_step(now_ms=1000) == wanted[ending]


def test_another_that_completed_our_segment_elsewhere_has_taken_over() -> None:
    """It may have gone on, or have missed records that are durable for us."""
    machine = writing()
    machine.end_with(Ending.CLOSE, "close")
    closed(machine, 0)
    (refused,) = machine.feed(Overtaken(completed_by_another(machine, entries=2), 0))
    assert isinstance(refused, Refuse)
    assert refused.tickets == ["close"]
    assert isinstance(refused.error, OwnershipAcquireFailedError)


def test_a_change_beside_ours_is_no_harm() -> None:
    """A truncation by another: our segment is open still, and completed from the head as it is."""
    machine = writing()
    machine.end_with(Ending.CLOSE, "close")
    first = closed(machine, 0)
    assert isinstance(first, CompleteSegment)
    change = plan_truncate(PATHS, machine.log.at, DLSN(1, 1, 0))
    assert change is not None
    assert machine.feed(Overtaken(change.after, 0)) == []
    assert machine.next_step(now_ms=0) == CompleteSegment(change.after, first.closing, seal=False)


def test_truncation_beside_the_machine() -> None:
    """The head it left is gone on from, unless the log is not ours any more."""
    machine = writing()
    change = plan_truncate(PATHS, machine.log.at, DLSN(1, 1, 0))
    assert change is not None
    assert machine.feed(HeadChanged(change.after, 0)) == []
    assert machine.log.at == change.after
    assert machine.feed(HeadChanged(completed_by_another(machine), 0)) == []
    assert isinstance(machine.error, OwnershipAcquireFailedError)
    idle = appender()
    theirs = opened_by_another(EMPTY)
    assert idle.feed(HeadChanged(theirs, 0)) == []
    assert idle.log.at == EMPTY
    done = plan_complete(PATHS, theirs, now_ms=6, closing=None, empty_ledger_id=77).after
    idle.feed(HeadChanged(done, 0))
    assert idle.log.at == done


def test_producers_that_others_changed_end_an_idle_writer_of_theirs() -> None:
    """Its marks are of before; a writer that keeps none goes on."""
    head = msgspec.structs.replace(EMPTY.head, producers_lssn=3)
    theirs = VersionedHead(log=EMPTY.log, head=head, version=1)
    bare = Stepped[str](EMPTY, SMALL)
    assert bare.feed(HeadChanged(theirs, 0)) == []
    assert bare.log.at == theirs
    idle = Stepped[str](EMPTY, SMALL, stamper=Producers())
    assert idle.feed(HeadChanged(EMPTY, 0)) == []
    idle.feed(HeadChanged(theirs, 0))
    assert isinstance(idle.error, OwnershipAcquireFailedError)
    assert idle.log.at == EMPTY
    overtaken = Stepped[str](EMPTY, SMALL, stamper=Producers())
    overtaken.feed(HeadChanged(opened_by_another(EMPTY), 0))
    assert isinstance(overtaken.error, OwnershipAcquireFailedError)


@pytest.mark.parametrize("ending", [Ending.CLOSE, Ending.PAUSE])
def test_the_last_entry_before_a_close_lists_the_producers(ending: Ending) -> None:
    """Another owner is to read it; a writer that only pauses knows them."""
    producers: Producers[str] = Producers()
    machine = Stepped[str](EMPTY, SMALL, stamper=producers)
    claim = producers.grant("meter", bytes(8), now_ms=0)

    def add(sequence: int) -> None:
        mark = Mark(claim, sequence)
        machine.add_batch(batch_of([1], [bytes(150)]), "a", mark=mark)
        producers.accepted(mark, 1, "a", now_ms=0)

    def listed() -> list[int] | None:
        machine.accept()
        body = b"".join(machine.next_entry(now_ms=0) or [])
        rows = decode_stamp(stamp_of(body, decode_entry_header(body))).rows
        return None if rows is None else [row.last for row in rows]

    add(0)
    started(machine)
    assert listed() == []
    for sequence in (1, 2, 3):
        add(sequence)
    assert listed() is None
    machine.end_with(ending, "end")
    assert listed() is None
    assert listed() == ([2] if ending is Ending.CLOSE else None)


def test_whether_the_log_is_as_we_left_it() -> None:
    """The ways to regain a lost lock."""
    machine = writing()
    assert machine.log.is_untouched(machine.log.at)
    assert not machine.log.is_untouched(completed_by_another(machine))
    idle = appender()
    assert idle.log.is_untouched(EMPTY)
    assert not idle.log.is_untouched(opened_by_another(EMPTY))
    assert not idle.log.is_untouched(
        plan_complete(PATHS, EMPTY, now_ms=0, closing=None, seal=True).after
    )


def test_an_idle_segment_is_completed_when_it_is_old() -> None:
    """The next record starts another one; what comes meanwhile is taken along by its start."""
    machine = writing()
    assert machine.old_in_s(now_ms=400) == 0.6
    assert machine.next_step(now_ms=999) is None
    step = closed(machine, 0, now_ms=1000)
    assert step == CompleteSegment(machine.log.at, machine.log.closing, seal=False, ends=False)
    assert machine.old_in_s(now_ms=2000) is None
    after = plan_complete(PATHS, machine.log.at, now_ms=1000, closing=step.closing).after
    assert machine.feed(Completed(after, 0, ends=False)) == []
    assert state_of(machine) is WriterState.OPENING
    assert machine.next_step(now_ms=5000) is None
    machine.add_record(2, b"b", "b")
    started(machine, 2, now_ms=5000)
    assert machine.old_in_s(now_ms=5000) is None  # it holds no entry yet

    hurried = writing()
    assert hurried.next_step(now_ms=1000) == CloseLedger()
    hurried.feed(LedgerClosed(0, 100, 1000))
    hurried.add_record(2, b"b", "b")
    assert isinstance(hurried.next_step(now_ms=1000), StartSegment)  # decided in its turn


def test_a_close_while_an_idle_segment_is_completed() -> None:
    """It has nothing left to change."""
    machine = writing()
    step = closed(machine, 0, now_ms=1000)
    assert isinstance(step, CompleteSegment)
    machine.end_with(Ending.CLOSE, "close")
    after = plan_complete(PATHS, machine.log.at, now_ms=1000, closing=step.closing).after
    assert machine.feed(Completed(after, 0, ends=False)) == [Ended("close")]


def test_a_change_of_settings_holds_from_the_next_entry_on() -> None:
    """Age and size of the segment, too."""
    machine = writing()
    machine.configure(LogConfig(entry_bytes=20, segment_age_max_s=0.5))
    assert machine.old_in_s(now_ms=0) == 0.5
    for txid in (2, 3):
        machine.add_record(txid, b"0123456789", str(txid))
    assert sent(machine) == 1
    machine.durable()
    assert sent(machine) == 1


def test_a_writer_may_refuse_records_while_it_rolls() -> None:
    """And while it does not own the log; else it keeps them until then."""
    machine = appender(config=replace(SMALL, fail_while_rolling=True))
    machine.add_record(1, b"a", "a")
    started(machine)
    sent(machine)
    machine.add_record(2, b"b", "b")
    machine.feed(Suspended())
    with pytest.raises(LogNotReadyError, match="log 'clicks' is suspended and takes no record"):
        machine.add_record(3, b"c", "c")
    machine.feed(Resumed(0))
    machine.durable()
    assert machine.next_entry(now_ms=2000) is None  # the ledger had no capacity for too long
    assert machine.next_step(now_ms=2000) == CloseLedger()
    with pytest.raises(LogNotReadyError, match="is rolling"):
        machine.add_record(3, b"c", "c")
    assert isinstance(closed(machine, 0, now_ms=2000), StartSegment)
    started(machine, 2, now_ms=2000)
    machine.add_record(3, b"c", "c")
    patient = writing()
    patient.add_record(2, b"b", "b")
    assert patient.next_step(now_ms=2000) == CloseLedger()
    patient.add_record(3, b"c", "c")
