"""The ledger ids that were allocated: a bookie stores nothing for any other id.

Ids only rise, and the metadata store holds the next one (the end of the last allocated range).
Therefore an id below the value read last is known to be allocated, without another read.  For a
higher id the bookie reads the value again, and not from a server that may be behind, so that a
ledger created just now is never refused.  If the id is still too high, it was made up, or the
metadata store was restored from an old backup.  Without an answer of the store nothing is known:
the request is not refused as invalid, but fails as unavailable.

One read serves all requests that came before it began.  Reads have a pause between them, however
many requests come.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks, refuse
from dlcore.base.errors import BadRequestError, BookieUnavailableError, DLError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_READ_PAUSE_S = 0.05
"""Pause between two reads; it bounds the load that made-up ids can put on the metadata store."""
_READ_TIMEOUT_S = 5.0
_REFUSED_AT_ONCE = 8
"""Refusals that are sent before the event loop gets a turn."""


class GivenIds:
    """The allocated ids, as far as one bookie knows them; used on one event loop.

    Args:
        read_next_id: reads the lowest id that is not allocated; its result covers all ids allocated
            before the call. None: every id counts as allocated.
    """

    def __init__(self, read_next_id: Callable[[], Awaitable[int]] | None) -> None:
        self._read_next_id = read_next_id
        self._next_id = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._reads = BackgroundTasks()
        self._is_reading = False
        self._next_read_s = 0.0

    def covers(self, ledger_id: int) -> bool:
        """Return whether the id is known to be allocated."""
        return ledger_id < self._next_id or self._read_next_id is None

    def once_given(
        self, ledger_id: int, write: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        """Call `write` when the id is known to be allocated; writes keep their order.

        Callbacks instead of tasks, because a client with made-up ids makes many requests wait.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ask(ledger_id).add_done_callback(partial(_go_on, write, answer))
        return answer

    async def check(self, ledger_id: int) -> None:
        """Return once the id is known to be allocated; waiting callers keep their order.

        Raises:
            BadRequestError: the id is not allocated.
            BookieUnavailableError: the metadata store did not answer.
        """
        if not self.covers(ledger_id):
            await self.ask(ledger_id)

    def ask(self, ledger_id: int) -> asyncio.Future[None]:
        """Read again; the future is done once the id is known to be allocated.

        It fails as `check` does.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ledger_id, answer))
        if not self._is_reading:
            self._is_reading = True
            self._reads.start(self._read_while_asked(), name="bookie given ids")
        return answer

    async def aclose(self) -> None:
        """Stop reading; waiting requests fail as unavailable."""
        await self._reads.aclose()
        self._settle(self._waiting, "the bookie is closing")
        self._waiting = []

    async def _read_while_asked(self) -> None:
        assert self._read_next_id is not None  # else all ids are covered
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
                    problem = f"the metadata store did not answer within {_READ_TIMEOUT_S} s"
                except DLError as error:
                    problem = str(error)
                self._next_read_s = loop.time() + _READ_PAUSE_S
                # First all requests that succeed, at once and in their order.
                self._settle([each for each in asked if self.covers(each[0])], problem)
                for at in range(0, len(asked), _REFUSED_AT_ONCE):
                    self._settle(asked[at : at + _REFUSED_AT_ONCE], problem)
                    await asyncio.sleep(0)  # the event loop gets a turn
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
                        f"cannot find out whether ledger {ledger_id} was ever created: {problem}"
                    )
                )
            elif self.covers(ledger_id):
                answer.set_result(None)
            else:
                answer.set_exception(
                    BadRequestError(
                        f"ledger {ledger_id} was never created: the next new ledger is "
                        f"{self._next_id}"
                    )
                )


def _go_on(
    write: Callable[[], asyncio.Future[None]],
    answer: asyncio.Future[None],
    asked: asyncio.Future[None],
) -> None:
    """Start a write whose id is allocated; `answer` ends as the write does."""
    error = asked.exception()
    if error is None and not answer.done():
        try:
            write().add_done_callback(partial(_end_alike, answer))
        except Exception as refusal:  # noqa: BLE001  # the caller must not wait for ever
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
