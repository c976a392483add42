"""Redaction of a log: the steps after which no file has a byte of the rows that were named.

Theory of operation.  The chain is scanned for entries with such rows.  Each run of extents that has
some is copied without them, to a ledger or to objects, as merging and tiering copy; the swap of
merges puts the copy in its place, and the same transaction notes in the redaction's own node what
was replaced.  The chain is scanned again, until nothing is found.  Then come rounds in which old
copies go: the table follows the chain and forgets its history, replaced ledgers and objects are
deleted, and bookies are asked to erase.  Rounds end when nothing is left, or with the caller's
patience.  docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Promises:

* Nothing is changed before the whole log was scanned and no obstacle was found.
* Every position, count, transaction id, sequence id and time stays.
* It ends well only after a scan that found nothing, and when no old copy was left in a round.
* Each step may be done twice: after a crash, the same command goes on.

The driver is `redactor.py`.  Each event has one effect.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.errors import DLError, UnexpectedError, UnsupportedError
from dlcore.base.machines import CallFailed, Ended, State, StepMachine, Transitions

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dlcore.log.metadata.segment import Extent
    from dlcore.ops.upkeep.config import MergePolicy

SCANS_MAX = 10
"""How often the log is scanned until it is given up, because it changes all the time."""
PAUSE_S = 1.0
"""The pause between two rounds."""


class RedactionState(State):
    """The state of the machine; CLEAN, DONE, WAITING and FAILED are final."""

    READY = "nothing has begun"
    SCANNING = "all entries of the log are read"
    COMPLETING = "the segment in progress is completed"
    REWRITING = "a run of extents is copied without the rows, and swapped"
    FOLLOWING = "the table follows the chain, and forgets its history"
    DROPPING = "replaced ledgers are deleted"
    DELETING = "objects that no ledger names are deleted"
    ASKING = "bookies are asked to erase, or for their answers"
    PAUSING = "something is left, and tried again later"
    FINISHING = "the redaction's node is removed"
    CLEAN = "the log had no such row, and no redaction had begun"
    DONE = "no file has the rows any more"
    WAITING = "the log has the rows no more; some files still have them"
    FAILED = "refused, or an error"


_S = RedactionState
_FAILED = {_S.FAILED: "an error"}
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.SCANNING: "begin"},
        _S.SCANNING: {
            _S.COMPLETING: "the segment in progress has rows",
            _S.REWRITING: "completed segments have rows",
            _S.FOLLOWING: "no rows, and something was replaced, now or before",
            _S.CLEAN: "no rows, and nothing was replaced",
            _S.FAILED: "an obstacle, an error, or too many scans",
        },
        _S.COMPLETING: {_S.SCANNING: "completed", **_FAILED},
        _S.REWRITING: {
            _S.REWRITING: "the next run",
            _S.SCANNING: "the last one, or another change was first",
            **_FAILED,
        },
        _S.FOLLOWING: {_S.DROPPING: "done, or noted what is left"},
        _S.DROPPING: {_S.DELETING: "done, or noted what is left"},
        _S.DELETING: {_S.ASKING: "done, or noted what is left"},
        _S.ASKING: {
            _S.FINISHING: "nothing is left",
            _S.PAUSING: "something is left",
            _S.WAITING: "truncated segments stay",
        },
        _S.PAUSING: {_S.FOLLOWING: "later", _S.WAITING: "patience is over"},
        _S.FINISHING: {_S.DONE: "removed", **_FAILED},
        _S.CLEAN: {},
        _S.DONE: {},
        _S.WAITING: {},
        _S.FAILED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    BEGIN = "the conditions fit the log"
    COMPLETED = "the segment in progress is completed"
    PAUSE_OVER = "the pause is over"
    PATIENCE_OVER = "the pause is over, and so is the patience of the caller"
    FINISHED = "the redaction's node is removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Adjacent extents of a segment, all cold or none, that are copied without `rows` rows.

    Some may have none: their ledger has rows in another extent, and goes as a whole.
    """

    lssn: int
    first: int
    parts: tuple[Extent, ...]
    rows: int

    @property
    def is_cold(self) -> bool:
        """Whether its entries are in objects."""
        return self.parts[0].is_cold


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """Event: the log was scanned.

    Attributes:
        runs: what is to be copied, in completed segments.
        open_rows: rows in the segment in progress.
        must_complete: whether the segment in progress must be completed first: it has rows, or
            extents of a ledger that has.
        obstacles: what forbids to begin.
        kept: what stays although it has rows, as truncated segments do for a time.
        is_begun: whether extents were replaced, now or before, or old copies are to go in any case.
    """

    runs: tuple[Run, ...] = ()
    open_rows: int = 0
    must_complete: bool = False
    obstacles: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    is_begun: bool = False

    @property
    def rows(self) -> int:
        """All rows that are to be redacted."""
        return self.open_rows + sum(each.rows for each in self.runs)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Event: the copy is in the log; False: another change was first."""

    is_there: bool


@dataclass(frozen=True, slots=True)
class Left:
    """Event: a step of a round is done but for these, each a sentence."""

    what: tuple[str, ...] = ()


Event: TypeAlias = Signal | Scanned | Rewritten | Left | CallFailed


class Call(enum.Enum):
    """Effects that carry nothing; without another word they are answered with `Left`."""

    SCAN = "read all entries; answer with `Scanned`"
    COMPLETE = "complete the segment in progress; answer with `COMPLETED`"
    FOLLOW = "let the table follow, and forget its history"
    DROP = "delete the ledgers that were replaced, and note them for bookies"
    DELETE = "delete objects of the log that no ledger names"
    ASK = "ask bookies to erase, or for their answers"
    FINISH = "remove the redaction's node and the request to bookies; answer with `FINISHED`"


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Effect: copy a run without its rows, and swap it; answer with `Rewritten`."""

    run: Run


