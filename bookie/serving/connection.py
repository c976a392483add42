"""The connections of a bookie's clients: the driver of each one's `Session`, and whose turn it is.

The writes of a client are here; its reads, which may wait long, are in `reads_in_progress`.

Connections take a few requests each, round-robin, in two queues as in the network scheduler
fq_codel.  The busy queue has the connections that always have more requests; the modest queue has
the others.  A connection with few requests therefore waits for one round of the modest queue,
whatever busy connections send.  The queues alternate, so busy connections make progress as well.

Distrusted connections, whose requests are of no use, have a third queue: all of them together have
one turn in a millisecond.  Their number does not matter, and others get most of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, assert_never, cast

from bookie.serving.reads_in_progress import ReadsInProgress, reported
from bookie.serving.session import (
    Abort,
    Call,
    CancelRead,
    CloseStream,
    Event,
    NoteDenial,
    NoteRefusal,
    OpenStream,
    Outcome,
    Read,
    Received,
    Relieve,
    RunNotTaken,
    Send,
    Session,
    Signal,
    Step,
    Stored,
    StoreEach,
    StoreLac,
    StoreRun,
    Tick,
    TickAt,
    WritePaused,
)
from dlcore.base.access.tls import name_in_certificate
from dlcore.base.background import failed
from dlcore.base.errors import BookieUnavailableError, DLError
from dlcore.wire.bookie_end import BookieEnd
from dlcore.wire.frames import send
from dlcore.wire.receiving import ReceiveMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bookie.ledger_storage import LedgerStorage
    from bookie.serving.access import Admission
    from bookie.serving.reads_in_progress import ReadBudget
    from bookie.serving.receive_budget import ReceiveBudget
    from bookie.serving.session import Bounds
    from bookie.storage.writes import Writes
    from dlcore.base.ids import BookieId
    from dlcore.wire.frames import FrameRun
    from dlcore.wire.messages import Add, Buffer, WriteLac


_TURN_S = 0.0003
"""After this time the event loop runs its other work: answers, syncs, received bytes."""


_DISTRUSTED_PAUSE_S = 0.001
"""Pause between two turns of distrusted connections; a turn and its answers take some 0.2 ms."""


class Taker(Protocol):
    """A connection that takes its requests when it is scheduled."""

    waits_for_turn: bool
    """Whether the connection is in a queue; `Turns` sets it."""

    @property
    def left_some(self) -> bool:
        """Whether the last `take_some` left requests because a bound was reached."""
        ...

    @property
    def is_distrusted(self) -> bool:
        """Whether many of its last requests were of no use."""
        ...

    def take_some(self) -> bool:
        """Take a few requests; return whether there are more that can be taken now."""
        ...

    def abort(self) -> None:
        """End the connection at once."""
        ...


class Turns:
    """The scheduler of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._modest: deque[Taker] = deque()
        self._busy: deque[Taker] = deque()
        self._distrusted: deque[Taker] = deque()
        self._is_due = False

    @property
    def are_free(self) -> bool:
        """Whether none waits, apart from the distrusted."""
        return not (self._modest or self._busy)

    def wait(self, taker: Taker) -> None:
        """Let a connection wait that has just taken requests, and has more of them."""
        if taker.is_distrusted:
            self._wait_distrusted(taker)
        else:
            self._wait(self._busy, taker)

    def take(self, taker: Taker) -> None:
        """Let a connection take requests: at once if none waits, otherwise in its queue's order."""
        if taker.waits_for_turn:
            return
        if taker.is_distrusted:
            self._wait_distrusted(taker)
            return
        # A connection that left requests is busy, though they did not fit: it comes back often.
        if self.are_free:
            self._serve(taker)
        else:
            self._wait(self._busy if taker.left_some else self._modest, taker)

    def _serve(self, taker: Taker) -> None:
        try:
            has_more = taker.take_some()
        except Exception as error:  # noqa: BLE001  # a defect must not stop other connections
            context = {"message": "taking a request failed", "exception": error}
            self._loop.call_exception_handler(context)
            taker.abort()
        else:
            if has_more:
                self.wait(taker)

    def _wait_distrusted(self, taker: Taker) -> None:
        taker.waits_for_turn = True
        if not self._distrusted:
            self._loop.call_later(_DISTRUSTED_PAUSE_S, self._serve_distrusted)
        self._distrusted.append(taker)

    def _serve_distrusted(self) -> None:
        taker = self._distrusted[0]
        taker.waits_for_turn = False
        self._serve(taker)
        # Only now, so that a connection that waits again does not begin a second timer.
        self._distrusted.popleft()
        if self._distrusted:
            self._loop.call_later(_DISTRUSTED_PAUSE_S, self._serve_distrusted)

    def _wait(self, queue: deque[Taker], taker: Taker) -> None:
        taker.waits_for_turn = True
        queue.append(taker)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        # By time and not by count: the cost of a connection's requests differs by far.
        until_s = self._loop.time() + _TURN_S
        while self._modest or self._busy:
            for queue in (self._modest, self._busy):
                if queue:
                    taker = queue.popleft()
                    taker.waits_for_turn = False
                    self._serve(taker)
            if self._loop.time() >= until_s:
                break
        self._is_due = bool(self._modest or self._busy)
        if self._is_due:
            self._loop.call_soon(self._run)


