"""The bound on the memory of all sends to readers; stalled clients lose their place in it.

gRPC keeps a copy of a message until its client receives it.  If another client needs memory, a
client that has received nothing for `STALL_S` is disconnected.  It knows its position, and can go
on from there.  Its message counts until gRPC has freed it.

A reader of older records needs memory as well, for its read-ahead.  Two such readers are always
allowed; more of them only while messages leave enough memory.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from dlcore.base.background import start_task
from dlcore.base.config import MIB
from dlcore.base.errors import ReaderStalledError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sized

Send: TypeAlias = "Callable[[Any], Coroutine[Any, Any, None]]"
"""Sends a message, which is of the kind that the reader's view makes."""
STALL_S = 1.0
"""A client that receives nothing for this time may be disconnected if others need memory."""
_READERS_MIN = 2
_READER_BYTES = 12 * MIB
"""Memory of a reader's read-ahead: two chunks in transit from a bookie, and decoded entries."""
_COPIES = 3
"""Factor for the memory of a message to one reader: the message, gRPC's copy, and as much again for
gaps in the heap that messages of other sizes leave."""


@dataclass(slots=True, eq=False)
class _Sending:
    """A message in transit, the time until which its client may stall, and a future of its end."""

    size_bytes: int
    until_s: float
    answer: asyncio.Future[None]


class _InTransit:
    """The messages in transit and their bytes, at most `bytes_max`.  No I/O, no clock."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self._sending: dict[_Sending, None] = {}  # in the order of their start
        self._leaving: dict[_Sending, None] = {}  # ended, but gRPC has not freed them yet

    def __iter__(self) -> Iterator[_Sending]:
        return iter(self._sending)

    def begin(self, sending: _Sending) -> None:
        """Count a message whose sending begins."""
        self._sending[sending] = None
        self.size_bytes += sending.size_bytes

    def end(self, sending: _Sending) -> None:
        """Forget a message that was received, or whose call has ended."""
        self._sending.pop(sending, None)
        self._leaving.pop(sending, None)
        self.size_bytes -= sending.size_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Return whether a message of this size may begin."""
        return self._fits(self.size_bytes, size_bytes)

    def _fits(self, taken_bytes: int, size_bytes: int) -> bool:
        # A message larger than the bound must be sent as well: then it is alone.
        return not taken_bytes or taken_bytes + size_bytes <= self.bytes_max

    def make_room(self, size_bytes: int, *, now_s: float) -> float | _Sending:
        """Give up the message that has stalled for longest, if its time is over.

        Returns: the message that was given up, or the seconds to wait for memory before the next
            call; 0: call again at once.

        While the clients ended so far free enough memory, no other one is ended.  gRPC gets as much
        time to free their messages as a client has; afterwards they do not count any more.
        """
        leaving_bytes = sum(each.size_bytes for each in self._leaving)
        is_enough = self._fits(self.size_bytes - leaving_bytes, size_bytes)
        # Neither is empty here: without bytes of its messages, there would be room.
        oldest = next(iter(self._leaving if is_enough else self._sending))
        if oldest.until_s > now_s:
            return oldest.until_s - now_s
        if is_enough:
            del self._leaving[oldest]
            self.size_bytes -= oldest.size_bytes
            # Otherwise `end` would subtract it once more, when gRPC frees it at last.
            oldest.size_bytes = 0
            return 0.0
        del self._sending[oldest]
        oldest.until_s = now_s + STALL_S
        self._leaving[oldest] = None
        return oldest


class Outgoing:
    """The messages in transit to readers, at most `bytes_max`; a single message always has room.

    Args:
        bytes_max: most bytes of messages, with their copies.
        on_use: called when a send begins, and when it ends.
        on_full: called when more than half of the bytes are used, and when a client is ended
            because others need memory.
    """

    def __init__(
        self,
        bytes_max: int,
        on_use: Callable[[], None] = lambda: None,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        self.sent_bytes = 0
        """Bytes of the messages that were begun."""
        self.readers_waiting = 0
        """Number of readers that wait for memory to read ahead."""
        self._on_use = on_use
        self._on_full = on_full
        self._in_transit = _InTransit(bytes_max)
        self._readers = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def bytes_max(self) -> int:
        """Most bytes in transit."""
        return self._in_transit.bytes_max

    @property
    def size_bytes(self) -> int:
        """Bytes in transit now."""
        return self._in_transit.size_bytes

    async def send(self, send: Send, message: Sized) -> None:
        """Wait for memory, and send a message of a ring.

        Only gRPC's copy counts here, because the ring keeps the message anyway.

        Raises: ReaderStalledError: the client received nothing, and others waited for memory.
        """
        await (await self._begin(send, message, len(message)))

    async def begin(self, send: Send, message: Sized) -> asyncio.Future[None]:
        """Wait for memory, and begin to send a message for one reader; return a future of its end.

        The future raises as `send`; cancelling it cancels the send.
        """
        return await self._begin(send, message, _COPIES * len(message))

    async def _begin(self, send: Send, message: Sized, size_bytes: int) -> asyncio.Future[None]:
        await self._room(size_bytes)
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        sending = _Sending(size_bytes, loop.time() + STALL_S, answer)
        writing = start_task(send(message), partial(self._written, sending))
        self._in_transit.begin(sending)
        self.sent_bytes += len(message)
        self._on_use()
        if self.is_short:
            self._on_full()
        answer.add_done_callback(lambda _: answer.cancelled() and writing.cancel())
        return answer

    def _written(self, sending: _Sending, writing: asyncio.Future[None]) -> None:
        """Note that a message was received, or that its call has ended."""
        self._in_transit.end(sending)
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

    def resize(self, bytes_max: int) -> None:
        """Use this many bytes from now on; what is in transit beyond them stays."""
        self._in_transit.bytes_max = bytes_max
        self._freed.set()

    @property
    def is_short(self) -> bool:
        """Whether more than half is used; clients that received nothing yet then get little."""
        return self.size_bytes > self.bytes_max // 2

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[None, None]:
        """Wait for the memory of a reader's read-ahead, and hold it during the block."""
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
        """Wait for memory, in order; end clients that have stalled for too long."""
        in_transit = self._in_transit
        if in_transit.has_room(size_bytes) and not self._turn.locked():
            return
        async with self._turn:
            while not in_transit.has_room(size_bytes):
                now_s = asyncio.get_running_loop().time()
                found = in_transit.make_room(size_bytes, now_s=now_s)
                if isinstance(found, _Sending):
                    self._end(found)
                elif found > 0:
                    self._freed.clear()
                    try:
                        async with asyncio.timeout(found):
                            await self._freed.wait()
                    except TimeoutError:
                        pass

    def _end(self, stalled: _Sending) -> None:
        """End the client of a message that was given up."""
        self._on_full()
        if not stalled.answer.done():
            stalled.answer.set_exception(
                ReaderStalledError(
                    f"the client received nothing for {STALL_S:g} s, and other clients need the "
                    "memory: it can go on from the position in the metadata of its last batch"
                )
            )
