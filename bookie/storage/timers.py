"""Actions that are due some time later; an action is scheduled at most once at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Timers:
    """Timers of one event loop, one per action."""

    def __init__(self) -> None:
        self._handles: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._is_closed = False

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` once after `delay_s`, unless it is scheduled or `close` was called."""
        if action in self._handles or self._is_closed:
            return

        def run() -> None:
            del self._handles[action]
            action()

        self._handles[action] = asyncio.get_running_loop().call_later(delay_s, run)

    def close(self) -> None:
        """Cancel all timers, and schedule no more."""
        self._is_closed = True
        for handle in self._handles.values():
            handle.cancel()
