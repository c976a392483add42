"""Runs a `Session` over one client's connection: requests in, storage calls, answers out."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

from bookie.serving.client_socket import ClientSocket
from bookie.serving.in_progress import ReadsInProgress, WritesInFlight
from bookie.serving.session import (
    Abort,
    Call,
    CancelRead,
    CloseStream,
    Event,
    NoteDenial,
    NoteRefusal,
    OpenStream,
    Read,
    Received,
    Relieve,
    Send,
    Session,
    Signal,
    Step,
    StoreEach,
    StoreLac,
    StoreRun,
    Tick,
    TickAt,
    WritePaused,
)
from dlcore.wire.bookie_end import BookieEnd

if TYPE_CHECKING:
    from bookie.serving.shared import Shared
    from bookie.storage.ledger_storage import LedgerStorage

logger = logging.getLogger(__name__)


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
