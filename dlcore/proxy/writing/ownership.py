"""Ownership of logs: those of this proxy, and who serves the others.  No I/O, no clock of its own.

Theory of operation.  A log that the proxy does not own is asked for, and the list of live proxies
says who should own it: another proxy is named to the client, and this one acquires it.  What it
owns it keeps, whoever should own it by a later list, until it is released: because it is idle, by
an operator, or because the proxy leaves.

    absent --asked, and preferred--> ACQUIRING --acquired--> OWNED --release--> RELEASING
    ACQUIRING --failed--> absent           OWNED --lost--> absent <--released--/

Who asks in ACQUIRING or RELEASING waits for the end of it, and asks again.  That a proxy may write
is decided by the log's lock, fence and head, not here: two that both believe to own a log do no
harm.

Invariants: a client is never sent to the proxy that answers it; a log is acquired only by who is
among the live proxies, and only if it is nobody else's turn.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dlcore.proxy.rendezvous import preferred_owner

if TYPE_CHECKING:
    from collections.abc import Collection


class LogState(enum.Enum):
    """Where a log is that the proxy has to do with."""

    ACQUIRING = "acquiring"
    OWNED = "owned"
    RELEASING = "releasing"


class Verdict(enum.Enum):
    """What to do for who asks for a log."""

    SERVE = "serve"
    ACQUIRE = "acquire"
    WAIT = "wait"
    """Until its state changes; then ask again."""
    FULL = "full"
    """Refuse: the proxy owns as many logs as it may."""
    NOBODY = "nobody"
    """Refuse: no live proxy takes logs."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The proxy at this location serves the log, or should."""

    location: str


Decision: TypeAlias = Verdict | Elsewhere


class Ownership:
    """The logs of the proxy at `location`, at most `logs_max` at once."""

    def __init__(self, location: str, *, logs_max: int) -> None:
        self._location = location
        self._logs_max = logs_max
        self._logs: dict[str, LogState] = {}

    def __len__(self) -> int:
        return len(self._logs)

    def owned(self) -> list[str]:
        """Return the sorted names of the logs that it owns."""
        return sorted(name for name, state in self._logs.items() if state is LogState.OWNED)

    def ask(self, log: str, live: Collection[str]) -> Decision:
        """Decide who serves a log, by the locations of the live proxies."""
        state = self._logs.get(log)
        if state is not None:
            return Verdict.SERVE if state is LogState.OWNED else Verdict.WAIT
        preferred = preferred_owner(log, live)
        if preferred is None:
            return Verdict.NOBODY
        if preferred != self._location:
            return Elsewhere(preferred)
        if len(self._logs) >= self._logs_max:
            return Verdict.FULL
        self._logs[log] = LogState.ACQUIRING
        return Verdict.ACQUIRE

    def successor(self, log: str, live: Collection[str]) -> Elsewhere | None:
        """Return who should serve a log that is let go of; None: this proxy again, or nobody."""
        preferred = preferred_owner(log, live)
        return None if preferred in (None, self._location) else Elsewhere(str(preferred))

    def acquired(self, log: str) -> None:
        """Note that the log's writer is open."""
        assert self._logs[log] is LogState.ACQUIRING
        self._logs[log] = LogState.OWNED

    def release(self, log: str) -> bool:
        """Begin to let go of a log; False if it is not owned."""
        if self._logs.get(log) is not LogState.OWNED:
            return False
        self._logs[log] = LogState.RELEASING
        return True

    def gone(self, log: str) -> None:
        """Note that the log is not ours: never acquired, released, or lost.  Idempotent."""
        self._logs.pop(log, None)
