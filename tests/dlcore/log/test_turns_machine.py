"""Goal: every transition of the machine that gives turns to appends.

Method: exact effects; then seeded chance, with a lock, a writer and appends that keep its rules.
"""

from __future__ import annotations

import random

import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    CorruptMetadataError,
    DLError,
    EndOfStreamError,
    LogNotFoundError,
    MetadataConnectionError,
    UnexpectedError,
)
from dlcore.base.machines import CallFailed
from dlcore.log.metadata.changes import SegmentLimits, plan_append
from dlcore.log.metadata.values import LockHolder, Turn, VersionedHead
from dlcore.log.proxied.turns import (
    RETRY_S,
    TRANSITIONS,
    TURN_S,
    After,
    AskForUpkeep,
    Broken,
    Call,
    Effect,
    Event,
    FailWriter,
    HeadRead,
    Looked,
    Note,
    ReportWanted,
    SetTurn,
    Signal,
    StepBack,
    TurnDue,
    Turns,
    TurnSet,
    TurnState,
)
from tests.fixtures.appenders import EMPTY, PATHS
from tests.fixtures.log_states import staged

AWAY = MetadataConnectionError("no answer")
CLOSED = AlreadyClosedError("closed")
DEFECT = UnexpectedError("broke")
GIVE = SetTurn("asked", "given")
REVOKE = SetTurn("given", "free")
LATE = Note("an append did not use its turn")


def holder(turn: Turn, *, wanted_by: str = "") -> LockHolder:
    """Return the writer, as its lock's node shows it."""
    return LockHolder(owner="proxy", token="t", turn=turn, wanted_by=wanted_by)


class Bench:
    """A machine that is validated after each event."""

    def __init__(self) -> None:
        self.machine = Turns(EMPTY.head)

    def handle(self, event: Event) -> list[Effect]:
        """Feed an event."""
        effects = self.machine.handle(event)
        self.machine.validate()
        return effects

    def look(self, turn: Turn | None, *, now: float = 0.0, wanted_by: str = "") -> list[Effect]:
        """Answer a look; None: the lock is not the writer's."""
        seen = None if turn is None else holder(turn, wanted_by=wanted_by)
        return self.handle(Looked(seen, now))

    def asked(self, *, now: float = 0.0) -> None:
        """Let an append ask."""
        assert self.handle(Signal.CHANGED) == [Call.LOOK]
        assert self.look("asked", now=now) == [Call.PAUSE]

    def given(self, *, now: float = 0.0, number: int = 1) -> None:
        """Give a turn that is not used yet."""
        self.asked(now=now)
        assert self.handle(Signal.PAUSED) == [GIVE]
        assert self.handle(TurnSet(True)) == [After(TURN_S, TurnDue(number)), Call.LOOK]
        assert self.look("given") == []

    def returned(self, *, now: float, at: VersionedHead = EMPTY) -> list[Effect]:
        """Let the writer continue."""
        back, *rest = self.handle(HeadRead(at, now))
        assert back == StepBack(at)
        return rest


def test_a_turn_that_is_used() -> None:
    """The writer continues from the stored head, and writes as long as it had to wait."""
    bench = Bench()
    bench.given(now=10.0)
    assert bench.handle(Signal.CHANGED) == [Call.LOOK]
    assert bench.look("free") == [Call.READ_HEAD]
    assert bench.returned(now=11.5) == [After(1.5, Signal.REST_DUE)]
    assert bench.handle(Signal.CHANGED) == []
    assert bench.handle(Signal.REST_DUE) == [Call.LOOK]
    assert bench.look("free") == []
    assert bench.machine.state is TurnState.FREE


def test_a_turn_that_is_not_used_is_ended() -> None:
    """By the timer of this turn, not by that of an earlier one."""
    bench = Bench()
    bench.given()
    bench.handle(Signal.CHANGED)
    bench.look("free")
    assert bench.returned(now=60.0) == [After(TURN_S, Signal.REST_DUE)]
    assert bench.handle(Signal.REST_DUE) == [Call.LOOK]
    bench.look("free")
    bench.given(number=2)
    assert bench.handle(TurnDue(1)) == []
    assert bench.handle(TurnDue(2)) == [LATE, REVOKE]
    assert bench.handle(TurnSet(True)) == [Call.READ_HEAD]


def test_a_turn_is_over_while_the_lock_is_read() -> None:
    """The answer decides: a turn that was used is not ended."""
    for turn in ("given", "free"):
        bench = Bench()
        bench.given()
        assert bench.handle(Signal.CHANGED) == [Call.LOOK]
        assert bench.handle(TurnDue(1)) == []
        assert bench.look(turn) == ([LATE, REVOKE] if turn == "given" else [Call.READ_HEAD])
    assert bench.returned(now=0.0) == [After(0.0, Signal.REST_DUE)]


