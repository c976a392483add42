"""Runs a `ClientSession` over one connection to a bookie: requests in, bytes out, answers back."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, assert_never, cast

from dlcore.wire.frames import send
from dlcore.wire.incoming import Incoming
from dlcore.wire.session import (
    UNSENT_BYTES_HIGH,
    AddWrite,
    Ask,
    Bring,
    Call,
    Cancelled,
    Confirm,
    EndRead,
    Expire,
    ExpireAt,
    GivenUp,
    LacWrite,
    Lost,
    NoteFailure,
    Received,
    Refuse,
    Send,
    Signal,
    Taken,
    Tick,
    TickAt,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.backoff import Backoff
    from dlcore.base.errors import DLError
    from dlcore.base.ids import BookieId
    from dlcore.wire.client_end import ClientEnd, Read
    from dlcore.wire.dialing import Dialer
    from dlcore.wire.messages import Frame
    from dlcore.wire.port import OnAnswer
    from dlcore.wire.session import Event, Sent

logger = logging.getLogger(__name__)


class Connection(asyncio.BufferedProtocol):
    """One connection from its first byte to its end; it is not used again once broken.

    Args:
        bookie: the bookie that it is to.
        dialer: begins it.
        backoff: the back-off of the bookie; success and failure of this connection are noted there.
        on_broken: called once the connection is of no use.
    """

    def __init__(
        self,
        bookie: BookieId,
        dialer: Dialer,
        *,
        backoff: Backoff,
        on_broken: Callable[[], None],
    ) -> None:
        self._dialer = dialer
        self._backoff = backoff
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._end: ClientEnd[Sent, Incoming]
        self._end, self.session = dialer.new_session(bookie, self._loop.time())
        self._transport: asyncio.Transport | None = None
        self._timers: dict[type, asyncio.TimerHandle] = {}
        self._settled: asyncio.Event | None = None  # made when a caller waits for the last write
        self.closed = asyncio.Event()
        """Set once the transport is gone, or if there never was one."""
        self._handle(Tick(self._loop.time()))

    # Requests

    def add(self, frame: Frame, size: int, on_answer: OnAnswer, *, is_recovery: bool) -> None:
        """Queue an add of so many bytes behind all earlier writes."""
        self._handle(AddWrite(frame, size, is_recovery, on_answer, self._loop.time()))

    def write_lac(self, ledger_id: int, last_add_confirmed: int, on_answer: OnAnswer) -> None:
        """Queue an explicit LAC behind all earlier writes."""
        self._handle(LacWrite(ledger_id, last_add_confirmed, on_answer, self._loop.time()))

    def read(self, request: Read) -> Incoming:
        """Send a read, and return the object that receives its answers."""
        incoming = Incoming()
        self._handle(Ask(request, incoming))
        return incoming

    def take(self, incoming: Incoming, size: int) -> None:
        """Let the bookie send as many bytes more as were taken."""
        self._handle(Taken(incoming, size))

    def cancel(self, incoming: Incoming) -> None:
        """Give up a read, at the bookie too; the caller of each read does so at its end."""
        self._handle(Cancelled(incoming))

    async def settled(self) -> None:
        """Return once every write so far has its answer or its error; no write may come after."""
        if self.session.has_writes:
            self._settled = self._settled or asyncio.Event()
            await self._settled.wait()

    def fail(self, error: DLError) -> None:
        """Break the connection: every unanswered request fails like `error`."""
        self._handle(GivenUp(error))

    # Calls of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES_HIGH)
        self._handle(Signal.CONNECTED)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return memory for received bytes."""
        return self._end.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes that arrived."""
        self._handle(Received(nbytes, self._loop.time()))

    def pause_writing(self) -> None:
        """Keep writes back: the bookie does not receive those that were sent."""
        self._handle(Signal.WRITE_PAUSED)

    def resume_writing(self) -> None:
        """Send the waiting writes."""
        self._handle(Signal.WRITE_RESUMED)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all unanswered requests."""
        self._transport = None
        self._end.close()
        reason = f": {exc}" if exc else ""
        if self.session.is_unheard:
            reason += f"; {self._dialer.why_unheard()}"
        self._handle(Lost(reason))

    # The machine

    def _handle(self, event: Event[Incoming]) -> None:  # noqa: C901 - one case for each kind
        for effect in self.session.handle(event):
            match effect:
                # The most frequent ones first, because the cases are tried one after the other.
                case Send():
                    if self._transport is not None:
                        send(self._transport, effect.buffers)
                case Confirm():
                    self._confirm(effect.writes)
                case Bring():
                    effect.read.put(effect.answer)
                case Call():
                    self._call(effect)
                case Refuse(on_answer, error):
                    self._loop.call_soon(on_answer, error)
                case EndRead(incoming, error):
                    incoming.fail(error)
                case TickAt(at_s):
                    self._say_at(at_s, Tick)
                case ExpireAt(at_s):
                    self._say_at(at_s, Expire)
                case NoteFailure(reason):
                    logger.debug(
                        "connection ended bookie=%s reason=%s", self.session.bookie, reason
                    )
                    self._backoff.failed(self._loop.time())
                case _:
                    assert_never(effect)
        if self._settled is not None and not self.session.has_writes:
            self._settled.set()

    def _call(self, call: Call) -> None:
        match call:
            case Call.FLUSH_SOON:
                self._loop.call_soon(self._handle, Signal.FLUSH)
            case Call.NOTE_WELCOME:
                self._backoff.succeeded()
            case Call.NOTE_BROKEN:
                for timer in self._timers.values():
                    timer.cancel()
                self._on_broken()
            case Call.ABORT:
                transport, self._transport = self._transport, None
                if transport is not None:
                    transport.abort()
            case Call.NOTE_CLOSED:
                self.closed.set()
            case _:
                assert_never(call)

    def _confirm(self, writes: Sequence[Sent]) -> None:
        for on_answer, _, _ in writes:
            try:
                on_answer(None)
            except Exception as defect:  # noqa: BLE001 - the other calls must get their answers
                context = {"message": "taking an answer failed", "exception": defect}
                self._loop.call_exception_handler(context)

    def _say_at(self, at_s: float, event: type[Tick | Expire]) -> None:
        say = partial(self._say_now, event)
        self._timers[event] = self._loop.call_at(at_s, say)

    def _say_now(self, event: type[Tick | Expire]) -> None:
        self._handle(event(self._loop.time()))
