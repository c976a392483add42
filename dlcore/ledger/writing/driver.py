"""Runs a `LedgerAppender`: sends its adds, finds replacements, stores its ensemble changes."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from dlcore.errors import (
    BadRequestError,
    BookieOverloadedError,
    BookieUnavailableError,
    DLError,
    EntryTooLargeError,
    LedgerFencedError,
    MetadataError,
    MetadataVersionError,
)
from dlcore.ledger.placing.probation import Probation
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

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dlcore.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.services import LedgerServices
    from dlcore.wire.frames import FrameParts

logger = logging.getLogger(__name__)

METADATA_PATIENCE_S = 20.0
"""How long a change that acks wait for goes on without an answer from the metadata store."""
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 2.0
_RETRY_S = 1.0
"""First pause before a failed bookie that nobody could replace is looked at again; doubles."""
_RETRY_S_MAX = 5.0
_STUCK_PATIENCE_S = 20.0
"""How long adds that cannot reach Qa are tried on bookies that failed lately, without others."""
_OVERLOAD_S = 0.02
"""First pause before an overloaded bookie is asked again; doubles up to a second."""
_OVERLOAD_S_MAX = 1.0

_CLIENTS_FAULT = (LedgerFencedError, EntryTooLargeError, BadRequestError)
"""What a bookie in good order answers too."""


class AppendDriver:
    """One appender's hands.

    `on_confirmed(first, last)` and `on_failed(error)` are called from the event loop, never from
    inside a call into the machine.
    """

    def __init__(
        self,
        appender: LedgerAppender,
        services: LedgerServices,
        *,
        version: int,
        is_recovery: bool,
        on_confirmed: Callable[[int, int], None],
        on_failed: Callable[[DLError], None],
    ) -> None:
        self.appender = appender
        self.version = version
        self._services = services
        self._on_confirmed = on_confirmed
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._bookies = services.bookies
        self._patience_s = services.config.add_timeout_s
        self._is_recovery = is_recovery
        self._is_closed = False
        self._tasks: dict[asyncio.Task[None], None] = {}  # a set that keeps its order
        self._waiters: list[asyncio.Future[None]] = []
        self._placer = services.placer
        self._conduct = services.placer.conduct.adds
        self._probation = Probation(conduct_s=4 * services.config.add_timeout_s)
        self._retry_timer: asyncio.TimerHandle | None = None
        self._retry_s = _RETRY_S
        self._is_retry = False
        self._stuck_since: float | None = None
        self._stuck_pause_s = _BACKOFF_S

    def perform(self, effects: Sequence[Effect]) -> None:
        """Do what the machine asks; answers come back in later turns of the loop."""
        for effect in effects:
            match effect:
                case SendAdd(entry_id, frame, targets):
                    until_s = self._loop.time() + self._patience_s
                    for position, bookie in targets:
                        self._send(entry_id, position, bookie, frame, until_s)
                case CompleteAdds(first_entry_id, last_entry_id):
                    self._on_confirmed(first_entry_id, last_entry_id)
                case FindReplacements():
                    self._spawn(self._find_replacements())
                case RetryReplacements():
                    self._retry_later(effect)
                case StoreMetadata():
                    self._spawn(self._store_change(effect.metadata))
                case FailAdds():
                    self._on_failed(effect.error)
                case _:
                    assert_never(effect)

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate` holds; it is asked again after every answer and change."""
        while not predicate():
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def notify(self) -> None:
        """Make waiters look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def aclose(self) -> None:
        """Stop everything; answers to adds on their way are for nobody.  Idempotent."""
        self._is_closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
        """Send an entry to one bookie; that an answer comes in time is the port's duty."""
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
            return  # it was given up
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
        """Ask a bookie again that was overloaded, if that still matters."""
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
        return self.appender.add_failed(
            entry_id=entry_id, position=position, bookie=bookie, error=error
        )

    def _advance(self, effects: Sequence[Effect]) -> None:
        self.perform(effects)
        if self._waiters:
            self.notify()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        # What it was to do is done by nobody: whoever waits for that must not wait for ever.
        if isinstance(error, DLError):
            self._advance(self.appender.fail(error))
            return
        self._advance(self.appender.fail(DLError(f"a defect ended the writer: {error!r}")))
        raise error  # for the loop's exception handler

    async def _find_replacements(self) -> None:
        failed = self.appender.failed_bookies
        self._probation.note_failed(failed, self._loop.time())
        try:
            registered = await self._list_bookies()
        except MetadataError as error:
            # Adds that do not need a replacement go on without the metadata store.
            effects = (
                self.appender.fail(error)
                if self.appender.is_stuck
                else self.appender.bookies_listed((), rng=self._services.rng)
            )
            self._advance(effects)
            return
        readmitted = self._choose_readmitted(registered)
        candidates = await self._choose_candidates(registered)
        self._advance(
            self.appender.bookies_listed(
                candidates,
                readmitted=readmitted,
                topology=self._placer.topology(),
                rng=self._services.rng,
            )
        )
        self._probation.note_admitted(self.appender.failed_bookies)

    def _choose_readmitted(self, registered: Sequence[BookieId]) -> Sequence[BookieId]:
        """Return who may get entries again if there is nobody to replace it.

        A bookie that is registered and does not answer would hold up all that is sent to it, again
        and again; it is tried at longer and longer intervals, unless entries cannot do without.
        """
        is_retry, self._is_retry = self._is_retry, False
        now = self._loop.time()
        if self.appender.is_stuck:
            return [each for each in registered if self._probation.is_last_hope(each, now)]
        if not is_retry:
            return []
        return [each for each in registered if self._probation.is_over(each, now)]

    async def _choose_candidates(self, registered: Sequence[BookieId]) -> Sequence[BookieId]:
        """Leave out who failed lately, unless adds wait and nobody else is there."""
        now = self._loop.time()
        usable = [each for each in registered if not self._conduct.is_resting(each, now)]
        members = self.appender.metadata.last_ensemble.bookies
        if not self.appender.is_stuck or not set(usable).issubset(members):
            self._stuck_since = None
            return usable
        if self._stuck_since is None:
            self._stuck_since = now
            self._stuck_pause_s = _BACKOFF_S
        if now + self._stuck_pause_s > self._stuck_since + _STUCK_PATIENCE_S:
            return usable
        if not set(registered).issubset(members):
            await asyncio.sleep(self._stuck_pause_s)
            self._stuck_pause_s = min(self._stuck_pause_s * 2, _BACKOFF_S_MAX)
        return registered

    async def _list_bookies(self) -> list[BookieId]:
        """List writable bookies, patiently as long as adds wait for the answer."""
        deadline = self._loop.time() + METADATA_PATIENCE_S
        pause = _BACKOFF_S
        while True:
            try:
                return await self._placer.list_writable()
            except MetadataError as error:
                is_over = self._loop.time() + pause > deadline
                if not error.retriable or is_over or not self.appender.is_stuck:
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, _BACKOFF_S_MAX)

    def _retry_later(self, effect: RetryReplacements) -> None:
        logger.info(
            "going on without ledger=%d bookies=%s retry_s=%.1f",
            self.appender.metadata.ledger_id,
            ",".join(map(str, sorted(effect.failed))),
            self._retry_s,
        )
        if self._retry_timer is None:
            self._retry_timer = self._loop.call_later(self._retry_s, self._retry)
            self._retry_s = min(self._retry_s * 2, _RETRY_S_MAX)

    def _retry(self) -> None:
        self._retry_timer = None
        self._is_retry = True
        self._advance(self.appender.retry_replacements())

    async def _store_change(self, planned: LedgerMetadata) -> None:
        """Compare-and-set an ensemble change; whatever happens, decide by what is stored."""
        logger.info(
            "ensemble change ledger=%d first_entry=%d bookies=%s",
            planned.ledger_id,
            planned.last_ensemble.first_entry_id,
            ",".join(map(str, planned.last_ensemble.bookies)),
        )
        try:
            self.version = await self._services.ledgers.write(planned, version=self.version)
        except MetadataVersionError:
            effects = await self._reread()
        except MetadataError as error:
            effects = await self._reread() if error.retriable else self.appender.fail(error)
        except DLError as error:
            effects = self.appender.fail(error)
        else:
            self._retry_s = _RETRY_S
            effects = self.appender.change_stored(planned)
        self._advance(effects)

    async def _reread(self) -> list[Effect]:
        deadline = self._loop.time() + METADATA_PATIENCE_S
        pause = _BACKOFF_S
        while True:
            try:
                stored = await self._services.ledgers.read(self.appender.metadata.ledger_id)
            except MetadataError as error:
                if not error.retriable or self._loop.time() + pause > deadline:
                    return self.appender.fail(error)
            except DLError as error:
                return self.appender.fail(error)
            else:
                self.version = stored.version
                return self.appender.metadata_reread(stored.metadata)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _BACKOFF_S_MAX)


def _error_of(answer: asyncio.Future[None]) -> DLError | None:
    if answer.cancelled():
        return BookieUnavailableError("the request was cancelled")
    error = answer.exception()
    if error is None or isinstance(error, DLError):
        return error
    raise error  # a defect, not an answer: the loop's exception handler reports it
