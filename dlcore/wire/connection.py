"""A client's connections to bookies: how they begin, and the driver of their `ClientSession`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar, assert_never, cast

from dlcore.base.access.tls_refusals import TLS_CLOSED, closed_unheard, explained
from dlcore.base.errors import BookieUnavailableError, MetadataError
from dlcore.wire.frames import send
from dlcore.wire.messages import FEATURES, PROTOCOL_VERSION, Hello
from dlcore.wire.receiving import ReceiveMemory
from dlcore.wire.session import (
    UNSENT_BYTES_HIGH,
    AddWrite,
    Ask,
    Bring,
    Call,
    Cancelled,
    ClientEnd,
    ClientSession,
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
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from dlcore.base.access.capability import Purse
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.backoff import Backoff
    from dlcore.base.config import LedgerClientConfig
    from dlcore.base.errors import DLError
    from dlcore.base.ids import BookieId
    from dlcore.wire.messages import Frame
    from dlcore.wire.port import OnAnswer
    from dlcore.wire.session import Answer, Event, Read, Sent


R = TypeVar("R")

Resolve: TypeAlias = "Callable[[BookieId], Awaitable[str]]"
"""Returns the address of a bookie as host:port."""


@contextmanager
def unknown_addresses(bookie: BookieId) -> Iterator[None]:
    """Map errors of an address look-up: an unknown address says nothing about the bookie."""
    try:
        yield
    except MetadataError as error:
        raise BookieUnavailableError(f"{bookie}: its address is not known: {error}") from error


class Dialer:
    """Begins the connections of one client.

    Args:
        resolve: returns a bookie's address; called for every new connection.
        cluster_id: the namespace's cluster; a bookie of another cluster is refused.
        config: time-outs and bounds.
        tls: the certificates for encrypted connections; None: connections are not encrypted.
        purse: capabilities that connections present before requests; None: they present none.
    """

    def __init__(
        self,
        resolve: Resolve,
        *,
        cluster_id: str,
        config: LedgerClientConfig,
        tls: TlsInUse | None = None,
        purse: Purse | None = None,
    ) -> None:
        self.memory = ReceiveMemory()
        """The memory for received bytes, of all connections."""
        self.tls = tls
        self.purse = purse
        self._resolve = resolve
        self._cluster_id = cluster_id
        self._config = config

    def new_session(
        self, bookie: BookieId, now_s: float
    ) -> tuple[ClientEnd[Sent, R], ClientSession[R]]:
        """Return the two machines of a new connection."""
        hello = Hello(PROTOCOL_VERSION, FEATURES, self._cluster_id, bookie.name, bookie.incarnation)
        end: ClientEnd[Sent, R] = ClientEnd(hello, self.memory)
        presenter = None
        if self.purse is not None:
            from dlcore.wire.capabilities import Presenter  # most clients have a certificate

            presenter = Presenter(self.purse)
        return end, ClientSession(bookie, end, self._config, presenter, now_s=now_s)

    async def dial(self, bookie: BookieId, protocol: asyncio.BufferedProtocol) -> None:
        """Connect a protocol to the bookie's present address.

        Raises:
            BookieUnavailableError: there is no connection.
        """
        with unknown_addresses(bookie):
            address = await self._resolve(bookie)
        try:
            async with asyncio.timeout(self._config.add_timeout_s):
                await self.connect(protocol, address)
        # The two in the middle come from a registered port that is no number, or is too large.
        except (OSError, ValueError, OverflowError, TimeoutError) as error:
            reason = explained(error, None if self.tls is None else self.tls.files)
            raise BookieUnavailableError(
                f"{bookie}: no connection to {address}: {reason}"
            ) from error

    async def connect(self, protocol: asyncio.BufferedProtocol, address: str) -> None:
        """Connect a protocol to host:port; failures are an OSError or an error of the address."""
        host, _, port = address.rpartition(":")
        context = None if self.tls is None else self.tls.client_context()
        await asyncio.get_running_loop().create_connection(
            lambda: protocol, host.strip("[]"), int(port), ssl=context
        )

    def why_unheard(self) -> str:
        """Return why a bookie may have closed a connection before it said anything."""
        return TLS_CLOSED if self.tls is None else closed_unheard(self.tls.files)


class Incoming:
    """The answers of a bookie to one read, in order, for one task that takes them."""

    def __init__(self) -> None:
        self.taker: Callable[[Answer], bool] | None = None
        """Asked for each answer that comes while the task waits; True: the task does not get it."""
        self._items: deque[Answer] = deque()
        self._error: DLError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Answer) -> None:
        """Add an answer that arrived."""
        waiter = self._waiter
        is_next = waiter is not None and not waiter.done() and not self._items
        # Only while no earlier answer is left, since answers are given in order.
        if is_next and self.taker is not None and self.taker(item):
            return
        self._items.append(item)
        self._wake()

    def fail(self, error: DLError) -> None:
        """End with an error, after the answers that came before."""
        if self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> Answer:
        """Return the next answer, or raise the error that ended the read."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()

    def drop(self) -> None:
        """Drop the answers that no task takes any more.

        A cancelled waiter holds the frames that awaited it, and these hold this object.  Without
        this call nothing of that would be freed before Python's next full garbage collection.
        """
        self._items.clear()
        self._waiter = self.taker = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
        # Starts the keepalive, which also ends a connection that is never made.
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
                # None first: nothing may be sent after this, and `abort` ends the connection only
                # later.
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
        self._timers[event] = self._loop.call_at(
            at_s, lambda: self._handle(event(self._loop.time()))
        )
