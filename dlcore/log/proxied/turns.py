"""Turns of atomic appends in a log whose lock a proxy holds: its writer gives them.

Theory of operation.  An append asks for a turn in the lock's node (`staging/commit.py`).  The
writer answers everything that it accepted, closes its extent, and sets the turn to given.  The
append commits, and ends the turn in the same transaction.  The segment stays in progress, and the
writer continues after the appended extents.  Therefore small extents are merged whichever side
wrote them, and turns make no further segments.  docs/architecture/machines.md shows `TRANSITIONS`
as a diagram.

Promises:

* While the turn is given the writer has no extent open, and begins none until the turn is over.
* The writer continues from the stored head: an append may have committed although the writer got no
  answer about its turn.
* An append that does not commit within `TURN_S` loses its turn.
* After a turn the waiting writers get the same time, so that consecutive appends do not block them.
* A client that waits for the lock itself is reported once, and not during a turn.
* A writer that is paused continues or fails, also after a defect: its callers never wait for ever.

Records are never lost or overwritten, because each change is guarded by the version of the head.
Turns only keep the two sides from overtaking each other for ever, and the writer's transaction ids
above those of the append.

The driver (`turns_driver.py`) performs the effects and feeds the answers back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.machines import CallFailed, Machine, State, Transitions
from dlcore.log.metadata.changes import lssn_to_merge
from dlcore.metadata.port import UNANSWERED

if TYPE_CHECKING:
    from dlcore.base.errors import DLError
    from dlcore.log.metadata.values import LockHolder, LogHead, Turn, VersionedHead

TURN_S = 5.0
"""An append that has not committed after this time loses its turn."""
RETRY_S = 0.2


class TurnState(State):
    """The state of the machine; OVER is final."""

    FREE = "no append asks for a turn"
    LOOKING = "whether an append asks is read"
    PARTING = "the writer answers what it accepted, and closes its extent"
    GIVING = "the turn is being set to given"
    GIVEN = "an append may commit"
    CHECKING = "whether the append's turn is over is read"
    REVOKING = "an append did not commit in time, and its turn is being ended"
    RETURNING = "the head is read, from which the writer continues"
    RESTING = "the writer writes, and no append gets a turn"
    OVER = "the writer has ended, or the log is sealed"


_S = TurnState
_PAUSED = frozenset({_S.GIVING, _S.GIVEN, _S.CHECKING, _S.REVOKING, _S.RETURNING})
"""In these the writer is paused.  Before and after them it writes, or has ended."""
_BROKEN = {_S.OVER: "a defect"}
_REFUSED = {_S.OVER: "refused, or a defect"}
TRANSITIONS = Transitions(
    _S.FREE,
    {
        _S.FREE: {_S.LOOKING: "the lock changed", **_BROKEN},
        _S.LOOKING: {
            _S.FREE: "no append asks, or no answer",
            _S.LOOKING: "the lock changed meanwhile",
            _S.PARTING: "an append asks",
            **_REFUSED,
        },
        _S.PARTING: {_S.GIVING: "all answered", _S.OVER: "sealed, failed or closed; a defect"},
        _S.GIVING: {
            _S.CHECKING: "given",
            _S.RETURNING: "no append asks any more, or no answer",
            **_REFUSED,
        },
        _S.GIVEN: {_S.CHECKING: "the lock changed", _S.REVOKING: "time is over", **_BROKEN},
        _S.CHECKING: {
            _S.GIVEN: "not over yet",
            _S.CHECKING: "the lock changed meanwhile",
            _S.REVOKING: "time is over",
            _S.RETURNING: "over, or no answer",
            **_REFUSED,
        },
        _S.REVOKING: {_S.RETURNING: "over, or no answer", **_REFUSED},
        _S.RETURNING: {_S.RESTING: "the writer continues", **_REFUSED},
        _S.RESTING: {_S.LOOKING: "later", **_BROKEN},
        _S.OVER: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    CHANGED = "the lock's node may have changed"
    PAUSED = "the writer has no extent open, and begins none"
    RETRY_DUE = "the head may be read again"
    REST_DUE = "appends may get turns again"


@dataclass(frozen=True, slots=True)
class Looked:
    """Event: the holder in the lock's node; None if it is not this writer."""

    holder: LockHolder | None
    now: float


