"""Ownership of a log: events in, effects out, no I/O.  The driver is `lock.py`.

Theory of operation.  The lock is a node that lives as long as its creator's session.  Each attempt
to create it carries a token, so that a lost reply is recognised, and so that a node of one's own
is told from another owner's: one of an earlier session is about to vanish, one of this session was
made when it was not known yet that there is one, and is taken.

              TryLock            Granted
    ACQUIRING --------> ... ------------> OWNED --SessionExpired/Suspended--> LOST
        |  LockHeld: wait or Denied        ^                                    |
        v                                  +------- Resumed (TryLock guarded) --+
      DENIED <--------------------- LockHeld by another, or the log moved on ---+

While LOST nothing may be acknowledged.  A guarded attempt succeeds only if nobody changed the log
since it was lost; once another holds the lock, or the log has moved on, ownership is denied for
good.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

if TYPE_CHECKING:
    from dlcore.log.metadata.values import LockHolder

_TOKENS_MAX = 100
"""Attempts whose tokens are remembered: of those before them no node can be left."""


class OwnershipState(enum.Enum):
    """Where the machine is; DENIED and RELEASED are final."""

    ACQUIRING = "acquiring"
    OWNED = "owned"
    LOST = "lost"
    DENIED = "denied"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class LockTaken:
    """Event: the node exists and is of our last attempt, or of one before it in this session."""


@dataclass(frozen=True, slots=True)
class LockHeld:
    """Event: the node exists and is `holder`'s."""

    holder: LockHolder


@dataclass(frozen=True, slots=True)
class LockChanged:
    """Event: the node may be gone; look again."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Event: the caller waits no longer."""


@dataclass(frozen=True, slots=True)
class LogMoved:
    """Event: a guarded attempt found that somebody else changed the log."""


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
    """Effect: the log is still ours; what was held back may be acknowledged."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Effect: give up; `holder` is who has the log, None if unknown."""

    holder: LockHolder | None


Effect: TypeAlias = TryLock | Granted | Suspended | Resumed | Denied


class Ownership:
    """The writer lock of one log, as seen by one writer."""

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits  # whether another owner is waited for
        self._attempts: deque[str] = deque(maxlen=_TOKENS_MAX)  # their tokens
        self.holder: LockHolder | None = None
        """Who was seen to have the log last."""
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
        """Remember that an attempt carries `token`.  Idempotent."""
        if token not in self._attempts:
            self._attempts.append(token)

    @property
    def has_attempted(self) -> bool:
        """Whether there may be a node of ours."""
        return bool(self._attempts)

    def is_own(self, holder: LockHolder) -> bool:
        """Return whether an attempt of ours made the node."""
        return holder.token in self._attempts

    def release(self) -> None:
        """Stop: nothing follows."""
        self.state = OwnershipState.RELEASED

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; late and repeated ones are harmless."""
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
        self.state = OwnershipState.LOST
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
            return []  # taken by a session that is gone
        self.holder = None
        if self.state is OwnershipState.ACQUIRING:
            self.state = OwnershipState.OWNED
            return [Granted()]
        if self.state is OwnershipState.LOST:
            self.state = OwnershipState.OWNED
            return [Resumed()]
        return []

    def _held(self, holder: LockHolder) -> list[Effect]:
        self.holder = holder
        if self.is_own(holder):
            return []  # left by our earlier session, it is about to vanish
        if self.state is OwnershipState.LOST:
            return self._deny()
        if self.state is OwnershipState.ACQUIRING and not self._waits:
            return self._deny()
        return []

    def _deny(self) -> list[Effect]:
        self.state = OwnershipState.DENIED
        return [Denied(self.holder)]
