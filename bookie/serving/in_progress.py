"""The requests of one client in progress: its writes, its reads, and the steps of its streams.

Most reads of new entries wait for nothing, and a task costs a turn of the event loop.  Therefore a
coroutine becomes a task only if it has to wait (`start_eagerly`).  Eager tasks of Python 3.12 save
the turn but not the task, and Python 3.11 has none, so all versions use this form.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from bookie.serving.budgets import ReadShare
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
    Follow,
    Held,
    Lac,
    ReadEntries,
    ReadEntry,
    ReadLac,
    Update,
)
from dlcore.wire.port import FollowUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence

    from bookie.serving.budgets import ReadBudget
    from bookie.storage.ledger_storage import LedgerStorage
    from bookie.storage.reads import Reads
    from bookie.storage.storage_core import Followers
    from bookie.storage.writes import Writes
    from dlcore.wire.frames import FrameRun
    from dlcore.wire.messages import Add, ReadHeld, WriteLac


def start_eagerly(
    coroutine: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], None]
) -> asyncio.Task[None] | None:
    """Run `coroutine` until it waits; return the task of the rest, None if it has ended.

    The caller keeps the task, and `on_end` is called at its end, as of `start_task`.
    Before the first wait it runs in no task, so it must not use `asyncio.timeout` and the like
    there.

    Raises:
        The error that the coroutine raises before its first wait.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return start_task(_go_on(coroutine, awaited), on_end)


async def _go_on(coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
    """Wait in place of the coroutine for its first awaitable, and run the rest."""
    await _Rest(coroutine, awaited)


class _Rest:
    """The rest of a coroutine that has begun, as an awaitable.

    A task accepts only a coroutine, and a coroutine that has begun cannot be awaited from its first
    wait on.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, None]:
        awaited = self._awaited
        step: Callable[[Any], Any]
        while True:
            try:
                argument = yield awaited
                step = self._coroutine.send
            except BaseException as error:  # noqa: BLE001  # its cancellation as well
                argument = error
                step = self._coroutine.throw
            try:
                awaited = step(argument)
            except StopIteration:
                return


class ReadStream(Protocol):
    """The stream of one reader; no entry of it stays in memory while it waits."""

    request_id: int
    chunk_bytes: int
    """Wanted size of a message."""
    has_news: bool
    """Whether there may be a new message."""

    async def advance(self, bytes_max: int) -> Chunk | Update | None:
        """Return the next message of at most `bytes_max` bytes of frames, None if nothing is new.

        Raises:
            LargerEntryError: one entry alone needs more.
            DLError: the answer that ends the stream.
        """
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class RangeStream:
    """Entries of a range, one chunk after the other."""

    def __init__(self, reads: Reads, request: ReadEntries, *, chunk_bytes: int) -> None:
        self.request_id = request.request_id
        self.chunk_bytes = chunk_bytes
        self.has_news = True
        self._reads = reads
        self._request = request
        self._next_entry_id = request.first_entry_id

    async def advance(self, bytes_max: int) -> Chunk:
        """Return the next chunk."""
        request = self._request
        frames = await self._reads.read_chunk(
            request.ledger_id,
            first_entry_id=self._next_entry_id,
            last_entry_id=request.last_entry_id,
            stride=request.stride,
            bytes_max=bytes_max,
        )
        self._next_entry_id += len(frames) * request.stride
        is_last = self._next_entry_id > request.last_entry_id
        return Chunk(self.request_id, frames, is_last)

    def close(self) -> None:
        """Do nothing: a range holds no resources."""


class FollowStream:
    """Entries of a ledger as they are confirmed."""

    def __init__(
        self,
        reads: Reads,
        followers: Followers,
        request: Follow,
        *,
        chunk_bytes: int,
        on_news: Callable[[FollowStream], None],
    ) -> None:
        self.request_id = request.request_id
        self.chunk_bytes = chunk_bytes
        self.has_news = True
        self._reads = reads
        self._ledger_id = request.ledger_id
        self._next_entry_id = request.first_entry_id
        self._sent: FollowUpdate | None = None
        self._on_news = on_news
        self._end_watch = followers.watch(request.ledger_id, self._wake)

    def _wake(self) -> None:
        if self._sent is not None and not self._reads.may_have_news(self._ledger_id, self._sent):
            return
        self.has_news = True
        self._on_news(self)

    async def advance(self, bytes_max: int) -> Update | None:
        """Return the new entries and the new LAC, None if there are none."""
        # Before the read: `_wake` may set it while the read waits for the disk.
        self.has_news = False
        update = await self._reads.follow_chunk(
            self._ledger_id,
            first_entry_id=self._next_entry_id,
            sent=self._sent,
            bytes_max=bytes_max,
        )
        if update is None:
            return None
        self.has_news = self.has_news or self._reads.may_have_news(self._ledger_id, update)
        self._next_entry_id = max(self._next_entry_id, update.last_add_confirmed + 1)
        frames, confirmed, fenced = update
        # Kept without the frames, so that their memory is free while the reader waits.
        self._sent = FollowUpdate((), confirmed, fenced)
        return Update(self.request_id, frames, confirmed, fenced)

    def close(self) -> None:
        """Stop watching the ledger."""
        self._end_watch()
        del self._end_watch  # it refers back to this stream, and so to the connection


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
            task = start_eagerly(step, partial(self._on_step, stream))
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
