"""The ledger ids that were ever given to anybody: a bookie takes nothing of any other.

Ids only rise, and the metadata holds the next one (the end of the last range that was taken).  So
an id below the value read last is known to be given, at no cost.  One above it makes the bookie
read the value anew, and not from a server that is behind: a ledger made a moment ago is never
refused.  An id that is still above was made up, or the metadata was restored from an old backup;
without an answer nothing is known, which is no "no".

One read serves all who asked before it began, and reads have a pause between them, whoever asks.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from dlcore.background import BackgroundTasks, refuse
from dlcore.errors import BadRequestError, BookieUnavailableError, DLError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_READ_PAUSE_S = 0.05
"""Between two reads: what anybody who makes ids up can cost the metadata."""
_READ_TIMEOUT_S = 5.0
_REFUSED_AT_ONCE = 100
"""Refusals that come at once, before others have their turn on the event loop."""


class GivenIds:
    """The ids that were given, as one bookie knows them; used on one event loop.

    Args:
        read_next_id: reads the lowest id that was not given; misses none given before the call.
            None: every id counts as given.
    """

    def __init__(self, read_next_id: Callable[[], Awaitable[int]] | None) -> None:
        self._read_next_id = read_next_id
        self._next_id = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._reads = BackgroundTasks()
        self._is_reading = False
        self._next_read_s = 0.0

    def covers(self, ledger_id: int) -> bool:
        """Return whether the id is known to be given."""
        return ledger_id < self._next_id or self._read_next_id is None

    def once_given(
        self, ledger_id: int, write: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        """Call `write` when the id is known to be given; writes go on in the order they came.

        Callbacks, and no task: whoever makes ids up has many of these wait.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ask(ledger_id).add_done_callback(partial(_go_on, write, answer))
        return answer

    async def check(self, ledger_id: int) -> None:
        """Return once the id is known to be given; those who wait go on in the order they came.

        Raises:
            BadRequestError: it was given to nobody.
            BookieUnavailableError: the metadata did not tell.
        """
        if not self.covers(ledger_id):
            await self.ask(ledger_id)

    def ask(self, ledger_id: int) -> asyncio.Future[None]:
        """Read anew; the future is done once the id is known to be given, or fails as `check`."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ledger_id, answer))
        if not self._is_reading:
            self._is_reading = True
            self._reads.start(self._read_while_asked(), name="bookie given ids")
        return answer

    async def aclose(self) -> None:
        """Read no more; whoever waits is told that nothing is known."""
        await self._reads.aclose()
        self._settle(self._waiting, "the bookie is closing")
        self._waiting = []

    async def _read_while_asked(self) -> None:
        assert self._read_next_id is not None  # else all are covered
        loop = asyncio.get_running_loop()
        asked: list[tuple[int, asyncio.Future[None]]] = []
        try:
            while self._waiting:
                await asyncio.sleep(self._next_read_s - loop.time())
                asked, self._waiting = self._waiting, []
                problem = ""
                try:
                    async with asyncio.timeout(_READ_TIMEOUT_S):
                        self._next_id = await self._read_next_id()
                except TimeoutError:
                    problem = f"the metadata did not answer within {_READ_TIMEOUT_S} s"
                except DLError as error:
                    problem = str(error)
                self._next_read_s = loop.time() + _READ_PAUSE_S
                # What goes on goes on at once, in the order in which it came.
                self._settle([each for each in asked if self.covers(each[0])], problem)
                for at in range(0, len(asked), _REFUSED_AT_ONCE):
                    self._settle(asked[at : at + _REFUSED_AT_ONCE], problem)
                    await asyncio.sleep(0)  # others have their turn
        finally:
            self._settle(asked, "the bookie is closing")
            self._is_reading = False

    def _settle(self, asked: list[tuple[int, asyncio.Future[None]]], problem: str) -> None:
        for ledger_id, answer in asked:
            if answer.done():
                continue
            if problem:
                answer.set_exception(
                    BookieUnavailableError(
                        f"whether ledger {ledger_id} was ever made is not known here: {problem}"
                    )
                )
            elif self.covers(ledger_id):
                answer.set_result(None)
            else:
                answer.set_exception(
                    BadRequestError(
                        f"ledger {ledger_id} was never made: the next new one is {self._next_id}"
                    )
                )


def _go_on(
    write: Callable[[], asyncio.Future[None]],
    answer: asyncio.Future[None],
    asked: asyncio.Future[None],
) -> None:
    """Begin a write whose id is given; `answer` ends as the write does."""
    error = asked.exception()
    if error is None and not answer.done():
        try:
            write().add_done_callback(partial(_end_alike, answer))
        except Exception as refusal:  # noqa: BLE001  # who waits must not wait for ever
            error = refusal
    if error is not None:
        refuse(answer, error)


def _end_alike(answer: asyncio.Future[None], written: asyncio.Future[None]) -> None:
    if answer.done():
        return
    if written.cancelled():
        answer.cancel()
    elif (error := written.exception()) is not None:
        refuse(answer, error)
    else:
        answer.set_result(None)
