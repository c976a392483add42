"""The memory that the streams of a proxy may take together: who finds it full waits in turn."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Bytes of what was accepted and is not durable, at most `bytes_max`.

    What is larger than that passes when nothing else is there.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> None:
        """Take so much; wait until it is free, behind those who waited before."""
        if not self._waiting and self._fits(size_bytes):
            self._taken += size_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size_bytes)  # it was our turn already
            else:
                self._let_in()
            raise

    def give(self, size_bytes: int) -> None:
        """Give back what was taken."""
        self._taken -= size_bytes
        assert self._taken >= 0
        self._let_in()

    def _fits(self, size_bytes: int) -> bool:
        return not self._taken or self._taken + size_bytes <= self._bytes_max

    def _let_in(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif self._fits(size_bytes):
                self._waiting.popleft()
                self._taken += size_bytes
                turn.set_result(None)
            else:
                return
