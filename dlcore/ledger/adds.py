"""Adds on their way to bookies: sending, and patience with overloaded bookies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from dlcore.errors import BookieOverloadedError, BookieUnavailableError, DLError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dlcore.ids import BookieId
    from dlcore.ledger.append import SendAdd
    from dlcore.ledger.port import BookieClient
    from dlcore.wire.frames import FrameParts

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

    __slots__ = ("attempts", "bookie", "entry_id", "frame", "future", "position", "retry_until_s")

    def __init__(
        self,
        *,
        entry_id: int,
        position: int,
        bookie: BookieId,
        frame: bytes | FrameParts,
        retry_until_s: float,
    ) -> None:
        self.entry_id = entry_id
        self.position = position
        self.bookie = bookie
        self.frame: bytes | FrameParts = frame
        self.retry_until_s = retry_until_s
        self.attempts = 0
        self.future: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it was answered or given up; the frame is gone then."""
        return not self.frame


class AddSender:
    """Sends adds and reports every answer exactly once; that one comes in time is the port's duty.

    Args:
        bookies: where to send.
        on_answer: told.
        patience_s: how long an overloaded bookie is asked again.
        is_recovery: whether these are recovery adds.
    """

    def __init__(
        self,
        bookies: BookieClient,
        *,
        on_answer: AnswerCallback,
        patience_s: float,
        is_recovery: bool,
    ) -> None:
        self._bookies = bookies
        self._on_answer = on_answer
        self._patience_s = patience_s
        self._is_recovery = is_recovery
        self._loop = asyncio.get_running_loop()
        self._sent: dict[SentAdd, None] = {}

    def send(self, effect: SendAdd) -> None:
        """Send one entry to its targets."""
        retry_until_s = self._loop.time() + self._patience_s
        for position, bookie in effect.targets:
            sent = SentAdd(
                entry_id=effect.entry_id,
                position=position,
                bookie=bookie,
                frame=effect.frame,
                retry_until_s=retry_until_s,
            )
            self._sent[sent] = None
            self._attempt(sent)

    def drop(self, bookies: Collection[BookieId]) -> None:
        """Give up every add to `bookies` without a report."""
        for sent in [each for each in self._sent if each.bookie in bookies]:
            self._finish(sent)

    def close(self) -> None:
        """Give up everything without a report."""
        for sent in list(self._sent):
            self._finish(sent)

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
                if self._loop.time() + pause < sent.retry_until_s:
                    self._loop.call_later(pause, self._attempt, sent)
                    return
            self._finish(sent)
            self._on_answer(sent, error)

        return on_done

    def _finish(self, sent: SentAdd) -> None:
        del self._sent[sent]
        sent.frame = b""
        if sent.future is not None and not sent.future.done():
            sent.future.cancel()


def _error_of(future: asyncio.Future[None]) -> DLError | None:
    if future.cancelled():
        return BookieUnavailableError("the request was cancelled")
    error = future.exception()
    if error is None or isinstance(error, DLError):
        return error
    raise error  # a defect, not an answer: the loop's exception handler reports it