@dataclass(frozen=True, slots=True)
class TurnSet:
    """Event: the turn was set, or was another one before."""

    is_set: bool


@dataclass(frozen=True, slots=True)
class HeadRead:
    """Event: the stored head, with everything that was committed before it was read."""

    at: VersionedHead
    now: float


@dataclass(frozen=True, slots=True)
class TurnDue:
    """Event: `TURN_S` have passed since the turn of this number was given."""

    number: int


@dataclass(frozen=True, slots=True)
class Broken:
    """Event: a defect ended the driver's work."""

    error: DLError


Event: TypeAlias = Signal | Looked | TurnSet | HeadRead | TurnDue | CallFailed | Broken


class Call(enum.Enum):
    """Effects that carry nothing: calls with one answer, which may be `CallFailed`."""

    LOOK = "read the lock's node; answer with `Looked`"
    PAUSE = "let the writer end its extent; answer with `PAUSED`"
    READ_HEAD = "read the log's head; answer with `HeadRead`"


@dataclass(frozen=True, slots=True)
class SetTurn:
    """Effect: change the turn from `before`; answer with `TurnSet`, or with `CallFailed`."""

    before: Turn
    turn: Turn


@dataclass(frozen=True, slots=True)
class After:
    """Effect: feed `event` after so many seconds."""

    after_s: float
    event: Signal | TurnDue


@dataclass(frozen=True, slots=True)
class StepBack:
    """Effect: let the writer continue from this head."""

    at: VersionedHead


@dataclass(frozen=True, slots=True)
class AskForUpkeep:
    """Effect: ask to merge the log's extents from this segment on; a failure does no harm."""

    lssn: int


@dataclass(frozen=True, slots=True)
class ReportWanted:
    """Effect: this client waits for the lock itself."""

    client: str


