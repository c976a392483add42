"""A connection of a client to a bookie: sends requests in call order, and matches answers.

Adds that wait together share a message.  Every write is answered or fails within `add_timeout_s`;
one that stays unanswered fails alone.  A connection that received no byte for that long is broken:
PINGs make sure that a healthy bookie sends something.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import chain, takewhile
from typing import TYPE_CHECKING, TypeAlias, cast

from dlcore.base.config import ENTRY_SIZE_BYTES_MAX, MIB
from dlcore.base.errors import BookieError, BookieOverloadedError, BookieUnavailableError, DLError
from dlcore.base.tls_refusals import closed_unheard, explained
from dlcore.transport.sending import send
from dlcore.wire.client_end import (
    Brought,
    ClientEnd,
    ReadRefused,
    Stored,
    Told,
    Welcomed,
    WriteRefused,
)
from dlcore.wire.keepalive import Keepalive
from dlcore.wire.messages import ADD_FRAMES_MAX, Ping, Pong, WireError, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.base.backoff import Backoff
    from dlcore.base.config import LedgerClientConfig
    from dlcore.base.ids import BookieId
    from dlcore.base.tls import TlsFiles
    from dlcore.ledger.port import OnAnswer
    from dlcore.wire.client_end import ClientEvent, Read
    from dlcore.wire.memory import ReceiveMemory
    from dlcore.wire.messages import Buffer, Chunk, Frame, Held, Hello, Update

logger = logging.getLogger(__name__)

_BATCH_BYTES_MAX = MIB
"""Adds that wait together are sent in one message of about this size."""
_BACKLOG_FACTOR = 4
"""A connection holds at most this many times the ledger client's own limits on pending adds."""
_UNSENT_BYTES_HIGH = 4 * MIB
"""Bytes that the transport holds unsent; beyond this requests wait in the queue."""


class Write:
    """An add (`frame`) or an explicit LAC (`lac`: ledger id, LAC) on its way to a bookie."""

    __slots__ = ("frame", "is_recovery", "lac", "on_answer", "size", "submitted_s")

    def __init__(
        self,
        on_answer: OnAnswer,
        submitted_s: float,
        frame: Frame | None,
        is_recovery: bool = False,
        lac: tuple[int, int] = (-1, -1),
    ) -> None:
        self.frame = frame
        self.on_answer = on_answer
        self.is_recovery = is_recovery
        self.lac = lac
        self.size = 0 if frame is None else len(frame)
        self.submitted_s = submitted_s


Answer: TypeAlias = "int | Held | Chunk | Update"
"""An answer to a read; an int is a LAC."""


class Incoming:
    """The answers of a bookie to one read, in order, for one task that takes them."""

    def __init__(self) -> None:
        self.request_id = 0
        self.taker: Callable[[Answer], bool] | None = None
        """Asked for each answer that comes while the task waits; True: the task does not get it."""
        self._items: deque[Answer] = deque()
        self._error: DLError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Answer) -> None:
        """Add an answer that arrived."""
        waiter = self._waiter
        is_next = waiter is not None and not waiter.done() and not self._items
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


Event: TypeAlias = "ClientEvent[Write, Incoming]"
Connect: TypeAlias = "Callable[[asyncio.BufferedProtocol, str], Awaitable[None]]"
"""Connects a protocol to host:port; failures are an OSError or an error of the address."""


