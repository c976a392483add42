"""Whether a bookie begins to store a ledger: its id is allocated, and it is not over.

Ids only rise, and the metadata store holds the next one (the end of the last allocated range).
Therefore an id below the value read last is known to be allocated, without another read.  For a
higher id the bookie reads the value again, and not from a server that may be behind, so that a
ledger created just now is never refused.  If the id is still too high, it was made up, or the
metadata store was restored from an old backup.

When a ledger is deleted, the bookie forgets that it was fenced.  A writer that was paused all the
while would add to it as to a new one, and get acknowledgements for entries that are lost.
Therefore the bookie looks into the metadata of an unknown ledger that it may have known before:
unless its id is above all forgotten ones, or if it was allocated before the bookie started and the
disk was not new then.  Writers may add to such a ledger while it is open, recoveries and repairs
while it is there.

Without an answer of the store nothing is known: the request is not refused as invalid, but fails as
unavailable.  One look serves all requests that came before it began.  Looks have a pause between
them, however many requests come.
"""

from __future__ import annotations

import asyncio
import enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dlcore.base.background import BackgroundTasks, fulfil, refuse
from dlcore.base.errors import (
    BadRequestError,
    BookieError,
    BookieUnavailableError,
    CorruptMetadataError,
    DLError,
    LedgerFencedError,
)
from dlcore.ledger.metadata.values import LedgerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.ledger.metadata.store import ReadLedgers

_READ_PAUSE_S = 0.05
"""Pause between two looks; it bounds the load that made-up ids can put on the metadata store."""
_READ_TIMEOUT_S = 5.0
"""Less than clients wait for an add, so that they get this answer and not a time-out."""
_LEDGERS_AT_ONCE = 1000
"""Ledgers whose metadata one look reads; the others wait for the next one."""
_REFUSED_AT_ONCE = 8
"""Refusals that are sent before the event loop gets a turn."""


class Ledgers(Protocol):
    """The part of the metadata that is asked for, as `LedgerStore` has it."""

    async def next_ledger_id(self) -> int:
        """Return the lowest id that is not allocated; all allocated before the call are lower."""

    async def read_many(self, ledger_ids: Sequence[int], *, fresh: bool) -> ReadLedgers:
        """Return the metadata of those that exist."""


class Need(enum.Enum):
    """The state that a request needs its ledger to have."""

    ALLOCATED = "its id was given to a client"
    THERE = "it has metadata"
    OPEN = "its writer may add to it"


class _Asked(NamedTuple):
    ledger_id: int
    need: Need
    answer: asyncio.Future[None]


