"""A position that a log keeps for an application: who may move it, through lost answers.

Theory of operation.  A subscription is a node below the log's head: a position, and the token of
the reader that may move it.  A reader takes the subscription's lock, and writes its own token into
the node.  The reader that held it before then loses its compare-and-set, even if its session and
its lock are gone and it does not know that yet.  docs/architecture/machines.md shows `TRANSITIONS`
as a diagram.

A reader without a session of its own, as a client of proxies, takes the lock only to write its
token.  From then on the token alone makes it the owner, until another reader takes the
subscription.

Promises:

* A position is stored by compare-and-set.  If the answer is lost the node shows the outcome: it has
  our token, or that of another reader, and then the position is not ours to move.
* A move of a client that repeats it because its answer was lost is done once: the node has the
  client's token, the position, and the next version.
* A subscription of the same name that was created after ours was deleted is not ours: it has
  another token.
* Only under the lock is a subscription removed.
* A hold that was released takes no lock any more.  The driver removes the lock when the call under
  way has ended, because this call may be the one that creates it.

The driver (`subscriptions.py`) performs the effects and feeds the answers back.  Each event has one
effect.  A call that ends early, by a cancellation, is given up with `GIVEN_UP`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, assert_never

import msgspec

from dlcore.base.backoff import Wait
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
from dlcore.base.machines import CallFailed, Ended, State, StepMachine, Transitions
from dlcore.log.metadata.values import LockHolder, Mark
from dlcore.metadata.port import UNANSWERED
from dlcore.metadata.stored import LAYOUT, Count, Number

SUBSCRIPTIONS_MAX = 1_000
"""Subscriptions of one log."""
RETRY_S = 0.1
TRIES_MAX = 50


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A stored position: that of the next record to read; only `token`'s reader may move it."""

    layout: int = LAYOUT
    position: tuple[Number, Count, Count] = (1, 0, 0)
    reader: str = ""
    token: str = ""
    moved_ms: Count = 0

    @property
    def dlsn(self) -> DLSN:
        """The position."""
        return DLSN(*self.position)


_MADE = Mark(0, "")
"""The mark of a subscription that no reader has taken."""


class Seen(NamedTuple):
    """A position, and the mark of the subscription when it was read."""

    position: DLSN
    mark: Mark


class HoldState(State):
    """The state of the machine; RELEASED is final."""

    FREE = "not locked, and nothing is under way"
    HELD = "locked, and nothing is under way"
    MAKING = "the subscription is created if there is none"
    LOCKING = "the lock is tried"
    LOOKING = "the holder of the lock is read"
    WAITING = "another reader has the lock"
    READING = "the subscription is read, to find out whose it is"
    STORING = "a position is being stored"
    CHECKING = "the subscription is read, to find out whether a position was stored"
    PAUSING = "a position was not stored, or there is no answer; it is tried again"
    REMOVING = "the subscription is being removed"
    RELEASED = "the caller has released it; a call under way ends with its next answer"


