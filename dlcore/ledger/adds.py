"""Adds on their way to bookies: sending, time-outs, and patience with overloaded bookies."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from dlcore.errors import BookieOverloadedError, BookieUnavailableError, DLError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dlcore.ids import BookieId
    from dlcore.ledger.append import SendAdd
    from dlcore.ledger.port import BookieClient

_OVERLOAD_DELAY_S = 0.02
"""First pause before an overloaded bookie is asked again; doubles up to a second."""
_OVERLOAD_DELAY_S_MAX = 1.0


class AnswerCallback(Protocol):
    """Called once per add, with None or the error that says why it failed."""

    def __call__(self, sent: SentAdd, error: DLError | None) -> None:
        """Take the answer to `sent`."""
        ...


class SentAdd:
    """One entry on its way to one bookie."""

    __slots__ = ("attempts", "bookie", "deadline", "entry_id", "frame", "future", "position")

    def __init__(
        self, *, entry_id: int, position: int, bookie: BookieId, frame: bytes, deadline: float
    ) -> None:
        self.entry_id = entry_id
        self.position = position
        self.bookie = bookie
        self.frame = frame
        self.deadline = deadline
        self.attempts = 0
        self.future: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it was answered or given up; the frame is gone then."""
        return not self.frame


class AddSender:
    """Sends adds and reports every answer exactly once, also the one that never came.

    A single timer serves all adds: they share one time-out, so their deadlines ascend.
    """

    def __init__(
        self,
        bookies: BookieClient,
        *,
        on_answer: AnswerCallback,
        timeout_s: float,
        is_recovery: bool,
    ) -> None:
        self._bookies = bookies
        self._on_answer = on_answer
        self._timeout_s = timeout_s
        self._is_recovery = is_recovery
        self._loop = asyncio.get_running_loop()
        self._sent: deque[SentAdd] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def send(self, effect: SendAdd) -> None:
        """Send one entry to its targets."""
        deadline = self._loop.time() + self._timeout_s
        for position, bookie in effect.targets:
            sent = SentAdd(
                entry_id=effect.entry_id,
                position=position,
                bookie=bookie,
                frame=effect.frame,
                deadline=deadline,
            )
            self._sent.append(sent)
            self._attempt(sent)
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._expire)

    def drop(self, bookies: Collection[BookieId]) -> None:
        """Give up every add to `bookies` without a report."""
        for sent in self._sent:
            if sent.bookie in bookies:
                self._finish(sent)
        self._forget_finished()

    def close(self) -> None:
        """Give up everything without a report."""
        for sent in self._sent:
            self._finish(sent)
        self._sent.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _attempt(self, sent: SentAdd) -> None:
        if sent.is_over:
            return
        sent.attempts += 1
        try:
            sent.future = asyncio.ensure_future(
                self._bookies.add_entry(sent.bookie, sent.frame, is_recovery=self._is_recovery)
            )
        except DLError as error:
            sent.future = self._loop.create_future()
            sent.future.set_exception(error)
        sent.future.add_done_callback(self._answered(sent))

    def _answered(self, sent: SentAdd) -> Callable[[asyncio.Future[None]], None]:
        def on_done(future: asyncio.Future[None]) -> None:
            error = _error_of(future)
            if sent.is_over:
                return
            if isinstance(error, BookieOverloadedError):
                pause = min(_OVERLOAD_DELAY_S * 2 ** (sent.attempts - 1), _OVERLOAD_DELAY_S_MAX)
                if self._loop.time() + pause < sent.deadline:
                    self._loop.call_later(pause, self._attempt, sent)
                    return
            self._finish(sent)
            self._forget_finished()
            self._on_answer(sent, error)

        return on_done

    def _finish(self, sent: SentAdd) -> None:
        sent.frame = b""
        if sent.future is not None and not sent.future.done():
            sent.future.cancel()

    def _forget_finished(self) -> None:
        while self._sent and self._sent[0].is_over:
            self._sent.popleft()

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        late: list[SentAdd] = []
        while self._sent and (self._sent[0].is_over or self._sent[0].deadline <= now):
            sent = self._sent.popleft()
            if not sent.is_over:
                self._finish(sent)
                late.append(sent)
        if self._sent:
            self._timer = self._loop.call_at(self._sent[0].deadline, self._expire)
        for sent in late:
            message = f"{sent.bookie} did not answer within {self._timeout_s} s"
            self._on_answer(sent, BookieUnavailableError(message))


def _error_of(future: asyncio.Future[None]) -> DLError | None:
    if future.cancelled():
        return BookieUnavailableError("the request was cancelled")
    error = future.exception()
    if error is None or isinstance(error, DLError):
        return error
    raise error  # a defect, not an answer: the loop's exception handler reports it
