"""The writer's machine while an atomic append changes its log."""

from __future__ import annotations

import pytest
from msgspec.structs import replace as replace_head

from dlcore.errors import (
    EndOfStreamError,
    LogNotReadyError,
    TransactionIdOutOfOrderError,
)
from dlcore.log.metadata.changes import plan_complete
from dlcore.log.writing.steps import (
    Acknowledge,
    CompleteSegment,
    Ended,
    Ending,
    Finish,
    StartSegment,
    WriterState,
)
from tests.fixtures.appenders import EMPTY, FENCED, PATHS, appender, closed, sent, state_of, writing


def test_stepping_aside_and_back() -> None:
    """All is answered, the segment completed; what comes meanwhile is refused, and then taken."""
    machine = writing()
    machine.add_record(2, b"b", "b")
    machine.end_with(Ending.ASIDE, "aside")
    assert not machine.has_room
    with pytest.raises(LogNotReadyError, match="atomic append"):
        machine.add_record(3, b"c", "c")
    assert sent(machine) == 1
    assert machine.entry_durable() == [Acknowledge(1, 1, [0], ["b"])]
    step = closed(machine, 1)
    assert isinstance(step, CompleteSegment)
    assert step.ends
    assert step.closing is not None
    after = plan_complete(PATHS, step.at, now_ms=0, closing=step.closing).after
    assert machine.completed(after) == [Ended("aside")]
    assert state_of(machine) is WriterState.OPENING
    assert machine.next_step(now_ms=0) is None
    appended = after.with_head(replace_head(after.head, max_txid=70))
    assert machine.step_back(appended) == []
    assert (machine.has_room, machine.last_txid, machine.at) == (True, 70, appended)
    with pytest.raises(TransactionIdOutOfOrderError):
        machine.add_record(3, b"c", "c")
    machine.add_record(70, b"c", "c")
    assert isinstance(machine.next_step(now_ms=0), StartSegment)


def test_nothing_steps_back_that_is_over_and_nothing_aside_that_is_sealed() -> None:
    """A writer that failed aside lets nobody wait; one that was sealed there says so."""
    machine = appender()
    machine.end_with(Ending.ASIDE, "aside")
    assert machine.next_step(now_ms=0) == Finish()
    assert machine.finished() == [Ended("aside")]
    machine.end_with(Ending.SEAL, "seal")
    with pytest.raises(EndOfStreamError):
        machine.end_with(Ending.ASIDE, "again")
    machine.fail(FENCED)
    assert machine.has_room
    assert machine.step_back(EMPTY) == []
    assert state_of(machine) is WriterState.FAILED