UNSENT_BYTES_HIGH = 64 * 1024
"""With so many bytes that the client has not received, no more answers are made.  It and the low
mark are asyncio's own defaults."""
_UNSENT_BYTES_LOW = 16 * 1024


class ClientSocket:
    """The transport of a connection; before it is there and after its loss, calls do nothing."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        """None before the connection is made, and once it is lost."""
        self.peer: object = None
        """The common name of the client's certificate, else its address; for logs."""

    def connect(self, transport: asyncio.BaseTransport) -> Mapping[str, object] | None:
        """Begin; return the client's certificate, None without one."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=UNSENT_BYTES_HIGH, low=_UNSENT_BYTES_LOW)
        certificate: Mapping[str, object] | None = transport.get_extra_info("peercert")
        self.peer = name_in_certificate(certificate) or transport.get_extra_info("peername")
        return certificate

    @property
    def is_open(self) -> bool:
        """Whether the client can be sent something."""
        # asyncio warns of each write to a transport that is closing.
        return self.transport is not None and not self.transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were sent, and that the network has not taken."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers, one after the other."""
        if self.transport is not None and not self.transport.is_closing():
            send(self.transport, buffers)

    def end_sending(self) -> None:
        """Tell the client that nothing more comes."""
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()

    def set_reading(self, *, is_reading: bool) -> None:
        """Read what the client sends, or leave it to TCP, which stops the client."""
        if self.transport is None:
            return
        if is_reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def close(self) -> None:
        """End when all answers were sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End at once."""
        if self.transport is not None:
            self.transport.abort()


_Connection = TypeVar("_Connection")


