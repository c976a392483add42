"""The budgets of a bookie: for large payloads that it receives, and for bytes sent to readers.

Bytes for readers are taken from the budget before they are read for a client.  They are given back
once the network has taken them, or never will.  The free part is never negative.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from bookie.files.entry_reader import LargerEntryError
from dlcore.base.errors import BookieOverloadedError
from dlcore.wire.frames import total_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.wire.messages import Chunk, Update


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
        return ReceiveRoom(self, loop.time, partial(loop.call_soon, on_granted))

    def take(self, room: ReceiveRoom, size: int) -> None:
        """Give `room` memory for `size` bytes, behind the connections that waited before."""
        if not self._waiters and self._fits(size):
            self._grant(room, size)
        else:
            self._waiters[room] = size
            self._on_wait()

    def give(self, room: ReceiveRoom) -> None:
        """Take back the memory that `room` has, and remove it from the queue."""
        self._waiters.pop(room, None)
        self._held_bytes -= room.held_bytes
        room.hold(0)
        self._serve()

    def wants(self, room: ReceiveRoom) -> bool:
        """Return whether `room` waits."""
        return room in self._waiters

    def _serve(self) -> None:
        # In order: small payloads that pass a large one could delay it for ever.
        for room, size in list(self._waiters.items()):
            if not self._fits(size):
                return
            del self._waiters[room]
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

    @property
    def is_waiting(self) -> bool:
        """Whether the connection waits for memory."""
        return self._budget.wants(self)

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


_SHARE = 8
_CHUNK_BYTES_MIN = 64 * 1024

_T = TypeVar("_T")


class ReadBudget:
    """Bytes read from disk and not yet taken by the network, over all readers.

    A chunk gets at most a share of the free bytes.  Therefore many clients that do not receive
    their data leave enough for one that does.  A single entry that is larger than its chunk waits
    in the queue for the bytes that it needs.

    `on_wait` is called when a reader begins to wait.
    """

    def __init__(self, bytes_max: int, *, on_wait: Callable[[], None]) -> None:
        self.bytes_max = bytes_max
        self.free = bytes_max
        self.sent_bytes = 0
        """The bytes of all messages that were passed to the network."""
        self._on_wait = on_wait
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def chunk_bytes(self, wanted: int) -> int:
        """Return the largest allowed size of a reader's next chunk."""
        return min(wanted, max(_CHUNK_BYTES_MIN, self.free // _SHARE), self.bytes_max)

    @property
    def is_exhausted(self) -> bool:
        """Whether a reader waits."""
        return bool(self._waiters)

    async def within(self, wanted: int, read: Callable[[int], Awaitable[_T]]) -> tuple[_T, int]:
        """Return the result of `read`, and how many bytes the caller must give back for it.

        `read` gets the number of bytes that it may read: at most `wanted`, or the size of a larger
        entry.

        Raises:
            BookieOverloadedError: one entry alone is larger than the budget.
        """
        size = self.chunk_bytes(wanted)
        while True:
            if not self._take_now(size):
                await self.take(size)
            try:
                return await read(size), size
            except LargerEntryError as error:
                # Only the read knows the size of the entry.  Give the bytes back before the wait
                # for more: readers that all hold some and wait for more would block each other.
                needed = error.size_bytes
                self.give(size)
            except BaseException:
                self.give(size)
                raise
            if needed > self.bytes_max:
                raise BookieOverloadedError(
                    f"an entry of {needed} bytes, expected at most read_bytes_max={self.bytes_max}"
                )
            size = needed

    async def take(self, size: int) -> None:
        """Wait for `size` bytes, behind the readers that waited before."""
        if self._take_now(size):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, future))
        self._on_wait()
        try:
            await future
        except asyncio.CancelledError:
            # The bytes may have been granted just before the cancellation.
            if future.done() and not future.cancelled():
                self.give(size)
            raise

    def _take_now(self, size: int) -> bool:
        if self._waiters or size > self.free:
            return False
        self.free -= size
        return True

    def give(self, size: int) -> None:
        """Give bytes back.  Raises: ValueError: fewer were taken."""
        if not 0 <= size <= self.bytes_max - self.free:
            raise ValueError(f"{size} bytes given back of {self.bytes_max - self.free} taken")
        self.free += size
        while self._waiters:
            wanted, future = self._waiters[0]
            if not future.done():
                # Even if a later waiter needs less: else large entries could wait for ever.
                if wanted > self.free:
                    return
                self.free -= wanted
                future.set_result(None)
            self._waiters.popleft()


class ReadShare:
    """Reads of one connection.

    Args:
        budget: the budget of all connections.
        write: passes a message to the network; returns whether the network is behind now.
    """

    def __init__(self, budget: ReadBudget, write: Callable[[Chunk | Update], bool]) -> None:
        self._budget = budget
        self._write = write
        self._unsent_bytes = 0

    async def send(
        self, wanted: int, read: Callable[[int], Awaitable[Chunk | Update | None]]
    ) -> None:
        """Send the message that `read` returns, if any.

        `read` gets the number of bytes that it may read.
        """
        message, held = await self._budget.within(wanted, read)
        try:
            if message is not None:
                size = total_bytes(message.frames)
                self._budget.give(held - size)
                held = size
                self._budget.sent_bytes += size
                # The transport keeps the message until the network takes it: `release` gives back.
                if self._write(message):
                    self._unsent_bytes += held
                    held = 0
        finally:
            self._budget.give(held)

    def close(self) -> None:
        """Give everything back, and drop the reference to the connection, which refers to this."""
        self.release()
        self._write = lambda _message: False

    def release(self) -> None:
        """Give back the bytes that the network has taken, or will never take."""
        unsent, self._unsent_bytes = self._unsent_bytes, 0
        self._budget.give(unsent)
