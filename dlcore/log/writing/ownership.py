"""The writer lock of a log: who owns it, through waits, lost answers and lost sessions.

Theory of operation.  The lock is a node that lives as long as its creator's session.  Each attempt
to create it has a token, by which a node of one's own is known after a lost answer.  An own node of
this session was made by such an attempt, and is taken.  An own node of an earlier session will soon
vanish, and is waited for.  docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Promises:

* While LOST or REGAINING nothing may be acknowledged.
* A lost lock is taken back only if the log was not changed since: the head is verified, and the
  node is created in one transaction with a check of the head's version.
* Once another client holds the lock after a loss, or has changed the log, ownership is denied for
  good: that client has fenced the ledger, or will.
* An attempt is not given up while its outcome is open: a time-out counts once it is known.
* A client that waits longer than a while gets one report, which names the owner.

A waiting client that may ask requests the lock from a holder that gives turns, which is a proxy's
writer, unless another client has requested it already.

The driver (`lock.py`) performs the effects and feeds the answers back.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base import backoff
from dlcore.base.errors import (
    DLError,
    LogNotFoundError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    OwnershipAcquireFailedError,
)
from dlcore.base.machines import Machine, State, Transitions
from dlcore.metadata.port import UNANSWERED

if TYPE_CHECKING:
    from dlcore.log.metadata.values import LockHolder

ATTEMPTS_MAX = 100
"""Attempts in a row that were overtaken, each by a change of the head or a node that vanished."""
_TOKENS_MAX = 100
"""Attempts whose tokens are remembered: a node of an older attempt cannot exist any more."""


class OwnershipState(State):
    """The state of the machine; RELEASED is final, and DENIED is left for it alone."""

    IDLE = "the lock is not wanted yet"
    ACQUIRING = "the lock is tried"
    WAITING = "another client has the lock, or an earlier session of this one"
    OWNED = "records may be acknowledged"
    LOST = "the session is gone, and nothing may be acknowledged"
    REGAINING = "the lock is tried again, if the log is as its owner left it"
    DENIED = "another client has the log, or has changed it"
    RELEASED = "the owner has released the lock"


_S = OwnershipState
_END = {_S.DENIED: "a defect", _S.RELEASED: "released"}
TRANSITIONS = Transitions(
    _S.IDLE,
    {
        _S.IDLE: {_S.ACQUIRING: "acquire", _S.RELEASED: "released"},
        _S.ACQUIRING: {
            _S.OWNED: "the lock is taken",
            _S.WAITING: "held, or made in a session that is gone",
            _S.DENIED: "held, and not waited for; refused",
            _S.RELEASED: "released",
        },
        _S.WAITING: {
            _S.ACQUIRING: "the node changed, or there is a session again",
            _S.DENIED: "waited too long",
            _S.RELEASED: "released",
        },
        _S.OWNED: {_S.LOST: "session expired", **_END},
        _S.LOST: {_S.REGAINING: "the node changed, or there is a session again", **_END},
        _S.REGAINING: {
            _S.OWNED: "taken again, the log unchanged",
            _S.LOST: "the session is gone again, or the node of an earlier one is there",
            _S.DENIED: "held by another, or the log moved on; refused",
            _S.RELEASED: "released",
        },
        _S.DENIED: {_S.RELEASED: "released"},
        _S.RELEASED: {_S.RELEASED: "released again"},
    },
)
_TRYING = (_S.ACQUIRING, _S.REGAINING)
_ENDED = (_S.DENIED, _S.RELEASED)


class Signal(enum.Enum):
    """Events that carry nothing."""

    CREATED = "the node was created"
    CHANGED = "the node may be gone"
    TIMED_OUT = "the caller waits no longer"
    EXPIRED = "the session is gone, and the node with it"
    RESUMED = "there is a connected session"
    RELEASE = "the caller releases the lock"


@dataclass(frozen=True, slots=True)
class Acquire:
    """Event: the caller wants the lock, and waits for so long; `now` is any clock's, in seconds."""

    timeout_s: float
    now: float


@dataclass(frozen=True, slots=True)
class Verified:
    """Event: the version of the head at which the log is as its owner left it; None: it is not."""

    version: int | None


@dataclass(frozen=True, slots=True)
class LockRead:
    """Event: the holder in the node, None if there is none; `is_current`: of the present session.

    Only the node shows its session: an attempt may have been sent in one session and carried out in
    the next.
    """

    holder: LockHolder | None
    version: int
    is_current: bool
    now: float


@dataclass(frozen=True, slots=True)
class ReportDue:
    """Event: a wait that is not over is reported."""

    now: float


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Event: a call was refused, or its outcome is unknown."""

    call: Call | CreateLock
    error: DLError


@dataclass(frozen=True, slots=True)
class Broken:
    """Event: a defect ended the driver's work."""

    error: DLError


Event: TypeAlias = Signal | Acquire | Verified | LockRead | ReportDue | CallFailed | Broken


