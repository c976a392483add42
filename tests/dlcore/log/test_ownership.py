"""Goal: every transition of the ownership machine.

Method: exact effects for each event; then seeded chance among all events, wanted or not.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from dlcore.base.backoff import REPORTED_AFTER_S
from dlcore.base.errors import (
    AlreadyClosedError,
    DLError,
    LogNotFoundError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    OwnershipAcquireFailedError,
    UnexpectedError,
)
from dlcore.log.metadata.values import LockHolder
from dlcore.log.writing.ownership import (
    ATTEMPTS_MAX,
    TRANSITIONS,
    Acquire,
    After,
    AskHolder,
    Broken,
    Call,
    CallFailed,
    CreateLock,
    Denied,
    Effect,
    Event,
    LockRead,
    Notice,
    Ownership,
    OwnershipState,
    Report,
    ReportDue,
    Signal,
    Verified,
)
from tests.fixtures.lengths import for_each

OTHER = LockHolder(owner="host:1", token="other")
OWN = LockHolder(owner="me", token="t1")
CREATE = CreateLock(None)
EXISTS = CallFailed(CREATE, NodeExistsError("exists"))
AWAY = MetadataConnectionError("no answer")
BROKEN = UnexpectedError("a defect")


class Bench:
    """A machine that is validated after each event, and whose attempts have the token t1."""

    def __init__(self, *, timeout_s: float = 60.0, asks: bool = False) -> None:
        self.machine = Ownership("clicks", "me", asks=asks)
        effects = self.handle(Acquire(timeout_s, 0.0))
        timers = [After(timeout_s, REPORTED_AFTER_S)] if timeout_s > 0 else []
        assert effects == [*timers, CREATE]
        self.machine.attempted("t1")

    def handle(self, event: Event) -> list[Effect]:
        """Feed an event."""
        effects = self.machine.handle(event)
        self.machine.validate()
        return effects

    def read(
        self, holder: LockHolder | None, *, is_current: bool = False, now: float = 0.0
    ) -> list[Effect]:
        """Answer a read of the node."""
        return self.handle(LockRead(holder, 3, is_current, now))

    def held(self, holder: LockHolder = OTHER) -> list[Effect]:
        """Find out that another has the lock."""
        assert self.handle(EXISTS) == [Call.READ]
        return self.read(holder)

    def owned(self) -> Bench:
        """Own the log, and return this."""
        assert self.handle(Signal.CREATED) == [Notice.GRANTED]
        assert self.machine.is_owner
        return self

    def lost(self) -> Bench:
        """Lose the session, and get another one; return this."""
        assert self.handle(Signal.EXPIRED) == [Notice.SUSPENDED]
        assert not self.machine.is_owner
        assert self.handle(Signal.RESUMED) == [Call.VERIFY]
        return self


def denied(effects: list[Effect]) -> DLError:
    """Return the error of a denial."""
    (effect,) = effects
    assert isinstance(effect, Denied)
    return effect.error


def owner_of(error: DLError) -> str:
    """Return the owner that a denial names."""
    assert isinstance(error, OwnershipAcquireFailedError)
    return error.owner


def test_waiting_for_another_owner() -> None:
    """It tries again when the node changes, and gives up on command."""
    bench = Bench()
    assert bench.held() == []
    assert bench.machine.is_waiting
    assert bench.handle(Signal.CHANGED) == [CREATE]
    assert bench.held() == []
    error = denied(bench.handle(Signal.TIMED_OUT))
    assert str(error) == "log 'clicks' is owned by host:1"
    assert owner_of(error) == "host:1"
    assert bench.machine.denial is error
    assert bench.handle(Signal.CHANGED) == []


def test_not_waiting_for_another_owner() -> None:
    """The first refusal is final; the error says how to reach the log of a proxy."""
    bench = Bench(timeout_s=0)
    error = denied(bench.held(replace(OTHER, owner="grpc://host:2")))
    assert "a proxy: reach the log through it" in str(error)
    assert bench.machine.state is OwnershipState.DENIED


def test_an_attempt_that_is_under_way_is_not_given_up() -> None:
    """The lock may be ours by then."""
    bench = Bench()
    assert bench.handle(Signal.TIMED_OUT) == []
    assert owner_of(denied(bench.held())) == "host:1"
    bench = Bench()
    assert bench.handle(Signal.TIMED_OUT) == []
    bench.owned()


def test_a_node_that_changes_during_a_try_is_tried_again() -> None:
    """It may be gone since it was read."""
    bench = Bench()
    assert bench.handle(Signal.CHANGED) == []
    assert bench.held() == [CREATE]
    assert bench.held() == []


def test_a_long_wait_is_reported_once_it_is_known_for_whom() -> None:
    """Once."""
    bench = Bench()
    assert bench.handle(ReportDue(5.0)) == []
    bench.handle(EXISTS)
    report = Report("log 'clicks' is owned by host:1; waiting for 54 s more")
    assert bench.read(OTHER, now=6.0) == [report]
    bench.handle(Signal.CHANGED)
    assert bench.held() == []
    bench = Bench()
    bench.held()
    text = "log 'clicks' is owned by host:1; waiting for 0 s more"
    assert bench.handle(ReportDue(61.0)) == [Report(text)]


def test_a_proxy_that_holds_the_lock_is_asked_to_let_go() -> None:
    """Once, by a waiting writer that may ask; another holder would not."""
    proxy = replace(OTHER, turn="free")
    bench = Bench(asks=True)
    assert bench.held() == []
    bench.handle(Signal.CHANGED)
    assert bench.held(proxy) == [AskHolder(proxy, 3)]
    bench.handle(Signal.CHANGED)
    assert bench.held(replace(proxy, wanted_by="me")) == []
    bench.handle(Signal.CHANGED)
    bench.owned()
    assert Bench().held(proxy) == []
    assert isinstance(denied(Bench(timeout_s=0, asks=True).held(proxy)), DLError)


def test_a_lost_answer() -> None:
    """The node shows whether it was created; one that is gone is created again."""
    bench = Bench()
    assert bench.handle(CallFailed(CREATE, AWAY)) == [Call.READ]
    assert bench.read(OWN, is_current=True) == [Notice.GRANTED]
    bench = Bench()
    bench.handle(CallFailed(CREATE, AWAY))
    assert bench.read(None) == [CREATE]


def test_attempts_that_are_overtaken_end() -> None:
    """By changes of the head, or by nodes that vanish before they are read."""
    bench = Bench().owned().lost()
    for _ in range(ATTEMPTS_MAX - 1):
        assert bench.handle(Verified(4)) == [CreateLock(4)]
        failed = CallFailed(CreateLock(4), MetadataVersionError("changed"))
        assert bench.handle(failed) == [Call.VERIFY]
    bench.handle(Verified(4))
    assert owner_of(denied(bench.handle(failed))) == ""
    bench = Bench()
    for _ in range(ATTEMPTS_MAX - 1):
        assert bench.handle(EXISTS) == [Call.READ]
        assert bench.read(None) == [CREATE]
    bench.handle(EXISTS)
    assert "owned by another writer" in str(denied(bench.read(None)))


def test_a_refusal_of_the_store_ends_it() -> None:
    """A log that is gone, a store that is closed, a head that cannot be read."""
    gone = denied(Bench().handle(CallFailed(CREATE, NoNodeError("no parent"))))
    assert isinstance(gone, LogNotFoundError)
    closed = AlreadyClosedError("closed")
    assert denied(Bench().handle(CallFailed(CREATE, closed))) is closed
    bench = Bench().owned().lost()
    assert denied(bench.handle(CallFailed(Call.VERIFY, AWAY))) is AWAY
    bench = Bench()
    bench.handle(EXISTS)
    assert denied(bench.handle(CallFailed(Call.READ, AWAY))) is AWAY


def test_the_lock_is_regained_when_nothing_happened() -> None:
    """Nothing may be acknowledged in between."""
    bench = Bench().owned()
    assert bench.handle(Signal.EXPIRED) == [Notice.SUSPENDED]
    assert not bench.machine.is_owner
    assert bench.handle(Signal.CHANGED) == []  # there is no session to try with
    assert bench.handle(Signal.RESUMED) == [Call.VERIFY]
    assert bench.handle(Verified(7)) == [CreateLock(7)]
    assert bench.handle(Signal.CREATED) == [Notice.RESUMED]
    assert bench.machine.is_owner


def test_the_lock_is_denied_when_another_was_there() -> None:
    """An owner that lost it to another writer, or whose log has changed, never gets it back."""
    bench = Bench().owned().lost()
    bench.handle(Verified(7))
    bench.handle(CallFailed(CreateLock(7), NodeExistsError("exists")))
    assert owner_of(denied(bench.read(OTHER))) == "host:1"
    assert bench.handle(Signal.CREATED) == []
    bench = Bench().owned().lost()
    assert owner_of(denied(bench.handle(Verified(None)))) == ""


def test_a_node_of_our_own_earlier_session_is_waited_for() -> None:
    """It is about to vanish, and is no one else's; even by a writer that waits for no other."""
    bench = Bench().owned().lost()
    bench.handle(Verified(7))
    bench.handle(CallFailed(CreateLock(7), NodeExistsError("exists")))
    assert bench.read(OWN) == []
    assert bench.machine.state is OwnershipState.LOST
    assert bench.handle(Signal.CHANGED) == [Call.VERIFY]
    bench = Bench(timeout_s=0)
    assert bench.held(OWN) == []
    assert bench.handle(Signal.CHANGED) == [CREATE]


