"""The state of a session with the metadata store, and the callbacks that hear of each change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.metadata.port import StoreFigures, Unsubscribe


class SessionStates:
    """The state of one session; used on its event loop.

    Args:
        now: the first state, which no callback hears.
        figures: count the sessions that were lost.
    """

    def __init__(self, now: SessionState, figures: StoreFigures) -> None:
        self.now = now
        """The present state."""
        self._loop = asyncio.get_running_loop()
        self._figures = figures
        self._callbacks: dict[object, Callable[[SessionState], None]] = {}

    def become(self, state: SessionState) -> None:
        """Change the state; callbacks hear of it soon, in turns of the loop of their own."""
        self.now = state
        self._figures.sessions_lost += state is SessionState.EXPIRED
        for key in list(self._callbacks):
            self._loop.call_soon(self._tell, key, state)

    def _tell(self, key: object, state: SessionState) -> None:
        if (callback := self._callbacks.get(key)) is not None:
            callback(state)

    def subscribe(self, callback: Callable[[SessionState], None]) -> Unsubscribe:
        """Call `callback` at every change, until it unsubscribes."""
        key = object()
        self._callbacks[key] = callback

        def unsubscribe() -> None:
            self._callbacks.pop(key, None)

        return unsubscribe

    def close(self) -> None:
        """End the session; no callback hears of that, or of anything later."""
        self.now = SessionState.EXPIRED
        self._callbacks.clear()
