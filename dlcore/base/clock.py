"""The clock, which only this module and event loops read, and random identities."""

from __future__ import annotations

import time
import uuid
from typing import Protocol


class Clock(Protocol):
    """Wall-clock time and fresh identities; time-outs use the event loop's own monotonic time."""

    def now_ms(self) -> int:
        """Return the wall-clock time in epoch milliseconds."""
        ...

    def new_token(self) -> str:
        """Return a fresh identity of 32 hex digits."""
        ...


def steady_s() -> float:
    """Return seconds that never go back, in the finest steps: a loop may count milliseconds."""
    return time.monotonic()


def wall_s() -> float:
    """Return the seconds since 1970 by the machine's clock, which may be set back."""
    return SystemClock().now_ms() / 1000


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Return the wall-clock time in epoch milliseconds."""
        return time.time_ns() // 1_000_000

    def new_token(self) -> str:
        """Return a random UUID as 32 hex digits."""
        return uuid.uuid4().hex
