"""Ownership of logs: those of this proxy, and the owners of the others.  No I/O, no clock.

Theory of operation.  When a client requests a log that the proxy does not own, the list of live
proxies determines which one should own it.  If that is another proxy, the client is redirected to
it; if it is this one, it acquires the log.  A proxy keeps an owned log, even if a later list has
another choice, until the log is released: because it is idle, by an operator, by the balance, or
because the proxy leaves.

    absent --asked, and preferred--> ACQUIRING --acquired--> OWNED --release--> RELEASING
    ACQUIRING --failed--> absent           OWNED --lost--> absent <--released--/

A request in ACQUIRING or RELEASING waits for the end of that state, and is repeated.  The log's
lock, fence and head decide whether a proxy may write, and not this machine.  Therefore two proxies
that both believe to own a log do no harm.

Invariants: a client is never redirected to the proxy that answers it; a proxy acquires a log only
if it is among the live proxies, and is their choice for the log.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dlcore.proxy.rendezvous import preferred_owner

if TYPE_CHECKING:
    from collections.abc import Collection


class LogState(enum.Enum):
    """The state of a log that this proxy owns, acquires or releases."""

    ACQUIRING = "acquiring"
    OWNED = "owned"
    RELEASING = "releasing"


class Verdict(enum.Enum):
    """The decision about a request for a log."""

    SERVE = "serve"
    ACQUIRE = "acquire"
    WAIT = "wait"
    """Wait until the log's state changes, and ask again."""
    FULL = "full"
    """Refuse: the proxy owns as many logs as it may."""
    NO_PROXY = "no proxy"
    """Refuse: no live proxy acquires logs."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The proxy at this location owns the log, or should own it."""

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
        """Return the sorted names of the owned logs."""
        return sorted(name for name, state in self._logs.items() if state is LogState.OWNED)

    def ask(self, log: str, live: Collection[str]) -> Decision:
        """Decide about a request for a log; `live` has the locations of the live proxies."""
        state = self._logs.get(log)
        if state is not None:
            return Verdict.SERVE if state is LogState.OWNED else Verdict.WAIT
        preferred = preferred_owner(log, live)
        if preferred is None:
            return Verdict.NO_PROXY
        if preferred != self._location:
            return Elsewhere(preferred)
        if len(self._logs) >= self._logs_max:
            return Verdict.FULL
        self._logs[log] = LogState.ACQUIRING
        return Verdict.ACQUIRE

    def successor(self, log: str, live: Collection[str]) -> Elsewhere | None:
        """Return the next owner of a log in release; None if it is this proxy, or there is none."""
        preferred = preferred_owner(log, live)
        return None if preferred in (None, self._location) else Elsewhere(str(preferred))

    def acquired(self, log: str) -> None:
        """Note that the log's writer is open."""
        assert self._logs[log] is LogState.ACQUIRING
        self._logs[log] = LogState.OWNED

    def release(self, log: str) -> bool:
        """Begin to release a log; False if it is not owned."""
        if self._logs.get(log) is not LogState.OWNED:
            return False
        self._logs[log] = LogState.RELEASING
        return True

    def gone(self, log: str) -> None:
        """Note that the log is not ours: never acquired, released, or lost.  Idempotent."""
        self._logs.pop(log, None)
