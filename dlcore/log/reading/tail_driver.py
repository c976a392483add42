"""Runs a `LogTail`: streams of entries, the segment list, the session, and the caller's wait."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, assert_never

from dlcore.base.background import BackgroundTasks, answer
from dlcore.base.errors import DLError, LedgerNotFoundError, UnexpectedError
from dlcore.log.reading.cursor import FollowExtent
from dlcore.log.reading.tail import (
    Alarm,
    AlarmAt,
    Broke,
    Control,
    Effect,
    Event,
    Fetched,
    Follow,
    FollowBegan,
    LogTail,
    Open,
    Pushed,
    Read,
    ReadState,
    Rejected,
    SessionChanged,
    Signal,
    Skipped,
    StateRead,
    StreamFailed,
    TailState,
    WaitOver,
    Waits,
    WarnIdle,
)
from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from dlcore.base.config import LogConfig
    from dlcore.ledger.reading.follow import FollowStep
    from dlcore.ledger.reading.reader import LedgerReader
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.history import LogHistory
    from dlcore.log.metadata.values import LogState
    from dlcore.log.reading.cursor import ReadCursor, ReadExtent
    from dlcore.log.reading.tail import FetchedEntry
    from dlcore.wire.frames import EntryFrame

logger = logging.getLogger(__name__)


class _Stream(NamedTuple):
    """The entries of one step; the stream goes on, or begins, when `goes_on` is set."""

    task: asyncio.Task[None]
    goes_on: asyncio.Event


class Fetcher:
    """Reads a log's entries from a position on, for one consumer."""

    def __init__(
        self,
        context: LogContext,
        history: LogHistory,
        state: LogState,
        cursor: ReadCursor,
        config: LogConfig,
        broken: BrokenEntries,
    ) -> None:
        self._machine = LogTail(state, cursor, config, skips_broken=broken.skips)
        self._ledgers = ExtentLedgers(context)
        self._history = history
        self._broken = broken
        self._tasks = BackgroundTasks()
        self._stream: _Stream | None = None
        self._ahead: _Stream | None = None  # opened before its turn
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._ends = ExitStack()
        store = context.store
        head = context.logs.paths_of(state.log).head
        changed = partial(self._handle, Signal.CHANGED)
        self._ends.callback(store.watch(head, changed, children=False))
        self._ends.callback(store.on_session(self._session_changed))
        self._session_changed(store.session_state)
        self._handle(Signal.START)

    @property
    def error(self) -> DLError | None:
        """The error that follows the buffered entries."""
        return self._machine.error

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows the buffered entries."""
        return self._machine.state is TailState.ENDED

    def take(self) -> FetchedEntry | None:
        """Return the next entry, if it is buffered."""
        buffer = self._machine.buffer
        entry = buffer.take()
        if buffer.waiting:
            self._handle(Signal.ROOM)
        return entry

    async def wait(self) -> None:
        """Wait for an entry, an error, the end or `aclose`, or until everything known was read.

        Raises:
            MetadataConnectionError, BookieUnavailableError: the cluster has not answered for
                `read_unavailable_timeout_s`; the caller may wait again.
            ReaderIdleError: no record came for `reader_idle_error_s`; the caller may wait again.
        """
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._handle(Waits(loop.time(), self._ledgers.heard_s))
        try:
            await self._waiter
        except asyncio.CancelledError:
            self._handle(Signal.WAIT_LEFT)
            raise

    def fail(self, error: DLError) -> None:
        """Stop fetching; entries after the one that was taken last are not delivered."""
        self._handle(Rejected(error))

    async def has_more(self) -> bool:
        """Return whether a record is readable now that was not taken.

        The log's metadata is read again, unless more is known to be readable.
        """
        machine = self._machine
        if machine.has_more:
            return True
        more = machine.more_in(await self._read_state(machine.cursor.position.lssn))
        if isinstance(more, FollowExtent):
            return await self._ledgers.is_readable(more) or bool(machine.buffer.entries)
        return more

    async def aclose(self) -> None:
        """Stop fetching, also if the caller that waits here is cancelled."""
        self._ends.close()
        self._handle(Signal.CLOSE)
        if self._alarm is not None:
            self._alarm.cancel()
        self._stream = self._ahead = None  # the frames of their tasks refer to this object
        await self._tasks.aclose()

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:  # noqa: C901 - one case for each kind
        match effect:
            case WaitOver():
                assert self._waiter is not None
                answer(self._waiter, effect.error)
            case Control.GO_ON:
                self._at_work.goes_on.set()
            case Open(step):
                self._ahead = self._begin(partial(self._read, step))
            case Read():
                assert self._ahead is not None
                self._stream, self._ahead = self._ahead, None
                self._stream.goes_on.set()
            case Follow(step):
                self._stream = self._begin(partial(self._follow, step))
            case Control.STOP:
                self._at_work.task.cancel()
            case Control.DROP:
                assert self._ahead is not None
                self._ahead.task.cancel()
                self._ahead = None
            case ReadState(from_lssn):
                self._tasks.start(self._watched(partial(self._learn, from_lssn)))
            case AlarmAt(at_s):
                if self._alarm is not None:
                    self._alarm.cancel()
                self._alarm = asyncio.get_running_loop().call_at(at_s, self._ring)
            case Skipped(lssn, entry_id, error):
                self._broken.meet(lssn, entry_id, error)
            case WarnIdle(position, idle_s):
                logger.warning(
                    "log=%s: a reader at %s got no news for %.3g s, and reads the metadata again; "
                    "to do: nothing now; see to ZooKeeper and to the writer if this comes often",
                    self._machine.segments.state.name,
                    position,
                    idle_s,
                )
            case _:
                assert_never(effect)

    @property
    def _at_work(self) -> _Stream:
        assert self._stream is not None
        return self._stream

    def _ring(self) -> None:
        self._handle(Alarm(asyncio.get_running_loop().time(), self._ledgers.heard_s))

    def _session_changed(self, state: SessionState) -> None:
        now = asyncio.get_running_loop().time()
        self._handle(SessionChanged(state is SessionState.CONNECTED, now))

    async def _watched(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except DLError as error:
            self._handle(Broke(error))
        except Exception as error:  # noqa: BLE001 - a defect: the consumer must not wait for ever
            name = self._machine.segments.state.name
            self._handle(Broke(UnexpectedError(f"reader of log {name!r} broke: {error!r}")))

    async def _learn(self, from_lssn: int) -> None:
        self._handle(StateRead(await self._read_state(from_lssn)))

    async def _read_state(self, from_lssn: int) -> LogState:
        return await self._history.read(from_lssn=from_lssn, count=SEGMENTS_AHEAD)

    def _begin(self, work: Callable[[asyncio.Event], Awaitable[None]]) -> _Stream:
        goes_on = asyncio.Event()
        return _Stream(self._tasks.start(self._watched(partial(work, goes_on))), goes_on)

    async def _read(self, step: ReadExtent, goes_on: asyncio.Event) -> None:
        try:
            async with aclosing(self._ledgers.chunks(step)) as chunks:
                async for frames in chunks:
                    await goes_on.wait()  # for its turn
                    goes_on.clear()
                    self._handle(Fetched(frames))
                    # The next chunk is not fetched yet: the buffer bounds what is in memory.
                    await goes_on.wait()
        except DLError as error:
            await goes_on.wait()
            self._ledgers.forget()
            self._handle(StreamFailed(error))
        else:
            self._handle(Signal.STREAM_ENDED)

    async def _follow(self, step: FollowExtent, goes_on: asyncio.Event) -> None:
        updates = self._ledgers.follow(
            step,
            on_begin=lambda: self._handle(FollowBegan(self._ledgers.heard_s)),
            on_entry=partial(self._take_at_once, step),
        )
        try:
            async with aclosing(updates):
                async for update in updates:
                    goes_on.clear()
                    self._handle(Fetched(update.frames))
                    await goes_on.wait()
        except DLError as error:
            self._ledgers.forget()
            self._handle(StreamFailed(error))
        else:
            self._handle(Signal.STREAM_ENDED)

    def _take_at_once(self, step: FollowExtent, frame: EntryFrame) -> bool:
        """Return whether a pushed entry was taken; else it comes with a step."""
        if not self._machine.has_room(step):
            return False
        self._handle(Pushed(frame))
        return True


class BrokenEntries:
    """Entries that have no undamaged replica: an error, or skipped and counted on request.

    A missing entry, or one whose bookies do not answer, is always an error.
    """

    def __init__(self, log: str, *, skip: bool) -> None:
        self._log = log
        self.skips = skip
        """Whether broken entries are skipped."""
        self.count = 0

    def meet(self, lssn: int, entry_id: int, error: DLError) -> None:
        """Count a broken entry that is skipped; raise `error` if none may be."""
        if not self.skips:
            raise error
        self.count += 1
        logger.warning(
            "log=%s: broken entry %d:%d is left out, %d so far: %s; to do: dlog log inspect, "
            "then dlog log repair; the record is not read",
            self._log,
            lssn,
            entry_id,
            self.count,
            error,
        )


class ExtentLedgers:
    """Opens ledgers, and keeps the last one: extents that follow each other often share it."""

    def __init__(self, context: LogContext) -> None:
        self._context = context
        self._reader: LedgerReader | None = None
        self._followed: LedgerReader | None = None
        self.heard_s = 0.0
        """When a followed bookie answered last, by the event loop's clock."""

    def forget(self) -> None:
        """Open the next ledger anew, also if it is the one that was read last."""
        self._reader = None

    async def chunks(self, step: ReadExtent) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield the entries of a final extent in order, many at a time.

        Raises: as `LedgerReader.read`; LedgerNotFoundError, MetadataError.
        """
        last_entry_id = step.last_entry_id
        assert last_entry_id is not None
        reader = await self._reader_of(step.extent.ledger_id, last_entry_id)
        known = reader.metadata
        async with aclosing(reader.read(step.first_entry_id, last_entry_id)) as chunks:
            async for frames in chunks:
                if reader.metadata is not known:
                    # The reader found that entries were moved: spare the next readers the search.
                    known = reader.metadata
                    self._context.ledger_cache.correct(known)
                yield frames

    async def _reader_of(self, ledger_id: int, last_entry_id: int) -> LedgerReader:
        reader = self._reader
        if reader is None or reader.metadata.ledger_id != ledger_id:
            known = await self._context.ledger_cache.read({ledger_id: last_entry_id})
            reader = self._reader = self._context.ledgers.open_ledger_of(known[ledger_id])
        return reader

    async def follow(
        self,
        step: FollowExtent,
        *,
        on_begin: Callable[[], None],
        on_entry: Callable[[EntryFrame], bool],
    ) -> AsyncGenerator[FollowStep, None]:
        """Yield the entries of an open extent, as `LedgerReader.follow` does.

        `on_begin` is called once the ledger is open.
        """
        reader = await self._context.ledgers.open_ledger(step.extent.ledger_id)
        updates = reader.follow(step.first_entry_id, on_answer=self._heard, on_entry=on_entry)
        self._followed = reader
        self._heard()
        on_begin()
        try:
            async with aclosing(updates):
                async for update in updates:
                    yield update
        finally:
            if self._followed is reader:
                self._followed = None

    def _heard(self) -> None:
        self.heard_s = asyncio.get_running_loop().time()

    async def is_readable(self, step: FollowExtent) -> bool:
        """Return whether the first entry of an open extent is confirmed; its follower learns it.

        Raises: LedgerReadError, MetadataError.
        """
        ledger_id = step.extent.ledger_id
        try:
            reader = await self._context.ledgers.open_ledger(ledger_id)
            confirmed = await reader.read_last_add_confirmed()
        except LedgerNotFoundError:
            return False  # it was recovered as empty right now
        followed = self._followed
        if followed is not None and followed.metadata.ledger_id == ledger_id:
            followed.note_end(confirmed)  # its bookies may never get the LAC of a dead writer
        return confirmed >= step.first_entry_id


SEGMENTS_AHEAD = 50
"""Segments whose metadata a reader knows in advance: a log may have very many."""
