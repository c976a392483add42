"""The memory that the streams of a proxy may take together: who finds it full waits in turn.

Theory of operation.  A log may hold a quarter of what is free: so one that stands still leaves four
fifths to the others, and each further one four fifths of the rest.  Who waits for the share of his
log holds up no other log; who waits for memory itself does, or others would always pass him.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from dlcore.errors import LogNotReadyError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHARE = 4
RETRY_AFTER_S = 1.0


class ByteBudget:
    """Bytes that streams hold, at most `bytes_max`.

    What is larger than that passes when nothing else is there.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._taken = 0
        self._taken_by: dict[str, int] = {}  # by log, of those that hold something
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def take_now(self, log: str, size_bytes: int) -> bool:
        """Take so much for a log, if nobody waits and it is free; return whether it is taken."""
        if self._waiting or not self._fits(size_bytes) or not self._may(log, size_bytes):
            return False
        self._add(log, size_bytes)
        return True

    async def take(self, log: str, size_bytes: int) -> None:
        """Take so much for a log; wait until it may, behind those of it who waited before."""
        if self.take_now(log, size_bytes):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(log, deque()).append((size_bytes, turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(log, size_bytes)  # it was our turn already
            else:
                self._let_in()
            raise

    def give(self, log: str, size_bytes: int) -> None:
        """Give back what was taken."""
        self._add(log, -size_bytes)
        self._let_in()

    def _add(self, log: str, size_bytes: int) -> None:
        self._taken += size_bytes
        by_log = self._taken_by.pop(log, 0) + size_bytes
        assert self._taken >= by_log >= 0
        if by_log:
            self._taken_by[log] = by_log

    def _fits(self, size_bytes: int) -> bool:
        return not self._taken or self._taken + size_bytes <= self._bytes_max

    def _may(self, log: str, size_bytes: int) -> bool:
        """Return whether the log would hold its share; one that holds nothing may begin."""
        by_log = self._taken_by.get(log, 0)
        return not by_log or (by_log + size_bytes) * _SHARE <= self._bytes_max - self._taken

    def _let_in(self) -> None:
        for log, queue in list(self._waiting.items()):
            while queue:
                size_bytes, turn = queue[0]
                if not turn.cancelled():
                    if not self._fits(size_bytes):
                        return
                    if not self._may(log, size_bytes):
                        break
                    self._add(log, size_bytes)
                    turn.set_result(None)
                queue.popleft()
            else:
                del self._waiting[log]


class ReceivedBytes:
    """What is read of streams and has to wait: never more than there may be, who is above fails."""

    def __init__(self, bytes_max: int) -> None:
        self._budget = ByteBudget(bytes_max)

    @contextlib.contextmanager
    def hold(self, log: str, size_bytes: int) -> Iterator[None]:
        """Hold so much for a log.  Raises: LogNotReadyError."""
        if not self._budget.take_now(log, size_bytes):
            raise LogNotReadyError(
                f"log {log!r}: too much waits already for it to have room, or for its rates: "
                "write again later",
                retry_after_s=RETRY_AFTER_S,
            )
        try:
            yield
        finally:
            self._budget.give(log, size_bytes)