_S = HoldState
_RELEASED = {_S.RELEASED: "released"}
_IDLE = {_S.FREE: "ended", _S.HELD: "ended, locked", **_RELEASED}
TRANSITIONS = Transitions(
    _S.FREE,
    {
        _S.FREE: {
            _S.MAKING: "take, or move",
            _S.LOCKING: "lock again, or move",
            _S.READING: "move by its owner, or forget",
            _S.STORING: "commit",
            **_RELEASED,
        },
        _S.HELD: {
            _S.FREE: "session expired",
            _S.READING: "move, or forget",
            _S.STORING: "commit",
            _S.REMOVING: "remove",
            **_RELEASED,
        },
        _S.MAKING: {_S.LOCKING: "it is there", _S.FREE: "refused", **_RELEASED},
        _S.LOCKING: {
            _S.READING: "locked",
            _S.LOOKING: "held, or no answer",
            _S.FREE: "the subscription is gone, or refused",
            **_RELEASED,
        },
        _S.LOOKING: {
            _S.READING: "locked by an attempt without an answer",
            _S.LOCKING: "free by now",
            _S.WAITING: "held by another reader",
            _S.FREE: "held, and not waited for; refused",
            **_RELEASED,
        },
        _S.WAITING: {
            _S.LOCKING: "the lock changed, or some time passed",
            _S.FREE: "given up",
            **_RELEASED,
        },
        _S.READING: {
            _S.STORING: "ours to move",
            _S.LOCKING: "to be forgotten",
            _S.REMOVING: "to be forgotten, and locked",
            **_IDLE,
        },
        _S.STORING: {
            _S.CHECKING: "conflict, or no answer",
            _S.READING: "conflict",
            _S.PAUSING: "no answer",
            **_IDLE,
        },
        _S.CHECKING: {
            _S.PAUSING: "not stored",
            _S.STORING: "an earlier position was stored",
            _S.READING: "moved by the owner that is replaced",
            **_IDLE,
        },
        _S.PAUSING: {_S.STORING: "later", _S.READING: "later, the owner is compared", **_IDLE},
        _S.REMOVING: {_S.FREE: "removed", _S.HELD: "refused", **_RELEASED},
        _S.RELEASED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    MADE = "the subscription is there"
    LOCKED = "the lock was created"
    WAIT_OVER = "the lock has changed, or the time of `AwaitLock` has passed"
    PAUSE_OVER = "the pause is over"
    REMOVED = "the subscription and its lock are gone"
    EXPIRED = "the session is gone, and the lock with it"
    GIVEN_UP = "the caller has left, and gets no answer"
    RELEASED = "the caller releases the subscription, and uses this machine no more"


@dataclass(frozen=True, slots=True)
class Take:
    """Event: the caller becomes the owner, and waits so long for another one."""

    timeout_s: float
    now: float


@dataclass(frozen=True, slots=True)
class Relock:
    """Event: the owner lost its lock, and wants it back."""

    now: float


@dataclass(frozen=True, slots=True)
class CommitPosition:
    """Event: the owner stores a position."""

    position: DLSN


@dataclass(frozen=True, slots=True)
class Move:
    """Event: a client that is known by its token stores a position.

    `mark` is what the client has seen; None: there was no subscription.
    """

    position: DLSN
    token: str
    mark: Mark | None
    timeout_s: float
    now: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Event: the subscription is removed if it has this mark, or is gone already."""

    mark: Mark
    now: float


@dataclass(frozen=True, slots=True)
class Remove:
    """Event: the caller, which has the lock, removes the subscription."""


@dataclass(frozen=True, slots=True)
class NodeRead:
    """Event: the subscription and its version; None if there is none."""

    stored: Subscription | None
    version: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Event: how many subscriptions the log has."""

    count: int


@dataclass(frozen=True, slots=True)
class HolderRead:
    """Event: the holder of the lock; None if it is free."""

    holder: LockHolder | None
    now: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Event: the position was stored as this version."""

    version: int


Job: TypeAlias = Take | Relock | CommitPosition | Move | Forget | Remove
Event: TypeAlias = Job | Signal | NodeRead | Counted | HolderRead | Stored | CallFailed


class Call(enum.Enum):
    """Effects that carry nothing; the answer may be `CallFailed`."""

    READ = "read the subscription; answer with `NodeRead`"
    COUNT = "count the log's subscriptions; answer with `Counted`"
    MAKE = "create the subscription unless it is there; answer with `MADE`"
    LOCK = "create the lock; answer with `LOCKED`"
    READ_HOLDER = "read the lock; answer with `HolderRead`"


@dataclass(frozen=True, slots=True)
class AwaitLock:
    """Effect: say `WAIT_OVER` once the lock has changed, at the latest after `at_most_s`.

    `report` is a warning to log first.
    """

    at_most_s: float
    report: str | None


@dataclass(frozen=True, slots=True)
class Put:
    """Effect: store a position if the node has this version; answer with `Stored`.

    The driver adds the time and the reader's name.
    """

    position: DLSN
    token: str
    version: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Effect: say `PAUSE_OVER` after so many seconds."""

    after_s: float


@dataclass(frozen=True, slots=True)
class RemoveNodes:
    """Effect: remove the subscription of this version, and the lock; answer with `REMOVED`."""

    version: int


Work: TypeAlias = Call | AwaitLock | Put | Pause | RemoveNodes
Effect: TypeAlias = Work | Ended[Mark | None]
"""The outcome is the new mark for `Move`, else None."""


@dataclass(slots=True)
class _Running:
    """The job under way: how long it waits for another reader's lock, and what it tried."""

    job: Job
    wait: Wait = field(default_factory=lambda: Wait(0.0))
    timeout_s: float = 0.0
    tries: int = 0
    """How often it tried to store the position."""


class Hold(StepMachine[HoldState, Event, Work | None, Mark | None]):
    """One subscription, as seen by one client.

    Args:
        log: the log's name.
        subscriber: the application's name.
        client_id: this client, for error texts.
        token: of this holder.
    """

    transitions = TRANSITIONS

    def __init__(self, log: str, subscriber: str, client_id: str, token: str) -> None:
        self.token = token
        self.state = HoldState.FREE
        self.position = DLSN.INITIAL
        """The stored position, as far as is known."""
        self.is_locked = False
        self._is_lost = False  # a job found it taken over, moved or deleted
        self._version = -1
        self._name = f"log {log!r}: "
        self._subscriber = subscriber
        self._client_id = client_id
        self._running = _Running(Remove())

    def handle(self, event: Event) -> Effect | None:
        """Take one event; None: nothing is to be done."""
        if self.state is HoldState.RELEASED:
            return self._end_released(event)
        match event:
            case Take() | Relock() | CommitPosition() | Move() | Forget() | Remove():
                return self._begin(event)
            case Signal():
                return self._on_signal(event)
            case NodeRead():
                return self._node_read(event)
            case Counted(count):
                return self._counted(count)
            case HolderRead(holder, now):
                return self._holder_read(holder, now)
            case Stored(version):
                return self._stored(version)
            case CallFailed(error):
                return self._call_failed(error)
            case _:
                assert_never(event)

    def _on_signal(self, signal: Signal) -> Effect | None:
        match signal:
            case Signal.MADE | Signal.WAIT_OVER:
                return self._lock()
            case Signal.LOCKED:
                return self._locked()
            case Signal.PAUSE_OVER:
                return self._read() if isinstance(self._running.job, Move) else self._put()
            case Signal.REMOVED:
                self.is_locked = False
                return self._end(None)
            case Signal.EXPIRED:
                self.is_locked = False
                if self.state is HoldState.HELD:
                    self._rest()
            case Signal.GIVEN_UP:
                self._rest()
            case Signal.RELEASED:
                self.is_locked = False
                self._become(HoldState.RELEASED)
            case _:
                assert_never(signal)
        return None

    def _rest(self) -> None:
        state = HoldState.HELD if self.is_locked else HoldState.FREE
        if self.state not in (state, HoldState.RELEASED):
            self._become(state)

    def _end_released(self, event: Event) -> Effect | None:
        """End a job that was under way at the release, or that comes after it."""
        match event:
            case Signal.EXPIRED | Signal.GIVEN_UP | Signal.RELEASED:
                return None
            case Stored(version):
                return self._stored(version)
            case Signal.REMOVED:
                return Ended(None)
            case CallFailed(error):
                return Ended(error)
            case _ if self._is_lost:
                return Ended(self._moved())
            case _:
                text = f"{self._name}subscriber {self._subscriber!r} was released by its reader"
                return Ended(AlreadyClosedError(text))

    def _end(self, outcome: Mark | DLError | None) -> Effect:
        self._rest()
        return Ended(outcome)

    def _begin(self, job: Job) -> Effect:
        running = self._running = _Running(job)
        match job:
            case Take(timeout_s, now) | Move(timeout_s=timeout_s, now=now, mark=None):
                running.timeout_s, running.wait = timeout_s, Wait(now)
                self._become(HoldState.MAKING)
                return Call.READ
            case Relock(now):
                running.wait = Wait(now)
                return self._lock()
            case Move(_, token, mark, timeout_s, now):
                running.timeout_s, running.wait = timeout_s, Wait(now)
                # An owner stays it without the lock: that of another reader would have a new token.
                return self._read() if mark is not None and mark.token == token else self._lock()
            case Forget(_, now):
                running.wait = Wait(now)
                return self._read()
            case CommitPosition():
                return self._put()
            case Remove():
                return self._remove()
            case _:
                assert_never(job)

    # The lock

    def _counted(self, count: int) -> Effect:
        if count < SUBSCRIPTIONS_MAX:
            return Call.MAKE
        return self._end(
            OverCapacityError(
                f"{self._name}it has {count} subscriptions, it can have {SUBSCRIPTIONS_MAX}: "
                "delete some"
            )
        )

    def _lock(self) -> Effect:
        if self.is_locked:
            return self._read()
        self._become(HoldState.LOCKING)
        return Call.LOCK

    def _holder_read(self, holder: LockHolder | None, now: float) -> Effect:
        if holder is None:
            return self._lock()
        if holder.token == self.token:
            return self._locked()
        text = (
            f"{self._name}another reader has subscriber {self._subscriber!r}: "
            f"{holder.described(self._client_id)}"
        )
        wait = self._running.wait
        left_s = wait.begun_s + self._running.timeout_s - now
        if left_s <= 0:
            return self._end(OwnershipAcquireFailedError(text, owner=holder.owner))
        is_due = wait.is_due(now)
        self._become(HoldState.WAITING)
        report = f"{text}; waiting for {left_s:.0f} s more" if is_due else None
        return AwaitLock(min(left_s, wait.due_s - now), report)

    def _locked(self) -> Effect:
        self.is_locked = True
        return self._read()

    # The subscription

    def _read(self) -> Effect:
        self._become(HoldState.READING)
        return Call.READ

    def _node_read(self, node: NodeRead) -> Effect:
        if self.state is HoldState.MAKING:
            return Call.COUNT if node.stored is None else self._lock()
        if self.state is HoldState.CHECKING:
            return self._checked(node)
        match self._running.job:
            case Take():
                # The lock alone does not stop an owner that lost its session and does not know it.
                if node.stored is None:
                    return self._end(self._moved())
                self.position, self._version = node.stored.dlsn, node.version
                self._running.tries = 0
                return self._put()
            case Move() as move:
                return self._compare(move, node)
            case Forget(mark):
                return self._forget(mark, node)
            case _:
                return self._end(None if self._take_up(node) else self._moved())

    def _take_up(self, node: NodeRead) -> bool:
        """Use the stored state if it has our token: a cancelled commit may have written it."""
        if node.stored is None or node.stored.token != self.token:
            return False
        self.position, self._version = node.stored.dlsn, node.version
        return True

    def _compare(self, move: Move, node: NodeRead) -> Effect:
        mark, seen = move.mark or _MADE, seen_in(node)
        # An earlier attempt, or an earlier request with a lost answer, may have stored it.
        if seen == Seen(move.position, Mark(mark.version + 1, move.token)):
            return self._end(seen.mark)
        return self._put() if seen is not None and seen.mark == mark else self._end(self._moved())

    def _forget(self, mark: Mark, node: NodeRead) -> Effect:
        seen = seen_in(node)
        if not self.is_locked:
            # Looked at again under the lock: only then no reader changes it before the removal.
            return self._end(None) if seen is None else self._lock()
        if seen is None or seen.mark != mark:
            return self._end(self._moved())
        self._version = mark.version
        return self._remove()

    def _remove(self) -> Effect:
        self._become(HoldState.REMOVING)
        return RemoveNodes(self._version)

    # The position

    def _wanted(self) -> DLSN:
        job = self._running.job
        return job.position if isinstance(job, CommitPosition) else self.position

    def _put(self) -> Effect:
        running, job = self._running, self._running.job
        running.tries += 1
        if running.tries > TRIES_MAX:
            return self._end(
                MetadataConnectionError(
                    f"{self._name}the metadata store did not answer to the position of subscriber "
                    f"{self._subscriber!r}"
                )
            )
        self._become(HoldState.STORING)
        if isinstance(job, Move):
            mark = job.mark or _MADE
            return Put(job.position, job.token, mark.version)
        return Put(self._wanted(), self.token, self._version)

    def _stored(self, version: int) -> Effect:
        job = self._running.job
        if isinstance(job, Move):
            return self._end(Mark(version, job.token))
        self.position, self._version = self._wanted(), version
        return self._end(None)

    def _checked(self, node: NodeRead) -> Effect:
        wanted = self._wanted()
        if node.stored is not None and node.version == self._version:
            return self._pause()  # the store did not apply this attempt
        if not self._take_up(node):
            # The owner that is replaced moved it in between.
            return self._read() if isinstance(self._running.job, Take) else self._end(self._moved())
        return self._end(None) if self.position == wanted else self._put()

    def _pause(self) -> Effect:
        self._become(HoldState.PAUSING)
        return Pause(RETRY_S)

    def _call_failed(self, error: DLError) -> Effect:
        is_unanswered = isinstance(error, UNANSWERED)
        if self.state is HoldState.LOCKING:
            if is_unanswered or isinstance(error, NodeExistsError):
                self._become(HoldState.LOOKING)
                return Call.READ_HOLDER
            # The lock is below the subscription: without that it was deleted.
            return self._end(self._moved() if isinstance(error, NoNodeError) else error)
        is_open = is_unanswered or isinstance(error, (MetadataVersionError, NoNodeError))
        if self.state is not HoldState.STORING or not is_open:
            return self._end(error)
        if isinstance(self._running.job, Move):
            return self._pause() if is_unanswered else self._read()
        self._become(HoldState.CHECKING)
        return Call.READ

    def _moved(self) -> SubscriptionMovedError:
        self._is_lost = True
        return SubscriptionMovedError(
            f"{self._name}subscriber {self._subscriber!r} was taken over, moved or deleted by "
            "another client"
        )

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state = self.state
        assert state is not HoldState.HELD or self.is_locked
        if state in (_S.FREE, _S.MAKING, _S.LOCKING, _S.LOOKING, _S.WAITING, _S.RELEASED):
            assert not self.is_locked
        if state in (_S.STORING, _S.CHECKING):
            assert 0 < self._running.tries <= TRIES_MAX
        assert state is not _S.CHECKING or not isinstance(self._running.job, Move)


def seen_in(node: NodeRead) -> Seen | None:
    """Return the position, and the mark of the subscription; None if there is none."""
    if node.stored is None:
        return None
    return Seen(node.stored.dlsn, Mark(node.version, node.stored.token))
