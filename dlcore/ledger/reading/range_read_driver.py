"""Runs a `RangeReader`: streams of bookies, the ticks, and entries for the caller."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks, end_tasks, fulfil, refuse, reported_to_callers
from dlcore.base.errors import DLError
from dlcore.ledger.reading.range_read import (
    Arrived,
    Broke,
    CloseStream,
    Deliver,
    Effect,
    Event,
    Fail,
    FetchNext,
    Frames,
    NoteRead,
    OpenStream,
    RangeReader,
    TellFailure,
    Tick,
    TickAt,
    Wanted,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.base.config import LedgerClientConfig, QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble
    from dlcore.ledger.placing.health import BookieHealth
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import BookieClient

logger = logging.getLogger(__name__)


class _Stream:
    """A stream of a bookie: its task, and whether that reads on, or ends, after a chunk."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.task: asyncio.Task[None]
        self.reads_on: asyncio.Future[bool] = loop.create_future()  # done while a chunk is fetched
        self.reads_on.set_result(True)

    def close(self) -> None:
        """End the task: by cancellation only while it waits for the bookie."""
        if self.reads_on.done():
            self.task.cancel()
        else:
            self.reads_on.set_result(False)


class RangeRead:
    """Reads one range of entries that lies in one ensemble; iterate over `chunks` once."""

    def __init__(
        self,
        bookies: BookieClient,
        config: LedgerClientConfig,
        health: BookieHealth,
        *,
        ledger_id: int,
        ensemble: Ensemble,
        quorum: QuorumConfig,
        first_entry_id: int,
        last_entry_id: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._machine = RangeReader(
            ledger_id=ledger_id,
            ensemble=ensemble,
            quorum=quorum,
            first_entry_id=first_entry_id,
            last_entry_id=last_entry_id,
            suspects=[each for each in ensemble.bookies if health.is_suspect(each, now)],
            silence_s=config.speculative_read_delay_s,
            timeout_s=config.read_timeout_s,
        )
        self._open = partial(bookies.read_entries, ledger_id=ledger_id, last_entry_id=last_entry_id)
        self._health = health
        self._ledger_id = ledger_id
        self._streams: dict[tuple[int, BookieId], _Stream] = {}  # by lane
        self._tasks = BackgroundTasks(reported_to_callers)
        self._timer: asyncio.TimerHandle | None = None
        self._given: asyncio.Future[Deliver]

    async def chunks(self) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield verified entries in order, as they arrive.

        Raises:
            LedgerReadError: every replica failed for the next entry.
        """
        try:
            is_last = False
            while not is_last:
                self._given = self._loop.create_future()
                self._handle(Wanted(self._loop.time()))
                entries, is_last = await self._given
                yield entries
                del entries  # else they would take memory until the next ones are there
        finally:
            self._streams.clear()
            if self._timer is not None:
                self._timer.cancel()
            await end_tasks(*self._tasks)

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case FetchNext(bookie, lane):
                self._streams[lane, bookie].reads_on.set_result(True)
            case NoteRead(bookie, is_good):
                reads, now = self._health.reads, self._loop.time()
                (reads.note_success if is_good else reads.note_failure)(bookie, now)
            case Deliver():
                fulfil(self._given, effect)
            case Fail(error):
                refuse(self._given, error)
            case TickAt(at_s):
                self._timer = self._loop.call_at(at_s, self._tick)
            case OpenStream(bookie=bookie, lane=lane):
                self._streams[lane, bookie] = stream = _Stream(self._loop)
                stream.task = self._tasks.start(self._read(effect, stream))
            case CloseStream(bookie=bookie, lane=lane):
                self._streams.pop((lane, bookie)).close()
            case TellFailure(bookie, entry_id, error):
                text = "read failed ledger=%d entry=%d bookie=%s: %s"
                logger.info(text, self._ledger_id, entry_id, bookie, error)
            case _:
                assert_never(effect)

    async def _read(self, opened: OpenStream, stream: _Stream) -> None:
        first, stride = opened.first_entry_id, opened.stride
        chunks = self._open(opened.bookie, first_entry_id=first, stride=stride)
        try:
            async with aclosing(chunks):
                while await stream.reads_on:
                    event = await self._arrival(opened, chunks)
                    stream.reads_on = self._loop.create_future()
                    self._feed(event)
                    del event  # else its frames would take memory until the next ones are there
        finally:
            del stream  # else it and this frame, which a cancelled task keeps, would be a cycle

    async def _arrival(self, opened: OpenStream, chunks: AsyncGenerator[Frames, None]) -> Event:
        try:
            outcome: Frames | DLError | None = await anext(chunks, None)
        except DLError as error:
            outcome = error.with_traceback(None)  # which would refer to this object
        except Exception as error:  # noqa: BLE001 - the caller gets it
            return Broke(error)
        return Arrived(opened.lane, opened.bookie, outcome, self._loop.time())

    def _tick(self) -> None:
        self._feed(Tick(self._loop.time()))

    def _feed(self, event: Event) -> None:
        """Handle an event that does not come from the caller, who gets the error of a defect."""
        try:
            self._handle(event)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._handle(Broke(error))
