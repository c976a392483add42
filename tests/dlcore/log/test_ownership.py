"""The ownership machine: exact effects for each event."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from dlcore.log.metadata.values import LockHolder
from dlcore.log.writing.ownership import (
    TRANSITIONS,
    AskHolder,
    Denied,
    Event,
    Granted,
    LockChanged,
    LockHeld,
    LockTaken,
    LogMoved,
    Ownership,
    OwnershipState,
    Resumed,
    SessionExpired,
    SessionResumed,
    Suspended,
    TimedOut,
    TryLock,
)

OTHER = LockHolder(owner="host:1", token="other")
OWN_EARLIER = LockHolder(owner="me", token="t1")


def owned() -> Ownership:
    """Return a machine that owns the log."""
    machine = Ownership(waits=True)
    assert machine.start() == [TryLock(guarded=False)]
    machine.attempted("t1")
    assert machine.handle(LockTaken()) == [Granted()]
    assert machine.is_owner
    return machine


def test_waiting_for_another_owner() -> None:
    """It tries again when the node changes, and gives up when told."""
    machine = Ownership(waits=True)
    machine.start()
    assert machine.handle(LockHeld(OTHER)) == []
    assert machine.handle(LockChanged()) == [TryLock(guarded=False)]
    assert machine.handle(LockHeld(OTHER)) == []
    assert machine.handle(TimedOut()) == [Denied(OTHER)]
    assert machine.handle(LockChanged()) == []


def test_not_waiting_for_another_owner() -> None:
    """The first refusal is final."""
    machine = Ownership(waits=False)
    machine.start()
    assert machine.handle(LockHeld(OTHER)) == [Denied(OTHER)]
    assert machine.state is OwnershipState.DENIED


def test_a_proxy_that_holds_the_lock_is_asked_to_let_go() -> None:
    """Once, by a writer who waits and may ask; another holder would not."""
    proxy = replace(OTHER, turn="free")
    machine = Ownership(waits=True, asks=True)
    machine.start()
    assert machine.handle(LockHeld(OTHER)) == []
    assert machine.handle(LockHeld(proxy)) == [AskHolder(proxy)]
    assert machine.handle(LockHeld(replace(proxy, wanted_by="me"))) == []
    assert machine.handle(LockTaken()) == [Granted()]
    for other in (Ownership(waits=True), Ownership(waits=False, asks=True)):
        other.start()
        assert AskHolder(proxy) not in other.handle(LockHeld(proxy))


def test_the_lock_is_regained_when_nothing_happened() -> None:
    """Nothing may be acknowledged in between."""
    machine = owned()
    assert machine.handle(SessionExpired()) == [Suspended()]
    assert not machine.is_owner
    assert machine.handle(LockChanged()) == []  # there is no session to try with
    assert machine.handle(SessionResumed()) == [TryLock(guarded=True)]
    assert machine.handle(LockTaken()) == [Resumed()]
    assert machine.is_owner


@pytest.mark.parametrize(
    ("event", "holder"), [(LockHeld(OTHER), OTHER), (LogMoved(), None)], ids=["held", "moved"]
)
def test_the_lock_is_denied_when_another_was_there(event: Event, holder: LockHolder | None) -> None:
    """Who lost it to another writer never gets it back."""
    machine = owned()
    machine.handle(SessionExpired())
    machine.handle(SessionResumed())
    assert machine.handle(event) == [Denied(holder)]
    assert machine.handle(LockTaken()) == []
    assert not machine.is_owner


def test_a_node_of_our_own_earlier_session_is_waited_for() -> None:
    """It is about to vanish, and is nobody else's."""
    machine = owned()
    machine.handle(SessionExpired())
    machine.handle(SessionResumed())
    assert machine.handle(LockHeld(OWN_EARLIER)) == []
    assert machine.handle(LockChanged()) == [TryLock(guarded=True)]


def test_an_answer_from_a_session_that_is_gone_counts_for_nothing() -> None:
    """The node went with the session."""
    machine = Ownership(waits=True)
    machine.start()
    machine.handle(SessionExpired())
    assert machine.handle(LockTaken()) == []
    assert not machine.is_owner


@pytest.mark.parametrize("seed", range(100))
def test_final_states_are_final(seed: int) -> None:
    """Random events: a denied or released machine asks for nothing and owns nothing."""
    play(seed)


def test_every_transition_of_the_table_happens() -> None:
    """One that never does would be a line of the diagram that means nothing."""
    seen = set().union(*map(play, range(100)))
    table = TRANSITIONS.causes.items()
    assert seen == {(before, after) for before, afters in table for after in afters}


def play(seed: int) -> set[tuple[OwnershipState, OwnershipState]]:
    """Let things happen to a machine; return its transitions."""
    rng = random.Random(seed)
    seen = set()
    machine = Ownership(waits=rng.random() < 0.5)
    machine.start()
    machine.attempted("t1")
    events: list[Event] = [
        LockTaken(),
        LockHeld(OTHER),
        LockHeld(OWN_EARLIER),
        LockChanged(),
        TimedOut(),
        LogMoved(),
        SessionExpired(),
        SessionResumed(),
    ]
    for _ in range(60):
        was_final = machine.state in (OwnershipState.DENIED, OwnershipState.RELEASED)
        before = machine.state
        effects = machine.handle(rng.choice(events))
        if machine.state is not before:
            seen.add((before, machine.state))
        if was_final:
            assert effects == []
            assert not machine.is_owner
        if rng.random() < 0.05:
            seen.add((machine.state, OwnershipState.RELEASED))
            machine.release()
    return seen


def test_a_log_that_moved_on_denies_only_whom_it_left_behind() -> None:
    """Found while the lock is taken back: an owner and one who still waits hear nothing of it."""
    machine = owned()
    assert machine.handle(LogMoved()) == []
    assert machine.handle(SessionExpired()) == [Suspended()]
    assert machine.handle(SessionResumed()) == [TryLock(guarded=True)]
    assert machine.handle(LogMoved()) == [Denied(None)]
    assert machine.state is OwnershipState.DENIED
    waiting = Ownership(waits=True)
    waiting.start()
    assert waiting.handle(LogMoved()) == []
    assert waiting.state is OwnershipState.ACQUIRING


def test_an_earlier_owner_is_not_blamed_for_what_came_later() -> None:
    """He who was waited for let go of the log; who changed it since is not known."""
    machine = Ownership(waits=True)
    machine.start()
    machine.handle(LockHeld(OTHER))
    machine.handle(LockTaken())
    machine.handle(SessionExpired())
    assert machine.handle(LogMoved()) == [Denied(None)]


def test_releasing_ends_it() -> None:
    """Nothing follows, whatever comes late; what it tried may have left a node."""
    machine = Ownership(waits=True)
    machine.start()
    machine.attempted("t1")
    machine.attempted("t1")  # told twice, it is one
    machine.release()
    for event in (LockTaken(), LockChanged(), SessionExpired(), SessionResumed(), LogMoved()):
        assert machine.handle(event) == []
    assert machine.state is OwnershipState.RELEASED
    assert machine.has_attempted
