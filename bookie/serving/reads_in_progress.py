"""The reads of one client: of single entries and LACs, and the steps of its streams."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bookie.serving.eager import start
from bookie.serving.read_budget import ReadShare
from bookie.serving.read_streams import FollowStream, RangeStream
from bookie.serving.reported import error_of, reported
from bookie.serving.session import Event, MessageRead, News, ReadEnded, Session, Signal, Stepped
from dlcore.base.background import start_task
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
    import asyncio
    from collections.abc import Callable

    from bookie.serving.read_budget import ReadBudget
    from bookie.serving.read_streams import ReadStream
    from bookie.storage.ledger_storage import LedgerStorage
    from dlcore.wire.messages import Follow, ReadHeld


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
