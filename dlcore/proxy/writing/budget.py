"""The bound on the memory of all streams of a proxy; streams beyond it wait in order.

Theory of operation.  A log may hold a quarter of the free bytes.  Therefore one log that stalls
leaves four fifths to the others, and each further one leaves four fifths of the rest.  Waiters that
are blocked by the share of their log, or by the limit of their principal, do not block others.
Waiters for total memory are served in order, because others would always pass a large request.  The
reason of a wait may change.  If it becomes the limit of the principal, the waiter is woken, and
waits again for the new reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.errors import LogNotReadyError, OverCapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_SHARE = 4
RETRY_AFTER_S = 1.0


class Holder(NamedTuple):
    """The owner of bytes: their log, and the principal of the client, if it is known."""

    log: str
    principal: str | None = None


class _Turn(NamedTuple):
    """A waiter; the answer is True if it has its bytes, False if it must wait again."""

    size_bytes: int
    is_due_to_principal: bool
    answer: asyncio.Future[bool]


class ByteBudget:
    """Bytes that streams hold: at most `bytes_max`, and limits for a log and a principal.

    A limit of 0 is none.  A request above a limit passes if nothing else is held.
    """

    def __init__(
        self, bytes_max: int, *, log_bytes_max: int = 0, principal_bytes_max: int = 0
    ) -> None:
        self._taken = 0
        self._taken_by: Counter[str] = Counter()  # by log; without zeros
        self._taken_by_principal: Counter[str] = Counter()
        self._waiting: dict[Holder, deque[_Turn]] = {}
        self.resize(bytes_max, log_bytes_max=log_bytes_max, principal_bytes_max=principal_bytes_max)

    def resize(
        self, bytes_max: int, *, log_bytes_max: int = 0, principal_bytes_max: int = 0
    ) -> None:
        """Set other limits; what is held beyond them stays until it is given back."""
        self._bytes_max = bytes_max
        self._log_bytes_max = log_bytes_max or bytes_max
        self._principal_bytes_max = principal_bytes_max or bytes_max
        self._let_in()

    def take_now(self, holder: Holder, size_bytes: int) -> bool:
        """Take bytes if they are free and no call waits; return whether they are taken."""
        if self._waiting or not self._fits(size_bytes) or not self._may(holder, size_bytes):
            return False
        self._add(holder, size_bytes)
        return True

    async def take(
        self,
        holder: Holder,
        size_bytes: int,
        holding_up: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Take bytes; if need be wait, behind earlier waiters of the same holder.

        The context `holding_up` is open while other writers of the log would have to wait as well.
        It is not open while only the limit of the principal is the reason of the wait.
        """
        is_taken = self.take_now(holder, size_bytes)
        while not is_taken:
            queue = self._waiting.setdefault(holder, deque())
            is_alone = self.is_due_to_principal(holder, size_bytes) or (
                bool(queue) and queue[0].is_due_to_principal  # the queue waits for its first one
            )
            turn = _Turn(size_bytes, is_alone, asyncio.get_running_loop().create_future())
            queue.append(turn)
            # `take_now` refuses while anything waits, but limits of other holders do not concern
            # this one.
            self._let_in()
            with contextlib.nullcontext() if is_alone else holding_up():
                is_taken = await self._answer(holder, turn)

    async def _answer(self, holder: Holder, turn: _Turn) -> bool:
        try:
            return await turn.answer
        except asyncio.CancelledError:
            # As the first of its queue the turn may hold up others that would fit now.
            if turn.answer.cancelled():
                self._let_in()
            elif turn.answer.result():
                self.give(holder, turn.size_bytes)  # granted just before the cancellation
            raise

    def give(self, holder: Holder, size_bytes: int) -> None:
        """Give bytes back."""
        self._add(holder, -size_bytes)
        if self._waiting:
            self._let_in()

    def is_due_to_principal(self, holder: Holder, size_bytes: int) -> bool:
        """Return whether the principal, if known, holds too many bytes to take more."""
        held = self._taken_by_principal[holder.principal] if holder.principal is not None else 0
        return bool(held) and held + size_bytes > self._principal_bytes_max

    def _add(self, holder: Holder, size_bytes: int) -> None:
        self._taken += size_bytes
        self._count(self._taken_by, holder.log, size_bytes)
        if holder.principal is not None:
            self._count(self._taken_by_principal, holder.principal, size_bytes)

    def _count(self, counts: dict[str, int], key: str, size_bytes: int) -> None:
        held = counts.get(key, 0) + size_bytes
        assert self._taken >= held >= 0
        if held:
            counts[key] = held
        else:
            counts.pop(key, None)

    def _fits(self, size_bytes: int) -> bool:
        return not self._taken or self._taken + size_bytes <= self._bytes_max

    def _may(self, holder: Holder, size_bytes: int) -> bool:
        """Return whether log and principal stay in their limits; a log without bytes may begin."""
        if self.is_due_to_principal(holder, size_bytes):
            return False
        held = self._taken_by[holder.log]
        share = min((self._bytes_max - self._taken) // _SHARE, self._log_bytes_max)
        return not held or held + size_bytes <= share

    def _let_in(self) -> None:
        for holder, queue in list(self._waiting.items()):
            while queue:
                size_bytes, was_alone, answer = queue[0]
                if not answer.cancelled():
                    # Total memory blocks all waiters behind; the other limits only this queue.
                    if not self._fits(size_bytes):
                        return
                    may = self._may(holder, size_bytes)
                    # A waiter whose reason has become the limit of its principal is woken (`may` is
                    # False), because from now on it must not hold up its log.
                    if not may and was_alone >= self.is_due_to_principal(holder, size_bytes):
                        break
                    if may:
                        self._add(holder, size_bytes)
                    answer.set_result(may)
                queue.popleft()
            else:
                # Only a queue that was emptied comes here, not one that was left by `break`.
                del self._waiting[holder]


class StreamCounts:
    """The numbers of open streams, where they are limited."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def join(self, whose: str, count_max: int) -> Iterator[None]:
        """Count a stream during the block; at most `count_max` may be open (0: any number).

        Raises:
            OverCapacityError: the limit is reached.
        """
        if not count_max:
            yield
            return
        if self._counts[whose] >= count_max:
            raise OverCapacityError(
                f"{whose} has {count_max} streams open at this proxy, the limit: write through "
                "these streams, or try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._counts[whose] += 1
        try:
            yield
        finally:
            self._counts[whose] -= 1
            if not self._counts[whose]:
                del self._counts[whose]


class ReceivedBytes:
    """The bytes of received messages that wait; a stream beyond the bound fails at once."""

    def __init__(self, bytes_max: int, *, principal_bytes_max: int = 0) -> None:
        self._budget = ByteBudget(bytes_max, principal_bytes_max=principal_bytes_max)

    def resize(self, bytes_max: int, *, principal_bytes_max: int = 0) -> None:
        """Set other limits."""
        self._budget.resize(bytes_max, principal_bytes_max=principal_bytes_max)

    @contextlib.contextmanager
    def hold(self, holder: Holder, size_bytes: int) -> Iterator[None]:
        """Hold bytes for a holder during the block.  Raises: LogNotReadyError."""
        if size_bytes and not self._budget.take_now(holder, size_bytes):
            raise LogNotReadyError(
                f"log {holder.log!r}: too many bytes wait already for this log, or for rates: "
                "write again later",
                retry_after_s=RETRY_AFTER_S,
            )
        try:
            yield
        finally:
            self._budget.give(holder, size_bytes)
