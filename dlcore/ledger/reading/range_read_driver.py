"""Runs a `RangeReader`: streams of bookies, and the wait for the next chunk or deadline."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks, reported_to_callers
from dlcore.base.errors import DLError
from dlcore.ledger.reading.range_read import (
    Arrived,
    Begin,
    CloseStream,
    Effect,
    FetchNext,
    Frames,
    NoteRead,
    OpenStream,
    RangeReader,
    Taken,
    TellFailure,
    Tick,
    plan_lanes,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from dlcore.base.config import LedgerClientConfig, QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble
    from dlcore.ledger.placing.health import BookieHealth
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import BookieClient

logger = logging.getLogger(__name__)


class _Stream:
    """One stream of frames from one bookie, with the next chunk being fetched."""

    def __init__(self, chunks: AsyncIterator[Frames]) -> None:
        self._chunks = chunks
        self._tasks = BackgroundTasks(reported_to_callers)
        self.task = self._fetch()

    def _fetch(self) -> asyncio.Task[Frames | None]:
        chunks = self._chunks  # `self` would hold the task, and the task its last frames

        async def fetch() -> Frames | None:
            return await anext(chunks, None)

        return self._tasks.start(fetch())

    def fetch_next(self) -> None:
        """Start fetching the chunk after the one that arrived."""
        self.task = self._fetch()

    async def aclose(self) -> None:
        """End the request, with its task, also if the caller that waits here is cancelled."""
        await self._tasks.aclose()
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()


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
        lanes = plan_lanes(
            ledger_id=ledger_id,
            ensemble=ensemble,
            quorum=quorum,
            first_entry_id=first_entry_id,
            last_entry_id=last_entry_id,
            suspects=[each for each in ensemble.bookies if health.is_suspect(each, now)],
        )
        self._machine = RangeReader(
            lanes,
            ledger_id=ledger_id,
            first_entry_id=first_entry_id,
            last_entry_id=last_entry_id,
            silence_s=config.speculative_read_delay_s,
            timeout_s=config.read_timeout_s,
        )
        self._bookies = bookies
        self._health = health
        self._ledger_id = ledger_id
        self._last = last_entry_id
        self._stride = lanes[0].stride
        self._streams: dict[tuple[int, BookieId], _Stream] = {}  # by lane
        self._closing: list[_Stream] = []

    async def chunks(self) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield verified entries in order, as they arrive.

        Raises:
            LedgerReadError: every replica failed for the next entry.
        """
        machine = self._machine
        try:
            self._perform(machine.handle(Begin(self._loop.time())))
            while not machine.is_done:
                entries = machine.take()
                if entries:
                    yield entries
                    self._perform(machine.handle(Taken(self._loop.time())))
                else:
                    await self._wait()
        finally:
            async with AsyncExitStack() as ends:  # closes each stream, also if this is cancelled
                for stream in (*self._streams.values(), *self._closing):
                    ends.push_async_callback(stream.aclose)
                self._streams.clear()
                self._closing.clear()

    async def _wait(self) -> None:
        """Wait for a chunk for any lane that has none, or until the silence lasts too long."""
        machine, loop = self._machine, self._loop
        waiting = [each for each in self._streams.items() if machine.is_waiting(each[0][0])]
        deadline_s = machine.deadline_s
        timeout = max(0.0, deadline_s - loop.time())
        tasks = [stream.task for _, stream in waiting]
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        now = loop.time()
        for (lane, bookie), stream in waiting:
            if stream.task.done() and self._streams.get((lane, bookie)) is stream:
                error = stream.task.exception()
                outcome = error if isinstance(error, DLError) else stream.task.result()
                self._perform(machine.handle(Arrived(lane, bookie, outcome, now)))
        if now >= deadline_s:
            self._perform(machine.handle(Tick(now)))
        while self._closing:
            await self._closing.pop().aclose()

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case FetchNext(bookie, lane):
                    self._streams[lane, bookie].fetch_next()
                case NoteRead(bookie, is_good):
                    reads, now = self._health.reads, self._loop.time()
                    (reads.note_success if is_good else reads.note_failure)(bookie, now)
                case OpenStream(bookie=bookie, first_entry_id=first, lane=lane):
                    chunks = self._bookies.read_entries(
                        bookie,
                        ledger_id=self._ledger_id,
                        first_entry_id=first,
                        last_entry_id=self._last,
                        stride=self._stride,
                    )
                    self._streams[lane, bookie] = _Stream(chunks)
                case CloseStream(bookie=bookie, lane=lane):
                    self._closing.append(self._streams.pop((lane, bookie)))
                case TellFailure(bookie, entry_id, error):
                    ledger_id = self._ledger_id
                    text = "read failed ledger=%d entry=%d bookie=%s: %s"
                    logger.info(text, ledger_id, entry_id, bookie, error)
                case _:
                    assert_never(effect)
