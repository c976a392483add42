"""The reads of one client in progress, the steps of its streams, and their budget of memory.

Bytes for readers are taken from the budget of all readers before they are read for a client.  They
are given back once the network has taken them, or never will.  The free part is never negative.

Most reads of new entries wait for nothing, and a task costs a turn of the event loop.  Therefore a
coroutine becomes a task only if it has to wait (`start_eagerly`).  Eager tasks of Python 3.12 save
the turn but not the task, and Python 3.11 has none, so all versions use this form.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bookie.files.entry_reader import LargerEntryError
from bookie.serving.session import Event, MessageRead, News, ReadEnded, Session, Signal, Stepped
from dlcore.base.background import start_task
from dlcore.base.errors import BookieOverloadedError, DLError
from dlcore.wire.frames import total_bytes
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
    from collections.abc import Awaitable, Callable, Coroutine, Generator

    from bookie.ledger_storage import LedgerStorage
    from bookie.storage.reads import Reads
    from bookie.storage.writes import Followers
    from dlcore.wire.messages import ReadHeld


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


_SHARE = 8
"""A chunk takes at most one part in 8 of what is free, so the bytes are never used up by a few."""
_CHUNK_BYTES_MIN = 64 * 1024
"""When little is free, chunks get no smaller than this: their fixed cost would count more."""
_T = TypeVar("_T")


class ReadBudget:
    """Bytes read from disk and not yet taken by the network, over all readers.

    A chunk gets at most a share of the free bytes.  Therefore many clients that do not receive
    their data leave enough for one that does.  A single entry that is larger than its chunk waits
    in the queue for the bytes that it needs.

    `on_wait` is called when a reader begins to wait.
    """

    def __init__(self, bytes_max: int, *, on_wait: Callable[[], None]) -> None:
        self.bytes_max = bytes_max
        self.free = bytes_max
        self.sent_bytes = 0
        """The bytes of all messages that were passed to the network."""
        self._on_wait = on_wait
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def chunk_bytes(self, wanted: int) -> int:
        """Return the largest allowed size of a reader's next chunk."""
        return min(wanted, max(_CHUNK_BYTES_MIN, self.free // _SHARE), self.bytes_max)

    @property
    def is_exhausted(self) -> bool:
        """Whether a reader waits."""
        return bool(self._waiters)

    async def within(self, wanted: int, read: Callable[[int], Awaitable[_T]]) -> tuple[_T, int]:
        """Return the result of `read`, and how many bytes the caller must give back for it.

        `read` gets the number of bytes that it may read: at most `wanted`, or the size of a larger
        entry.

        Raises:
            BookieOverloadedError: one entry alone is larger than the budget.
        """
        size = self.chunk_bytes(wanted)
        while True:
            if not self._take_now(size):
                await self.take(size)
            try:
                return await read(size), size
            except LargerEntryError as error:
                # Only the read knows the size of the entry.  Give the bytes back before the wait
                # for more: readers that all hold some and wait for more would block each other.
                needed = error.size_bytes
                self.give(size)
            except BaseException:
                self.give(size)
                raise
            if needed > self.bytes_max:
                raise BookieOverloadedError(
                    f"an entry of {needed} bytes, expected at most read_bytes_max={self.bytes_max}"
                )
            size = needed

    async def take(self, size: int) -> None:
        """Wait for `size` bytes, behind the readers that waited before."""
        if self._take_now(size):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, future))
        self._on_wait()
        try:
            await future
        except asyncio.CancelledError:
            # The bytes may have been granted just before the cancellation.
            if future.done() and not future.cancelled():
                self.give(size)
            raise

    def _take_now(self, size: int) -> bool:
        # Not past those that wait, although the bytes may suffice: else they could wait for ever.
        if self._waiters or size > self.free:
            return False
        self.free -= size
        return True

    def give(self, size: int) -> None:
        """Give bytes back.  Raises: ValueError: fewer were taken."""
        if not 0 <= size <= self.bytes_max - self.free:
            raise ValueError(f"{size} bytes given back of {self.bytes_max - self.free} taken")
        self.free += size
        while self._waiters:
            wanted, future = self._waiters[0]
            if not future.done():
                # Even if a later waiter needs less: else large entries could wait for ever.
                if wanted > self.free:
                    return
                self.free -= wanted
                future.set_result(None)
            self._waiters.popleft()


class ReadShare:
    """Reads of one connection.

    Args:
        budget: the budget of all connections.
        write: passes a message to the network; returns whether the network is behind now.
    """

    def __init__(self, budget: ReadBudget, write: Callable[[Chunk | Update], bool]) -> None:
        self._budget = budget
        self._write = write
        self._unsent_bytes = 0

    async def send(
        self, wanted: int, read: Callable[[int], Awaitable[Chunk | Update | None]]
    ) -> None:
        """Send the message that `read` returns, if any.

        `read` gets the number of bytes that it may read.
        """
        message, held = await self._budget.within(wanted, read)
        try:
            if message is not None:
                size = total_bytes(message.frames)
                # The read had to reserve for the largest possible message.
                self._budget.give(held - size)
                held = size
                self._budget.sent_bytes += size
                # The transport keeps the message until the network takes it: `release` gives back.
                # If the network keeps up, the transport holds too little to count.
                if self._write(message):
                    self._unsent_bytes += held
                    held = 0
        finally:
            self._budget.give(held)

    def close(self) -> None:
        """Give everything back, and drop the reference to the connection, which refers to this."""
        self.release()
        self._write = lambda _message: False

    def release(self) -> None:
        """Give back the bytes that the network has taken, or will never take."""
        # Only called once the network has taken nearly all, so it is not counted message by
        # message.
        unsent, self._unsent_bytes = self._unsent_bytes, 0
        self._budget.give(unsent)


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
        # Before the first update even an empty one is news: it has the LAC and the fence.
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
        # The update is complete up to its LAC, also where entries are missing here.
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
        # Before the session hears of it, which may begin another read at once.
        del self.single[request_id]
        self._tell(ReadEnded(request_id, error_of(task)))

    def _on_news(self, stream: ReadStream) -> None:
        self._tell(News(stream.request_id))

    async def _next_of(self, stream: ReadStream, bytes_max: int) -> Chunk | Update | None:
        # The client may have cancelled the stream while it waited for the budget, or during the
        # read.
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
