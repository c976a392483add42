"""The writer's machine while an atomic append changes its log."""

from __future__ import annotations

import pytest
from msgspec.structs import replace as replace_head

from dlcore.base.errors import (
    EndOfStreamError,
    LogNotReadyError,
    TransactionIdOutOfOrderError,
)
from dlcore.base.ids import DLSN
from dlcore.log.metadata.changes import (
    SegmentLimits,
    plan_append,
    plan_complete,
    plan_pause,
    plan_start,
)
from dlcore.log.proxied.producers import Producers
from dlcore.log.writing.append import (
    Acknowledge,
    Completed,
    CompleteSegment,
    Ended,
    Ending,
    Fail,
    SegmentStarted,
    StartSegment,
    SteppedBack,
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
    sent,
    started,
    state_of,
    writing,
)
from tests.fixtures.log_states import staged


def test_pausing_and_going_on() -> None:
    """All is answered, the segment completed; what comes meanwhile is refused, and then taken."""
    machine = writing()
    machine.add_record(2, b"b", "b")
    machine.end_with(Ending.PAUSE, "pause")
    assert not machine.has_room
    with pytest.raises(LogNotReadyError, match="atomic append"):
        machine.add_record(3, b"c", "c")
    assert sent(machine) == 1
    assert machine.durable() == [Acknowledge(1, 1, [0], ["b"])]
    step = closed(machine, 1)
    assert isinstance(step, CompleteSegment)
    assert step.ends
    assert step.closing is not None
    after = plan_complete(PATHS, step.at, now_ms=0, closing=step.closing).after
    assert machine.feed(Completed(after, 0)) == [Ended("pause")]
    assert state_of(machine) is WriterState.OPENING
    assert machine.next_step(now_ms=0) is None
    appended = after.with_head(replace_head(after.head, max_txid=70))
    assert machine.feed(SteppedBack(appended, 0)) == []
    assert (machine.has_room, machine.last_txid, machine.log.at) == (True, 70, appended)
    with pytest.raises(TransactionIdOutOfOrderError):
        machine.add_record(3, b"c", "c")
    machine.add_record(70, b"c", "c")
    assert isinstance(machine.next_step(now_ms=0), StartSegment)


def test_a_writer_that_gives_turns_goes_on_in_the_segment_that_it_left() -> None:
    """Behind the extents of an append, whose entries and bytes count for positions and limits."""
    machine = Stepped[str](EMPTY, SMALL, Producers())
    machine.add_record(1, b"a", "a")
    started(machine)
    sent(machine)
    assert machine.durable() == [Acknowledge(1, 0, [0], ["a"])]
    machine.end_with(Ending.PAUSE, "pause")
    step = closed(machine, 0)
    assert isinstance(step, CompleteSegment)
    assert step.stays
    assert step.closing is not None
    paused = plan_pause(PATHS, step.at, closing=step.closing).after
    assert machine.feed(Completed(paused, 0)) == [Ended("pause")]
    assert machine.log.is_untouched(paused)
    limits = SegmentLimits.of(SMALL)
    change, _, _ = plan_append(PATHS, paused, [staged(8, size=4_700)], now_ms=0, limits=limits)
    assert not machine.log.is_untouched(change.after)
    assert machine.feed(SteppedBack(change.after, 0)) == []
    machine.add_record(5, b"b", "b")
    start = machine.next_step(now_ms=0)
    assert start == StartSegment(change.after, None, limits)
    machine.feed(
        SegmentStarted(
            9, plan_start(PATHS, change.after, ledger_id=9, now_ms=0, limits=limits).after, 0
        )
    )
    ends = [machine.log.end]
    sent(machine)
    assert machine.durable() == [Acknowledge(1, 3, [0], ["b"])]
    assert [*ends, machine.log.end] == [None, DLSN(1, 4, 0)]
    assert machine.log.segment is not None
    assert machine.log.segment.is_nearly_full(machine._maker.limits, now_ms=0)
    machine.add_record(6, bytes(150), "c")
    rolled = closed(machine, 0)
    assert isinstance(rolled, StartSegment)
    assert rolled.closing is not None
    assert rolled.limits is None


def test_nothing_steps_back_that_is_over_and_nothing_aside_that_is_sealed() -> None:
    """A writer that failed while paused lets no one wait; one that was sealed then says so."""
    machine = appender()
    machine.end_with(Ending.PAUSE, "pause")
    assert machine.accept() == [Ended("pause")]
    machine.end_with(Ending.SEAL, "seal")
    with pytest.raises(EndOfStreamError):
        machine.end_with(Ending.PAUSE, "again")
    machine.feed(Fail(FENCED))
    assert machine.has_room
    assert machine.feed(SteppedBack(EMPTY, 0)) == []
    assert state_of(machine) is WriterState.FAILED
