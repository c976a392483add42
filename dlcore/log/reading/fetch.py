"""Fetching ahead: runs the read cursor over ledgers and keeps a bounded buffer of entries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import forget_frames
from dlcore.base.config import MIB
from dlcore.base.errors import (
    BookieUnavailableError,
    DLError,
    InvalidEntryError,
    LedgerNotFoundError,
    LedgerReadError,
    MetadataConnectionError,
    ReaderIdleError,
    UnexpectedError,
)
from dlcore.base.records import EntryPlace
from dlcore.log.entries.body import EntryHeader, decode_entry_header
from dlcore.log.reading.cursor import (
    EndOfStream,
    FollowExtent,
    LearnSegments,
    ReadCursor,
    ReadExtent,
    WaitForChange,
)
from dlcore.log.reading.idle import IdleStep, IdleWatch
from dlcore.log.reading.opened import OpenedExtent
from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.base.config import LogConfig
    from dlcore.ledger.reading.reader import LedgerReader
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.history import LogHistory
    from dlcore.log.metadata.values import LogState
    from dlcore.log.reading.broken import BrokenEntries
    from dlcore.wire.digest import EntryFrame

logger = logging.getLogger(__name__)

SEGMENTS_AHEAD = 50
"""Segments whose metadata a reader knows in advance: a log may have very many."""
_OPENED_AHEAD_BYTES = 12 * MIB
"""With this much left of an extent, the next one is opened, and its first entries are requested.
Its ledger and first chunk arrive after some milliseconds, in which a reader reads about as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedEntry:
    """An entry on its way to the reader's caller; rows before `first_slot` are left out."""

    place: EntryPlace
    first_slot: int
    assigned_txid: int | None
    header: EntryHeader
    body: memoryview

    @property
    def last_txid(self) -> int:
        """The highest transaction id in it."""
        return self.header.last_txid if self.assigned_txid is None else self.assigned_txid


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
        self._context = context
        self._broken = broken
        self._idle = IdleWatch(warn_s=config.reader_idle_warn_s, error_s=config.reader_idle_error_s)
        self._history = history
        self._state = state
        self._cursor = cursor
        self._ahead_bytes = config.read_ahead_bytes
        self._unavailable_timeout_s = config.read_unavailable_timeout_s
        self._entries: deque[FetchedEntry] = deque()
        self._buffered_bytes = 0
        self._reader: LedgerReader | None = None
        self._opened: OpenedExtent | None = None  # the extent to read now, or next
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._news = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None  # wakes `wait` at this time at the latest
        self._alarm_s = math.inf
        self._followed: FollowExtent | None = None  # the step that takes entries as they come
        self._followed_ledger: LedgerReader | None = None
        self._times_idle = 0
        self.error: DLError | None = None
        self.has_ended = False
        self._is_closed = False
        path = context.logs.paths_of(state.log).head
        self._unwatch = context.store.watch(path, self._changed.set, children=False)
        self._loop = asyncio.get_running_loop()
        self._metadata_lost_at: float | None = None
        self._bookies_heard_at: float | None = None  # while an open extent is followed
        self._unsubscribe = context.store.on_session(self._session_changed)
        self._session_changed(context.store.session_state)
        self._task = asyncio.create_task(self._run(), name=f"log-reader-{state.name}")
        self._task.add_done_callback(self._stopped)

    def take(self) -> FetchedEntry | None:
        """Return the next entry, if it is buffered."""
        if not self._entries:
            return None
        entry = self._entries.popleft()
        self._buffered_bytes -= entry.body.nbytes
        self._room.set()
        return entry

    async def wait(self) -> None:
        """Wait for an entry, an error, the end or `aclose`, or until everything known was read.

        Raises:
            MetadataConnectionError, BookieUnavailableError: the cluster has not answered for
                `read_unavailable_timeout_s`; the caller may wait again.
        """
        began, times_idle = self._loop.time(), self._times_idle
        self._idle.waits(began)
        while not (
            self._entries
            or self.error
            or self.has_ended
            or self._is_closed
            or self._times_idle > times_idle
        ):
            silent_since = self._silent_since()
            deadline = (
                None
                if silent_since is None
                else max(began, silent_since) + self._unavailable_timeout_s
            )
            if deadline is not None and self._loop.time() >= deadline:
                raise self._unavailable()
            self._heed_idleness()
            wake_at = (
                self._idle.deadline if deadline is None else min(deadline, self._idle.deadline)
            )
            self._news.clear()
            if wake_at < self._alarm_s:
                self._set_alarm(wake_at)
            await self._news.wait()

    def _set_alarm(self, wake_at: float) -> None:
        # The timer is kept for later waits, most of which end much sooner; an early wake-up does no
        # harm, and a new timer for each wait would cost more.
        self._stop_alarm()
        self._alarm_s = wake_at
        self._alarm = self._loop.call_at(wake_at, self._ring)

    def _ring(self) -> None:
        self._stop_alarm()
        self._news.set()

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_s = None, math.inf

    def _heed_idleness(self) -> None:
        now = self._loop.time()
        idle_s = self._idle.idle_s(now)
        step = self._idle.due(now)
        if step is IdleStep.FAIL:
            raise ReaderIdleError(
                f"log {self._state.name!r}: no record came for {idle_s:.3g} s at "
                f"{self._cursor.position}"
            )
        if step is IdleStep.LOOK:
            logger.warning(
                "log=%s: a reader at %s got no news for %.3g s, and reads the metadata again",
                self._state.name,
                self._cursor.position,
                idle_s,
            )
            self._changed.set()

    def fail(self, error: DLError) -> None:
        """Stop fetching; entries after the one that was taken last are not delivered."""
        self._task.cancel()
        # Buffered entries follow the failed one: delivered, they would leave a gap.
        self._entries.clear()
        self._buffered_bytes = 0
        self._fail(error)

    def _silent_since(self) -> float | None:
        """Return since when ZooKeeper, or the followed bookies, may have been unreachable."""
        times = (self._metadata_lost_at, self._bookies_heard_at)
        return min((at for at in times if at is not None), default=None)

    def _unavailable(self) -> DLError:
        timeout_s = self._unavailable_timeout_s
        lost = []
        if self._metadata_lost_at is not None:
            lost.append("ZooKeeper")
        heard_at = self._bookies_heard_at
        if heard_at is not None and self._loop.time() - heard_at >= timeout_s:
            lost.append("the bookies that it follows")
        kind = BookieUnavailableError if self._metadata_lost_at is None else MetadataConnectionError
        return kind(
            f"log {self._state.name!r}: a reader that waits for records has heard nothing of "
            f"{' and '.join(lost)} for {timeout_s:g} s"
        )

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._metadata_lost_at = None
        elif self._metadata_lost_at is None:
            self._metadata_lost_at = self._loop.time()
        self._news.set()

    def _bookie_answered(self) -> None:
        self._bookies_heard_at = self._loop.time()

    async def has_more(self) -> bool:
        """Return whether a record is readable now that was not taken.

        The log's metadata is read again, unless more is known to be readable.
        """
        # On copies: planning may move the cursor, which only the fetching task may do.
        if isinstance(self._cursor.copy().plan(self._state), ReadExtent):
            return True  # unless it is truncated right now: then `wait` returns without it
        state = await self._reread()
        if self._entries or self.error is not None or self.has_ended:
            return True
        step = self._cursor.copy().plan(state)
        match step:
            case WaitForChange():
                return False
            case ReadExtent() | EndOfStream() | LearnSegments():
                return True
            case FollowExtent():
                return await self._has_followable(step)
            case _:
                assert_never(step)

    async def _has_followable(self, step: FollowExtent) -> bool:
        try:
            reader = await self._context.ledgers.open_ledger(step.extent.ledger_id)
            confirmed = await reader.read_last_add_confirmed()
            followed = self._followed_ledger
            if followed is not None and followed.metadata.ledger_id == step.extent.ledger_id:
                followed.tell_end(confirmed)  # its bookies may never get the LAC of a dead writer
        except LedgerNotFoundError:
            return bool(self._entries)  # it was recovered as empty right now
        return confirmed >= step.first_entry_id or bool(self._entries)

    async def aclose(self) -> None:
        """Stop fetching, also if the caller that waits here is cancelled."""
        self._unwatch()
        self._unsubscribe()
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
        finally:
            forget_frames(self._task)
            self._entries.clear()
            self._is_closed = True
            self._stop_alarm()
            self._news.set()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # DLErrors are handled inside: this is a defect, and the consumer must not wait for
            # ever.
            self._fail(UnexpectedError(f"reader of log {self._state.name!r} broke: {error!r}"))

    def _fail(self, error: DLError) -> None:
        self.error = error
        self._news.set()

    async def _run(self) -> None:
        try:
            while not self.has_ended:
                await self._step()
        except DLError as error:
            self._fail(error)
        finally:
            await self._drop_opened()

    async def _step(self) -> None:
        step = self._cursor.plan(self._state)
        try:
            match step:
                case ReadExtent():
                    await self._read(step)
                case FollowExtent():
                    await self._follow(step)
                case LearnSegments():
                    await self._refresh()
                case WaitForChange():
                    await self._next_state()
                case EndOfStream():
                    self.has_ended = True
                    self._news.set()
                case _:
                    assert_never(step)
        except (LedgerNotFoundError, LedgerReadError) as error:
            self._reader = None
            if isinstance(error, LedgerReadError) and error.is_damaged:
                assert isinstance(step, ReadExtent | FollowExtent)
                self._skip(step, error)
                return
            # Truncation, recovery and merges remove ledgers, and each of them changes the head.
            before = self._state
            await self._refresh()
            if self._state.version == before.version:
                raise

    async def _next_state(self) -> None:
        self._times_idle += 1
        self._news.set()
        await self._changed.wait()
        await self._refresh()

    async def _refresh(self) -> None:
        # Cleared before the read, so that no change during the read is missed.
        self._changed.clear()
        self._state = await self._reread()

    async def _reread(self) -> LogState:
        lssn = self._cursor.position.lssn
        return await self._history.read(from_lssn=lssn, count=SEGMENTS_AHEAD)

    async def _reader_of(self, ledger_id: int, last_entry_id: int) -> LedgerReader:
        reader = self._reader
        if reader is None or reader.metadata.ledger_id != ledger_id:
            known = await self._context.ledger_cache.read({ledger_id: last_entry_id})
            reader = self._reader = self._context.ledgers.open_ledger_of(known[ledger_id])
        return reader

    async def _read(self, step: ReadExtent) -> None:
        last_entry_id = step.last_entry_id
        assert last_entry_id is not None
        opened = await self._take_opened(step)
        entry_bytes = step.extent.size_bytes / step.extent.entry_count
        async with aclosing(opened), aclosing(opened.chunks()) as chunks:
            async for frames in chunks:
                # Near its end the next extent is opened, so that the first chunk of this one is
                # here in time: between small extents the reader would wait for a round trip each.
                left_bytes = entry_bytes * (last_entry_id - frames[-1].entry_id)
                if left_bytes <= _OPENED_AHEAD_BYTES and self._opened is None:
                    self._open_next(step)
                await self._deliver_all(step, frames)

    async def _take_opened(self, step: ReadExtent) -> OpenedExtent:
        opened = self._opened
        if opened is None or opened.step != step:
            await self._drop_opened()
            return self._open(step)
        self._opened = None
        return opened

    def _open_next(self, step: ReadExtent) -> None:
        """Open the extent after `step`, if it is known and final; its own turn raises errors."""
        with contextlib.suppress(DLError):
            following = self._cursor.plan_after(step, self._state)
            if isinstance(following, ReadExtent):
                self._opened = self._open(following)

    def _open(self, step: ReadExtent) -> OpenedExtent:
        return OpenedExtent(step, self._chunks_of(step))

    async def _chunks_of(self, step: ReadExtent) -> AsyncGenerator[Sequence[EntryFrame], None]:
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

    async def _drop_opened(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.aclose()

    async def _follow(self, step: FollowExtent) -> None:
        """Follow an open extent until it is closed, or another step is due."""
        self._followed = step
        following = asyncio.create_task(self._deliver_followed(step))
        try:
            while self._is_at(step):
                await self._first_of(following)
                if following.done():
                    await following
                    # The ledger is closed; the segment's metadata will soon show what follows.
                    await self._changed.wait()
                if self._changed.is_set():
                    await self._refresh()
        finally:
            self._followed = None
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            forget_frames(following)

    def _is_at(self, step: FollowExtent) -> bool:
        # On a copy: the cursor itself must not move past truncated records while an earlier step
        # still delivers entries.
        cursor = self._cursor.copy()
        now = cursor.plan(self._state)
        return (
            isinstance(now, FollowExtent)
            and now.extent.ledger_id == step.extent.ledger_id
            and cursor.position == self._cursor.position
        )

    async def _first_of(self, following: asyncio.Task[None]) -> None:
        change = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({following, change}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            await asyncio.gather(change, return_exceptions=True)
            forget_frames(change)

    async def _deliver_followed(self, step: FollowExtent) -> None:
        reader = await self._context.ledgers.open_ledger(step.extent.ledger_id)
        updates = reader.follow(
            step.first_entry_id,
            on_answer=self._bookie_answered,
            on_entry=partial(self._take_at_once, step),
        )
        self._bookie_answered()  # silence counts from here on
        self._news.set()
        self._followed_ledger = reader
        try:
            async with aclosing(updates):
                async for update in updates:
                    await self._deliver_all(step, update.frames)
                    if update.closed:
                        return
        finally:
            self._followed_ledger = None
            self._bookies_heard_at = None

    async def _deliver_all(
        self, step: ReadExtent | FollowExtent, frames: Sequence[EntryFrame]
    ) -> None:
        for frame in frames:
            # Above the bound by one entry at most: an entry larger than it must pass as well.
            while self._buffered_bytes > self._ahead_bytes:
                self._room.clear()
                await self._room.wait()
            self._deliver(step, frame)

    def _deliver(self, step: ReadExtent | FollowExtent, frame: EntryFrame) -> None:
        """Buffer an entry, or skip it if it is broken."""
        if self.error is not None:
            return  # an entry before it failed, and the task has not ended yet
        try:
            header = decode_entry_header(frame.body)
        except InvalidEntryError as error:
            self._skip(step, error)
        else:
            self._buffer(step, frame, header)

    def _take_at_once(self, step: FollowExtent, frame: EntryFrame) -> bool:
        """Buffer a pushed entry; False: it comes with a step later, or nothing follows any more."""
        is_over = self.error is not None or self._followed is not step
        if is_over or self._buffered_bytes > self._ahead_bytes:
            return False
        try:
            header = decode_entry_header(frame.body)
        except InvalidEntryError:
            return False  # `_deliver` gets it again, and skips it or fails
        self._buffer(step, frame, header)
        return True

    def _buffer(
        self, step: ReadExtent | FollowExtent, frame: EntryFrame, header: EntryHeader
    ) -> None:
        """Buffer an entry and move the cursor past it, both at once: cancelling loses nothing."""
        first_slot = self._cursor.position.slot_id
        entry_id, sequence_id = self._cursor.deliver(
            step,
            frame.entry_id,
            records_before=header.records_before,
            record_count=header.record_count,
        )
        extent = step.extent
        entry = FetchedEntry(
            place=EntryPlace(
                step.lssn,
                entry_id,
                sequence_id,
                step.segment_sequence_id,
                extent.timestamp_ms(header.write_time_ms),
            ),
            first_slot=first_slot,
            assigned_txid=extent.assigned_txid,
            header=header,
            body=frame.body,
        )
        self._idle.received()
        self._entries.append(entry)
        self._buffered_bytes += frame.body.nbytes
        self._news.set()

    def _skip(self, step: ReadExtent | FollowExtent, error: DLError) -> None:
        """Skip the next entry, which is broken, or raise `error`."""
        position = self._cursor.position
        self._broken.meet(position.lssn, position.entry_id, error)
        self._cursor.skip(step)
        self._news.set()