class Connection(asyncio.BufferedProtocol):
    """One connection from its first byte to its end; it is not used again once broken.

    Args:
        bookie: the bookie's name in errors.
        hello: the message that opens the connection; it names the bookie.
        memory: the memory for received bytes.
        backoff: the back-off of the bookie; success and failure of this connection are noted there.
        config: time-outs and bounds.
        tls: the files of TLS, if it is used, for errors to name.
    """

    def __init__(
        self,
        bookie: BookieId,
        *,
        hello: Hello,
        memory: ReceiveMemory,
        backoff: Backoff,
        config: LedgerClientConfig,
        tls: TlsFiles | None = None,
    ) -> None:
        self._tls = tls
        self._bookie = bookie
        self._backoff = backoff
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._end: ClientEnd[Write, Incoming] = ClientEnd(hello, memory)
        self.get_buffer = self._end.get_buffer  # type: ignore[method-assign]  # a step less
        self._keepalive = Keepalive(config.add_timeout_s, now_s=(now_s := self._loop.time()))
        self._transport: asyncio.Transport | None = None
        self._is_welcome = False
        self._is_write_paused = False
        self._is_flush_due = False
        self._queue: deque[Write] = deque()
        self._unasked: dict[Incoming, Read] = {}
        self._pending_bytes = 0
        self._pending_entries_max = _BACKLOG_FACTOR * config.pending_entries_max
        self._pending_bytes_max = _BACKLOG_FACTOR * config.pending_bytes_max + ENTRY_SIZE_BYTES_MAX
        self._expiry: asyncio.TimerHandle | None = None
        self._ticker = self._loop.call_at(self._keepalive.due_s(now_s), self._tick)
        self.is_broken = False
        self.on_broken: Callable[[], None] = lambda: None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done once the transport is gone, or if there never was one."""

    # Requests

    def add(self, frame: Frame, on_answer: OnAnswer, *, is_recovery: bool) -> None:
        """Queue an add behind all earlier writes."""
        self._submit(Write(on_answer, self._loop.time(), frame, is_recovery))

    def write_lac(self, ledger_id: int, last_add_confirmed: int, on_answer: OnAnswer) -> None:
        """Queue an explicit LAC behind all earlier writes."""
        lac = (ledger_id, last_add_confirmed)
        self._submit(Write(on_answer, self._loop.time(), None, lac=lac))

    def read(self, request: Read) -> Incoming:
        """Send a read, and return the object that receives its answers."""
        incoming = Incoming()
        if self._is_welcome and not self.is_broken:
            self._ask(request, incoming)
        elif self.is_broken:
            incoming.fail(BookieUnavailableError(f"{self._bookie}: the connection is broken"))
        else:
            self._unasked[incoming] = request
        return incoming

    def take(self, incoming: Incoming, size: int) -> None:
        """Let the bookie send as many bytes more as were taken."""
        self._write(self._end.take(incoming.request_id, size))

    def cancel(self, incoming: Incoming) -> None:
        """Give up a read, at the bookie too."""
        if incoming.request_id:
            self._write(self._end.cancel(incoming.request_id))
        else:
            self._unasked.pop(incoming, None)

    def fail(self, error: DLError) -> None:
        """Break the connection: every unanswered request fails like `error`."""
        if self.is_broken:
            return
        self.is_broken = True
        self._ticker.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        writes = [*self._end.writes.values(), *self._queue]
        self._end.writes.clear()
        self._queue.clear()
        for write in writes:
            self._settle(write, type(error)(*error.args))  # one instance each: tracebacks grow
        for incoming in (*self._end.reads, *self._unasked):
            incoming.fail(type(error)(*error.args))
        self._unasked.clear()
        self.on_broken()
        if self._transport is not None:
            self._transport.abort()
        elif not self.closed.done():
            self.closed.set_result(None)

    async def open(self, address: str, connect: Connect) -> None:
        """Connect; a failure breaks the connection."""
        try:
            async with asyncio.timeout(self._config.add_timeout_s):
                await connect(self, address)
        except (OSError, ValueError, OverflowError, TimeoutError) as error:
            reason = explained(error, self._tls)
            self._backoff.failed(self._loop.time())
            self.fail(
                BookieUnavailableError(f"{self._bookie}: no connection to {address}: {reason}")
            )

    # Calls of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self._transport = cast("asyncio.Transport", transport)
        if self.is_broken:  # it broke while the connection was made
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_HIGH)
        self._transport.writelines(self._end.hello())

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes that arrived."""
        if self.is_broken:
            return
        self._keepalive.heard(self._loop.time())
        self._end.received(nbytes)
        try:
            while (event := self._end.next_event()) is not None:
                self._take(event)
        except WireError as error:
            self._break(BookieUnavailableError(f"it breaks the protocol: {error}"))
        except BookieError as error:
            self._break(error)

    def pause_writing(self) -> None:
        """Keep requests in the queue."""
        self._is_write_paused = True

    def resume_writing(self) -> None:
        """Send the waiting requests."""
        self._is_write_paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all unanswered requests."""
        self._transport = None
        self._end.close()
        reason = f": {exc}" if exc else ""
        if self._tls is not None and not self._is_welcome and not self.is_broken:
            reason += f"; {closed_unheard(self._tls)}"
        self._break(BookieUnavailableError(f"the connection was closed{reason}"))
        if not self.closed.done():
            self.closed.set_result(None)

    # Answers

    def _take(self, event: Event) -> None:
        match event:
            case Stored(writes):
                for write in writes:
                    self._settle(write, None)
            case Ping(token):
                if not self._is_write_paused:  # else the peer gets our bytes once it reads
                    self._write(encode(Pong(token)))
            case Pong():
                pass
            case Welcomed():
                self._start()
            case _:
                self._answer(event)

    def _start(self) -> None:
        """Send the requests that waited for the handshake."""
        self._backoff.succeeded()
        self._is_welcome = True
        unasked, self._unasked = self._unasked, {}
        for incoming, request in unasked.items():
            self._ask(request, incoming)
        self._flush()

    def _answer(
        self,
        event: WriteRefused[Write] | Told[Incoming] | Brought[Incoming] | ReadRefused[Incoming],
    ) -> None:
        match event:
            case WriteRefused(write, error):
                self._settle(write, named(self._bookie, error))
            case Told(incoming, lac):
                incoming.put(lac)
            case Brought(incoming, message):
                incoming.put(message)
            case ReadRefused(incoming, error):
                incoming.fail(named(self._bookie, error))

    def _break(self, error: BookieError) -> None:
        if not self.is_broken:
            logger.debug("connection ended bookie=%s reason=%s", self._bookie, error)
            self._backoff.failed(self._loop.time())
            self.fail(named(self._bookie, error))

    def _settle(self, write: Write, error: DLError | None) -> None:
        self._pending_bytes -= write.size
        if error is not None:
            # Not now: the caller may write again, and this connection may be at its end.
            self._loop.call_soon(write.on_answer, error)
            return
        try:
            write.on_answer(None)
        except Exception as defect:  # noqa: BLE001 - the others get their answers all the same
            told = {"message": "taking an answer failed", "exception": defect}
            self._loop.call_exception_handler(told)

    # Sending

    def _ask(self, request: Read, incoming: Incoming) -> None:
        try:
            incoming.request_id, buffers = self._end.read(request, incoming)
        except BookieError as error:
            incoming.fail(named(self._bookie, error))
        else:
            self._write(buffers)

    def _submit(self, write: Write) -> None:
        pending = len(self._end.writes) + len(self._queue)
        if (
            pending >= self._pending_entries_max
            or self._pending_bytes + write.size > self._pending_bytes_max
        ):
            held = f"{pending} requests of {self._pending_bytes} bytes are pending"
            error = BookieOverloadedError(f"{self._bookie}: {held}")
            self._loop.call_soon(write.on_answer, error)
            return
        self._pending_bytes += write.size
        self._queue.append(write)
        if self._expiry is None:
            self._expiry = self._loop.call_later(self._config.add_timeout_s, self._expire)
        if self._pending_bytes == write.size or (write.frame is None and len(self._queue) == 1):
            self._flush()  # there is no other add to share a message with
        elif not self._is_flush_due and self._is_welcome:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        """Send waiting requests, adds of one kind together."""
        if not self._is_welcome or self.is_broken:
            return
        try:
            while self._queue and not self._is_write_paused:
                if self._queue[0].frame is None:
                    write = self._queue.popleft()
                    self._write(self._end.write_lac(*write.lac, write))
                else:
                    self._send_adds()
        except BookieError as error:
            self._break(error)

    def _send_adds(self) -> None:
        queue = self._queue
        is_recovery = queue[0].is_recovery
        batch: list[Write] = []
        frames: list[Frame] = []
        size = 0
        while queue and len(batch) < ADD_FRAMES_MAX:
            write = queue[0]
            size += write.size
            if write.frame is None or write.is_recovery != is_recovery:
                break
            # The first one goes in any case: it may be larger than a batch alone.
            if batch and size > _BATCH_BYTES_MAX:
                break
            batch.append(queue.popleft())
            frames.append(write.frame)
            write.frame = None  # the transport keeps the bytes; the answer does not need them
        self._write(self._end.add(frames, batch, is_recovery=is_recovery))

    def _write(self, buffers: list[Buffer]) -> None:
        if buffers and self._transport is not None and not self.is_broken:
            send(self._transport, buffers)

    # Time

    def _tick(self) -> None:
        now_s = self._loop.time()
        try:
            ping = self._keepalive.check(now_s)
        except BookieUnavailableError as error:
            self._break(error)
            return
        self._ticker = self._loop.call_at(self._keepalive.due_s(now_s), self._tick)
        if ping is not None and self._is_welcome:
            self._write(encode(ping))

    def _expire(self) -> None:
        """Fail the writes that waited too long."""
        self._expiry = None
        timeout_s = self._config.add_timeout_s
        now_s = self._loop.time()
        sent, queue = self._end.writes, self._queue

        def is_due(write: Write) -> bool:
            return write.submitted_s + timeout_s <= now_s

        # Both are in the order of submission; the sent ones come before the queued ones.
        ids = list(takewhile(lambda request_id: is_due(sent[request_id]), sent))
        expired = [sent.pop(request_id) for request_id in ids]
        while queue and is_due(queue[0]):
            expired.append(queue.popleft())
        reason = f"{self._bookie}: no answer within {timeout_s} s"
        for write in expired:
            self._settle(write, BookieUnavailableError(reason))
        oldest = next(chain(sent.values(), queue), None)
        if oldest is not None:
            self._expiry = self._loop.call_at(oldest.submitted_s + timeout_s, self._expire)


def named(bookie: BookieId, error: BookieError) -> BookieError:
    """Return the error with the name of the bookie that answered it."""
    return type(error)(f"{bookie}: {error}")
