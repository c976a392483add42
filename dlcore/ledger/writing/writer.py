"""The writer of an open ledger: the driver of its `LedgerAppender`, futures for appends, close."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks, answer, fulfil, refuse
from dlcore.base.clock import steady_s
from dlcore.base.config import ENTRY_SIZE_BYTES_MAX
from dlcore.base.errors import (
    BookieUnavailableError,
    DLError,
    EntryTooLargeError,
    LedgerClosedError,
    NotEnoughBookiesError,
    copied,
)
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.ledger.placing.health import ReplacementSearch
from dlcore.ledger.writing.appender import (
    TAKEN,
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
    Share,
    Signal,
    StoreMetadata,
)
from dlcore.wire.frames import FRAME_BYTES, BytesLike

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.base.metrics import Durations
    from dlcore.ledger.metadata.store import VersionedLedger
    from dlcore.ledger.writing.context import LedgerContext
    from dlcore.metadata.port import Op
    from dlcore.wire.port import OnAnswer

logger = logging.getLogger(__name__)


class _Callers:
    """The callers of entries, in entry order; `on_answered` is called soon after some answers."""

    def __init__(self, times: Durations, on_answered: Callable[[], None]) -> None:
        self._times = times
        self._on_answered = on_answered
        self._calls: deque[OnAnswer] = deque()
        self._begun_s: deque[float] = deque()  # when each called
        self._is_due = False  # `on_answered` is called soon

    def add(self, on_answer: OnAnswer) -> None:
        """Add the caller of the next entry."""
        self._calls.append(on_answer)
        self._begun_s.append(steady_s())

    def confirm(self, count: int) -> None:
        """Answer the first ones, whose entries are confirmed."""
        now_s, note = steady_s(), self._times.note
        for _ in range(count):
            note(now_s - self._begun_s.popleft())
            self._calls.popleft()(None)
        if not self._is_due:
            self._is_due = True
            # In a later turn: callers that append in response spare a LAC message of its own.
            asyncio.get_running_loop().call_soon(self._say)

    def fail(self, error: DLError) -> None:
        """Answer all of them, whose entries failed."""
        while self._calls:
            self._calls.popleft()(error)

    def _say(self) -> None:
        self._is_due = False
        self._on_answered()


class _Waiters:
    """The callers that wait for the machine: for a condition, or for the answer to a close."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []
        self._close: asyncio.Future[None] | None = None

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate` holds; it is checked again after every event."""
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self.waiting.append(waiter)
            await waiter

    def wake(self) -> None:
        """Let each check its condition again."""
        waiting, self.waiting = self.waiting, []
        for waiter in waiting:
            fulfil(waiter, None)

    async def closed(self, ask: Callable[[], None]) -> None:
        """Ask for a close, and return once it is answered; one caller at a time."""
        self._close = asyncio.get_running_loop().create_future()
        ask()
        await self._close

    def answer_close(self, error: DLError | None) -> None:
        """Answer the close."""
        assert self._close is not None
        answer(self._close, error and copied(error))


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
        self.waiters = _Waiters()
        self.share = Share(context.in_flight, self.waiters.wake)
        self._context = context
        self._recover = recover
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks(self._on_defect)
        self._timers: dict[object, asyncio.TimerHandle] = {}
        self._callers = _Callers(context.append_times, self._on_answered)
        self._is_closed = False

    @property
    def _ledger_id(self) -> int:
        return self.appender.metadata.ledger_id

    def append(self, event: Append | AppendRecovered, on_answer: OnAnswer) -> None:
        """Append an entry; `on_answer` is called in entry order with the error, None for success.

        It is called from the event loop, never from inside a call into the machine.
        """
        self._callers.add(on_answer)
        self.handle(event)

    def handle(self, event: Event) -> None:
        """Feed the machine, perform its effects, and let waiters check what they wait for."""
        self._perform(self.appender.handle(event))
        if self._recover is not None:  # a recovery has its own bounds
            window = self.appender.window
            self.share.changed(size_bytes=window.pending_bytes, entry_count=window.pending_count)
        if self.waiters.waiting:
            self.waiters.wake()

    async def close(self, signal: Signal) -> None:
        """Say CLOSE or PREPARE_CLOSE, and return once it is answered.

        Raises:
            The error of the answer.
        """
        await self.waiters.closed(partial(self.handle, signal))

    async def aclose(self) -> None:
        """Stop everything; answers to pending requests are ignored.  Idempotent."""
        self._is_closed = True
        # Timers first: one that fired during the wait for tasks would feed the machine again.
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self._tasks.aclose()
        self.waiters.wake()

    def _perform(self, effects: Sequence[Effect]) -> None:  # noqa: C901 - one case for each kind
        for effect in effects:
            match effect:
                case SendAdd(entry_id, frame, targets):
                    send, is_recovery = self._context.bookies.send_add, self._recover is None
                    for position, bookie in targets:
                        answered = partial(self._on_add, entry_id, position, bookie)
                        send(bookie, frame, answered, is_recovery=is_recovery)
                case CompleteAdds(first_entry_id, last_entry_id):
                    self._callers.confirm(last_entry_id + 1 - first_entry_id)
                case SendLac(bookie, lac):
                    self._context.bookies.write_lac(
                        bookie, ledger_id=self._ledger_id, last_add_confirmed=lac
                    ).add_done_callback(partial(self._on_lac, bookie, lac))
                case After(after_s, event):
                    self._feed_later(after_s, event)
                case NoteFailure():
                    self._note_failure(effect)
                case GoOnWithout(failed, after_s):
                    names = ",".join(map(str, sorted(failed)))
                    logger.info("going on without ledger=%d bookies=%s", self._ledger_id, names)
                    self._feed_later(after_s, Signal.RETRY_DUE)
                case Call() | StoreMetadata():
                    self._tasks.start(self._call(effect))
                case FailAdds(error):
                    lac = self.appender.window.last_add_confirmed
                    logger.info("writer ended ledger=%d lac=%d: %s", self._ledger_id, lac, error)
                    self._callers.fail(error)
                case CloseEnded(error):
                    self.waiters.answer_close(error)
                case _:
                    assert_never(effect)

    def _note_failure(self, failure: NoteFailure) -> None:
        entry_id, bookie, error = failure.entry_id, failure.bookie, failure.error
        logger.info(
            "add failed ledger=%d entry=%d bookie=%s: %s", self._ledger_id, entry_id, bookie, error
        )
        if failure.is_refusal:
            self._context.placer.health.adds.note_refusal(bookie, self._loop.time())
        else:
            self._note_add(bookie, is_good=False)

    def _note_add(self, bookie: BookieId, *, is_good: bool) -> None:
        """Note how a bookie took an entry, for all ledgers of the client."""
        adds, now = self._context.placer.health.adds, self._loop.time()
        if is_good:
            adds.note_success(bookie, now)
        elif adds.note_failure(bookie, now):
            logger.warning(
                "bookie fails often, others are chosen for a while: %s; to do: see why the bookie "
                "fails (its log, its disk, the network)",
                bookie,
            )

    def _feed_later(self, after_s: float, event: Event) -> None:
        # A key of its own: equal events may wait at the same time.
        key = object()
        self._timers[key] = self._loop.call_later(after_s, self._on_due, key, event)

    def _on_due(self, key: object, event: Event) -> None:
        del self._timers[key]
        self.handle(event)

    def _on_answered(self) -> None:
        if not self._is_closed:
            self.handle(Signal.CALLERS_ANSWERED)

    def _on_add(
        self, entry_id: int, position: int, bookie: BookieId, error: DLError | None
    ) -> None:
        if self._is_closed:
            return
        if error is None:
            self._note_add(bookie, is_good=True)
            self.handle(AddSucceeded(entry_id, position, bookie))
        else:
            self.handle(AddFailed(entry_id, position, bookie, error, self._loop.time()))

    def _on_lac(self, bookie: BookieId, lac: int, answer: asyncio.Future[None]) -> None:
        # Looked at even if closed: asyncio reports an exception that was never retrieved.
        error = _error_of(answer)
        if not self._is_closed:
            self.handle(LacAccepted(bookie, lac) if error is None else LacFailed(bookie, error))

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
                    logger.info("ensemble change ledger=%d %s", self._ledger_id, ensemble)
                return MetadataStored(metadata, await store.write(metadata, version=version))
            case Call.READ_METADATA:
                stored = await store.read(self._ledger_id)
                return MetadataRead(stored.metadata, stored.version)
            case Call.LIST_BOOKIES:
                placer = self._context.placer
                listed = await placer.list_writable()
                return BookiesListed(listed, placer.topology(), self._loop.time())
            case Call.RECOVER_LEDGER:
                assert self._recover is not None
                return LedgerClosed(await self._recover(self._ledger_id))
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


class LedgerWriter:
    """Appends entries; made by `LedgerClient.create_ledger`, used on one event loop.

    After any failure the writer has ended: every later call raises that error again.  `close` still
    closes the ledger, unless another client took it over.  If entries were not acknowledged, it
    closes the ledger by a recovery, since readers may have seen those that an ack quorum holds.
    """

    def __init__(
        self,
        versioned: VersionedLedger,
        context: LedgerContext,
        *,
        recover: Callable[[int], Awaitable[LedgerMetadata]],
        on_end: Callable[[LedgerWriter], None],
    ) -> None:
        self._context = context
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._driver = AppenderDriver(versioned, context, recover=recover)
        self._appender = self._driver.appender
        self._close_lock = asyncio.Lock()

    def __repr__(self) -> str:
        quorum = self.metadata.quorum
        return (
            f"<LedgerWriter {self.ledger_id} {self.metadata.state.name} "
            f"lac={self.last_add_confirmed} pushed={self.last_add_pushed} "
            f"E{quorum.ensemble_size}/Qw{quorum.write_quorum_size}/Qa{quorum.ack_quorum_size}>"
        )

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as this writer knows it is stored."""
        return self._appender.metadata

    @property
    def ledger_id(self) -> int:
        """The ledger's id."""
        return self._appender.metadata.ledger_id

    @property
    def last_add_confirmed(self) -> int:
        """The last acknowledged entry; -1 for none."""
        return self._appender.window.last_add_confirmed

    @property
    def last_add_pushed(self) -> int:
        """The last appended entry, acknowledged or not; -1 for none."""
        return self._appender.window.last_add_pushed

    @property
    def length_bytes(self) -> int:
        """Body bytes of all appended entries."""
        return self._appender.window.pushed_bytes

    @property
    def confirmed_bytes(self) -> int:
        """Body bytes of all acknowledged entries."""
        return self._appender.window.confirmed_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes of entries that some bookie of their write set has not answered."""
        return self._appender.window.pending_bytes

    def append(self, body: Sequence[BytesLike]) -> asyncio.Future[int]:
        """Append one entry; the future gives its id once it and all before it are acknowledged.

        `body` is not copied: its bytes must not change until all its replicas have answered.

        Nothing blocks here; call `wait_for_capacity` first to bound the bytes in flight.  An entry
        that is too large is refused, and the writer stays usable.

        Raises:
            Nothing: the future holds LedgerFencedError, NotEnoughBookiesError, LedgerClosedError,
            EntryTooLargeError or a MetadataError.  Unless it is EntryTooLargeError, the entry may
            have been written.
        """
        future: asyncio.Future[int] = self._loop.create_future()
        self.submit(body, partial(_answer, future, self.last_add_pushed + 1))
        return future

    def submit(self, body: Sequence[BytesLike], on_answer: OnAnswer) -> None:
        """Append one entry, as `append` does; `on_answer` gets the error, None for success.

        It is called from the event loop, in entry order.  Entries appended from the callback carry
        the new LAC.  While callers always append in response, no separate LAC message is sent.
        """
        error = self._refusal(body)
        if error is not None:
            self._loop.call_soon(on_answer, error)
            return
        self._driver.append(Append(body), on_answer)

    def _refusal(self, body: Sequence[BytesLike]) -> DLError | None:
        if self._appender.error is not None:
            return self._appender.error
        if self._appender.is_closing:
            return LedgerClosedError(f"ledger {self.ledger_id} was closed by this writer")
        size = FRAME_BYTES + sum(map(len, body))
        if size > ENTRY_SIZE_BYTES_MAX:
            return EntryTooLargeError(
                f"an entry of {size} bytes, the limit is {ENTRY_SIZE_BYTES_MAX}"
            )
        return None

    async def wait_for_capacity(self) -> None:
        """Return once the bytes and entries in flight of the whole client are below its limits.

        Writers get their turn in order; one that has nothing in flight may always append an entry.
        An entry is in flight until its whole write set answered or was given up, so a slow third
        replica does not take memory without bound.
        """
        if not self._has_capacity():
            try:
                await self._driver.waiters.until(lambda: self._has_capacity() or self._is_over)
            finally:
                self._driver.share.leave()
        self._raise_if_failed()

    def _has_capacity(self) -> bool:
        return self._driver.share.may_append()

    async def flush(self) -> None:
        """Return once all entries appended so far are acknowledged."""
        target = self._appender.window.last_add_pushed
        await self._driver.waiters.until(
            lambda: self._appender.window.last_add_confirmed >= target or self._is_over
        )
        if self._appender.window.last_add_confirmed < target:
            self._raise_if_failed()

    async def publish_lac(self) -> None:
        """Tell the bookies the present LAC, so that followers are sent all entries up to it.

        It waits until enough bookies accepted it that no read can reach coverage without one of
        them.  A read that begins later sees acknowledged entries even without this call.  A bookie
        accepts a LAC once it is durable there, so a killed bookie does not forget it.

        Raises:
            NotEnoughBookiesError: too few accepted it within the add time-out; the writer keeps
                trying.
        """
        lac = self.last_add_confirmed
        if self.metadata.state is LedgerState.CLOSED:
            return
        self._raise_if_failed()
        if lac < 0:
            return
        self._driver.handle(Signal.PUBLISH_LAC)
        try:
            async with asyncio.timeout(self._context.config.add_timeout_s):
                await self._driver.waiters.until(
                    lambda: self._appender.is_published(lac) or self._is_over
                )
        except TimeoutError as error:
            raise NotEnoughBookiesError(
                f"ledger {self.ledger_id}: too few bookies accepted the LAC {lac} in time"
            ) from error
        if not self._appender.is_published(lac):
            self._raise_if_failed()

    async def close(self) -> LedgerMetadata:
        """Wait for the appended entries, close the ledger at its LAC, and return the metadata.

        If appends failed because bookies or metadata were missing, a recovery finds the ledger's
        end and closes it.  It is safe to call this again after an error.

        Raises:
            LedgerRecoveryError: the recovery could not find the end.
            LedgerFencedError: a recoverer took the ledger over and decides its end.
            LedgerClosedError: another client closed it, at another entry.
            LedgerNotFoundError: it was deleted.
            MetadataError: it is unknown whether it is closed.
        """
        async with self._close_lock:
            if self.metadata.state is not LedgerState.CLOSED:
                async with self._stopped_if_taken():
                    await self._driver.close(Signal.CLOSE)
                await self._stop()
            return self.metadata

    async def prepare_close(self) -> tuple[LedgerMetadata, Op]:
        """Wait for the appended entries; return the closed metadata, and the operation to store it.

        The operation is for a transaction of the caller.  After that was applied, call
        `was_closed`; if it was not, `close` finds out the ledger's state.

        Raises:
            LedgerFencedError, LedgerClosedError: another client took the ledger over.
            DLError: the error that ended the writer while entries were not acknowledged.
        """
        async with self._close_lock, self._stopped_if_taken():
            await self._driver.close(Signal.PREPARE_CLOSE)
            closed = self._appender.window.closed(self._appender.metadata)
            return closed, self._context.ledger_store.put(closed, version=self._appender.version)

    async def was_closed(self, metadata: LedgerMetadata) -> None:
        """Stop: the metadata store holds this end of the ledger now."""
        self._driver.handle(LedgerClosed(metadata))
        await self._stop()

    @asynccontextmanager
    async def _stopped_if_taken(self) -> AsyncGenerator[None, None]:
        try:
            yield
        except TAKEN:
            await self._stop()  # nothing is left to do here, and a retry would not help
            raise

    async def abandon(self) -> None:
        """Stop without closing the ledger, as a crash would: recovery decides about its end."""
        error = LedgerClosedError(f"the writer of ledger {self.ledger_id} was abandoned")
        self._driver.handle(Fail(error))
        await self._stop()

    async def _stop(self) -> None:
        await self._driver.aclose()
        self._on_end(self)

    @property
    def _is_over(self) -> bool:
        return self._appender.error is not None

    def _raise_if_failed(self) -> None:
        if self._appender.error is not None:
            raise copied(self._appender.error)

    def tell_lac(self) -> None:
        """Tell the LAC to the bookie that followers listen to, unless an add is under way.

        Call this when more records are already waiting.  Otherwise followers see the new LAC only
        once the next entry has been built and sent.  It is one message to one bookie for each entry
        of writers that share a log; the bookie syncs it to disk together with the next add.
        """
        self._driver.handle(Signal.TELL_LAC)


def _answer(future: asyncio.Future[int], entry_id: int, error: DLError | None) -> None:
    if error is None:
        fulfil(future, entry_id)
    else:
        refuse(future, copied(error))  # a caller that only flushes gets the failure there
