"""Runs a `LogTail`: streams of entries, the segment list, the session, and the caller's wait."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks, answer
from dlcore.log.reading.entry_events import entry_events
from dlcore.log.reading.extent_ledgers import ExtentLedgers
from dlcore.log.reading.more_check_driver import check_more
from dlcore.log.reading.tail import (
    Alarm,
    AlarmAt,
    Broke,
    Control,
    Effect,
    Event,
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
    TailState,
    WaitOver,
    Waits,
    WarnIdle,
)
from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from dlcore.base.config import LogConfig
    from dlcore.base.errors import DLError
    from dlcore.base.records import EntryPlace
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.history import LogHistory
    from dlcore.log.metadata.values import LogState
    from dlcore.log.reading.broken_entries import BrokenEntries
    from dlcore.log.reading.cursor import FollowExtent, ReadCursor
    from dlcore.log.reading.tail import FetchedEntry
    from dlcore.wire.frames import EntryFrame

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """The entries of one step; the stream goes on, or begins, when `goes_on` is set."""

    task: asyncio.Task[None]
    goes_on: asyncio.Event
    awaits_room: bool = False


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
        entry = self._machine.buffer.take()
        stream = self._stream
        if stream is not None and stream.awaits_room:
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

    def reject(self, place: EntryPlace, error: DLError) -> None:
        """Note that the entry that was taken last is broken: it is skipped, or `error` follows."""
        self._handle(Rejected(place, error))

    async def has_more(self) -> bool:
        """Return whether a record is readable now that was not taken.

        The log's metadata is read again, unless more is known to be readable.

        Raises: as `LogHistory.read`; AlreadyTruncatedError, LedgerNotFoundError, LedgerReadError.
        """
        return await check_more(self._machine, self._history, self._ledgers)

    async def aclose(self) -> None:
        """Stop fetching, also if the caller that waits here is cancelled."""
        self._ends.close()
        self._handle(Signal.CLOSE)
        if self._alarm is not None:
            self._alarm.cancel()
        self._stream = self._ahead = None  # the frames of their tasks refer to this object
        await self._tasks.aclose()

    def _push(self, step: FollowExtent, frame: EntryFrame) -> bool:
        """Return whether a pushed entry was taken; else it comes with the stream."""
        effects = self._machine.handle(Pushed(step, frame))
        for effect in effects:
            self._perform(effect)
        return Control.REFUSE not in effects

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:  # noqa: C901 - one case for each kind
        match effect:
            case WaitOver():
                assert self._waiter is not None
                answer(self._waiter, effect.error)
            case Control.GO_ON:
                self._at_work.awaits_room = False
                self._at_work.goes_on.set()
            case Control.AWAIT_ROOM:
                self._at_work.awaits_room = True
            case Control.REFUSE:
                pass  # `_push` returns it
            case Open(step):
                self._ahead = self._begin(self._ledgers.chunks(step))
            case Read():
                assert self._ahead is not None
                self._stream, self._ahead = self._ahead, None
                self._stream.goes_on.set()
            case Follow(step):
                push = partial(self._push, step)
                entries = self._ledgers.follow(step, on_begin=self._follow_began, on_entry=push)
                self._stream = self._begin(entries)
                self._stream.goes_on.set()
            case Control.STOP:
                self._at_work.awaits_room = False
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
                self._broken.add(lssn, entry_id, error)
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
        except Exception as error:  # noqa: BLE001 - the consumer gets it
            self._handle(Broke(error))

    async def _learn(self, from_lssn: int) -> None:
        self._handle(StateRead(await self._history.read_ahead(from_lssn)))

    def _begin(self, entries: AsyncGenerator[Sequence[EntryFrame], None]) -> _Stream:
        goes_on = asyncio.Event()
        run = partial(self._run, entry_events(entries, goes_on))
        return _Stream(self._tasks.start(self._watched(run)), goes_on)

    async def _run(self, events: AsyncGenerator[Event, None]) -> None:
        async with aclosing(events):
            async for event in events:
                self._handle(event)

    def _follow_began(self) -> None:
        self._handle(FollowBegan(self._ledgers.heard_s))
