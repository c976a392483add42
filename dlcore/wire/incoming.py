"""The answers to one read, between the connection that gets them and the task that takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.errors import DLError
    from dlcore.wire.session import Answer


class Incoming:
    """The answers of a bookie to one read, in order, for one task that takes them."""

    def __init__(self) -> None:
        self.taker: Callable[[Answer], bool] | None = None
        """Asked for each answer that comes while the task waits; True: the task does not get it."""
        self._items: deque[Answer] = deque()
        self._error: DLError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Answer) -> None:
        """Add an answer that arrived."""
        waiter = self._waiter
        is_next = waiter is not None and not waiter.done() and not self._items
        if is_next and self.taker is not None and self.taker(item):
            return
        self._items.append(item)
        self._wake()

    def fail(self, error: DLError) -> None:
        """End with an error, after the answers that came before."""
        if self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> Answer:
        """Return the next answer, or raise the error that ended the read."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()

    def drop(self) -> None:
        """Drop the answers that no task takes any more.

        A cancelled waiter holds the frames that awaited it, and these hold this object.  Without
        this call nothing of that would be freed before Python's next full garbage collection.
        """
        self._items.clear()
        self._waiter = self.taker = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