class GivenIds:
    """The ledgers that may be begun, as far as one bookie knows; used on one event loop.

    Args:
        ledgers: their metadata; None: every ledger may be begun.
    """

    def __init__(self, ledgers: Ledgers | None) -> None:
        self._ledgers = ledgers
        self._next_id = 0
        self._first_new: int | None = None
        """From this id on no ledger was known and forgotten; None: this is not known yet."""
        self._just_forgotten: set[int] = set()  # since the last look began
        self._waiting: list[_Asked] = []
        self._looks = BackgroundTasks()
        self._is_looking = False
        self._next_look_s = 0.0

    def covers(self, ledger_id: int, need: Need) -> bool:
        """Return whether the ledger is what is needed, without a look."""
        if self._ledgers is None:
            return True
        if ledger_id >= self._next_id or self._first_new is None:
            return False
        return need is Need.ALLOCATED or ledger_id >= self._first_new

    def begin_new(self) -> None:
        """Note that the bookie's disk is new: it has never known a ledger."""
        self._first_new = 0

    def forget(self, ledger_id: int) -> None:
        """Note that the bookie forgets a deleted ledger, and with it whether it was fenced."""
        if self._first_new is not None:
            # One number covers all that were ever forgotten, because ids only rise.
            self._first_new = max(self._first_new, ledger_id + 1)
        if self._is_looking:
            # The look may have read the metadata before the deletion, and would call the ledger
            # open.
            self._just_forgotten.add(ledger_id)

    def once_given(
        self, ledger_id: int, need: Need, write: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        """Call `write` when the ledger is found to be what is needed; writes keep their order.

        Callbacks instead of tasks, because a client with made-up ids makes many requests wait.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ask(ledger_id, need).add_done_callback(partial(_go_on, write, answer))
        return answer

    async def check(self, ledger_id: int, need: Need) -> None:
        """Return once the ledger is found to be what is needed; waiting callers keep their order.

        Raises:
            BadRequestError: the id is not allocated.
            LedgerFencedError: the ledger is over.
            BookieUnavailableError: the metadata store did not answer.
        """
        if not self.covers(ledger_id, need):
            await self.ask(ledger_id, need)

    def ask(self, ledger_id: int, need: Need) -> asyncio.Future[None]:
        """Look; the future is done once the ledger is found to be what is needed.

        It fails as `check` does.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(ledger_id, need, answer))
        if not self._is_looking:
            self._is_looking = True
            self._looks.start(self._look_while_asked(), name="bookie given ids")
        return answer

    async def aclose(self) -> None:
        """Look no more; waiting requests fail as unavailable."""
        await self._looks.aclose()
        _close(self._waiting)
        self._waiting = []

    async def _look_while_asked(self) -> None:
        loop = asyncio.get_running_loop()
        asked: list[_Asked] = []
        try:
            while self._waiting:
                # It yields even if no time is left, so that all requests of this turn share the
                # look.
                await asyncio.sleep(self._next_look_s - loop.time())
                asked, self._waiting = self._waiting, []
                found: dict[_Asked, BookieError | None] = {}
                try:
                    async with asyncio.timeout(_READ_TIMEOUT_S):
                        found = await self._look(asked)
                except TimeoutError:
                    problem = f"the metadata store did not answer within {_READ_TIMEOUT_S} s"
                    found = {each: _unknown(each, problem) for each in asked}
                except DLError as error:
                    found = {each: _unknown(each, str(error)) for each in asked}
                self._next_look_s = loop.time() + _READ_PAUSE_S
                # In front, because they asked first.
                self._waiting[:0] = [each for each in asked if each not in found]
                await _settle(found)
        finally:
            _close(asked)
            self._is_looking = False

    async def _look(self, asked: Sequence[_Asked]) -> dict[_Asked, BookieError | None]:
        """Return why each request is refused, or None; others need a further look."""
        assert self._ledgers is not None  # else all is covered
        self._just_forgotten.clear()
        self._next_id = await self._ledgers.next_ledger_id()
        if self._first_new is None:
            self._first_new = self._next_id  # any that was forgotten before the start is lower
        found: dict[_Asked, BookieError | None] = {}
        wanted: dict[int, list[_Asked]] = {}
        for each in asked:
            if each.ledger_id >= self._next_id:
                found[each] = BadRequestError(
                    f"ledger {each.ledger_id} was never created: the next new ledger is "
                    f"{self._next_id}"
                )
            elif self.covers(each.ledger_id, each.need):
                found[each] = None
            elif each.ledger_id in wanted or len(wanted) < _LEDGERS_AT_ONCE:
                wanted.setdefault(each.ledger_id, []).append(each)
        if wanted:
            # Fresh: a server that is behind could still show a ledger as open that is closed.
            ledgers = await self._ledgers.read_many([*wanted], fresh=True)
            # Ledgers that were forgotten meanwhile may be deleted since.
            for ledger_id in wanted.keys() - self._just_forgotten:
                found |= {each: _refusal(each, ledgers) for each in wanted[ledger_id]}
        return {each: found[each] for each in asked if each in found}


def _refusal(asked: _Asked, ledgers: ReadLedgers) -> BookieError | None:
    metadata = ledgers.get(asked.ledger_id)
    if isinstance(metadata, CorruptMetadataError):
        return _unknown(asked, str(metadata))
    if metadata is None:
        return LedgerFencedError(f"ledger {asked.ledger_id} was deleted")
    if asked.need is Need.OPEN and metadata.state is not LedgerState.OPEN:
        state = metadata.state.name.lower().replace("_", " ")
        return LedgerFencedError(f"ledger {asked.ledger_id} is {state}")
    return None


def _unknown(asked: _Asked, problem: str) -> BookieUnavailableError:
    return BookieUnavailableError(
        f"cannot find out whether ledger {asked.ledger_id} may be written: {problem}"
    )


async def _settle(found: dict[_Asked, BookieError | None]) -> None:
    """Answer: first all requests that succeed, at once and in their order."""
    refused: list[tuple[_Asked, BookieError]] = []
    for asked, error in found.items():
        if error is not None:
            refused.append((asked, error))
        else:
            fulfil(asked.answer, None)
    for number, (asked, error) in enumerate(refused, 1):
        if not asked.answer.done():
            asked.answer.set_exception(error)
        if number % _REFUSED_AT_ONCE == 0:
            await asyncio.sleep(0)  # the event loop gets a turn


def _close(asked: Sequence[_Asked]) -> None:
    for each in asked:
        if not each.answer.done():
            each.answer.set_exception(_unknown(each, "the bookie is closing"))


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