def test_an_answer_from_a_session_that_is_gone_counts_for_nothing() -> None:
    """The node went with the session; it is tried again with the next one."""
    bench = Bench()
    bench.handle(Signal.EXPIRED)
    assert bench.handle(Signal.CREATED) == []
    assert bench.handle(Signal.RESUMED) == [CREATE]
    bench.handle(Signal.EXPIRED)
    assert bench.handle(Signal.RESUMED) == []
    assert bench.handle(Signal.CREATED) == [CREATE]
    bench.handle(EXISTS)
    bench.handle(Signal.EXPIRED)
    assert bench.read(OWN, is_current=True) == []
    assert not bench.machine.is_owner


def test_an_earlier_owner_is_not_blamed_for_what_came_later() -> None:
    """The owner that was waited for released the log; the client that changed it is not known."""
    bench = Bench()
    bench.held()
    bench.handle(Signal.CHANGED)
    bench.owned().lost()
    assert owner_of(denied(bench.handle(Verified(None)))) == ""


def test_releasing_ends_it() -> None:
    """Nothing follows, whatever comes late; what it tried may have left a node."""
    bench = Bench()
    assert bench.handle(Signal.RELEASE) == []
    for event in (Signal.CREATED, Signal.CHANGED, Signal.EXPIRED, Signal.RESUMED, EXISTS):
        assert bench.handle(event) == []
    assert bench.handle(Signal.RELEASE) == []
    assert bench.machine.state is OwnershipState.RELEASED
    assert bench.machine.has_attempted
    idle = Ownership("clicks", "me")
    assert idle.handle(Signal.RELEASE) == []
    assert not idle.has_attempted


