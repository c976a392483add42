"""Runs a `LedgerAppender`: sends its adds, finds replacements, stores its ensemble changes."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks
from dlcore.base.backoff import Backoff
from dlcore.base.errors import (
    BadRequestError,
    BookieOverloadedError,
    BookieUnavailableError,
    DLError,
    EntryTooLargeError,
    LedgerFencedError,
    MetadataError,
    MetadataVersionError,
)
from dlcore.ledger.placing.health import ReplacementSearch
from dlcore.ledger.writing.append import (
    CompleteAdds,
    Effect,
    FailAdds,
    FindReplacements,
    LedgerAppender,
    RetryReplacements,
    SendAdd,
    StoreMetadata,
)
from dlcore.ledger.writing.in_flight import Share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.ledger.context import LedgerContext
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.wire.frames import FrameParts

logger = logging.getLogger(__name__)

METADATA_PATIENCE_S = 20.0
"""How long a change that adds wait for goes on without an answer from the metadata store."""
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 2.0
_OVERLOAD_S = 0.02
"""First pause before an overloaded bookie is asked again; it doubles up to `_OVERLOAD_S_MAX`."""
_OVERLOAD_S_MAX = 1.0

_CLIENTS_FAULT = (LedgerFencedError, EntryTooLargeError, BadRequestError)
"""Errors that a healthy bookie returns too."""


class AppendDriver:
    """The driver of one appender.

    `on_confirmed(first, last)` and `on_failed(error)` are called from the event loop, never from
    inside a call into the machine.
    """

    def __init__(
        self,
        appender: LedgerAppender,
        context: LedgerContext,
        *,
        version: int,
        is_recovery: bool,
        on_confirmed: Callable[[int, int], None],
        on_failed: Callable[[DLError], None],
    ) -> None:
        self.appender = appender
        self.version = version
        self._context = context
        self._on_confirmed = on_confirmed
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._bookies = context.bookies
        self._patience_s = context.config.add_timeout_s
        self._is_recovery = is_recovery
        self._is_closed = False
        self._tasks = BackgroundTasks(self._on_task_failed)
        self._waiters: list[asyncio.Future[None]] = []
        self._placer = context.placer
        self._search = ReplacementSearch(
            context.placer.health.adds, patience_s=context.config.bookies_wait_s
        )
        self._retry_timer: asyncio.TimerHandle | None = None
        self.share = Share(context.in_flight, self.notify)

    def perform(self, effects: Sequence[Effect]) -> None:
        """Perform the effects; answers come back in later turns of the loop."""
        for effect in effects:
            match effect:
                case SendAdd(entry_id, frame, targets):
                    until_s = self._loop.time() + self._patience_s
                    for position, bookie in targets:
                        self._send(entry_id, position, bookie, frame, until_s)
                case CompleteAdds(first_entry_id, last_entry_id):
                    self._on_confirmed(first_entry_id, last_entry_id)
                case FindReplacements():
                    self._tasks.start(self._find_replacements())
                case RetryReplacements():
                    self._retry_later(effect)
                case StoreMetadata():
                    self._tasks.start(self._store_change(effect.metadata))
                case FailAdds():
                    self._on_failed(effect.error)
                case _:
                    assert_never(effect)
        self._share_changed()

    def _share_changed(self) -> None:
        # A recovery has its own bounds, and does not wait for the client's in-flight limit.
        if not self._is_recovery:
            appender = self.appender
            self.share.changed(
                size_bytes=appender.pending_bytes, entry_count=appender.pending_count
            )

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate` holds; it is checked again after every answer and change."""
        while not predicate():
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def notify(self) -> None:
        """Make waiters check their predicate again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def aclose(self) -> None:
        """Stop everything; the answers to pending adds are ignored.  Idempotent."""
        self._is_closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        await self._tasks.aclose()
        self.notify()

    def _send(
        self,
        entry_id: int,
        position: int,
        bookie: BookieId,
        frame: bytes | FrameParts,
        until_s: float,
        pause_s: float = _OVERLOAD_S,
    ) -> None:
        """Send an entry to one bookie; the port makes sure that an answer comes in time."""
        self._bookies.add_entry(bookie, frame, is_recovery=self._is_recovery).add_done_callback(
            partial(self._on_answer, entry_id, position, bookie, until_s, pause_s)
        )

    def _on_answer(
        self,
        entry_id: int,
        position: int,
        bookie: BookieId,
        until_s: float,
        pause_s: float,
        answer: asyncio.Future[None],
    ) -> None:
        error = _error_of(answer)
        if self._is_closed:
            return
        if isinstance(error, LedgerFencedError):
            effects = self._add_failed(entry_id, position, bookie, error)
        elif not self.appender.awaits(entry_id, position, bookie):
            return  # nobody needs the answer any more
        elif error is None:
            self._placer.note_add(bookie, is_good=True)
            effects = self.appender.add_succeeded(entry_id, position, bookie)
        elif isinstance(error, BookieOverloadedError) and self._loop.time() + pause_s < until_s:
            self._loop.call_later(
                pause_s, self._send_again, entry_id, position, bookie, until_s, pause_s
            )
            return
        else:
            effects = self._add_failed(entry_id, position, bookie, error)
        self._advance(effects)

    def _send_again(
        self, entry_id: int, position: int, bookie: BookieId, until_s: float, pause_s: float
    ) -> None:
        """Send again to a bookie that was overloaded, if its answer still matters."""
        if not self._is_closed and self.appender.awaits(entry_id, position, bookie):
            frame = self.appender.frame_of(entry_id)
            pause_s = min(2 * pause_s, _OVERLOAD_S_MAX)
            self._send(entry_id, position, bookie, frame, until_s, pause_s)

    def _add_failed(
        self, entry_id: int, position: int, bookie: BookieId, error: DLError
    ) -> list[Effect]:
        logger.info(
            "add failed ledger=%d entry=%d bookie=%s: %s",
            self.appender.metadata.ledger_id,
            entry_id,
            bookie,
            error,
        )
        if not isinstance(error, _CLIENTS_FAULT):
            self._placer.note_add(bookie, is_good=False)
        elif not isinstance(error, LedgerFencedError):
            self._placer.health.adds.note_refusal(bookie, self._loop.time())
        return self.appender.add_failed(
            entry_id=entry_id, position=position, bookie=bookie, error=error
        )

    def _advance(self, effects: Sequence[Effect]) -> None:
        self.perform(effects)
        if self._waiters:
            self.notify()

    def _on_task_failed(self, error: BaseException) -> None:
        # Nobody does the task's work now: adds that wait for it must not wait for ever.
        if isinstance(error, DLError):
            self._advance(self.appender.fail(error))
            return
        self._advance(self.appender.fail(DLError(f"a defect ended the writer: {error!r}")))
        raise error  # for the loop's exception handler

    async def _find_replacements(self) -> None:
        try:
            registered = await self._list_bookies()
        except MetadataError as error:
            # Adds that do not need a replacement go on without the metadata store.
            effects = (
                self.appender.fail(error)
                if self.appender.is_stuck
                else self.appender.bookies_listed((), rng=self._context.rng)
            )
            self._advance(effects)
            return
        appender = self.appender
        choice = self._search.choose(
            registered,
            members=appender.metadata.last_ensemble.bookies,
            stuck_entry=appender.last_add_confirmed + 1 if appender.is_stuck else None,
            now=self._loop.time(),
        )
        if choice.pause_s:
            await asyncio.sleep(choice.pause_s)
        self._advance(
            self.appender.bookies_listed(
                choice.candidates,
                readmitted=choice.readmitted,
                topology=self._placer.topology(),
                may_wait=choice.may_wait,
                rng=self._context.rng,
            )
        )

    async def _list_bookies(self) -> list[BookieId]:
        """List writable bookies; retry as long as adds wait for the answer."""
        deadline = self._loop.time() + METADATA_PATIENCE_S
        backoff = Backoff(_BACKOFF_S, _BACKOFF_S_MAX)
        while True:
            try:
                return await self._placer.list_writable()
            except MetadataError as error:
                pause_s = backoff.failed(self._loop.time())
                is_over = backoff.due_s > deadline
                if not error.retriable or is_over or not self.appender.is_stuck:
                    raise
                await asyncio.sleep(pause_s)

    def _retry_later(self, effect: RetryReplacements) -> None:
        if self._retry_timer is not None:
            return
        retry_s = self._search.look_later(self._loop.time())
        logger.info(
            "going on without ledger=%d bookies=%s retry_s=%.1f",
            self.appender.metadata.ledger_id,
            ",".join(map(str, sorted(effect.failed))),
            retry_s,
        )
        self._retry_timer = self._loop.call_later(retry_s, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        self._search.look_again()
        self._advance(self.appender.retry_replacements())

    async def _store_change(self, planned: LedgerMetadata) -> None:
        """Compare-and-set an ensemble change; in every case decide by the stored metadata."""
        logger.info(
            "ensemble change ledger=%d first_entry=%d bookies=%s",
            planned.ledger_id,
            planned.last_ensemble.first_entry_id,
            ",".join(map(str, planned.last_ensemble.bookies)),
        )
        try:
            self.version = await self._context.ledger_store.write(planned, version=self.version)
        except MetadataVersionError:
            effects = await self._reread()
        except MetadataError as error:
            effects = await self._reread() if error.retriable else self.appender.fail(error)
        except DLError as error:
            effects = self.appender.fail(error)
        else:
            self._search.replaced()
            effects = self.appender.change_stored(planned)
        self._advance(effects)

    async def _reread(self) -> list[Effect]:
        deadline = self._loop.time() + METADATA_PATIENCE_S
        backoff = Backoff(_BACKOFF_S, _BACKOFF_S_MAX)
        while True:
            try:
                stored = await self._context.ledger_store.read(self.appender.metadata.ledger_id)
            except MetadataError as error:
                pause_s = backoff.failed(self._loop.time())
                if not error.retriable or backoff.due_s > deadline:
                    return self.appender.fail(error)
            except DLError as error:
                return self.appender.fail(error)
            else:
                self.version = stored.version
                return self.appender.metadata_reread(stored.metadata)
            await asyncio.sleep(pause_s)


def _error_of(answer: asyncio.Future[None]) -> DLError | None:
    if answer.cancelled():
        return BookieUnavailableError("the request was cancelled")
    error = answer.exception()
    if error is None or isinstance(error, DLError):
        return error
    raise error  # a defect, not an answer: the loop's exception handler reports it
