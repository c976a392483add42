"""The requests of one client in progress: its writes, its reads, and the steps of its streams."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, cast

from bookie.serving.eager import start
from bookie.serving.read_budget import ReadShare
from bookie.serving.read_streams import FollowStream, RangeStream
from bookie.serving.session import (
    Event,
    MessageRead,
    News,
    Outcome,
    ReadEnded,
    RunNotTaken,
    Session,
    Signal,
    Stepped,
    Stored,
)
from dlcore.base.background import failed, start_task
from dlcore.base.errors import BookieUnavailableError, DLError
from dlcore.wire.messages import (
    CHUNK_BYTES_MAX,
    Chunk,
    Held,
    Lac,
    ReadEntries,
    ReadEntry,
    ReadLac,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bookie.serving.read_budget import ReadBudget
    from bookie.serving.read_streams import ReadStream
    from bookie.storage.ledger_storage import LedgerStorage
    from bookie.storage.writes import Writes
    from dlcore.wire.frames import FrameRun
    from dlcore.wire.messages import Add, Follow, ReadHeld, WriteLac

logger = logging.getLogger(__name__)

_GIVEN_UP = "the bookie dropped the request"


class WritesInFlight:
    """Gives writes to the storage, and tells the session of their ends, of many in one event.

    Args:
        storage: takes the writes.
        session: has counted each write that it asks for.
        tell: feeds the session, and performs what it answers.
    """

    def __init__(self, storage: Writes, session: Session, tell: Callable[[Event], object]) -> None:
        self._storage = storage
        self._session = session
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._landed: list[Outcome] = []
        self.settled = asyncio.Event()
        """Set when the bookie drains, and every write that was accepted is answered."""

    def store_run(self, add: Add) -> None:
        """Store the entries of a message all together."""
        run = cast("FrameRun", add.frames)
        future = self._storage.add_run(run)
        if future is None:
            self._tell(RunNotTaken(add))
        else:
            first = add.first_request_id
            self._fly(range(first, first + len(run)), len(run.payload), future)

    def store_each(self, add: Add) -> None:
        """Store each entry of a message."""
        for request_id, frame in enumerate(add.frames, add.first_request_id):
            future = self._storage.add_entry(frame, is_recovery=add.is_recovery)
            self._fly([request_id], len(frame), future)

    def store_lac(self, request: WriteLac) -> None:
        """Store a LAC."""
        try:
            future = self._storage.write_lac(request.ledger_id, request.last_add_confirmed)
        except DLError as error:
            future = failed(error)
        self._fly([request.request_id], 0, future)

    def close(self) -> None:
        """Go on for a client that is gone: its session counts the ends, and answers none.

        Afterwards nothing refers back to the connection.
        """
        self._tell = self._session.handle

    def _fly(
        self, request_ids: Sequence[int], payload_bytes: int, future: asyncio.Future[None]
    ) -> None:
        # Also if it is done: answers come when all requests of the turn are in flight.
        future.add_done_callback(partial(self._land, request_ids, payload_bytes))

    def _land(
        self, request_ids: Sequence[int], payload_bytes: int, future: asyncio.Future[None]
    ) -> None:
        error = BookieUnavailableError(_GIVEN_UP) if future.cancelled() else future.exception()
        landed = self._landed
        landed.append(Outcome(request_ids, payload_bytes, reported(error)))
        # Writes that end together are one event.  The last one in flight waits for no other.
        if len(landed) == self._session.writes.in_flight:
            self._end_landing()
        elif len(landed) == 1:
            self._loop.call_soon(self._end_landing)

    def _end_landing(self) -> None:
        landed, self._landed = self._landed, []
        if landed:
            self._tell(Stored(landed))


class ReadsInProgress:
    """Reads what the session asks for, within the client's share of the budget of all readers.

    Args:
        storage: is read.
        budget: of the bytes of all readers.
        session: decides which read begins, and when.
        tell: feeds the session, and performs what it answers.
    """

    def __init__(
        self,
        storage: LedgerStorage,
        budget: ReadBudget,
        session: Session,
        tell: Callable[[Event], object],
    ) -> None:
        self.streams: dict[int, ReadStream] = {}
        """The open streams, by the request."""
        self.steps: set[asyncio.Task[None]] = set()
        """The steps of streams that wait for something."""
        self.single: dict[int, asyncio.Task[None]] = {}
        """The reads of single entries and LACs, by the request."""
        self._storage = storage
        self._session = session
        self._tell = tell
        self._share = ReadShare(budget, self._send)

    def begin(self, request: ReadLac | ReadHeld | ReadEntry) -> None:
        """Begin a read of a LAC or of a single entry."""
        on_end = partial(self._on_read, request.request_id)
        self.single[request.request_id] = start_task(self._answer(request), on_end)

    def cancel(self, request_id: int) -> None:
        """Cancel such a read, unless it is over."""
        if request_id in self.single:
            self.single[request_id].cancel()

    def open_stream(self, request: ReadEntries | Follow, chunk_bytes: int) -> None:
        """Open a stream whose messages have about so many bytes."""
        storage = self._storage
        self.streams[request.request_id] = (
            RangeStream(storage.reads, request, chunk_bytes=chunk_bytes)
            if isinstance(request, ReadEntries)
            else FollowStream(
                storage.reads,
                storage.followers,
                request,
                chunk_bytes=chunk_bytes,
                on_news=self._on_news,
            )
        )

    def close_stream(self, request_id: int) -> None:
        """Close a stream; a message that is being read is dropped."""
        self.streams.pop(request_id).close()

    def step(self, request_id: int) -> None:
        """Read the next message of a stream."""
        stream = self.streams[request_id]
        try:
            step = self._share.send(stream.chunk_bytes, partial(self._next_of, stream))
            task = start(step, partial(self._on_step, stream))
        except Exception as error:  # noqa: BLE001  # the client gets it as its answer
            self._tell(Stepped(request_id, stream.has_news, reported(error)))
            return
        if task is None:
            self._tell(Stepped(request_id, stream.has_news, None))
        else:
            # It is never cancelled: it ends by itself when the stream is closed.
            self.steps.add(task)
            self._tell(Signal.STEP_WAITS)

    def release(self) -> None:
        """Give back the bytes of the budget that the network has taken."""
        self._share.release()

    def close(self) -> None:
        """Give everything back: the client is gone, and its session has ended all reads.

        Afterwards nothing refers back to the connection.
        """
        self._share.close()
        self._tell = self._session.handle

    async def _answer(self, request: ReadLac | ReadHeld | ReadEntry) -> None:
        reads = self._storage.reads
        if isinstance(request, ReadEntry):
            await self._share.send(CHUNK_BYTES_MAX, partial(self._read_entry, request))
        elif isinstance(request, ReadLac):
            self._session.writes.check_fence(is_fence=request.fence)
            lac = await reads.read_lac(request.ledger_id, fence=request.fence)
            self._tell(MessageRead(Lac(request.request_id, lac)))
        else:
            held = await reads.read_held(request.ledger_id)
            self._tell(MessageRead(Held(request.request_id, *held)))

    async def _read_entry(self, request: ReadEntry, bytes_max: int) -> Chunk:
        request_id, ledger_id, entry_id, fence = request
        self._session.writes.check_fence(is_fence=fence)
        frame = await self._storage.reads.read_entry(
            ledger_id, entry_id, fence=fence, bytes_max=bytes_max
        )
        return Chunk(request_id, [frame], is_last=True)

    def _send(self, message: Chunk | Update) -> bool:
        """Send a message of a read; return whether the client is slow to receive."""
        self._tell(MessageRead(message))
        return self._session.patience.is_stalled

    def _on_read(self, request_id: int, task: asyncio.Task[None]) -> None:
        del self.single[request_id]
        self._tell(ReadEnded(request_id, error_of(task)))

    def _on_news(self, stream: ReadStream) -> None:
        self._tell(News(stream.request_id))

    async def _next_of(self, stream: ReadStream, bytes_max: int) -> Chunk | Update | None:
        is_open = stream.request_id in self.streams
        message = await stream.advance(bytes_max) if is_open else None
        return message if stream.request_id in self.streams else None

    def _on_step(self, stream: ReadStream, task: asyncio.Task[None]) -> None:
        self.steps.remove(task)
        self._tell(Stepped(stream.request_id, stream.has_news, error_of(task)))


def reported(error: BaseException | None) -> BaseException | None:
    """Return the error of a request, which its client gets; log it if a defect has caused it."""
    if error is not None and not isinstance(error, DLError):
        logger.error(
            "a request failed unexpectedly; to do: report this as a defect; the client asks "
            "another bookie",
            exc_info=error,
        )
    return error


def error_of(task: asyncio.Task[None]) -> BaseException | None:
    """Return the error of a request's task, reported; None if it has none, or was cancelled."""
    return None if task.cancelled() else reported(task.exception())
