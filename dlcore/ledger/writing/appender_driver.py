"""Runs a `LedgerAppender`: performs its effects, and feeds answers and the ends of pauses back."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks
from dlcore.base.clock import steady_s
from dlcore.base.errors import BookieUnavailableError, DLError
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.ledger.placing.health import ReplacementSearch
from dlcore.ledger.writing.appender import (
    AddFailed,
    AddSucceeded,
    After,
    Append,
    AppendRecovered,
    BookiesListed,
    Call,
    CallFailed,
    CloseEnded,
    CompleteAdds,
    Effect,
    Event,
    Fail,
    FailAdds,
    GoOnWithout,
    LacAccepted,
    LacFailed,
    LedgerAppender,
    LedgerClosed,
    MetadataRead,
    MetadataStored,
    NoteFailure,
    SendAdd,
    SendLac,
    Signal,
    StoreMetadata,
)
from dlcore.ledger.writing.in_flight import Share

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.ledger.context import LedgerContext
    from dlcore.ledger.metadata.store import VersionedLedger

logger = logging.getLogger(__name__)


class AppenderDriver:
    """An appender and its driver.

    Args:
        versioned: the ledger's metadata as it is stored.
        context: the ports.
        last_add_confirmed: the entry that the first one follows.
        recover: recovers the ledger; None where a recovery writes back, which closes it itself.
    """

    def __init__(
        self,
        versioned: VersionedLedger,
        context: LedgerContext,
        *,
        last_add_confirmed: int = -1,
        recover: Callable[[int], Awaitable[LedgerMetadata]] | None = None,
    ) -> None:
        config = context.config
        self.appender = LedgerAppender(
            versioned.metadata,
            version=versioned.version,
            search=ReplacementSearch(context.placer.health.adds, patience_s=config.bookies_wait_s),
            rng=context.rng,
            overload_patience_s=config.add_timeout_s,
            last_add_confirmed=last_add_confirmed,
            is_recovery=recover is None,
        )
        self.ledger_id = versioned.metadata.ledger_id
        self._context = context
        self._recover = recover
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks(self._on_defect)
        self._timers: dict[object, asyncio.TimerHandle] = {}
        self._callers: deque[Callable[[DLError | None], None]] = deque()  # in entry order
        self._begun_s: deque[float] = deque()  # when each of them called
        self._answered: asyncio.Handle | None = None  # says that callers were answered
        self._close: asyncio.Future[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._is_closed = False
        self.share = Share(context.in_flight, self._notify)

    def append(
        self, event: Append | AppendRecovered, on_answer: Callable[[DLError | None], None]
    ) -> None:
        """Append an entry; `on_answer` is called in entry order with the error, None for success.

        It is called from the event loop, never from inside a call into the machine.
        """
        self._callers.append(on_answer)
        self._begun_s.append(steady_s())
        self.handle(event)

    def handle(self, event: Event) -> None:
        """Feed the machine, perform its effects, and let waiters check what they wait for."""
        self._perform(self.appender.handle(event))
        if self._recover is not None:  # a recovery has its own bounds
            window = self.appender.window
            self.share.changed(size_bytes=window.pending_bytes, entry_count=window.pending_count)
        if self._waiters:
            self._notify()

    async def close(self, signal: Signal) -> None:
        """Say CLOSE or PREPARE_CLOSE, and return once it is answered; one caller at a time.

        Raises:
            The error of the answer.
        """
        self._close = self._loop.create_future()
        self.handle(signal)
        await self._close

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate` holds; it is checked again after every event."""
        while not predicate():
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    async def aclose(self) -> None:
        """Stop everything; answers to pending requests are ignored.  Idempotent."""
        self._is_closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self._tasks.aclose()
        self._notify()

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _perform(self, effects: Sequence[Effect]) -> None:  # noqa: C901 - one case for each kind
        for effect in effects:
            match effect:
                case SendAdd(entry_id, frame, targets):
                    send, is_recovery = self._context.bookies.send_add, self._recover is None
                    for position, bookie in targets:
                        answered = partial(self._on_add, entry_id, position, bookie)
                        send(bookie, frame, answered, is_recovery=is_recovery)
                case CompleteAdds(first_entry_id, last_entry_id):
                    now_s, note = steady_s(), self._context.append_times.note
                    for _ in range(first_entry_id, last_entry_id + 1):
                        note(now_s - self._begun_s.popleft())
                        self._callers.popleft()(None)
                    if self._answered is None:
                        self._answered = self._loop.call_soon(self._on_answered)
                case SendLac(bookie, lac):
                    self._context.bookies.write_lac(
                        bookie, ledger_id=self.ledger_id, last_add_confirmed=lac
                    ).add_done_callback(partial(self._on_lac, bookie, lac))
                case After(after_s, event):
                    self._feed_later(after_s, event)
                case NoteFailure():
                    self._note_failure(effect)
                case GoOnWithout(failed, after_s):
                    names = ",".join(map(str, sorted(failed)))
                    logger.info("going on without ledger=%d bookies=%s", self.ledger_id, names)
                    self._feed_later(after_s, Signal.RETRY_DUE)
                case Call() | StoreMetadata():
                    self._tasks.start(self._call(effect))
                case FailAdds(error):
                    lac = self.appender.window.last_add_confirmed
                    logger.info("writer ended ledger=%d lac=%d: %s", self.ledger_id, lac, error)
                    while self._callers:
                        self._callers.popleft()(error)
                case CloseEnded(error):
                    self._answer_close(error)
                case _:
                    assert_never(effect)

    def _note_failure(self, failure: NoteFailure) -> None:
        entry_id, bookie, error = failure.entry_id, failure.bookie, failure.error
        logger.info(
            "add failed ledger=%d entry=%d bookie=%s: %s", self.ledger_id, entry_id, bookie, error
        )
        placer = self._context.placer
        if failure.is_refusal:
            placer.health.adds.note_refusal(bookie, self._loop.time())
        else:
            placer.note_add(bookie, is_good=False)

    def _feed_later(self, after_s: float, event: Event) -> None:
        key = object()
        self._timers[key] = self._loop.call_later(after_s, self._on_due, key, event)

    def _on_due(self, key: object, event: Event) -> None:
        del self._timers[key]
        self.handle(event)

    def _on_answered(self) -> None:
        self._answered = None
        if not self._is_closed:
            self.handle(Signal.CALLERS_ANSWERED)

    def _on_add(
        self, entry_id: int, position: int, bookie: BookieId, error: DLError | None
    ) -> None:
        if self._is_closed:
            return
        if error is None:
            self._context.placer.note_add(bookie, is_good=True)
            self.handle(AddSucceeded(entry_id, position, bookie))
        else:
            self.handle(AddFailed(entry_id, position, bookie, error, self._loop.time()))

    def _on_lac(self, bookie: BookieId, lac: int, answer: asyncio.Future[None]) -> None:
        error = _error_of(answer)
        if not self._is_closed:
            self.handle(LacAccepted(bookie, lac) if error is None else LacFailed(bookie, error))

    def _answer_close(self, error: DLError | None) -> None:
        assert self._close is not None
        if self._close.done():
            return  # its caller was cancelled
        if error is None:
            self._close.set_result(None)
        else:
            self._close.set_exception(copy_of(error))

    async def _call(self, call: Call | StoreMetadata) -> None:
        try:
            event: Event = await self._answer_of(call)
        except DLError as error:
            event = CallFailed(call, error, self._loop.time())
        self.handle(event)

    async def _answer_of(self, call: Call | StoreMetadata) -> Event:
        store = self._context.ledger_store
        match call:
            case StoreMetadata(metadata, version):
                if metadata.state is LedgerState.OPEN:
                    ensemble = metadata.last_ensemble
                    logger.info("ensemble change ledger=%d %s", self.ledger_id, ensemble)
                return MetadataStored(metadata, await store.write(metadata, version=version))
            case Call.READ_METADATA:
                stored = await store.read(self.ledger_id)
                return MetadataRead(stored.metadata, stored.version)
            case Call.LIST_BOOKIES:
                placer = self._context.placer
                listed = await placer.list_writable()
                return BookiesListed(listed, placer.topology(), self._loop.time())
            case Call.RECOVER_LEDGER:
                assert self._recover is not None
                return LedgerClosed(await self._recover(self.ledger_id))
            case _:
                assert_never(call)

    def _on_defect(self, error: BaseException) -> None:
        # No task does this work now: adds that wait for it must not wait for ever.
        self.handle(Fail(DLError(f"a defect ended the writer: {error!r}")))
        raise error  # for the loop's exception handler


def _error_of(answer: asyncio.Future[None]) -> DLError | None:
    if answer.cancelled():
        return BookieUnavailableError("the request was cancelled")
    error = answer.exception()
    if error is None or isinstance(error, DLError):
        return error
    raise error  # a defect, not an answer: the loop's exception handler reports it


def copy_of(error: DLError) -> DLError:
    """Return an equal error without a traceback: an instance raised twice collects frames."""
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
