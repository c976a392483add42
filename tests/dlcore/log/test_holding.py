"""Goal: every transition of the machine of a stored position.

Method: exact effects over a node and its lock; then seeded chance among several readers, with lost
answers, lost sessions and cancelled calls: no consumer moves what another one has taken.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from dlcore.base.backoff import REPORTED_AFTER_S
from dlcore.base.errors import (
    AlreadyClosedError,
    DLError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    OverCapacityError,
    OwnershipAcquireFailedError,
    SubscriptionMovedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.machines import CallFailed, Ended
from dlcore.log.metadata.values import LockHolder, Mark
from dlcore.log.reading.holding import (
    RETRY_S,
    SUBSCRIPTIONS_MAX,
    TRANSITIONS,
    TRIES_MAX,
    AwaitLock,
    Call,
    CommitPosition,
    Counted,
    Effect,
    Event,
    Forget,
    Hold,
    HolderRead,
    HoldState,
    Move,
    NodeRead,
    Pause,
    Put,
    Relock,
    Remove,
    RemoveNodes,
    Signal,
    Stored,
    Subscription,
    Take,
)

if TYPE_CHECKING:
    from dlcore.log.reading.holding import Job

AWAY = MetadataConnectionError("no answer")
CLOSED = AlreadyClosedError("closed")
CHANGED = MetadataVersionError("changed")
EXISTS = NodeExistsError("exists")
FIRST, NEXT = DLSN(1, 0, 0), DLSN(1, 5, 0)


class Nodes:
    """A subscription, its lock, and how it was moved."""

    def __init__(self) -> None:
        self.stored: Subscription | None = None
        self.version = 0
        self.lock: str | None = None
        self.was_removed = False
        self.tokens: list[str] = []
        """The token of each position that was stored."""

    def put(self, effect: Put) -> int:
        """Store a position; return its version."""
        if self.stored is None:
            raise NoNodeError("gone")
        if effect.version != self.version:
            raise CHANGED
        position = effect.position
        self.stored = Subscription(
            position=(position.lssn, position.entry_id, position.slot_id), token=effect.token
        )
        self.version += 1
        self.tokens.append(effect.token)
        return self.version

    def answer(self, effect: Effect, token: str, *, now: float = 0.0) -> Event:
        """Perform an effect of the holder with this token; return the answer."""
        try:
            return self._perform(effect, token, now)
        except DLError as error:
            return CallFailed(error)

    def _perform(  # noqa: C901 - one case for each kind
        self, effect: Effect, token: str, now: float
    ) -> Event:
        match effect:
            case Call.READ:
                return NodeRead(self.stored, self.version)
            case Call.COUNT:
                return Counted(3)
            case Call.MAKE:
                if self.stored is None:
                    self.stored, self.version = Subscription(), 0
                return Signal.MADE
            case Call.LOCK:
                if self.stored is None:
                    raise NoNodeError("gone")
                if self.lock is not None:
                    raise EXISTS
                self.lock = token
                return Signal.LOCKED
            case Call.READ_HOLDER:
                holder = None if self.lock is None else LockHolder(owner="x", token=self.lock)
                return HolderRead(holder, now)
            case AwaitLock():
                return Signal.WAIT_OVER
            case Put():
                return Stored(self.put(effect))
            case Pause():
                return Signal.PAUSE_OVER
            case RemoveNodes(version):
                if self.lock is None or self.stored is None or version != self.version:
                    raise CHANGED
                self.stored = self.lock = None
                self.was_removed = True
                return Signal.REMOVED
            case _:
                raise AssertionError(effect)


class Bench:
    """A machine, validated after each event, on the nodes."""

    def __init__(self, at: Nodes | None = None, token: str = "t") -> None:
        self.at = at or Nodes()
        self.machine = Hold("clicks", "s", "me", token)

    def handle(self, event: Event) -> Effect | None:
        """Feed an event."""
        effect = self.machine.handle(event)
        self.machine.validate()
        return effect

    def run(self, event: Event, *, until: type[object] = Ended, now: float = 0.0) -> Effect:
        """Answer all effects until one of a kind; return it."""
        effect = self.handle(event)
        while not isinstance(effect, until):
            assert effect is not None
            effect = self.handle(self.at.answer(effect, self.machine.token, now=now))
        assert effect is not None
        return effect

    def outcome(self, event: Event, *, now: float = 0.0) -> Mark | DLError | None:
        """Answer all effects; return what the caller gets."""
        effect = self.run(event, now=now)
        assert isinstance(effect, Ended)
        return effect.outcome

    def taken(self) -> Bench:
        """Take the subscription, and return this."""
        assert self.outcome(Take(0.0, 0.0)) is None
        assert self.machine.state is HoldState.HELD
        return self


def move(position: DLSN, mark: Mark | None, token: str = "client") -> Move:
    """Return the move of a client."""
    return Move(position, token, mark, 0.0, 0.0)


def test_a_subscription_is_made_taken_and_moved() -> None:
    """The token is written with the lock, before any position."""
    bench = Bench()
    assert bench.handle(Take(0.0, 0.0)) is Call.READ
    assert bench.handle(NodeRead(None, -1)) is Call.COUNT
    assert bench.handle(Counted(SUBSCRIPTIONS_MAX - 1)) is Call.MAKE
    bench.at.answer(Call.MAKE, "t")
    assert bench.handle(Signal.MADE) is Call.LOCK
    assert bench.handle(Signal.LOCKED) is Call.READ
    assert bench.handle(NodeRead(Subscription(), 0)) == Put(FIRST, "t", 0)
    assert bench.handle(Stored(1)) == Ended(None)
    assert bench.handle(CommitPosition(NEXT)) == Put(NEXT, "t", 1)
    assert bench.handle(Stored(2)) == Ended(None)
    assert (bench.machine.position, bench.machine.is_locked) == (NEXT, True)
    assert bench.handle(Remove()) == RemoveNodes(2)
    assert bench.handle(Signal.REMOVED) == Ended(None)
    assert bench.machine.state is HoldState.FREE


def test_a_log_has_only_so_many_subscriptions() -> None:
    """One more is refused."""
    bench = Bench()
    bench.handle(Take(0.0, 0.0))
    bench.handle(NodeRead(None, -1))
    ended = bench.handle(Counted(SUBSCRIPTIONS_MAX))
    assert isinstance(ended, Ended)
    assert isinstance(ended.outcome, OverCapacityError)
    assert "has 1000 subscriptions" in str(ended.outcome)


def test_another_reader_is_waited_for() -> None:
    """A long wait is reported once; it ends in time, and at once by one that does not wait."""
    at = Nodes()
    Bench(at, "first").taken()
    bench = Bench(at)
    timeout_s = REPORTED_AFTER_S + 3.0
    wait = bench.run(Take(timeout_s, 10.0), until=AwaitLock, now=10.0)
    text = "log 'clicks': another reader has subscriber 's': x"
    assert wait == AwaitLock(REPORTED_AFTER_S, None)
    wait = bench.run(Signal.WAIT_OVER, until=AwaitLock, now=10.0 + REPORTED_AFTER_S)
    assert wait == AwaitLock(3.0, f"{text}; waiting for 3 s more")
    error = bench.outcome(Signal.WAIT_OVER, now=10.0 + timeout_s)
    assert isinstance(error, OwnershipAcquireFailedError)
    assert (str(error), error.owner) == (text, "x")
    assert isinstance(bench.outcome(Take(0.0, 0.0)), OwnershipAcquireFailedError)
    wait = bench.run(Take(1.0, 0.0), until=AwaitLock)
    assert wait == AwaitLock(1.0, None)
    at.lock = None
    assert bench.outcome(Signal.WAIT_OVER) is None


def test_a_lock_without_an_answer() -> None:
    """Its node shows whose it is; one that is gone is tried again."""
    bench = Bench()
    bench.at.answer(Call.MAKE, "t")
    for is_applied in (True, False):
        bench.run(Take(0.0, 0.0), until=type(Call.LOCK))
        bench.handle(NodeRead(Subscription(), bench.at.version))
        if is_applied:
            bench.at.lock = "t"
        assert bench.handle(CallFailed(AWAY)) is Call.READ_HOLDER
        answer = bench.at.answer(Call.READ_HOLDER, "t")
        assert bench.handle(answer) is (Call.READ if is_applied else Call.LOCK)
        bench.handle(Signal.GIVEN_UP)
        bench.handle(Signal.EXPIRED)
        bench.at.lock = None


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_position_without_an_answer(is_applied: bool) -> None:
    """It was stored, or is tried again after a pause."""
    bench = Bench().taken()
    put = bench.handle(CommitPosition(NEXT))
    assert isinstance(put, Put)
    if is_applied:
        bench.at.put(put)
    assert bench.handle(CallFailed(AWAY)) is Call.READ
    effect = bench.handle(bench.at.answer(Call.READ, "t"))
    if not is_applied:
        assert effect == Pause(RETRY_S)
        effect = bench.run(Signal.PAUSE_OVER)
    assert effect == Ended(None)
    assert bench.machine.position == NEXT


def test_a_cancelled_commit_may_have_stored_its_position() -> None:
    """The next one finds its own token, and goes on from there."""
    bench = Bench().taken()
    put = bench.handle(CommitPosition(NEXT))
    assert isinstance(put, Put)
    bench.at.put(put)
    assert bench.handle(Signal.GIVEN_UP) is None
    assert bench.machine.state is HoldState.HELD
    assert bench.outcome(CommitPosition(DLSN(1, 9, 0))) is None
    assert bench.at.version == 3


def test_answers_that_never_come_end_a_commit() -> None:
    """After a number of tries."""
    bench = Bench().taken()
    effect = bench.handle(CommitPosition(NEXT))
    for _ in range(TRIES_MAX - 1):
        assert isinstance(effect, Put)
        bench.handle(CallFailed(AWAY))
        bench.handle(bench.at.answer(Call.READ, "t"))
        effect = bench.handle(Signal.PAUSE_OVER)
    bench.handle(CallFailed(AWAY))
    bench.handle(bench.at.answer(Call.READ, "t"))
    ended = bench.handle(Signal.PAUSE_OVER)
    assert isinstance(ended, Ended)
    assert isinstance(ended.outcome, MetadataConnectionError)
    assert "did not answer to the position" in str(ended.outcome)


def test_a_reader_that_was_replaced_moves_nothing() -> None:
    """It lost its session, and may not know that yet."""
    at = Nodes()
    first = Bench(at, "first").taken()
    at.lock = None
    second = Bench(at, "second").taken()
    assert isinstance(first.outcome(CommitPosition(NEXT)), SubscriptionMovedError)
    assert first.handle(Signal.EXPIRED) is None
    assert first.machine.state is HoldState.FREE
    assert isinstance(first.outcome(Relock(0.0)), OwnershipAcquireFailedError)
    second.handle(Signal.RELEASED)
    at.lock = None
    assert isinstance(first.outcome(Relock(0.0)), SubscriptionMovedError)
    at.stored = None
    assert isinstance(first.outcome(CommitPosition(NEXT)), SubscriptionMovedError)
    assert at.tokens == ["first", "second"]


def test_a_reader_gets_its_lock_back() -> None:
    """If no one took the subscription meanwhile."""
    bench = Bench().taken()
    bench.at.lock = None
    bench.handle(Signal.EXPIRED)
    assert bench.outcome(Relock(0.0)) is None
    assert bench.machine.state is HoldState.HELD
    bench.at.lock = bench.at.stored = None
    bench.handle(Signal.EXPIRED)
    assert isinstance(bench.outcome(Relock(0.0)), SubscriptionMovedError)


def test_the_owner_that_is_replaced_moves_it_once_more() -> None:
    """Between the look at its position and its end: the new one begins there."""
    at = Nodes()
    first = Bench(at, "first").taken()
    at.lock = None
    second = Bench(at, "second")
    put = second.run(Take(0.0, 0.0), until=Put)
    assert first.outcome(CommitPosition(NEXT)) is None
    effect = second.handle(at.answer(put, "second"))
    while not isinstance(effect, Ended):
        assert effect is not None
        effect = second.handle(at.answer(effect, "second"))
    assert effect.outcome is None
    assert second.machine.position == NEXT


def test_a_subscription_that_vanishes_while_it_is_taken() -> None:
    """It was deleted: before the lock, or under it."""
    bench = Bench()
    bench.at.answer(Call.MAKE, "t")
    bench.run(Take(0.0, 0.0), until=type(Call.LOCK))
    effect = bench.handle(NodeRead(Subscription(), 0))
    assert effect is Call.LOCK
    ended = bench.handle(CallFailed(NoNodeError("gone")))
    assert isinstance(ended, Ended)
    assert isinstance(ended.outcome, SubscriptionMovedError)
    bench.handle(Take(0.0, 0.0))
    bench.handle(NodeRead(Subscription(), 0))
    bench.handle(Signal.LOCKED)
    ended = bench.handle(NodeRead(None, -1))
    assert isinstance(ended, Ended)
    assert isinstance(ended.outcome, SubscriptionMovedError)


def test_a_client_moves_by_its_token() -> None:
    """Once, however often it asks; by a mark that is not the latest it moves nothing."""
    at = Nodes()
    bench = Bench(at)
    assert bench.outcome(move(FIRST, None)) == Mark(1, "client")
    bench.handle(Signal.EXPIRED)
    at.lock = None
    assert bench.outcome(move(FIRST, None)) == Mark(1, "client")
    at.lock = None
    bench.handle(Signal.EXPIRED)
    # Its owner needs no lock.
    assert bench.handle(move(NEXT, Mark(1, "client"))) is Call.READ
    bench.handle(Signal.GIVEN_UP)
    assert bench.outcome(move(NEXT, Mark(1, "client"))) == Mark(2, "client")
    assert isinstance(bench.outcome(move(FIRST, None, "else")), SubscriptionMovedError)
    assert at.tokens == ["client", "client"]


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_move_without_an_answer(is_applied: bool) -> None:
    """The next look shows it, after a pause."""
    bench = Bench()
    bench.outcome(move(FIRST, None))
    put = bench.run(move(NEXT, Mark(1, "client")), until=Put)
    assert isinstance(put, Put)
    if is_applied:
        bench.at.put(put)
    assert bench.handle(CallFailed(AWAY)) == Pause(RETRY_S)
    assert bench.outcome(Signal.PAUSE_OVER) == Mark(2, "client")
    put = bench.run(move(NEXT, Mark(2, "client")), until=Put)
    bench.at.stored = None
    assert bench.handle(CallFailed(NoNodeError("gone"))) is Call.READ
    ended = bench.handle(NodeRead(None, -1))
    assert isinstance(ended, Ended)
    assert isinstance(ended.outcome, SubscriptionMovedError)


def test_a_subscription_is_forgotten_under_its_lock() -> None:
    """Only by the mark that was seen; one that is gone is no error."""
    at = Nodes()
    bench = Bench(at)
    assert bench.outcome(Forget(Mark(1, "client"), 0.0)) is None
    mark = bench.outcome(move(FIRST, None))
    assert isinstance(mark, Mark)
    bench.handle(Signal.EXPIRED)
    at.lock = None
    assert isinstance(bench.outcome(Forget(Mark(0, ""), 0.0)), SubscriptionMovedError)
    # Locked by now, for a move by another token too.
    assert bench.handle(move(NEXT, Mark(0, ""))) is Call.READ
    bench.handle(Signal.GIVEN_UP)
    assert bench.outcome(Forget(mark, 0.0)) is None
    assert (at.stored, at.lock) == (None, None)


def test_other_failures_are_raised_to_the_caller() -> None:
    """Those of a removal, of a look, and of a lock, and what the store refuses for good."""
    bench = Bench().taken()
    for job in (CommitPosition(NEXT), Remove(), Forget(Mark(1, "t"), 0.0)):
        bench.handle(job)
        assert bench.handle(CallFailed(CLOSED)) == Ended(CLOSED)
    bench.handle(Signal.EXPIRED)
    bench.handle(Relock(0.0))
    assert bench.handle(CallFailed(CLOSED)) == Ended(CLOSED)
    bench.handle(CommitPosition(NEXT))
    bench.handle(Signal.EXPIRED)
    assert bench.handle(Stored(2)) == Ended(None)


def test_a_hold_that_was_released_takes_no_lock() -> None:
    """A call that was under way ends with its answer, and one that comes later ends at once."""
    bench = Bench().taken()
    bench.at.lock = None
    bench.handle(Signal.EXPIRED)
    assert bench.handle(Relock(0.0)) is Call.LOCK
    for signal in (Signal.RELEASED, Signal.RELEASED, Signal.EXPIRED, Signal.GIVEN_UP):
        assert bench.handle(signal) is None
    assert bench.machine.state is HoldState.RELEASED
    for event in (bench.at.answer(Call.LOCK, "t"), Relock(0.0), CommitPosition(NEXT)):
        ended = bench.handle(event)
        assert isinstance(ended, Ended)
        assert isinstance(ended.outcome, AlreadyClosedError)
        assert "subscriber 's' was released" in str(ended.outcome)
    assert not bench.machine.is_locked
    assert bench.handle(CallFailed(AWAY)) == Ended(AWAY)


def test_a_result_that_comes_at_the_release_is_no_error() -> None:
    """A position that was stored, and a subscription that was removed."""
    bench = Bench().taken()
    put = bench.handle(CommitPosition(NEXT))
    assert isinstance(put, Put)
    bench.handle(Signal.RELEASED)
    assert bench.handle(Stored(bench.at.put(put))) == Ended(None)
    assert bench.machine.position == NEXT
    at = Nodes()
    bench = Bench(at)
    put = bench.run(move(FIRST, None), until=Put)
    assert isinstance(put, Put)
    bench.handle(Signal.RELEASED)
    assert bench.handle(Stored(at.put(put))) == Ended(Mark(1, "client"))
    bench = Bench().taken()
    assert bench.handle(Remove()) == RemoveNodes(1)
    bench.handle(Signal.RELEASED)
    assert bench.handle(Signal.REMOVED) == Ended(None)


def test_a_reader_that_was_replaced_hears_so_after_its_release() -> None:
    """Its driver releases it as soon as that is known."""
    at = Nodes()
    first = Bench(at, "first").taken()
    at.lock = None
    Bench(at, "second").taken()
    assert isinstance(first.outcome(CommitPosition(NEXT)), SubscriptionMovedError)
    first.handle(Signal.RELEASED)
    assert isinstance(first.outcome(Relock(0.0)), SubscriptionMovedError)


def test_chance_makes_every_transition_and_no_one_moves_anothers_position() -> None:
    """Three readers and a client meet."""
    made: set[tuple[HoldState, HoldState]] = set()
    for seed in range(600):
        made |= play(random.Random(seed))
    assert made == {
        (before, after) for before, afters in TRANSITIONS.causes.items() for after in afters
    }


def play(rng: random.Random) -> set[tuple[HoldState, HoldState]]:
    """Let readers meet; return the transitions."""
    at, made = Nodes(), set[tuple[HoldState, HoldState]]()
    benches = [Bench(at, f"t{number}") for number in range(3)]
    effects: dict[str, Effect | None] = {}  # None: no call is under way
    jobs: dict[str, Job] = {}
    owners: set[str] = set()  # whose take was completed, so that they may commit
    for step in range(120):
        bench = rng.choice(benches)
        machine, now = bench.machine, step / 10
        token, before, version = machine.token, machine.state, at.version
        effect = effects.get(token)
        if machine.state is HoldState.RELEASED and effect is None:
            # As the driver does it: no call of this reader is under way any more.
            at.lock = None if at.lock == token else at.lock
            benches[benches.index(bench)] = Bench(at, f"t{len(benches) + step}")
        elif rng.random() < 0.05:
            at.lock = None if at.lock == token else at.lock
            bench.handle(Signal.EXPIRED)
        elif rng.random() < 0.05:
            bench.handle(Signal.RELEASED)
        elif effect is None:
            may_commit = token in owners
            job = choose(machine, at, rng, DLSN(1, step, 0), now, may_commit=may_commit)
            jobs[token], effects[token] = job, bench.handle(job)
            owners -= {token} if isinstance(job, Take) else set()
        elif rng.random() < 0.05:
            bench.handle(Signal.GIVEN_UP)
            effects[token] = None
        else:
            following = bench.handle(answer(at, effect, token, rng, now))
            assert before is not HoldState.RELEASED or isinstance(following, Ended)
            effects[token] = None if isinstance(following, Ended) else following
            owners |= (
                {token} if following == Ended(None) and isinstance(jobs[token], Take) else set()
            )
        made.add((before, machine.state))
        # A reader commits only what it has taken.  The version alone does not tell a subscription
        # from one that is created after it was removed.
        is_commit = isinstance(effect, Put) and isinstance(jobs[token], CommitPosition)
        if is_commit and at.version > version and not at.was_removed:
            assert at.tokens[-2] == token
    return {(one, other) for one, other in made if other in TRANSITIONS.causes[one]}


def choose(
    machine: Hold, at: Nodes, rng: random.Random, position: DLSN, now: float, *, may_commit: bool
) -> Job:
    """Return what a reader does next."""
    mark = Mark(at.version, at.stored.token) if at.stored and rng.random() < 0.9 else None
    timeout_s = rng.choice([0.0, 2.0, math.inf])
    jobs: list[Job] = [CommitPosition(position), CommitPosition(position)] if may_commit else []
    if machine.is_locked:
        jobs.append(Remove())
    else:
        token = rng.choice(["client", machine.token])
        jobs += [Take(timeout_s, now), Relock(now), Move(position, token, mark, timeout_s, now)]
    return rng.choice([*jobs, Forget(mark, now)] if mark else jobs)


def answer(at: Nodes, effect: Effect, token: str, rng: random.Random, now: float) -> Event:
    """Answer an effect, well or badly."""
    if isinstance(effect, Pause) or rng.random() > 0.15:
        return at.answer(effect, token, now=now)
    if rng.random() < 0.4 and effect is not Call.MAKE:
        at.answer(effect, token, now=now)  # and the answer is lost
    return CallFailed(CLOSED if rng.random() < 0.2 else AWAY)
