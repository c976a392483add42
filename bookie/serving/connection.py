"""Runs a `Session` over one client's connection: requests in, storage calls, answers out."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, assert_never, cast

from bookie.serving.eager import start
from bookie.serving.read_budget import ReadShare
from bookie.serving.read_streams import FollowStream, RangeStream
from bookie.serving.session import (
    Abort,
    Call,
    CancelRead,
    CloseStream,
    Event,
    MessageRead,
    News,
    NoteDenial,
    NoteRefusal,
    OpenStream,
    Outcome,
    Read,
    ReadEnded,
    Received,
    Relieve,
    RunNotTaken,
    Send,
    Session,
    Signal,
    Step,
    Stepped,
    Stored,
    StoreEach,
    StoreLac,
    StoreRun,
    Tick,
    TickAt,
    WritePaused,
)
from dlcore.access.client_names import names_in
from dlcore.access.tls import name_in_certificate
from dlcore.base.background import failed, start_task
from dlcore.base.errors import BookieUnavailableError, DLError
from dlcore.transport.sending import send
from dlcore.wire.bookie_end import BookieEnd
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
    from collections.abc import Sequence

    from bookie.serving.read_streams import ReadStream
    from bookie.serving.shared import Shared
    from bookie.storage.ledger_storage import LedgerStorage
    from dlcore.wire.frames import FrameRun
    from dlcore.wire.messages import Add, Follow, ReadHeld, WriteLac

logger = logging.getLogger(__name__)

_UNSENT_BYTES_HIGH = 64 * 1024
_UNSENT_BYTES_LOW = 16 * 1024
_GIVEN_UP = "the bookie dropped the request"


class Connection(asyncio.BufferedProtocol):
    """A connection from its acceptance to its end."""

    def __init__(self, service: Shared[Connection], storage: LedgerStorage) -> None:
        self._service = service
        self._storage = storage
        self._loop = asyncio.get_running_loop()
        self._room = service.receive_budget.room(self._read_on)
        self._end = BookieEnd(service.bookie, service.cluster_id, service.memory, self._room)
        self.session = Session(
            self._end,
            self._room,
            service.bounds,
            opened_s=self._loop.time(),
            is_draining=service.is_draining,
        )
        self._share = ReadShare(service.read_budget, self._send_message)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._landed: list[Outcome] = []
        self._reads: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, ReadStream] = {}
        self._steps: set[asyncio.Task[None]] = set()
        self.waits_for_turn = False
        self.peer_name: str | None = None
        """The common name of the client's certificate, None without one."""
        self.closed = asyncio.Event()
        self.settled = asyncio.Event()
        """Set when the connection drains and every accepted write is answered."""

    @property
    def peer(self) -> object:
        """The client's name or address, for logs."""
        transport = self._transport
        return self.peer_name or (transport and transport.get_extra_info("peername"))

    @property
    def left_some(self) -> bool:
        """Whether the last `take_some` left requests because of a bound of the connection."""
        return self.session.intake.left_some

    @property
    def is_distrusted(self) -> bool:
        """Whether many of the client's last requests were of no use."""
        return self.session.trust.is_low

    # Calls from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_HIGH, low=_UNSENT_BYTES_LOW)
        certificate = transport.get_extra_info("peercert")
        self.peer_name = name_in_certificate(certificate)
        if self._service.new_access is not None and not certificate:
            access = self.session.access = self._service.new_access()
            self._room.require_right = access.require_right_to_add
        else:
            self._end.refusal = self._service.client_names.refusal(names_in(certificate))
        self._service.connections[self] = None
        self._tick()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return memory for received bytes."""
        return self._end.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Take received bytes."""
        turns = self._service.turns
        is_turn = turns.are_free and not self.session.trust.is_low
        self._handle(Received(nbytes, self._loop.time(), is_turn))
        if is_turn and self.session.intake.is_turn_due:
            turns.wait(self)

    def pause_writing(self) -> None:
        """Stop making answers: the client does not receive those that were sent."""
        self._handle(WritePaused(self._unsent_bytes(), self._loop.time()))

    def resume_writing(self) -> None:
        """Go on: the client has received most of its answers."""
        self._share.release()
        self._handle(Signal.WRITE_RESUMED)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything."""
        self._transport = None
        self._service.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        self._handle(Signal.LOST)
        # Also so that nothing refers back: thousands that leave are freed at once, and not by the
        # collector, which comes late.
        self._share.close()
        self._end.close()
        self._room.close()
        self.closed.set()

    # Calls from the service

    def take_some(self) -> bool:
        """Take requests; return whether some are left for this connection's next turn."""
        if self._transport is None or self._transport.is_closing():
            return False
        self._handle(Signal.TURN)
        return self.session.intake.is_turn_due

    def relieve(
        self, *, reads_wait: bool, adds_wait: bool, stall_s: float, held_s_max: float
    ) -> None:
        """End the connection if others wait and it makes no progress, see `Relieve`."""
        self._handle(
            Relieve(
                self._unsent_bytes(),
                self._loop.time(),
                self._room.held_s(),
                reads_wait=reads_wait,
                adds_wait=adds_wait,
                stall_s=stall_s,
                held_s_max=held_s_max,
            )
        )

    def begin_drain(self) -> None:
        """Refuse writes from now on, and end the streams that follow a ledger."""
        self._handle(Signal.DRAIN)

    def close(self) -> None:
        """End when all answers were sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once."""
        if self._transport is not None:
            self._transport.abort()

    # The machine

    def _handle(self, event: Event) -> None:  # noqa: C901 - one case for each kind
        for effect in self.session.handle(event):
            match effect:
                # The most frequent ones first, because the cases are tried one after the other.
                case Send():
                    if self._transport is not None and not self._transport.is_closing():
                        send(self._transport, effect.buffers)
                case StoreEach():
                    self._store_each(effect.add)
                case StoreLac():
                    self._store_lac(effect.request)
                case Step():
                    self._step(effect.request_id)
                case Call():
                    self._call(effect)
                case StoreRun(add):
                    self._store_run(add)
                case Read(request):
                    self._read(request)
                case CancelRead(request_id):
                    if request_id in self._reads:
                        self._reads[request_id].cancel()
                case OpenStream(request, chunk_bytes):
                    self._open_stream(request, chunk_bytes)
                case CloseStream(request_id):
                    self._streams.pop(request_id).close()
                case TickAt(at_s):
                    self._timer = self._loop.call_at(at_s, self._tick)
                case NoteRefusal(reason):
                    logger.warning(
                        "connection refused peer=%s: %s; to do: if the peer is one of yours, give "
                        "it what is missing; else nothing",
                        self.peer,
                        reason,
                    )
                case NoteDenial(reason):
                    logger.warning(
                        "request denied peer=%s: %s; to do: if the peer may do this, give it a "
                        "certificate or a capability; else nothing",
                        self.peer,
                        reason,
                    )
                case Abort(reason):
                    logger.info("client disconnected peer=%s: %s", self.peer, reason)
                    self.abort()
                case _:
                    assert_never(effect)

    def _call(self, call: Call) -> None:
        match call:
            case Call.TAKE_TURN:
                self._take_turn()
            case Call.SET_READING:
                if self._transport is not None and self.session.intake.is_reading:
                    self._transport.resume_reading()
                elif self._transport is not None:
                    self._transport.pause_reading()
            case Call.FLUSH_SOON:
                self._loop.call_soon(self._handle, Signal.FLUSH)
            case Call.STEPS_SOON:
                self._loop.call_soon(self._handle, Signal.BEGIN_STEPS)
            case Call.END_SENDING:
                if self._transport is not None and self._transport.can_write_eof():
                    self._transport.write_eof()
            case Call.NOTE_SETTLED:
                self.settled.set()
            case _:
                assert_never(call)

    def _take_turn(self) -> None:
        self._service.turns.take(self)
        if self.waits_for_turn:
            self._handle(Signal.TURN_WAITS)

    def _read_on(self) -> None:
        self._handle(Signal.READ_ON)

    def _tick(self) -> None:
        self._handle(Tick(self._unsent_bytes(), self._loop.time()))

    def _unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # Writes

    def _store_run(self, add: Add) -> None:
        run = cast("FrameRun", add.frames)
        future = self._storage.writes.add_run(run)
        if future is None:
            self._handle(RunNotTaken(add))
        else:
            first = add.first_request_id
            self._fly(range(first, first + len(run)), len(run.payload), future)

    def _store_each(self, add: Add) -> None:
        for request_id, frame in enumerate(add.frames, add.first_request_id):
            future = self._storage.writes.add_entry(frame, is_recovery=add.is_recovery)
            self._fly([request_id], len(frame), future)

    def _store_lac(self, request: WriteLac) -> None:
        try:
            future = self._storage.writes.write_lac(request.ledger_id, request.last_add_confirmed)
        except DLError as error:
            future = failed(error)
        self._fly([request.request_id], 0, future)

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
        landed.append(Outcome(request_ids, payload_bytes, _reported(error)))
        # Writes that end together are one event.  The last one in flight waits for no other.
        if len(landed) == self.session.writes.in_flight:
            self._end_landing()
        elif len(landed) == 1:
            self._loop.call_soon(self._end_landing)

    def _end_landing(self) -> None:
        landed, self._landed = self._landed, []
        if landed:
            self._handle(Stored(landed))

    # Reads

    def _read(self, request: ReadLac | ReadHeld | ReadEntry) -> None:
        on_end = partial(self._on_read, request.request_id)
        self._reads[request.request_id] = start_task(self._answer(request), on_end)

    async def _answer(self, request: ReadLac | ReadHeld | ReadEntry) -> None:
        reads = self._storage.reads
        if isinstance(request, ReadEntry):
            await self._share.send(CHUNK_BYTES_MAX, partial(self._read_entry, request))
        elif isinstance(request, ReadLac):
            self.session.writes.check_fence(is_fence=request.fence)
            lac = await reads.read_lac(request.ledger_id, fence=request.fence)
            self._handle(MessageRead(Lac(request.request_id, lac)))
        else:
            held = await reads.read_held(request.ledger_id)
            self._handle(MessageRead(Held(request.request_id, *held)))

    async def _read_entry(self, request: ReadEntry, bytes_max: int) -> Chunk:
        request_id, ledger_id, entry_id, fence = request
        self.session.writes.check_fence(is_fence=fence)
        frame = await self._storage.reads.read_entry(
            ledger_id, entry_id, fence=fence, bytes_max=bytes_max
        )
        return Chunk(request_id, [frame], is_last=True)

    def _send_message(self, message: Chunk | Update) -> bool:
        """Send a message of a read; return whether the client is slow to receive."""
        self._handle(MessageRead(message))
        return self.session.patience.is_stalled

    def _on_read(self, request_id: int, task: asyncio.Task[None]) -> None:
        del self._reads[request_id]
        self._handle(ReadEnded(request_id, _error_of(task)))

    # Streams

    def _open_stream(self, request: ReadEntries | Follow, chunk_bytes: int) -> None:
        storage = self._storage
        self._streams[request.request_id] = (
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

    def _on_news(self, stream: ReadStream) -> None:
        self._handle(News(stream.request_id))

    def _step(self, request_id: int) -> None:
        stream = self._streams[request_id]
        try:
            step = self._share.send(stream.chunk_bytes, partial(self._next_of, stream))
            task = start(step, partial(self._on_step, stream))
        except Exception as error:  # noqa: BLE001  # the client gets it as its answer
            self._handle(Stepped(request_id, stream.has_news, _reported(error)))
            return
        if task is None:
            self._handle(Stepped(request_id, stream.has_news, None))
        else:
            # It is never cancelled: it ends by itself when the stream is closed.
            self._steps.add(task)
            self._handle(Signal.STEP_WAITS)

    async def _next_of(self, stream: ReadStream, bytes_max: int) -> Chunk | Update | None:
        is_open = stream.request_id in self._streams
        message = await stream.advance(bytes_max) if is_open else None
        return message if stream.request_id in self._streams else None

    def _on_step(self, stream: ReadStream, task: asyncio.Task[None]) -> None:
        self._steps.remove(task)
        self._handle(Stepped(stream.request_id, stream.has_news, _error_of(task)))


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else _reported(task.exception())


def _reported(error: BaseException | None) -> BaseException | None:
    if error is not None and not isinstance(error, DLError):
        logger.error(
            "a request failed unexpectedly; to do: report this as a defect; the client asks "
            "another bookie",
            exc_info=error,
        )
    return error
