"""Runs read lanes over streams: verifies every frame, measures silence, merges the lanes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks, told_to_callers
from dlcore.base.errors import (
    BookieStorageError,
    BookieUnavailableError,
    DLError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.ledger.reading.range_read import (
    CloseStream,
    Deliver,
    Effect,
    FailRead,
    OpenStream,
    ReadLane,
    plan_lanes,
)
from dlcore.wire.digest import EntryFrame, decode_frame, decode_run
from dlcore.wire.frames import FrameRun

if TYPE_CHECKING:
    from dlcore.base.config import LedgerClientConfig, QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble
    from dlcore.ledger.placing.health import BookieHealth
    from dlcore.ledger.port import BookieClient

logger = logging.getLogger(__name__)

_Frames = Sequence[bytes | memoryview]


class _Stream:
    """One stream of frames from one bookie, with the next chunk being fetched."""

    def __init__(
        self, bookie: BookieId, next_entry_id: int, chunks: AsyncIterator[_Frames], since: float
    ) -> None:
        self.bookie = bookie
        self.next_entry_id = next_entry_id
        self.since = since
        self._chunks = chunks
        self._tasks = BackgroundTasks(told_to_callers)
        self.task = self._fetch()

    def _fetch(self) -> asyncio.Task[_Frames | None]:
        chunks = self._chunks  # `self` would hold the task, and the task its last frames

        async def fetch() -> _Frames | None:
            return await anext(chunks, None)

        return self._tasks.start(fetch())

    def fetch_next(self, now: float) -> None:
        """Start fetching the chunk after the one that arrived."""
        self.since = now
        self.task = self._fetch()

    async def aclose(self) -> None:
        """End the request, with its task, also if the caller that waits here is cancelled."""
        await self._tasks.aclose()
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()


class _Lane:
    """One lane's streams, and the chunks that wait for their turn."""

    def __init__(self, machine: ReadLane, now: float) -> None:
        self.machine = machine
        self.quiet_since = now
        self.streams: dict[BookieId, _Stream] = {}
        self.ready: deque[Sequence[EntryFrame]] = deque()
        self.taken = 0  # entries of the first ready chunk that are merged already
        self.error: DLError | None = None
        self.closing: list[_Stream] = []


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
        self._bookies = bookies
        self._config = config
        self._health = health
        self._ledger_id = ledger_id
        self._loop = asyncio.get_running_loop()
        self._next = first_entry_id
        self._first = first_entry_id
        self._last = last_entry_id
        now = self._loop.time()
        lanes = plan_lanes(
            ledger_id=ledger_id,
            ensemble=ensemble,
            quorum=quorum,
            first_entry_id=first_entry_id,
            last_entry_id=last_entry_id,
            suspects=[each for each in ensemble.bookies if health.is_suspect(each, now)],
        )
        self._lanes = [_Lane(machine, now) for machine in lanes]

    async def chunks(self) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield verified entries in order, as they arrive.

        Raises:
            LedgerReadError: every replica failed for the next entry.
        """
        try:
            for lane in self._lanes:
                self._perform(lane, lane.machine.start())
            while self._next <= self._last:
                entries = self._take()
                if entries:
                    self._next = entries[-1].entry_id + 1
                    yield entries
                    self._forgive_silence()
                else:
                    await self._wait()
        finally:
            await self._aclose()

    def _forgive_silence(self) -> None:
        """Measure silence from now on: the caller's time is not the bookies' silence."""
        now = self._loop.time()
        for lane in self._lanes:
            lane.quiet_since = now
            for stream in lane.streams.values():
                stream.since = now

    def _take(self) -> Sequence[EntryFrame]:
        """Return the received entries that come next."""
        if len(self._lanes) == 1:
            lane = self._lanes[0]
            if lane.ready:
                return lane.ready.popleft()
            self._raise_if_failed(lane)
            return ()
        # With several lanes, lane k reads every n-th entry from the k-th on.
        merged: list[EntryFrame] = []
        for entry_id in range(self._next, self._last + 1):
            lane = self._lanes[(entry_id - self._first) % len(self._lanes)]
            if not lane.ready:
                if not merged:
                    self._raise_if_failed(lane)
                break
            chunk = lane.ready[0]
            merged.append(chunk[lane.taken])
            lane.taken += 1
            if lane.taken == len(chunk):
                lane.ready.popleft()
                lane.taken = 0
        return merged

    @staticmethod
    def _raise_if_failed(lane: _Lane) -> None:
        if lane.error is not None:
            raise lane.error

    async def _wait(self) -> None:
        """Wait for a chunk for any lane that has none, or until the silence lasts too long."""
        waiting = [lane for lane in self._lanes if not lane.ready]
        streams = [(lane, stream) for lane in waiting for stream in lane.streams.values()]
        tasks = [stream.task for _, stream in streams]
        delay = max(0.0, self._next_deadline(waiting) - self._loop.time())
        await asyncio.wait(tasks, timeout=delay, return_when=asyncio.FIRST_COMPLETED)
        now = self._loop.time()
        for lane, stream in streams:
            if stream.task.done() and lane.streams.get(stream.bookie) is stream:
                self._on_chunk(lane, stream, now)
        for lane in waiting:
            self._on_time(lane, now)
        for lane in self._lanes:
            while lane.closing:
                await lane.closing.pop().aclose()

    def _next_deadline(self, lanes: Sequence[_Lane]) -> float:
        return min(
            min(
                lane.quiet_since + self._config.speculative_read_delay_s,
                *(s.since + self._config.read_timeout_s for s in lane.streams.values()),
            )
            for lane in lanes
            if lane.streams
        )

    def _on_chunk(self, lane: _Lane, stream: _Stream, now: float) -> None:
        try:
            frames = stream.task.result()
        except DLError as error:
            self._end(lane, stream, error)
            return
        if frames is None:
            self._end(lane, stream, BookieStorageError("the stream ended before its last entry"))
            return
        entries, damage = self._verify(lane, stream, frames)
        # Damage counts as an answer, not as silence: the stream is ended for it below.
        lane.quiet_since = now
        if entries:
            self._health.reads.note_success(stream.bookie, now)
        self._perform(lane, lane.machine.received(stream.bookie, entries))
        if damage is not None:
            self._end(lane, stream, damage)
        elif stream.bookie in lane.streams:
            stream.fetch_next(now)

    def _verify(
        self, lane: _Lane, stream: _Stream, frames: _Frames
    ) -> tuple[list[EntryFrame], DLError | None]:
        """Return the good entries at the head of a chunk, and the error of the next one, if any."""
        stride = lane.machine.stride
        # All frames in one pass over their memory; only a run with damage goes frame by frame.
        if isinstance(frames, FrameRun):
            sound = decode_run(
                frames,
                ledger_id=self._ledger_id,
                first_entry_id=stream.next_entry_id,
                stride=stride,
            )
            if sound is not None:
                stream.next_entry_id += stride * len(sound)
                return sound, None
        entries: list[EntryFrame] = []
        for frame in frames:
            try:
                entries.append(
                    decode_frame(frame, ledger_id=self._ledger_id, entry_id=stream.next_entry_id)
                )
            except DLError as error:
                return entries, error
            stream.next_entry_id += stride
        return entries, None

    def _end(self, lane: _Lane, stream: _Stream, error: DLError) -> None:
        logger.info(
            "read failed ledger=%d entry=%d bookie=%s: %s",
            self._ledger_id,
            stream.next_entry_id,
            stream.bookie,
            error,
        )
        if lane.streams.get(stream.bookie) is not stream:
            return  # the machine has closed or replaced this stream already
        if not isinstance(error, NoSuchEntryError | NoSuchLedgerError):  # these are valid answers
            self._health.reads.note_failure(stream.bookie, self._loop.time())
        del lane.streams[stream.bookie]
        lane.closing.append(stream)
        self._perform(lane, lane.machine.failed(stream.bookie, error))

    def _on_time(self, lane: _Lane, now: float) -> None:
        for stream in list(lane.streams.values()):
            if now >= stream.since + self._config.read_timeout_s and not stream.task.done():
                message = f"no answer within {self._config.read_timeout_s} s"
                self._end(lane, stream, BookieUnavailableError(message))
        if now >= lane.quiet_since + self._config.speculative_read_delay_s:
            # Not yet an error: the machine asks the next replica too, and takes the first answer.
            lane.quiet_since = now
            effects = lane.machine.silent()
            if effects:
                for bookie in lane.streams:
                    self._health.reads.note_failure(bookie, now)
            self._perform(lane, effects)

    def _perform(self, lane: _Lane, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case OpenStream():
                    self._open(lane, effect)
                case CloseStream():
                    lane.closing.append(lane.streams.pop(effect.bookie))
                case Deliver():
                    lane.ready.append(effect.entries)
                case FailRead():
                    lane.error = effect.error
                case _:
                    assert_never(effect)

    def _open(self, lane: _Lane, effect: OpenStream) -> None:
        chunks = self._bookies.read_entries(
            effect.bookie,
            ledger_id=self._ledger_id,
            first_entry_id=effect.first_entry_id,
            last_entry_id=self._last,
            stride=lane.machine.stride,
        )
        now = self._loop.time()
        lane.streams[effect.bookie] = _Stream(effect.bookie, effect.first_entry_id, chunks, now)

    async def _aclose(self) -> None:
        async with AsyncExitStack() as ends:  # closes each stream, also if this is cancelled
            for lane in self._lanes:
                for stream in (*lane.streams.values(), *lane.closing):
                    ends.push_async_callback(stream.aclose)
                lane.streams.clear()
                lane.closing.clear()
