"""Places for a number of holders, which may change while some of them are held."""

from __future__ import annotations

import asyncio
from collections import deque


class Places:
    """At most `count` holders at once, each an ``async with``; others wait in order.

    After `resize` to fewer places than holders, callers wait until fewer are held than `count`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._held = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def locked(self) -> bool:
        """Return whether a caller that comes now has to wait."""
        return self._held >= self._count or bool(self._waiting)

    def resize(self, count: int) -> None:
        """Let there be `count` places from now on."""
        self._count = count
        self._let_in()

    async def __aenter__(self) -> None:
        if not self.locked():
            self._held += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._let_in()  # it may have stood before others
            else:  # it was let in at the same moment
                self._give_back()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self._held -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and (self._held < self._count or self._waiting[0].done()):
            turn = self._waiting.popleft()
            if not turn.done():  # else its caller was cancelled
                self._held += 1
                turn.set_result(None)