class Shared(Generic[_Connection]):
    """The part of the service that its connections use; the arguments are the service's."""

    def __init__(
        self,
        *,
        bookie: BookieId,
        cluster_id: str,
        bounds: Bounds,
        read_budget: ReadBudget,
        receive_budget: ReceiveBudget,
        admission: Admission,
    ) -> None:
        self.bookie = bookie
        self.cluster_id = cluster_id
        self.bounds = bounds
        self.read_budget = read_budget
        self.receive_budget = receive_budget
        self.admission = admission
        self.turns = Turns()
        self.memory = ReceiveMemory()
        self.connections: dict[_Connection, None] = {}
        self.is_draining = False

    def leave(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        self.connections.pop(connection, None)


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
            # Answered as an error of the future, so that the session has one way for both.
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
        if error is not None:
            reported(error)
        landed.append(Outcome(request_ids, payload_bytes, error))
        # Writes that end together are one event.  The last one in flight waits for no other.
        # Otherwise a client that waits for its only add would wait for the next iteration.
        if len(landed) == self._session.writes.in_flight:
            self._end_landing()
        elif len(landed) == 1:
            self._loop.call_soon(self._end_landing)

    def _end_landing(self) -> None:
        landed, self._landed = self._landed, []
        if landed:
            self._tell(Stored(landed))


class Connection(asyncio.BufferedProtocol):
    """A connection from its acceptance to its end.

    It feeds the session and performs its effects, each by the part that it is about: the socket,
    the writes, the reads, or the turns of all connections.
    """

    def __init__(self, service: Shared[Connection], storage: LedgerStorage) -> None:
        self.socket = ClientSocket()
        self.waits_for_turn = False
        self.closed = asyncio.Event()
        self._service = service
        self._room = service.receive_budget.room(self._read_on)
        self._end = BookieEnd(service.bookie, service.cluster_id, service.memory, self._room)
        self.session = Session(
            self._end,
            self._room,
            service.bounds,
            opened_s=_now_s(),
            is_draining=service.is_draining,
        )
        self.writes = WritesInFlight(storage.writes, self.session, self._handle)
        self.reads = ReadsInProgress(storage, service.read_budget, self.session, self._handle)
        self._timer: asyncio.TimerHandle | None = None

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
        certificate = self.socket.connect(transport)
        access, self._end.greeting.refusal = self._service.admission.admit(certificate)
        if access is not None:
            self.session.access = access
            self._room.require_right = access.require_right_to_add
        self._service.connections[self] = None
        self._tick()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return memory for received bytes."""
        return self._end.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Take received bytes."""
        turns = self._service.turns
        # In the common case no other client waits, and the way over the queue would only cost time.
        is_turn = turns.are_free and not self.session.trust.is_low
        self._handle(Received(nbytes, _now_s(), is_turn))
        if is_turn and self.session.intake.is_turn_due:
            turns.wait(self)

    def pause_writing(self) -> None:
        """Stop making answers: the client does not receive those that were sent."""
        self._handle(WritePaused(self.socket.unsent_bytes, _now_s()))

    def resume_writing(self) -> None:
        """Go on: the client has received most of its answers."""
        self.reads.release()
        self._handle(Signal.WRITE_RESUMED)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything."""
        self.socket.transport = None
        # First, so that a drain or a relief that runs meanwhile does not find it any more.
        self._service.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        self._handle(Signal.LOST)
        # Also so that nothing refers back: thousands that leave are freed at once, and not by the
        # collector, which comes late.
        self.writes.close()
        self.reads.close()
        self._end.close()
        self._room.close()
        self.closed.set()

    # Calls from the service

    def take_some(self) -> bool:
        """Take requests; return whether some are left for this connection's next turn."""
        # The connection may have been lost while it waited in the queue.
        if not self.socket.is_open:
            return False
        self._handle(Signal.TURN)
        return self.session.intake.is_turn_due

    def relieve(
        self, *, reads_wait: bool, adds_wait: bool, stall_s: float, held_s_max: float
    ) -> None:
        """End the connection if others wait and it makes no progress, see `Relieve`."""
        self._handle(
            Relieve(
                self.socket.unsent_bytes,
                _now_s(),
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

    def abort(self) -> None:
        """End at once."""
        self.socket.abort()

    # The machine

    def _handle(self, event: Event) -> None:  # noqa: C901 - one case for each kind
        for effect in self.session.handle(event):
            match effect:
                # The most frequent ones first, because the cases are tried one after the other.
                case Send():
                    self.socket.send(effect.buffers)
                case StoreEach():
                    self.writes.store_each(effect.add)
                case StoreLac():
                    self.writes.store_lac(effect.request)
                case Step():
                    self.reads.step(effect.request_id)
                case Call():
                    self._call(effect)
                case StoreRun(add):
                    self.writes.store_run(add)
                case Read(request):
                    self.reads.begin(request)
                case CancelRead(request_id):
                    self.reads.cancel(request_id)
                case OpenStream(request, chunk_bytes):
                    self.reads.open_stream(request, chunk_bytes)
                case CloseStream(request_id):
                    self.reads.close_stream(request_id)
                case TickAt(at_s):
                    self._timer = asyncio.get_running_loop().call_at(at_s, self._tick)
                case NoteRefusal(reason):
                    logger.warning(
                        "connection refused peer=%s: %s; to do: if the peer is one of yours, give "
                        "it what is missing; else nothing",
                        self.socket.peer,
                        reason,
                    )
                case NoteDenial(reason):
                    logger.warning(
                        "request denied peer=%s: %s; to do: if the peer may do this, give it a "
                        "certificate or a capability; else nothing",
                        self.socket.peer,
                        reason,
                    )
                case Abort(reason):
                    logger.info("client disconnected peer=%s: %s", self.socket.peer, reason)
                    self.abort()
                case _:
                    assert_never(effect)

    def _call(self, call: Call) -> None:
        match call:
            case Call.TAKE_TURN:
                self._take_turn()
            case Call.SET_READING:
                self.socket.set_reading(is_reading=self.session.intake.is_reading)
            case Call.FLUSH_SOON:
                asyncio.get_running_loop().call_soon(self._handle, Signal.FLUSH)
            case Call.STEPS_SOON:
                asyncio.get_running_loop().call_soon(self._handle, Signal.BEGIN_STEPS)
            case Call.END_SENDING:
                self.socket.end_sending()
            case Call.NOTE_SETTLED:
                self.writes.settled.set()
            case _:
                assert_never(call)

    def _take_turn(self) -> None:
        self._service.turns.take(self)
        if self.waits_for_turn:
            self._handle(Signal.TURN_WAITS)

    def _read_on(self) -> None:
        self._handle(Signal.READ_ON)

    def _tick(self) -> None:
        self._handle(Tick(self.socket.unsent_bytes, _now_s()))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