class Call(enum.Enum):
    """Effects that carry nothing: calls with one answer, which may be `CallFailed`."""

    VERIFY = "find out whether the log is as its owner left it; answer with `Verified`"
    READ = "read the node; answer with `LockRead`"


@dataclass(frozen=True, slots=True)
class CreateLock:
    """Effect: create the node; answer with `CREATED`, or with `CallFailed`.

    The token of the attempt is announced with `attempted` before.  With `guard` the node is created
    only if the head has this version.
    """

    guard: int | None


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Effect: write into the node that the lock is wanted, if it still has this version.

    If that fails, the node has changed, or the next look asks again.
    """

    holder: LockHolder
    version: int


@dataclass(frozen=True, slots=True)
class After:
    """Effect: say `TIMED_OUT` after so many seconds, and `ReportDue` after `report_s`."""

    timeout_s: float
    report_s: float


class Notice(enum.Enum):
    """Effects that the owner hears of."""

    GRANTED = "the caller owns the log"
    SUSPENDED = "acknowledge nothing until `RESUMED`"
    RESUMED = "the log is still ours; delayed acknowledgements may be sent"


@dataclass(frozen=True, slots=True)
class Denied:
    """Effect: the lock can never be held again."""

    error: DLError


@dataclass(frozen=True, slots=True)
class Report:
    """Effect: log a warning."""

    text: str


Effect: TypeAlias = Call | CreateLock | AskHolder | After | Notice | Denied | Report


class _Wait:
    """How long the caller of `Acquire` waits for another owner, and whether that was reported."""

    def __init__(self, timeout_s: float = 0.0, begun_s: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self.is_over = False
        """Whether the caller waits no longer."""
        self.is_report_due = False
        self._begun_s = begun_s

    def left_s(self, now: float) -> float:
        """Return the seconds that are left."""
        return max(self._begun_s + self.timeout_s - now, 0.0)


class _Try:
    """One try to take the lock, with all that has happened since it began."""

    def __init__(self) -> None:
        self.attempts = 0
        self.may_differ = False
        """Whether the node or the session may have changed."""
        self.is_stale = False
        """Whether the session of the try is gone."""


class Ownership(Machine[OwnershipState]):
    """The writer lock of one log, as seen by one writer.

    Args:
        name: the log's.
        client_id: this client, for error texts.
        asks: whether to ask a proxy that holds the lock to release it.
    """

    transitions = TRANSITIONS

    def __init__(self, name: str, client_id: str, *, asks: bool = False) -> None:
        self.state = OwnershipState.IDLE
        self.denial: DLError | None = None
        """The error for which the lock can never be held again."""
        self._name = name
        self._client_id = client_id
        self._asks = asks
        self._tokens: deque[str] = deque(maxlen=_TOKENS_MAX)  # of attempts
        self._holder: LockHolder | None = None  # the last other owner that was seen
        self._wait = _Wait()
        self._try = _Try()  # the last one
        self._is_connected = True

    @property
    def is_owner(self) -> bool:
        """Whether records may be acknowledged."""
        return self.state is OwnershipState.OWNED

    @property
    def is_waiting(self) -> bool:
        """Whether it is not known yet that the lock is held, or cannot be."""
        return self.state in (OwnershipState.ACQUIRING, OwnershipState.WAITING)

    def attempted(self, token: str) -> None:
        """Remember the token of an attempt.

        It is announced before the attempt: without an answer the node may exist, and only its token
        shows that it is ours.
        """
        self._tokens.append(token)

    @property
    def has_attempted(self) -> bool:
        """Whether a node of ours may exist."""
        return bool(self._tokens)

    def is_own(self, holder: LockHolder) -> bool:
        """Return whether an attempt of ours made the node."""
        return holder.token in self._tokens

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; late and repeated ones do no harm."""
        if self.state in _ENDED and event is not Signal.RELEASE:
            return []
        match event:
            case Signal():
                return self._on_signal(event)
            case Acquire(timeout_s, now):
                return self._acquire(timeout_s, now)
            case Verified(version):
                return self._deny() if version is None else [CreateLock(version)]
            case LockRead():
                return self._lock_read(event)
            case ReportDue(now):
                self._wait.is_report_due = True
                return self._report(now)
            case CallFailed(call, error):
                return self._call_failed(call, error)
            case Broken(error):
                return self._end(error)
            case _:
                assert_never(event)

    def _on_signal(self, signal: Signal) -> list[Effect]:
        match signal:
            case Signal.CREATED:
                # The session that made the node is gone, so it vanishes and protects nothing.
                return self._not_taken() if self._try.is_stale else self._taken()
            case Signal.CHANGED:
                return self._try_again()
            case Signal.TIMED_OUT:
                self._wait.is_over = True
                return self._deny() if self.state is OwnershipState.WAITING else []
            case Signal.EXPIRED:
                return self._session_expired()
            case Signal.RESUMED:
                self._is_connected = True
                return self._try_again()
            case Signal.RELEASE:
                self._become(OwnershipState.RELEASED)
                return []
            case _:
                assert_never(signal)

    def _acquire(self, timeout_s: float, now: float) -> list[Effect]:
        self._wait = _Wait(timeout_s, now)
        first = self._begin(OwnershipState.ACQUIRING)
        if timeout_s <= 0:
            return first  # the first refusal is final
        return [After(timeout_s, backoff.REPORTED_AFTER_S), *first]

    # One try: verify if the lock was lost, create, read if that does not tell the outcome

    def _begin(self, state: OwnershipState) -> list[Effect]:
        self._become(state)
        self._try = _Try()
        return self._attempt()

    def _attempt(self) -> list[Effect]:
        self._try.attempts += 1
        if self._try.attempts > ATTEMPTS_MAX:
            return self._deny()
        # Between the lost session and this attempt another writer may have come and gone.
        is_lost = self.state is OwnershipState.REGAINING
        return [Call.VERIFY if is_lost else CreateLock(None)]

    def _call_failed(self, call: Call | CreateLock, error: DLError) -> list[Effect]:
        if not isinstance(call, CreateLock):
            return self._end(error)
        if isinstance(error, MetadataVersionError):
            # The head changed since it was verified; perhaps only by a truncation.
            return self._attempt()
        if isinstance(error, NoNodeError):
            return self._end(LogNotFoundError(f"log {self._name!r} does not exist"))
        is_open = isinstance(error, (NodeExistsError, *UNANSWERED))
        return [Call.READ] if is_open else self._end(error)

    def _lock_read(self, seen: LockRead) -> list[Effect]:
        holder = seen.holder
        if holder is None:
            return self._attempt()
        if self.is_own(holder):
            is_taken = seen.is_current and self._is_connected
            return self._taken() if is_taken else self._not_taken()
        self._holder = holder
        # While this one was away the other owner took the log over, with the extent that was open.
        if self.state is OwnershipState.REGAINING or self._wait.timeout_s <= 0:
            return self._deny()
        # One that refuses turns does not watch its node for requests.
        may_ask = self._asks and holder.turn != "refused" and not holder.wanted_by
        asked: list[Effect] = [AskHolder(holder, seen.version)] if may_ask else []
        return [*self._report(seen.now), *asked, *self._not_taken()]

    def _taken(self) -> list[Effect]:
        is_first = self.state is OwnershipState.ACQUIRING
        self._become(OwnershipState.OWNED)
        self._holder, self._try.may_differ = None, False
        return [Notice.GRANTED if is_first else Notice.RESUMED]

    def _not_taken(self) -> list[Effect]:
        """Wait: the node belongs to another, or vanishes with a session that is gone."""
        is_first = self.state is OwnershipState.ACQUIRING
        self._become(OwnershipState.WAITING if is_first else OwnershipState.LOST)
        if is_first and self._wait.is_over:
            return self._deny()
        may_differ, self._try.may_differ = self._try.may_differ, False
        return self._try_again() if may_differ else []

    # Changes of the session and the node

    def _session_expired(self) -> list[Effect]:
        self._is_connected, self._try.is_stale = False, True
        if self.state is not OwnershipState.OWNED:
            return []
        self._become(OwnershipState.LOST)
        return [Notice.SUSPENDED]

    def _try_again(self) -> list[Effect]:
        if self.state in _TRYING:
            # The answer that is awaited may be of a moment before this change.
            self._try.may_differ = True
        elif self._is_connected and self.state is OwnershipState.WAITING:
            return self._begin(OwnershipState.ACQUIRING)
        elif self._is_connected and self.state is OwnershipState.LOST:
            return self._begin(OwnershipState.REGAINING)
        return []

    # The end

    def _report(self, now: float) -> list[Effect]:
        """Report a long wait, once the lock's holder is known."""
        if not self._wait.is_report_due or self._holder is None:
            return []
        self._wait.is_report_due = False
        left_s = self._wait.left_s(now)
        return [Report(f"{self._owned()}; waiting for {left_s:.0f} s more")]

    def _owned(self) -> str:
        holder = self._holder
        who = "another writer" if holder is None else holder.described(self._client_id)
        if holder is not None and holder.owner.startswith("grpc"):
            who += (
                ", a proxy: reach the log through it (--endpoint of dlog, endpoint of Spark, "
                "grpc://…), or wait until it was idle for so long that the proxy lets go of "
                "it (idle_release_s)"
            )
        return f"log {self._name!r} is owned by {who}"

    def _deny(self) -> list[Effect]:
        owner = "" if self._holder is None else self._holder.owner
        return self._end(OwnershipAcquireFailedError(self._owned(), owner=owner))

    def _end(self, error: DLError) -> list[Effect]:
        self._become(OwnershipState.DENIED)
        self.denial = error
        return [Denied(error)]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state = self.state
        assert state is not OwnershipState.DENIED or self.denial is not None
        assert self.denial is None or state in _ENDED
        if state in _TRYING:
            assert 0 < self._try.attempts <= ATTEMPTS_MAX
        elif state not in _ENDED:
            assert not self._try.may_differ
        if state is OwnershipState.OWNED:
            assert self._is_connected
            assert self._holder is None
        assert state is not OwnershipState.WAITING or not self._wait.is_over