@for_each(range(100))
def test_final_states_are_final(seed: int) -> None:
    """Random events: a denied or released machine asks for nothing and owns nothing."""
    play(seed)


def test_every_transition_of_the_table_happens() -> None:
    """One that never does would be a line of the diagram that means nothing."""
    seen = {(OwnershipState.IDLE, OwnershipState.ACQUIRING)}
    seen.add((OwnershipState.IDLE, OwnershipState.RELEASED))
    seen |= set().union(*map(play, range(400)))
    table = TRANSITIONS.causes.items()
    assert seen == {(before, after) for before, afters in table for after in afters}


def play(seed: int) -> set[tuple[OwnershipState, OwnershipState]]:
    """Let things happen to a machine; return its transitions."""
    rng = random.Random(seed)
    seen = set[tuple[OwnershipState, OwnershipState]]()
    bench = Bench(timeout_s=rng.choice([0.0, 60.0]), asks=rng.random() < 0.5)
    call: Effect | None = CREATE
    for _ in range(60):
        machine = bench.machine
        was_final = machine.state in (OwnershipState.DENIED, OwnershipState.RELEASED)
        before = machine.state
        event: Event
        if isinstance(call, Call | CreateLock) and rng.random() < 0.6:
            event, call = answer(call, rng), None
        else:
            rare: list[Event] = [Signal.TIMED_OUT, Broken(BROKEN), Signal.RELEASE]
            often: list[Event] = [Signal.CHANGED, Signal.EXPIRED, Signal.RESUMED, ReportDue(9.0)]
            event = rng.choice(rare if rng.random() < 0.06 else [*often, Signal.RESUMED])
        effects = bench.handle(event)
        calls = [each for each in effects if isinstance(each, Call | CreateLock)]
        assert not (calls and isinstance(call, Call | CreateLock)), "one call at a time"
        call = calls[0] if calls else call
        if machine.state is not before or event is Signal.RELEASE:
            seen.add((before, machine.state))
        if was_final:
            assert effects == []
            assert not machine.is_owner
            call = None
    return seen


def answer(call: Call | CreateLock, rng: random.Random) -> Event:
    """Return an answer to a call."""
    if rng.random() < 0.3:
        return CallFailed(call, rng.choice([AWAY, NodeExistsError("exists")]))
    if call is Call.VERIFY:
        return Verified(rng.choice([None, 1, 1, 1]))
    if call is Call.READ:
        return LockRead(rng.choice([None, OTHER, OWN, OWN]), 1, rng.random() < 0.5, 0.0)
    return Signal.CREATED
