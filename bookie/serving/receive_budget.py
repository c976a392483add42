"""The budget of a bookie for large payloads that it receives: memory that connections wait for."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ReceiveBudget:
    """Bytes of incomplete payloads, over all connections.

    A payload gets memory for all its bytes at once, in the order of the requests, and gives it back
    when it is complete.  A connection that has memory therefore waits only for its client.  If no
    connection has memory, the first request is granted whatever its size is.

    `on_wait` is called when a connection begins to wait.
    """

    def __init__(self, bytes_max: int, *, on_wait: Callable[[], None]) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._on_wait = on_wait
        self._waiters: dict[ReceiveRoom, int] = {}

    @property
    def is_exhausted(self) -> bool:
        """Whether a connection waits."""
        return bool(self._waiters)

    def room(self, on_granted: Callable[[], None]) -> ReceiveRoom:
        """Return the room of a connection; `on_granted` is called when its wait ends."""
        loop = asyncio.get_running_loop()
        # Not at once: memory is given back within the turn of another session.
        return ReceiveRoom(self, loop.time, partial(loop.call_soon, on_granted))

    def take(self, room: ReceiveRoom, size: int) -> None:
        """Give `room` memory for `size` bytes, behind the connections that waited before."""
        if not self._waiters and self._fits(size):
            self._grant(room, size)
        else:
            self._waiters[room] = size
            room.is_waiting = True
            self._on_wait()

    def give(self, room: ReceiveRoom) -> None:
        """Take back the memory that `room` has, and remove it from the queue."""
        self._waiters.pop(room, None)
        room.is_waiting = False
        self._held_bytes -= room.held_bytes
        room.hold(0)
        self._serve()

    def _serve(self) -> None:
        # In order: small payloads that pass a large one could delay it for ever.
        for room, size in list(self._waiters.items()):
            if not self._fits(size):
                return
            del self._waiters[room]
            room.is_waiting = False
            self._grant(room, size)
            room.on_granted()

    def _fits(self, size: int) -> bool:
        # A payload larger than the whole budget must not wait for ever.
        return not self._held_bytes or self._held_bytes + size <= self._bytes_max

    def _grant(self, room: ReceiveRoom, size: int) -> None:
        self._held_bytes += size
        room.hold(size)


class ReceiveRoom:
    """The part of the budget that one connection has: memory for one payload at a time."""

    def __init__(
        self, budget: ReceiveBudget, now_s: Callable[[], float], on_granted: Callable[[], object]
    ) -> None:
        self._budget = budget
        self._now_s = now_s
        self._since_s = 0.0
        self.on_granted = on_granted
        self.require_right: Callable[[], None] | None = None
        """Raises an error for a connection that may not have a large payload."""
        self.held_bytes = 0
        self.is_waiting = False
        """Whether the connection waits for memory; the budget sets it."""

    def take(self, size: int) -> bool:
        """Return whether a payload of `size` bytes has its memory; if not, call again later."""
        if not self.held_bytes and not self.is_waiting:
            if self.require_right is not None:
                self.require_right()
            self._budget.take(self, size)
        return bool(self.held_bytes)

    def close(self) -> None:
        """Give the memory back for good, and drop the connection, which refers to this."""
        self.give()
        self.on_granted = lambda: None
        self.require_right = None

    def hold(self, size: int) -> None:
        """Note the memory that was granted, and the time."""
        self.held_bytes = size
        self._since_s = self._now_s()

    def held_s(self) -> float:
        """Return for how long an incomplete payload has had its memory."""
        return self._now_s() - self._since_s if self.held_bytes else 0.0

    def give(self) -> None:
        """Give the memory back: the payload is complete, or its connection has ended."""
        self._budget.give(self)