def test_a_lock_that_changes_during_a_look_is_read_again() -> None:
    """Before a turn and in it."""
    bench = Bench()
    assert bench.handle(Signal.CHANGED) == [Call.LOOK]
    assert bench.handle(Signal.CHANGED) == []
    assert bench.look("free") == [Call.LOOK]
    assert bench.look(None) == []
    bench.given()
    assert bench.handle(Signal.CHANGED) == [Call.LOOK]
    assert bench.handle(Signal.CHANGED) == []
    assert bench.look("given") == [Call.LOOK]
    assert bench.look(None) == [Call.READ_HEAD]


def test_a_client_that_waits_for_the_lock_is_reported_once() -> None:
    """If the news comes with a turn, it is reported after the turn."""
    bench = Bench()
    bench.given()
    bench.handle(Signal.CHANGED)
    assert bench.look("free", wanted_by="x") == [Call.READ_HEAD]
    bench.returned(now=0.0)
    bench.handle(Signal.REST_DUE)
    assert bench.look("asked", wanted_by="x") == [ReportWanted("x"), Call.PAUSE]
    bench.handle(Signal.PAUSED)
    bench.handle(TurnSet(False))
    bench.returned(now=0.0)
    bench.handle(Signal.REST_DUE)
    assert bench.look("free", wanted_by="y") == []


def test_an_append_that_is_gone_before_its_turn() -> None:
    """The writer continues, but from the stored head."""
    bench = Bench()
    bench.asked()
    bench.handle(Signal.PAUSED)
    assert bench.handle(TurnSet(False)) == [Call.READ_HEAD]


def test_missing_answers() -> None:
    """A look waits for the next change; a turn is over, and the head is read until it is known."""
    bench = Bench()
    bench.handle(Signal.CHANGED)
    assert bench.handle(CallFailed(AWAY)) == [Note("cannot read whether a turn is asked for", AWAY)]
    bench.asked()
    bench.handle(Signal.PAUSED)
    note = Note("cannot read whether the turn is over", AWAY)
    assert bench.handle(CallFailed(AWAY)) == [note, Call.READ_HEAD]
    assert bench.handle(CallFailed(AWAY)) == [After(RETRY_S, Signal.RETRY_DUE)]
    assert bench.handle(Signal.RETRY_DUE) == [Call.READ_HEAD]
    bench.returned(now=0.0)
    bench.handle(Signal.REST_DUE)
    bench.look("free")
    bench.given()
    bench.handle(TurnDue(1))
    assert bench.handle(CallFailed(AWAY)) == [note, Call.READ_HEAD]


def test_a_writer_that_ends_gives_no_more_turns() -> None:
    """Sealed, closed, or failed, be it for a store without an answer; the log may be gone."""
    for error in (EndOfStreamError("sealed"), AWAY):
        bench = Bench()
        bench.asked()
        assert bench.handle(CallFailed(error)) == [Note("no more turns are given", error)]
        assert bench.machine.state is TurnState.OVER
        assert bench.handle(Signal.CHANGED) == []
    bench = Bench()
    bench.asked()
    bench.handle(Signal.PAUSED)
    bench.handle(TurnSet(False))
    gone = LogNotFoundError("gone")
    over = Note("no more turns are given", gone)
    assert bench.handle(CallFailed(gone)) == [FailWriter(gone), over]


def test_a_paused_writer_fails_if_no_more_turns_are_given() -> None:
    """Else it would take no records, and its callers would wait for ever."""
    set_ = TurnSet(True)
    waits: dict[TurnState, list[Event]] = {
        TurnState.GIVING: [],
        TurnState.CHECKING: [set_],
        TurnState.REVOKING: [set_, Looked(holder("given"), 0.0), TurnDue(1)],
        TurnState.RETURNING: [set_, Looked(holder("free"), 0.0)],
    }
    damaged = CorruptMetadataError("a newer layout")
    for state, events in waits.items():
        for last in (CallFailed(damaged), Broken(DEFECT)):
            bench = Bench()
            bench.asked()
            for event in (Signal.PAUSED, *events):
                bench.handle(event)
            assert bench.machine.state is state
            assert bench.handle(last) == over(last.error, is_held=True)


def over(error: DLError, *, is_held: bool) -> list[Effect]:
    """Return the last effects; `is_held`: with the writer's failure."""
    note = Note("no more turns are given", error)
    return [FailWriter(error), note] if is_held else [note]