@dataclass(frozen=True, slots=True)
class FailWriter:
    """Effect: the writer cannot continue, because of `error`."""

    error: DLError


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: log that `what`; `error` is the reason, None if there is none."""

    what: str
    error: DLError | None = None


Effect: TypeAlias = (
    Call | SetTurn | After | StepBack | AskForUpkeep | ReportWanted | FailWriter | Note
)


class Turns(Machine[TurnState]):
    """The turns of appends beside one writer.

    Args:
        head: the log's head when the writer began.
    """

    transitions = TRANSITIONS

    def __init__(self, head: LogHead) -> None:
        self.state = TurnState.FREE
        self._head = head  # at the end of the last turn
        self._may_differ = False  # the lock, since the last look began
        self._number = 0  # of the last turn that was given
        self._is_late = False  # the append that has this turn
        self._begun_s = 0.0  # when the last turn was asked for
        self._wanted_by = ""

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; answers to calls come one at a time."""
        if self.state is TurnState.OVER:
            return []  # as a timer, or the answer to a call that a defect left under way
        match event:
            case Signal():
                return self._on_signal(event)
            case Looked(holder, now):
                return self._looked(holder, now)
            case TurnSet(is_set):
                return self._turn_set(is_set=is_set)
            case HeadRead(at, now):
                return self._step_back(at, now)
            case TurnDue(number):
                return self._turn_due(number)
            case CallFailed(error):
                return self._call_failed(error)
            case Broken(error):
                # The writer may be paused already, although the answer did not come.
                return self._end(error, may_be_paused=self.state is TurnState.PARTING)
            case _:
                assert_never(event)

    def _on_signal(self, signal: Signal) -> list[Effect]:
        match signal:
            case Signal.CHANGED:
                return self._changed()
            case Signal.PAUSED:
                # "given" promises that the head has no open extent.
                self._become(TurnState.GIVING)
                return [SetTurn("asked", "given")]
            case Signal.RETRY_DUE:
                return [Call.READ_HEAD]
            case Signal.REST_DUE:
                return self._look(TurnState.LOOKING)
            case _:
                assert_never(signal)

    def _changed(self) -> list[Effect]:
        if self.state is TurnState.FREE:
            return self._look(TurnState.LOOKING)
        if self.state is TurnState.GIVEN:
            return self._look(TurnState.CHECKING)
        self._may_differ = True  # only a look in progress needs it; another state has a look ahead
        return []

    def _look(self, state: TurnState) -> list[Effect]:
        self._become(state)
        self._may_differ = False
        return [Call.LOOK]

    def _looked(self, holder: LockHolder | None, now: float) -> list[Effect]:
        turn = "refused" if holder is None else holder.turn
        if self.state is TurnState.CHECKING:
            return self._go_on_waiting() if turn == "given" else self._return()
        effects: list[Effect] = []
        if holder is not None and holder.wanted_by and not self._wanted_by:
            self._wanted_by = holder.wanted_by
            effects.append(ReportWanted(holder.wanted_by))
        if turn != "asked":
            return effects + self._settle()
        self._begun_s = now
        self._become(TurnState.PARTING)
        return [*effects, Call.PAUSE]

    def _settle(self) -> list[Effect]:
        """Be FREE, unless the lock may have changed: no append asks, as far as is known."""
        if self._may_differ:
            return self._look(TurnState.LOOKING)
        self._become(TurnState.FREE)
        return []

    def _turn_set(self, *, is_set: bool) -> list[Effect]:
        if self.state is TurnState.REVOKING or not is_set:
            return self._return()
        self._number, self._is_late = self._number + 1, False
        return [After(TURN_S, TurnDue(self._number)), *self._look(TurnState.CHECKING)]

    def _go_on_waiting(self) -> list[Effect]:
        if self._is_late:
            return self._revoke()
        if self._may_differ:
            return self._look(TurnState.CHECKING)
        self._become(TurnState.GIVEN)
        return []

    def _turn_due(self, number: int) -> list[Effect]:
        # Another number is that of an earlier turn, which has ended.
        if number == self._number:
            self._is_late = True
        return self._revoke() if self._is_late and self.state is TurnState.GIVEN else []

    def _revoke(self) -> list[Effect]:
        self._become(TurnState.REVOKING)
        return [Note("an append did not use its turn"), SetTurn("given", "free")]

    def _return(self) -> list[Effect]:
        self._become(TurnState.RETURNING)
        return [Call.READ_HEAD]

    def _step_back(self, at: VersionedHead, now: float) -> list[Effect]:
        before, self._head = self._head, at.head
        # The extents since the last turn, the writer's own ones too, may be worth a merge.
        lssn = lssn_to_merge(before, at.head)
        asked: list[Effect] = [] if lssn is None else [AskForUpkeep(lssn)]
        self._become(TurnState.RESTING)
        # As long as the writer was kept from writing, so that appends get half of the time at most.
        rest = After(min(now - self._begun_s, TURN_S), Signal.REST_DUE)
        return [StepBack(at), *asked, rest]

    def _call_failed(self, error: DLError) -> list[Effect]:
        is_open = isinstance(error, UNANSWERED)
        if self.state is TurnState.RETURNING:
            return [After(RETRY_S, Signal.RETRY_DUE)] if is_open else self._end(error)
        # A writer that cannot end its extent has failed, whatever its error is.
        if not is_open or self.state is TurnState.PARTING:
            return self._end(error)
        if self.state is TurnState.LOOKING:
            # The append asks as long as it waits; after a reconnection the watch fires.
            return [Note("cannot read whether a turn is asked for", error), *self._settle()]
        return [Note("cannot read whether the turn is over", error), *self._return()]

    def _end(self, error: DLError, *, may_be_paused: bool = False) -> list[Effect]:
        # Nothing else lets a paused writer continue: its callers would wait for ever.
        is_paused = may_be_paused or self.state in _PAUSED
        failed: list[Effect] = [FailWriter(error)] if is_paused else []
        self._become(TurnState.OVER)
        return [*failed, Note("no more turns are given", error)]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self.state is not TurnState.FREE or not self._may_differ
        assert self.state is not TurnState.GIVEN or not (self._may_differ or self._is_late)
