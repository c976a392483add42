"""One budget for all bytes of a bookie that are on their way to readers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SHARE = 8
_CHUNK_BYTES_MIN = 64 * 1024


class ReadBudget:
    """Bytes read from disk and not yet taken by the network, over all readers.

    A chunk gets at most a share of what is free, so that many readers who do not read leave room
    for one who does.  One chunk may turn out larger than it was meant to be, by one entry: then
    what is free is less than nothing, and the next ones wait.

    `on_wait` is called when somebody begins to wait.
    """

    def __init__(self, bytes_max: int, *, on_wait: Callable[[], None]) -> None:
        self.free = bytes_max
        self._on_wait = on_wait
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def chunk_bytes(self, wanted: int) -> int:
        """Return how large the next chunk of somebody may be."""
        return min(wanted, max(_CHUNK_BYTES_MIN, self.free // _SHARE))

    @property
    def is_exhausted(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiters)

    async def take(self, size: int) -> None:
        """Wait for `size` bytes, behind those who waited before."""
        if not self._waiters and size <= self.free:
            self.free -= size
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, future))
        self._on_wait()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(size)
            raise

    def give(self, size: int) -> None:
        """Return bytes; a negative size takes more without waiting."""
        self.free += size
        while self._waiters:
            wanted, future = self._waiters[0]
            if not future.done():
                if wanted > self.free:
                    return
                self.free -= wanted
                future.set_result(None)
            self._waiters.popleft()