def test_a_defect_fails_only_a_writer_that_may_be_paused() -> None:
    """Nothing else happens after it, whatever was under way."""
    broken = Broken(DEFECT)
    begun: dict[TurnState, list[Event]] = {
        TurnState.FREE: [],
        TurnState.LOOKING: [Signal.CHANGED],
        TurnState.PARTING: [Signal.CHANGED, Looked(holder("asked"), 0.0)],
    }
    held = {TurnState.PARTING, TurnState.GIVEN}
    for state, events in begun.items():
        bench = Bench()
        for event in events:
            bench.handle(event)
        assert bench.machine.state is state
        assert bench.handle(broken) == over(broken.error, is_held=state in held)
    given, resting = Bench(), Bench()
    given.given()
    resting.given()
    resting.handle(Signal.CHANGED)
    resting.look("free")
    resting.returned(now=0.0)
    for bench in (given, resting):
        is_held = bench.machine.state in held
        assert bench.handle(broken) == over(broken.error, is_held=is_held)
        for late in (broken, Signal.CHANGED, Signal.REST_DUE, TurnDue(1), TurnSet(True)):
            assert bench.handle(late) == []


def test_extents_since_the_last_turn_may_be_worth_a_merge() -> None:
    """The request names their segment, once."""
    limits, at = SegmentLimits(size_bytes_max=1, age_max_ms=10**9), EMPTY
    bench = Bench()
    asked: list[Effect] = []
    for number in range(3):
        at = plan_append(PATHS, at, [staged(number + 1)], now_ms=0, limits=limits)[0].after
        bench.given(number=number + 1)
        bench.handle(Signal.CHANGED)
        bench.look("free")
        *upkeep, _ = bench.returned(now=0.0, at=at)
        asked += upkeep
        bench.handle(Signal.REST_DUE)
        bench.look("free")
    assert asked == [AskForUpkeep(1), AskForUpkeep(2)]


def test_chance_makes_every_transition_and_no_turn_beside_an_open_extent() -> None:
    """Appends come, use their turn or not; the store does not answer at times."""
    made: set[tuple[TurnState, TurnState]] = set()
    for seed in range(200):
        made |= Life(random.Random(seed)).run()
    assert made == {
        (before, after) for before, afters in TRANSITIONS.causes.items() for after in afters
    }


class Life:
    """A lock and a writer around a machine."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bench = Bench()
        self.turn: Turn = "free"
        self.is_paused = self.has_failed = False
        self.now = 0.0
        self.calls: list[Effect] = []
        self.timers: list[After] = []

    def run(self) -> set[tuple[TurnState, TurnState]]:
        """Let something happen many times; return the transitions."""
        made = set[tuple[TurnState, TurnState]]()
        for _ in range(80):
            before, self.now = self.bench.machine.state, self.now + 1.0
            for effect in self.step():
                self.perform(effect)
            after = self.bench.machine.state
            if before is not after or Call.LOOK in self.calls:
                made.add((before, after))
            # The promise: an append that commits in its turn finds no open extent.
            assert self.turn != "given" or self.is_paused
            assert len(self.calls) <= 1, "one call at a time"
            assert after is not TurnState.OVER or self.has_failed or not self.is_paused
        return {(one, other) for one, other in made if other in TRANSITIONS.causes[one]}

    def step(self) -> list[Effect]:
        """Let an append act, a timer end, or a call be answered; return the effects."""
        rng = self.rng
        if rng.random() < 0.003:
            return self.bench.handle(Broken(DEFECT))
        match rng.randrange(6):
            case 0:
                # An append asks, or commits in its turn, or leaves it unused.
                before: Turn = self.turn
                self.turn = "asked" if before == "free" else "free" if before == "given" else before
                return [] if before == self.turn else self.bench.handle(Signal.CHANGED)
            case 1:
                return self.bench.handle(Signal.CHANGED)
            case 2 if self.timers:
                return self.bench.handle(self.timers.pop(rng.randrange(len(self.timers))).event)
            case _ if self.calls:
                return self.answer(self.calls.pop())
            case _:
                return []

    def answer(self, call: Effect) -> list[Effect]:
        """Answer a call."""
        if (luck := self.rng.random()) < 0.1:
            return self.bench.handle(CallFailed(AWAY if luck < 0.08 else CLOSED))
        match call:
            case Call.LOOK:
                return self.bench.look(self.turn, now=self.now)
            case Call.PAUSE:
                self.is_paused = True
                return self.bench.handle(Signal.PAUSED)
            case SetTurn(before, turn):
                is_set = self.turn == before
                self.turn = turn if is_set else self.turn
                return self.bench.handle(TurnSet(is_set))
            case _:
                return self.bench.handle(HeadRead(EMPTY, self.now))

    def perform(self, effect: Effect) -> None:
        """Note what the machine wants."""
        match effect:
            case Call() | SetTurn():
                self.calls.append(effect)
            case After():
                self.timers.append(effect)
            case FailWriter():
                self.has_failed = True
            case StepBack():
                # A turn that is still given is of an append that the version of the head refuses.
                self.is_paused = False
                self.turn = "free" if self.turn == "given" else self.turn
            case _:
                pass


def test_the_machine_asserts_its_table() -> None:
    """An answer that no one waits for is a defect."""
    with pytest.raises(AssertionError):
        Bench().handle(TurnSet(True))
