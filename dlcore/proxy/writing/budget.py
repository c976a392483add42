"""The memory that the streams of a proxy may take together: who finds it full waits in turn.

Theory of operation.  A log may hold a quarter of what is free: so one that stands still leaves four
fifths to the others, and each further one four fifths of the rest.  Who waits for the share of his
log, or for what he may hold himself, holds up nobody else here; who waits for memory itself does,
or others would always pass him.  What somebody waits for may become another thing meanwhile: when
it becomes what he may hold himself, he is woken, and waits anew.
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
    """Whose bytes they are: the log that they are for, and the principal, if he is known."""

    log: str
    principal: str | None = None


class _Turn(NamedTuple):
    """One who waits.  It is answered with whether he has what he wants, or is to wait anew."""

    size_bytes: int
    is_due_to_principal: bool
    answer: asyncio.Future[bool]


class ByteBudget:
    """Bytes that streams hold, at most `bytes_max`; of one log or principal likewise, unless 0.

    What is larger than that passes when nothing else is there.
    """

    def __init__(
        self, bytes_max: int, *, log_bytes_max: int = 0, principal_bytes_max: int = 0
    ) -> None:
        self._bytes_max = bytes_max
        self._log_bytes_max = log_bytes_max or bytes_max
        self._principal_bytes_max = principal_bytes_max or bytes_max
        self._taken = 0
        self._taken_by: Counter[str] = Counter()  # by log, of those that hold something
        self._taken_by_principal: Counter[str] = Counter()
        self._waiting: dict[Holder, deque[_Turn]] = {}

    def take_now(self, holder: Holder, size_bytes: int) -> bool:
        """Take so much, if nobody waits and it is free; return whether it is taken."""
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
        """Take so much; wait until one may, behind those of the same who waited before.

        `holding_up` is open while others who write to the log would have to wait likewise: not
        while it is what the principal holds himself that is too much.
        """
        is_taken = self.take_now(holder, size_bytes)
        while not is_taken:
            queue = self._waiting.setdefault(holder, deque())
            is_alone = self.is_due_to_principal(holder, size_bytes) or (
                bool(queue) and queue[0].is_due_to_principal  # who is behind him waits for that too
            )
            turn = _Turn(size_bytes, is_alone, asyncio.get_running_loop().create_future())
            queue.append(turn)
            self._let_in()
            with contextlib.nullcontext() if is_alone else holding_up():
                is_taken = await self._answer(holder, turn)

    async def _answer(self, holder: Holder, turn: _Turn) -> bool:
        try:
            return await turn.answer
        except asyncio.CancelledError:
            if turn.answer.cancelled():
                self._let_in()
            elif turn.answer.result():
                self.give(holder, turn.size_bytes)  # it was our turn already
            raise

    def give(self, holder: Holder, size_bytes: int) -> None:
        """Give back what was taken."""
        self._add(holder, -size_bytes)
        if self._waiting:
            self._let_in()

    def is_due_to_principal(self, holder: Holder, size_bytes: int) -> bool:
        """Return whether the principal, of those who have one, holds too much to take so much."""
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
        """Return whether log and principal would hold their shares; who has nothing may begin."""
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
                    if not self._fits(size_bytes):
                        return
                    may = self._may(holder, size_bytes)
                    if not may and was_alone >= self.is_due_to_principal(holder, size_bytes):
                        break
                    if may:
                        self._add(holder, size_bytes)
                    answer.set_result(may)
                queue.popleft()
            else:
                del self._waiting[holder]


class StreamCounts:
    """How many streams are open, of those whose number is limited."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def join(self, whose: str, count_max: int) -> Iterator[None]:
        """Count a stream meanwhile, unless any number may be open (0).

        Raises:
            OverCapacityError: there are as many as may be.
        """
        if not count_max:
            yield
            return
        if self._counts[whose] >= count_max:
            raise OverCapacityError(
                f"{whose} has {count_max} streams open at this proxy, as many as it may have: "
                "write through these, or come again",
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
    """What is read of streams and has to wait: never more than there may be, who is above fails."""

    def __init__(self, bytes_max: int, *, principal_bytes_max: int = 0) -> None:
        self._budget = ByteBudget(bytes_max, principal_bytes_max=principal_bytes_max)

    @contextlib.contextmanager
    def hold(self, holder: Holder, size_bytes: int) -> Iterator[None]:
        """Hold so much for somebody.  Raises: LogNotReadyError."""
        if size_bytes and not self._budget.take_now(holder, size_bytes):
            raise LogNotReadyError(
                f"log {holder.log!r}: too much waits already for it to have room, or for "
                "rates: write again later",
                retry_after_s=RETRY_AFTER_S,
            )
        try:
            yield
        finally:
            self._budget.give(holder, size_bytes)
