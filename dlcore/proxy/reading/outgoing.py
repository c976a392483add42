"""The memory of all sends to readers: bounded, at the expense of those that take nothing.

A message leaves memory when its client takes it; until then gRPC has a copy of it.  Who has taken
nothing for `STALL_S` is ended when another one needs the room: it has its position, and goes on
from there when it comes again.  Its message counts until gRPC has let go of it.

Who reads older records for a client has memory as well, for what it reads ahead.  Two always may;
more of them only while messages leave room for that.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.config import MIB
from dlcore.base.errors import ReaderStalledError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

Send: TypeAlias = "Callable[[bytes], Awaitable[None]]"
STALL_S = 1.0
"""A client that takes nothing for so long has no use for what is held for it."""
_READERS_MIN = 2
_READER_BYTES = 12 * MIB
"""What a reader has of what it reads ahead: two chunks on their way from a bookie, and entries."""
_COPIES = 3
"""Of a message to one reader: it, gRPC's, and as much again of the heap around them, which messages
of other sizes leave unused."""


@dataclass(slots=True, eq=False)
class _Sending:
    """A message on its way: until when its client may stand still, and who waits for its end."""

    size_bytes: int
    until_s: float
    answer: asyncio.Future[None]


class Outgoing:
    """The messages on their way to readers, `bytes_max` at once; one message has room if alone.

    Args:
        bytes_max: what they may take, with the copies of them.
        on_use: called when a message begins to be sent, and when it is not any more.
        on_full: called when half of that is taken, and when a client is ended for want of room.
    """

    def __init__(
        self,
        bytes_max: int,
        on_use: Callable[[], None] = lambda: None,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self._on_use = on_use
        self._on_full = on_full
        self._sending: dict[_Sending, None] = {}  # the longest under way first
        self._leaving: dict[_Sending, None] = {}  # ended, and gRPC has them still
        self._readers = 0
        self.readers_waiting = 0
        """How many wait for memory to read ahead."""
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def send(self, send: Send, message: bytes) -> None:
        """Send a message that is kept in any case, so that its copy counts, once there is room.

        Raises: ReaderStalledError: its client took nothing, while others waited for room.
        """
        await (await self._begin(send, message, len(message)))

    async def begin(self, send: Send, message: bytes) -> asyncio.Future[None]:
        """Return the sending of a message for one reader, which goes on, once there is room.

        It raises what `send` does.
        """
        return await self._begin(send, message, _COPIES * len(message))

    async def _begin(self, send: Send, message: bytes, size_bytes: int) -> asyncio.Future[None]:
        await self._room(size_bytes)
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        sending = _Sending(size_bytes, loop.time() + STALL_S, answer)
        writing = asyncio.ensure_future(send(message))
        self._sending[sending] = None
        self.size_bytes += size_bytes
        self._on_use()
        if self.is_short:
            self._on_full()
        writing.add_done_callback(partial(self._written, sending))
        answer.add_done_callback(lambda _: answer.cancelled() and writing.cancel())
        return answer

    def _written(self, sending: _Sending, writing: asyncio.Future[None]) -> None:
        """Note that a message is taken, or that its call has ended."""
        self._sending.pop(sending, None)
        self._leaving.pop(sending, None)
        self.size_bytes -= sending.size_bytes
        self._freed.set()
        self._on_use()
        error = None if writing.cancelled() else writing.exception()
        if sending.answer.done():
            return
        if writing.cancelled():
            sending.answer.cancel()
        elif error is not None:
            sending.answer.set_exception(error)
        else:
            sending.answer.set_result(None)

    @property
    def is_short(self) -> bool:
        """Whether more than half is taken: then who has taken nothing yet gets little."""
        return self.size_bytes > self.bytes_max // 2

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[None, None]:
        """Read ahead for a client meanwhile, once there is memory for it."""
        self.readers_waiting += 1
        try:
            while self._readers >= _READERS_MIN and not self._may_read():
                self._freed.clear()
                await self._freed.wait()
        finally:
            self.readers_waiting -= 1
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._freed.set()

    def _may_read(self) -> bool:
        return self.size_bytes + (self._readers + 1) * _READER_BYTES <= self.bytes_max

    async def _room(self, size_bytes: int) -> None:
        """Wait for room, in turn; end whoever has stood still in it for too long."""
        if self._has_room(size_bytes) and not self._turn.locked():
            return
        async with self._turn:
            while not self._has_room(size_bytes):
                left_s = self._make_room(size_bytes)
                if left_s <= 0:
                    continue
                self._freed.clear()
                try:
                    async with asyncio.timeout(left_s):
                        await self._freed.wait()
                except TimeoutError:
                    pass

    def _has_room(self, size_bytes: int) -> bool:
        return self._fits(self.size_bytes, size_bytes)

    def _fits(self, taken_bytes: int, size_bytes: int) -> bool:
        return not taken_bytes or taken_bytes + size_bytes <= self.bytes_max

    def _make_room(self, size_bytes: int) -> float:
        """End the client that has stood still for longest; return how long to wait before another.

        None is ended while those that were ended leave enough; for these gRPC is waited for as long
        as for a client.
        """
        now_s = asyncio.get_running_loop().time()
        leaving_bytes = sum(each.size_bytes for each in self._leaving)
        staying_bytes = self.size_bytes - leaving_bytes
        is_enough = self._fits(staying_bytes, size_bytes)
        oldest = next(iter(self._leaving if is_enough else self._sending))
        if oldest.until_s > now_s:
            return oldest.until_s - now_s
        if is_enough:
            del self._leaving[oldest]
            self.size_bytes -= oldest.size_bytes
            oldest.size_bytes = 0
            return 0.0
        del self._sending[oldest]
        oldest.until_s = now_s + STALL_S
        self._leaving[oldest] = None
        self._on_full()
        if not oldest.answer.done():
            oldest.answer.set_exception(
                ReaderStalledError(
                    f"the client took nothing for {STALL_S:g} s, and others need the room: it can "
                    "go on from the position beside the last batch that it has"
                )
            )
        return 0.0
