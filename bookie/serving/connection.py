"""One client's connection at the bookie: requests in, storage calls, answers out.

Bounds give back-pressure: while too many bytes of adds are in flight, too many reads run, or the
client does not take its answers, the connection is not read, and TCP stops the client.  Chunks and
updates are read one by one, within each reader's window and within the bookie's budget.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, cast

from bookie.serving.answers import Answers
from bookie.serving.eager import start
from bookie.serving.read_budget import ReadShare
from bookie.serving.read_streams import FollowStream, RangeStream
from bookie.serving.shared import IN_FLIGHT_BYTES_MIN
from dlcore.base.errors import (
    BadRequestError,
    BookieOverloadedError,
    BookieUnavailableError,
    DLError,
)
from dlcore.base.tls import name_in_certificate
from dlcore.transport.sending import send
from dlcore.wire.bookie_end import BookieEnd
from dlcore.wire.frames import FrameRun
from dlcore.wire.keepalive import LEAST_S, Keepalive
from dlcore.wire.messages import (
    CHUNK_BYTES_MAX,
    Add,
    Buffer,
    Cancel,
    Chunk,
    Credit,
    Failed,
    Follow,
    Held,
    Hello,
    Lac,
    Ping,
    Pong,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Update,
    WriteLac,
)
from dlcore.wire.statuses import status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie.serving.read_streams import ReadStream
    from bookie.serving.shared import Shared
    from bookie.storage.ledger_storage import LedgerStorage
    from dlcore.wire.bookie_end import BookieEvent

logger = logging.getLogger(__name__)

_REQUEST_BYTES = 2048
"""Bytes that a request in flight counts beside its payload: about its own use of memory."""
_REQUESTS_PER_TURN = 32
"""After this number of requests the next connection is served."""
_READS_MAX = 256
"""Most reads of single entries and LACs in progress; beyond it the connection is not read."""
_STREAMS_MAX = 16 * 1024
_STEPS_MAX = 4
"""Concurrent reads for streams, and for single entries: one for each read thread of the disk.
Uncached entries of 512 KB: 440 a second one by one, 810 a second with four or more."""
_STEPS_PER_TURN = 16
"""Messages of streams that are begun in one iteration of the event loop."""
_UNSENT_BYTES_HIGH = 64 * 1024
_UNSENT_BYTES_LOW = 16 * 1024
_SHUTTING_DOWN = "the bookie is shutting down"
_GIVEN_UP = "the bookie dropped the request"


class Connection(asyncio.BufferedProtocol):
    """A connection from its acceptance to its end."""

    def __init__(self, service: Shared[Connection], storage: LedgerStorage) -> None:
        self._service = service
        self._storage = storage
        self._loop = asyncio.get_running_loop()
        self._room = service.receive_budget.room(self._read_on)
        self._end = BookieEnd(service.bookie, service.cluster_id, service.memory, self._room)
        self.get_buffer = self._end.get_buffer  # type: ignore[method-assign]  # saves a call
        self._opened_s = self._loop.time()
        self._keepalive = Keepalive(service.silence_s, now_s=self._opened_s)
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.peer_name: str | None = None
        """The common name of the client's certificate, None without one."""
        self._is_reading = True
        self.waits_for_turn = self.left_some = self._is_write_paused = False
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._entry_slots = asyncio.Semaphore(_STEPS_MAX)
        self._share = ReadShare(service.read_budget, self._send_frames)
        self._stalled_bytes, self._stalled_s = 0, 0.0
        self._in_flight = self._in_flight_bytes = 0
        self._answers = Answers()
        self._is_flush_due = False
        self._reads: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, ReadStream] = {}
        self._queue: deque[ReadStream] = deque()
        self._steps_left = _STEPS_PER_TURN
        self._steps: dict[asyncio.Task[None], None] = {}
        self._is_draining = service.is_draining
        self._refusal: DLError | None = None
        self._is_advancing = self._is_over = False
        """The refusal was sent; later bytes are thrown away until the client closes."""
        self.closed = asyncio.Event()
        self.settled = asyncio.Event()
        """Set when the connection drains and every accepted write is answered."""

    # Calls from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_HIGH, low=_UNSENT_BYTES_LOW)
        self.peer_name = name_in_certificate(transport.get_extra_info("peercert"))
        self._service.connections[self] = None
        self._tick_later(self._opened_s)

    def buffer_updated(self, nbytes: int) -> None:
        """Take received bytes."""
        if self._is_over:
            return
        self._keepalive.heard(self._loop.time())
        self._end.received(nbytes)
        self._service.turns.take(self)
        if self.waits_for_turn:
            self._pause_reading()

    def pause_writing(self) -> None:
        """Stop making answers: the client does not receive those that were sent."""
        self._is_write_paused = True
        self._is_writable.clear()
        self._stalled_bytes = -1  # differs from every size, so the next line starts the measurement
        self.stalled_s()

    def resume_writing(self) -> None:
        """Go on: the client has received most of its answers."""
        self._is_write_paused = False
        self._is_writable.set()
        self._share.release()
        self._advance()
        self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything; the storage completes the writes that it has accepted."""
        self._transport = None
        self._is_write_paused = False
        self._service.connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        for task in self._reads.values():
            task.cancel()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._queue.clear()
        self._share.release()
        self._end.close()
        self._room.give()
        self.settled.set()
        self.closed.set()

    def begin_drain(self) -> None:
        """Refuse writes from now on, and end the streams that follow a ledger."""
        self._is_draining = True
        for stream in list(self._streams.values()):
            if isinstance(stream, FollowStream):
                self._end_stream(stream, BookieUnavailableError(_SHUTTING_DOWN))
        if not self._in_flight and not self._is_flush_due:
            self.settled.set()

    def close(self) -> None:
        """End when all answers were sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once."""
        if self._transport is not None:
            self._transport.abort()

    def _tick(self) -> None:
        if self._is_over:
            self.abort()
            return
        now_s = self._loop.time()
        if not self._end.is_open and now_s >= self._opened_s + self._service.handshake_s:
            self._refuse(BadRequestError(f"no HELLO within {self._service.handshake_s} s"))
        if not self._is_reading:
            self._keepalive.heard(now_s)  # it may have sent bytes that we do not read now
        if self.stalled_s() >= self._service.silence_s:
            logger.info("client disconnected peer=%s: it receives no answers", self.peer)
            self.abort()
            return
        try:
            ping = self._keepalive.check(now_s)
        except BookieUnavailableError as error:
            logger.info("client disconnected peer=%s: %s", self.peer, error)
            self.abort()
            return
        self._tick_later(now_s)
        if ping is not None:
            self._write(self._end.send(ping))

    def _tick_later(self, now_s: float) -> None:
        due_s = self._keepalive.due_s(now_s)
        if self._is_write_paused:
            due_s = min(due_s, self._stalled_s + self._service.silence_s)
        if not self._end.is_open and self._refusal is None:
            due_s = min(due_s, self._opened_s + self._service.handshake_s)
        self._timer = self._loop.call_at(max(due_s, now_s + LEAST_S), self._tick)

    def stalled_s(self) -> float:
        """Return the seconds for which the client has received no byte of its waiting answers."""
        if not self._is_write_paused or self._transport is None:
            return 0.0
        now_s = self._loop.time()
        unsent = self._transport.get_write_buffer_size()
        if unsent != self._stalled_bytes:
            self._stalled_bytes, self._stalled_s = unsent, now_s
        return now_s - self._stalled_s

    def sends_slowly(self, stall_s: float, held_s_max: float) -> bool:
        """Return whether the client is too slow with a large payload."""
        held_s, quiet_s = self._room.held_s(), self._keepalive.quiet_s(self._loop.time())
        # If we do not read, the client is not to blame, unless it takes no answers.
        if not (self._is_reading or self._is_write_paused):
            return False
        return min(held_s, quiet_s) >= stall_s or held_s >= held_s_max

    @property
    def peer(self) -> object:
        """The client's name or address, for logs."""
        transport = self._transport
        return self.peer_name or (transport and transport.get_extra_info("peername"))

    def _refuse(self, error: DLError) -> None:
        """End the connection with a reason, after the answers to accepted requests."""
        logger.warning("connection refused peer=%s: %s", self.peer, error)
        self._refusal = error
        self._end_if_refused()

    def _end_if_refused(self) -> None:
        if self._refusal is None or self._in_flight or self._is_flush_due or self._is_over:
            return
        self._write(self._end.send(Failed(0, *status_of(self._refusal))))
        self._is_over = True
        # If we closed with unread bytes, TCP would reset, and the client could miss the reason.
        self._resume_reading()
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def take_some(self) -> bool:
        """Take requests; return whether some are left for this connection's next turn."""
        if self._transport is None or self._transport.is_closing() or self._is_over:
            return False
        room = _REQUESTS_PER_TURN
        try:
            while self._has_room:
                if room <= 0:
                    self._pause_reading()
                    return True
                event = self._end.next_event()
                if event is None:
                    self.left_some = self._room.is_waiting
                    if self.left_some:
                        break
                    self._resume_reading()
                    return False
                self._take(event)
                room -= len(event.frames) if isinstance(event, Add) else 1
            else:
                self.left_some = True
        except DLError as error:
            self._refuse(error)
        self._pause_reading()
        return False

    @property
    def _has_room(self) -> bool:
        return (
            self._refusal is None
            and (
                # First the cheap check, which is True for most connections.
                self._in_flight_bytes < IN_FLIGHT_BYTES_MIN
                or self._in_flight_bytes < self._service.in_flight_share()
            )
            and not self._is_write_paused
            and len(self._reads) < _READS_MAX
        )

    def _pause_reading(self) -> None:
        if self._is_reading and not self._is_over and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._is_reading and self._transport is not None:
            self._is_reading = True
            self._transport.resume_reading()

    def _read_on(self) -> None:
        if not self._is_reading:
            self._service.turns.take(self)

    def _take(self, event: BookieEvent) -> None:
        match event:
            case Add(first_request_id, is_recovery, frames):
                if len(frames) == 1 or not self._add_run(event):
                    for request_id, frame in enumerate(frames, first_request_id):
                        self._add(request_id, frame, is_recovery=is_recovery)
            case WriteLac():
                self._write_lac(event)
            case ReadLac() | ReadHeld() | ReadEntry():
                self._read(event)
            case ReadEntries() | Follow():
                self._open_stream(event)
            case _:
                self._take_control(event)

    def _take_control(self, event: BookieEvent) -> None:
        """Take a message that is no request."""
        match event:
            case Credit(request_id):
                stream = self._streams.get(request_id)
                if stream is not None:
                    self._enqueue(stream)
            case Cancel(request_id):
                self._cancel(request_id)
            case Hello():
                self._write(self._end.welcome())
            case Ping(token):
                self._answers.note_alive(token)
                self._flush_soon()
            case Pong():
                pass

    # Writes

    def _add_run(self, add: Add) -> bool:
        """Store all entries together, on the fast path; return False if they must go one by one."""
        frames, first = add.frames, add.first_request_id
        if self._is_draining or add.is_recovery or not isinstance(frames, FrameRun):
            return False
        future = self._storage.writes.add_run(frames)
        if future is not None:
            self._fly(range(first, first + len(frames)), len(frames.payload), future)
        return future is not None

    def _add(self, request_id: int, frame: Buffer, *, is_recovery: bool) -> None:
        if self._is_draining:
            self._settle([request_id], BookieUnavailableError(_SHUTTING_DOWN))
            return
        future = self._storage.writes.add_entry(frame, is_recovery=is_recovery)
        if future.done():
            self._settle([request_id], future.exception())
        else:
            self._fly([request_id], len(frame), future)

    def _write_lac(self, request: WriteLac) -> None:
        try:
            if self._is_draining:
                raise BookieUnavailableError(_SHUTTING_DOWN)
            future = self._storage.writes.write_lac(request.ledger_id, request.last_add_confirmed)
        except DLError as error:
            self._settle([request.request_id], error)
        else:
            self._fly([request.request_id], 0, future)

    def _fly(
        self, request_ids: Sequence[int], size_bytes: int, future: asyncio.Future[None]
    ) -> None:
        """Settle the requests once `future` is done."""
        size_bytes += _REQUEST_BYTES
        self._in_flight += 1
        self._in_flight_bytes += size_bytes
        self._service.in_flight_bytes += size_bytes
        future.add_done_callback(partial(self._land, request_ids, size_bytes))

    def _land(
        self, request_ids: Sequence[int], size_bytes: int, future: asyncio.Future[None]
    ) -> None:
        """Settle requests that were in flight; send at once if no other answer is expected."""
        self._in_flight -= 1
        self._in_flight_bytes -= size_bytes
        self._service.in_flight_bytes -= size_bytes
        assert self._in_flight_bytes >= 0
        error = BookieUnavailableError(_GIVEN_UP) if future.cancelled() else future.exception()
        self._answers.note(request_ids, error)
        (self._flush_soon if self._in_flight or self._is_flush_due else self._flush)()

    def _settle(self, request_ids: Sequence[int], error: BaseException | None) -> None:
        self._answers.note(request_ids, error)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send the answers of settled requests."""
        self._is_flush_due = False
        self._write(self._answers.take())
        if self._is_draining and not self._in_flight:
            self.settled.set()
        if self._refusal is not None:
            self._end_if_refused()
        if not self._is_reading:
            self._read_on()

    def _write(self, buffers: list[Buffer]) -> None:
        transport = self._transport
        if buffers and transport and not (transport.is_closing() or self._is_over):
            send(transport, buffers)

    # Reads

    def _read(self, request: ReadLac | ReadHeld | ReadEntry) -> None:
        request_id = request.request_id
        task = self._loop.create_task(self._answer(request))
        self._reads[request_id] = task
        task.add_done_callback(partial(self._on_read, request_id))

    async def _answer(self, request: ReadLac | ReadHeld | ReadEntry) -> None:
        try:
            if isinstance(request, ReadLac):
                self._refuse_fence(is_fence=request.fence)
                lac = await self._storage.reads.read_lac(request.ledger_id, fence=request.fence)
                self._write(self._end.send(Lac(request.request_id, lac)))
            elif isinstance(request, ReadHeld):
                held = await self._storage.reads.read_held(request.ledger_id)
                self._write(self._end.send(Held(request.request_id, *held)))
            else:
                await self._send_entry(request)
        except DLError as error:
            self._settle([request.request_id], error)

    async def _send_entry(self, request: ReadEntry) -> None:
        """Send one entry, within the budget, when the client has received earlier answers."""
        request_id, ledger_id, entry_id, fence = request

        async def read(bytes_max: int) -> Chunk:
            self._refuse_fence(is_fence=fence)
            frame = await self._storage.reads.read_entry(
                ledger_id, entry_id, fence=fence, bytes_max=bytes_max
            )
            return Chunk(request_id, [frame], is_last=True)

        async with self._entry_slots:
            await self._is_writable.wait()
            await self._share.send(CHUNK_BYTES_MAX, read)

    def _send_frames(self, message: Chunk | Update) -> bool:
        """Send a message of a read; return whether the client is slow to receive."""
        self._write(self._end.send(message))
        return self._is_write_paused

    def _on_read(self, request_id: int, task: asyncio.Task[None]) -> None:
        self._reads.pop(request_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._settle([request_id], error)
        self._read_on()

    def _refuse_fence(self, *, is_fence: bool) -> None:
        if is_fence and self._is_draining:
            raise BookieUnavailableError(_SHUTTING_DOWN)

    def _cancel(self, request_id: int) -> None:
        task = self._reads.get(request_id)
        if task is not None:
            task.cancel()
        stream = self._streams.get(request_id)
        if stream is not None:
            self._end_stream(stream, None)

    # Streams

    def _open_stream(self, request: ReadEntries | Follow) -> None:
        try:
            if len(self._streams) >= _STREAMS_MAX:
                raise BookieOverloadedError(f"a connection has at most {_STREAMS_MAX} open reads")
            stream = self._new_stream(request)
        except DLError as error:
            self._end.end(request.request_id)
            self._settle([request.request_id], error)
        else:
            self._streams[request.request_id] = stream
            self._enqueue(stream)

    def _new_stream(self, request: ReadEntries | Follow) -> ReadStream:
        chunk_bytes = min(self._service.chunk_bytes_max, CHUNK_BYTES_MAX)
        if isinstance(request, ReadEntries):
            chunk_bytes = min(request.chunk_bytes, chunk_bytes)
            return RangeStream(self._storage.reads, request, chunk_bytes=chunk_bytes)
        if self._is_draining:
            raise BookieUnavailableError(_SHUTTING_DOWN)
        reads, followers = self._storage.reads, self._storage.followers
        return FollowStream(
            reads, followers, request, chunk_bytes=chunk_bytes, on_news=self._enqueue
        )

    def _enqueue(self, stream: ReadStream) -> None:
        """Queue the stream for its next message, if it may have one and its window allows one."""
        if (
            stream.is_queued
            or not stream.has_news
            or not self._end.window_of(stream.request_id) > 0
        ):
            return
        stream.is_queued = True
        self._queue.append(stream)
        self._advance()

    def _advance(self) -> None:
        """Start a step of each queued stream, up to the bound of one iteration of the loop."""
        if self._is_advancing or not self._queue or not self._can_advance:
            return
        if self._steps_left == _STEPS_PER_TURN:
            self._loop.call_soon(self._begin_turn)
        self._is_advancing = True
        for _ in range(min(len(self._queue), self._steps_left)):
            if self._can_advance:
                self._steps_left -= 1
                self._start_step(self._queue.popleft())
        self._is_advancing = False

    def _begin_turn(self) -> None:
        self._steps_left = _STEPS_PER_TURN
        self._advance()

    @property
    def _can_advance(self) -> bool:
        return len(self._steps) < _STEPS_MAX and not self._is_write_paused

    def _start_step(self, stream: ReadStream) -> None:
        if stream.request_id not in self._streams:
            return
        try:
            task = start(self._step(stream))
        except Exception as error:  # noqa: BLE001  # the client gets it as its answer
            self._on_stepped(stream, error)
            return
        if task is None:
            self._on_stepped(stream, None)
        else:
            self._steps[task] = None
            task.add_done_callback(partial(self._on_step, stream))

    def _on_step(self, stream: ReadStream, task: asyncio.Task[None]) -> None:
        del self._steps[task]
        self._on_stepped(stream, None if task.cancelled() else task.exception())
        self._advance()

    def _on_stepped(self, stream: ReadStream, error: BaseException | None) -> None:
        stream.is_queued = False
        if error is not None:
            if not isinstance(error, DLError):
                logger.error("a read failed unexpectedly", exc_info=error)
            self._end_stream(stream, error)
        elif stream.request_id in self._streams:
            self._enqueue(stream)

    async def _step(self, stream: ReadStream) -> None:
        """Send a stream's next message; never cancelled, it checks if the stream has ended."""
        await self._share.send(stream.chunk_bytes, partial(self._advance_one, stream))

    async def _advance_one(self, stream: ReadStream, bytes_max: int) -> Chunk | Update | None:
        is_open = stream.request_id in self._streams
        message = await stream.advance(bytes_max) if is_open else None
        if message is None or stream.request_id not in self._streams:
            return None
        if isinstance(message, Chunk) and message.is_last:
            self._forget(stream)
        return message

    def _end_stream(self, stream: ReadStream, error: BaseException | None) -> None:
        if stream.request_id in self._streams:
            self._forget(stream)
            if error is not None:
                self._settle([stream.request_id], error)

    def _forget(self, stream: ReadStream) -> None:
        del self._streams[stream.request_id]
        self._end.end(stream.request_id)
        stream.close()