@dataclass(frozen=True, slots=True)
class Wait:
    """Effect: wait; answer with `PAUSE_OVER`, or `PATIENCE_OVER`."""

    s: float
    left: tuple[str, ...]


Work: TypeAlias = Call | Rewrite | Wait
"""Effects that the driver performs."""
Effect: TypeAlias = Work | Ended[bool]
_ROUND = {
    RedactionState.FOLLOWING: (RedactionState.DROPPING, Call.DROP),
    RedactionState.DROPPING: (RedactionState.DELETING, Call.DELETE),
    RedactionState.DELETING: (RedactionState.ASKING, Call.ASK),
}


class Redaction(StepMachine[RedactionState, Event, Work, bool]):
    """One redaction, which ends with whether no file has the rows any more."""

    transitions = TRANSITIONS

    def __init__(self) -> None:
        self.state = RedactionState.READY
        self._scans = 0
        self._runs: list[Run] = []
        self._is_changed = False
        self._kept: tuple[str, ...] = ()
        self._left: list[str] = []

    @property
    def left(self) -> tuple[str, ...]:
        """Why some files still have the rows, a sentence each."""
        return (*self._kept, *self._left)

    def handle(self, event: Event) -> Effect:
        """Take one event."""
        try:
            match event:
                case Signal.BEGIN | Signal.COMPLETED:
                    return self._scan()
                case Scanned():
                    return self._scanned(event)
                case Rewritten(is_there):
                    self._is_changed |= is_there
                    return self._next_run() if is_there else self._scan()
                case Left(what):
                    return self._step_done(what)
                case Signal.PAUSE_OVER:
                    return self._begin_round()
                case Signal.PATIENCE_OVER:
                    self._become(RedactionState.WAITING)
                    return Ended(False)
                case Signal.FINISHED:
                    self._become(RedactionState.DONE)
                    return Ended(True)
                case CallFailed(error):
                    return self._call_failed(error)
                case _:
                    assert_never(event)
        except DLError as error:
            self._become(RedactionState.FAILED)
            return Ended(error)

    def _scan(self) -> Effect:
        if self._scans == SCANS_MAX:
            raise UnexpectedError(
                f"the log was scanned {SCANS_MAX} times, and had such rows again each time: run "
                "the command again when no writer writes them any more"
            )
        self._become(RedactionState.SCANNING)
        self._scans += 1
        return Call.SCAN

    def _scanned(self, seen: Scanned) -> Effect:
        self._kept = seen.kept
        if seen.rows and seen.obstacles:
            raise UnsupportedError("; ".join(seen.obstacles))
        if seen.must_complete:
            self._become(RedactionState.COMPLETING)
            return Call.COMPLETE
        # From the last one on: what is before a run stays where it is.
        self._runs = sorted(seen.runs, key=lambda each: (each.lssn, each.first))
        if self._runs:
            return self._next_run()
        if seen.is_begun or seen.kept or self._is_changed:
            return self._begin_round()
        self._become(RedactionState.CLEAN)
        return Ended(True)

    def _next_run(self) -> Effect:
        if not self._runs:
            return self._scan()
        self._become(RedactionState.REWRITING)
        return Rewrite(self._runs.pop())

    def _begin_round(self) -> Effect:
        self._become(RedactionState.FOLLOWING)
        self._left = []
        return Call.FOLLOW

    def _step_done(self, what: Sequence[str]) -> Effect:
        self._left += what
        if self.state in _ROUND:
            state, call = _ROUND[self.state]
            self._become(state)
            return call
        if self._left:
            self._become(RedactionState.PAUSING)
            return Wait(PAUSE_S, self.left)
        if self._kept:
            # The node stays, so that the same command later removes what is left then.
            self._become(RedactionState.WAITING)
            return Ended(False)
        self._become(RedactionState.FINISHING)
        return Call.FINISH

    def _call_failed(self, error: DLError) -> Effect:
        if self.state in _ROUND or self.state is RedactionState.ASKING:
            # A store or a server that is away: the other steps go on, and this one later.
            return self._step_done((f"{type(error).__name__}: {error}",))
        raise error

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self._scans <= SCANS_MAX
        assert self._runs == [] or self.state in (
            RedactionState.REWRITING,
            RedactionState.SCANNING,  # another change was first: what is planned is forgotten
            RedactionState.FAILED,
        )
        if self.state is RedactionState.DONE:
            assert not self.left
        if self.state is RedactionState.CLEAN:
            assert not self._is_changed


