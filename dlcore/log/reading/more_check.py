"""The check whether a log has a record to read now that its reader's caller has not taken.

A reader that ends when it has caught up asks this each time that its buffer is empty.  Nothing is
read if the known segments have more.  Else the segment list is read, with every change that is
complete by then; and if an open extent is next, its bookies say whether an entry can be read.  If
its ledger is gone, the list is read again: a recovery removed it as empty, or a merge moved its
entries.  Both change the list; with the same list the ledger is really lost.
docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

The driver of the tail (`tail_driver.py`) performs it.  Each event has one effect.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.errors import DLError, LedgerNotFoundError
from dlcore.base.machines import CallFailed, Ended, State, StepMachine, Transitions
from dlcore.log.reading.cursor import (
    EndOfStream,
    FollowExtent,
    LearnSegments,
    ReadExtent,
    WaitForChange,
)
from dlcore.log.reading.tail import ReadState, StateRead, TailState

if TYPE_CHECKING:
    from dlcore.log.metadata.values import LogState
    from dlcore.log.reading.cursor import Step
    from dlcore.log.reading.tail import LogTail


class CheckState(State):
    """The state of the machine; ANSWERED is final."""

    READY = "nothing has begun"
    LOOKING = "the segment list is being read"
    ASKING = "the bookies of the open extent are asked for its end"
    ANSWERED = "it is known whether there is more, or why not"


_S = CheckState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {
            _S.LOOKING: "the known segments have no more",
            _S.ANSWERED: "they have more, or are truncated",
        },
        _S.LOOKING: {
            _S.ASKING: "an open extent is next",
            _S.ANSWERED: "the list decides, or cannot be read",
        },
        _S.ASKING: {
            _S.LOOKING: "the ledger is gone",
            _S.ANSWERED: "the bookies answered, or did not",
        },
        _S.ANSWERED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    BEGIN = "the caller asks"


@dataclass(frozen=True, slots=True)
class EndAsked:
    """Event: whether the first entry of the open extent can be read."""

    is_readable: bool


@dataclass(frozen=True, slots=True)
class AskEnd:
    """Effect: ask the bookies of an open extent for its end."""

    step: FollowExtent


Event: TypeAlias = Signal | StateRead | EndAsked
Effect: TypeAlias = ReadState | AskEnd


class MoreCheck(StepMachine[CheckState, Event, Effect, bool]):
    """One check; the outcome is whether there is more.

    Args:
        tail: is only looked at, and may change between two events.
    """

    transitions = TRANSITIONS

    def __init__(self, tail: LogTail) -> None:
        self.state = _S.READY
        self._tail = tail
        self._asked_at = -1  # the version of the list that showed the open extent
        self._lost: LedgerNotFoundError | None = None  # the error of its ledger
        self._outcome: bool | DLError | None = None

    def handle(self, event: Event | CallFailed) -> Effect | Ended[bool]:
        """Take one event."""
        match event:
            case Signal.BEGIN:
                return self._begin()
            case StateRead(state):
                return self._judge(state)
            case EndAsked(is_readable):
                # The entry may have come, and been confirmed, after the bookies answered.
                return self._end(is_readable or bool(self._tail.buffer.entries))
            case CallFailed(LedgerNotFoundError() as error) if self.state is _S.ASKING:
                self._lost = error
                return self._look()
            case CallFailed(error):
                return self._end(error)
            case _:
                assert_never(event)

    def _begin(self) -> Effect | Ended[bool]:
        try:
            is_known = isinstance(self._plan(self._tail.segments.state), ReadExtent)
        except DLError as error:
            return self._end(error)
        if is_known:
            return self._end(True)  # unless it is being truncated
        return self._look()

    def _look(self) -> Effect:
        self._become(_S.LOOKING)
        return ReadState(self._tail.cursor.position.lssn)

    def _judge(self, state: LogState) -> Effect | Ended[bool]:
        tail = self._tail
        if tail.buffer.entries or tail.state in _FINAL:
            return self._end(True)
        if self._lost is not None and state.version == self._asked_at:
            return self._end(self._lost)
        try:
            step = self._plan(state)
        except DLError as error:
            return self._end(error)
        match step:
            case WaitForChange():
                return self._end(False)
            case ReadExtent() | EndOfStream() | LearnSegments():
                return self._end(True)
            case FollowExtent():
                self._become(_S.ASKING)
                self._asked_at = state.version
                return AskEnd(step)
            case _:
                assert_never(step)

    def _plan(self, state: LogState) -> Step:
        # On a copy: planning may move the cursor, which only the tail's own plan may do.
        return self._tail.cursor.copy().plan(state)

    def _end(self, outcome: bool | DLError) -> Ended[bool]:
        self._become(_S.ANSWERED)
        self._outcome = outcome
        return Ended(outcome)

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert (self._outcome is not None) == (self.state is _S.ANSWERED)


_FINAL = (TailState.ENDED, TailState.FAILED, TailState.CLOSED)
"""The next `take` or wait of the caller has the answer, which may be an error."""
