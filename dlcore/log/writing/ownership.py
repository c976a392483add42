"""Ownership of a log: events in, effects out, no I/O.  The driver is `lock.py`.

Theory of operation.  The lock is a node that lives as long as its creator's session.  Each attempt
to create it has a token.  By the token an own node is distinguished from that of another owner,
also after a lost reply.  An own node of an earlier session will soon vanish.  An own node of this
session was created by an attempt whose answer was lost, and is taken.
docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

In ACQUIRING, a waiting client that may ask requests the lock from a holder that gives turns, which
is a proxy's writer, unless another client has requested it already.

While LOST nothing may be acknowledged.  A guarded attempt succeeds only if the log was not changed
since the loss.  Once another client holds the lock, or has changed the log, ownership is denied for
good.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.machines import Transitions

if TYPE_CHECKING:
    from dlcore.log.metadata.values import LockHolder

_TOKENS_MAX = 100
"""Attempts whose tokens are remembered: a node of an older attempt cannot exist any more."""


class OwnershipState(enum.Enum):
    """The state of the machine; RELEASED is final, and DENIED is left for it alone."""

    ACQUIRING = "the lock is tried, or waited for"
    OWNED = "records may be acknowledged"
    LOST = "the session is gone, and nothing may be acknowledged"
    DENIED = "another client has the log, or has changed it"
    RELEASED = "the owner has let go"


_S = OwnershipState
TRANSITIONS = Transitions(
    _S.ACQUIRING,
    {
        _S.ACQUIRING: {
            _S.OWNED: "the lock is taken",
            _S.DENIED: "held by another, or timed out",
            _S.RELEASED: "let go",
        },
        _S.OWNED: {_S.LOST: "session expired", _S.RELEASED: "let go"},
        _S.LOST: {
            _S.OWNED: "taken again, the log unchanged",
            _S.DENIED: "held by another, or the log moved on",
            _S.RELEASED: "let go",
        },
        _S.DENIED: {_S.RELEASED: "let go"},
        _S.RELEASED: {_S.RELEASED: "let go again"},
    },
)


@dataclass(frozen=True, slots=True)
class LockTaken:
    """Event: the node exists, made by our last attempt or an earlier one in this session."""


@dataclass(frozen=True, slots=True)
class LockHeld:
    """Event: the node exists and belongs to `holder`."""

    holder: LockHolder


@dataclass(frozen=True, slots=True)
class LockChanged:
    """Event: the node may be gone; try again."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Event: the caller waits no longer."""


@dataclass(frozen=True, slots=True)
class LogMoved:
    """Event: a guarded attempt found that another client changed the log."""


@dataclass(frozen=True, slots=True)
class SessionExpired:
    """Event: the session is gone, and the node with it."""


@dataclass(frozen=True, slots=True)
class SessionResumed:
    """Event: there is a connected session."""


Event: TypeAlias = (
    LockTaken | LockHeld | LockChanged | TimedOut | LogMoved | SessionExpired | SessionResumed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TryLock:
    """Effect: try to create the node; `guarded`: only if the log is as the owner left it."""

    guarded: bool


@dataclass(frozen=True, slots=True)
class Granted:
    """Effect: the caller owns the log."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """Effect: acknowledge nothing until `Resumed`."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Effect: the log is still ours; delayed acknowledgements may be sent."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Effect: give up; `holder` has the log, None if unknown."""

    holder: LockHolder | None


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Effect: tell `holder` that its lock is wanted; if that fails, the next look asks again."""

    holder: LockHolder


Effect: TypeAlias = TryLock | Granted | Suspended | Resumed | Denied | AskHolder


class Ownership:
    """The writer lock of one log, as seen by one writer."""

    def __init__(self, *, waits: bool, asks: bool = False) -> None:
        self._waits = waits  # whether to wait for another owner
        self._asks = asks  # whether to ask that owner to release the lock
        self._attempts: deque[str] = deque(maxlen=_TOKENS_MAX)  # tokens of attempts
        self.holder: LockHolder | None = None
        """The last owner that was seen."""
        self._connected = True
        self.state = OwnershipState.ACQUIRING

    @property
    def is_owner(self) -> bool:
        """Whether records may be acknowledged."""
        return self.state is OwnershipState.OWNED

    def start(self) -> list[Effect]:
        """Begin to acquire."""
        assert self.state is OwnershipState.ACQUIRING
        return [TryLock(guarded=False)]

    def attempted(self, token: str) -> None:
        """Remember the token of an attempt.  Idempotent."""
        if token not in self._attempts:
            self._attempts.append(token)

    @property
    def has_attempted(self) -> bool:
        """Whether a node of ours may exist."""
        return bool(self._attempts)

    def is_own(self, holder: LockHolder) -> bool:
        """Return whether an attempt of ours made the node."""
        return holder.token in self._attempts

    def _become(self, state: OwnershipState) -> None:
        assert TRANSITIONS.allow(self.state, state), (self.state, state)
        self.state = state

    def release(self) -> None:
        """Stop: nothing follows."""
        self._become(OwnershipState.RELEASED)

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; late and repeated ones do no harm."""
        match event:
            case SessionExpired():
                return self._session_expired()
            case SessionResumed():
                self._connected = True
                return self._try_again()
            case LockChanged():
                return self._try_again()
            case LockTaken():
                return self._taken()
            case LockHeld():
                return self._held(event.holder)
            case TimedOut():
                return self._deny() if self.state is OwnershipState.ACQUIRING else []
            case LogMoved():
                return self._deny() if self.state is OwnershipState.LOST else []
            case _:
                assert_never(event)

    def _session_expired(self) -> list[Effect]:
        self._connected = False
        if self.state is not OwnershipState.OWNED:
            return []
        self._become(OwnershipState.LOST)
        return [Suspended()]

    def _try_again(self) -> list[Effect]:
        if not self._connected:
            return []
        if self.state is OwnershipState.ACQUIRING:
            return [TryLock(guarded=False)]
        if self.state is OwnershipState.LOST:
            return [TryLock(guarded=True)]
        return []

    def _taken(self) -> list[Effect]:
        if not self._connected:
            return []  # the node belongs to an expired session, and vanishes with it
        self.holder = None
        if self.state is OwnershipState.ACQUIRING:
            self._become(OwnershipState.OWNED)
            return [Granted()]
        if self.state is OwnershipState.LOST:
            self._become(OwnershipState.OWNED)
            return [Resumed()]
        return []

    def _held(self, holder: LockHolder) -> list[Effect]:
        self.holder = holder
        if self.is_own(holder):
            return []  # our earlier session left it, and it will soon vanish
        # A new owner has fenced our ledger, or will: waiting for the lock would be useless.
        if self.state is OwnershipState.LOST:
            return self._deny()
        if self.state is OwnershipState.ACQUIRING and not self._waits:
            return self._deny()
        if self.state is OwnershipState.ACQUIRING and self._asks:
            # One that refuses turns does not watch its node for requests.
            lets_go = holder.turn != "refused" and not holder.wanted_by
            return [AskHolder(holder)] if lets_go else []
        return []

    def _deny(self) -> list[Effect]:
        self._become(OwnershipState.DENIED)
        return [Denied(self.holder)]