def plan_runs(
    extents: Sequence[Extent],
    rows: Sequence[int],
    policy: MergePolicy,
    *,
    lssn: int,
    tainted: Collection[int],
) -> list[Run]:
    """Return the runs of a segment to copy: all extents of the ledgers that have rows.

    Args:
        extents: the extents of the segment.
        rows: how many rows each has that are to be redacted.
        policy: the limits of one run.
        lssn: the segment.
        tainted: the ledgers that have such rows, here or elsewhere.
    """
    runs: list[Run] = []
    part: list[int] = []

    def end() -> None:
        if part:
            parts = tuple(extents[index] for index in part)
            counted = sum(rows[index] for index in part)
            runs.append(Run(lssn=lssn, first=part[0], parts=parts, rows=counted))
            part.clear()

    for index, extent in enumerate(extents):
        if extent.ledger_id not in tainted:
            end()
            continue
        ledgers = {extents[each].ledger_id for each in part} | {extent.ledger_id}
        size = sum(extents[each].size_bytes for each in part) + extent.size_bytes
        if part and (
            extents[part[0]].is_cold is not extent.is_cold
            or len(part) == policy.run_extents_max
            or len(ledgers) > policy.run_ledgers_max
            or size > policy.run_weight_max
        ):
            end()
        part.append(index)
    end()
    return runs
