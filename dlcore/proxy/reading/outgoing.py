"""The memory of all sends to readers: bounded, at the expense of those that take nothing.

A message leaves memory when its client takes it.  Who has taken nothing for `STALL_S` is ended when
another one needs the room: it has its position, and goes on from there when it comes again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

from dlcore.errors import ReaderStalledError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Send: TypeAlias = "Callable[[bytes], Awaitable[None]]"
STALL_S = 1.0
"""A client that takes nothing for so long has no use for what is held for it."""


class Outgoing:
    """The messages on their way to readers, `bytes_max` at once; one message has room if alone."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self._sending: dict[asyncio.Timeout, tuple[int, float]] = {}  # the longest under way first
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def send(self, send: Send, message: bytes) -> None:
        """Send a message, once there is room.

        Raises: ReaderStalledError: its client took nothing, while others waited for room.
        """
        await self._room(len(message))
        await self._send(send, message)

    async def begin(self, send: Send, message: bytes) -> asyncio.Future[None]:
        """Return the sending of a message, which goes on, once there is room.

        It raises what `send` does.
        """
        await self._room(len(message))
        return asyncio.ensure_future(self._send(send, message))

    async def _send(self, send: Send, message: bytes) -> None:
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._sending[limit] = len(message), asyncio.get_running_loop().time()
                self.size_bytes += len(message)
                await send(message)
        except TimeoutError:
            raise ReaderStalledError(
                f"the client took nothing for {STALL_S:g} s, and others need the room: it can go "
                "on from the position beside the last batch that it has"
            ) from None
        finally:
            self._forget(limit)

    def _forget(self, limit: asyncio.Timeout) -> None:
        size_bytes, _ = self._sending.pop(limit, (0, 0.0))
        self.size_bytes -= size_bytes
        self._freed.set()

    def _has_room(self, size_bytes: int) -> bool:
        return not self._sending or self.size_bytes + size_bytes <= self.bytes_max

    async def _room(self, size_bytes: int) -> None:
        """Wait for room, in turn; end whoever has stood still in it for too long."""
        if self._has_room(size_bytes) and not self._turn.locked():
            return
        clock = asyncio.get_running_loop().time
        async with self._turn:
            while not self._has_room(size_bytes):
                limit, (_, since_s) = next(iter(self._sending.items()))
                left_s = since_s + STALL_S - clock()
                if left_s <= 0:
                    limit.reschedule(clock())
                    self._forget(limit)
                    continue
                self._freed.clear()
                try:
                    async with asyncio.timeout(left_s):
                        await self._freed.wait()
                except TimeoutError:
                    pass
