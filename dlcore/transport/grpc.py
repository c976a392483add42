"""The bookie client over gRPC: one write stream and one channel for reads per bookie.

A `_WriteStream` is one connection's life: it shakes hands, sends what is queued in call order, and
settles the futures of its requests.  When it breaks, for whatever reason, every future fails and
the next request makes a new one; so a request is answered, or fails within `add_timeout_s`.  Reads
have a channel of their own: a chunk on its way to a slow reader does not delay the results of adds.

gRPC's own reconnection and retries stay out of it: a connection that failed is dropped with its
channel, and the bookie's address is asked for again: a bookie that restarted has another port.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import grpc

from dlcore.config import ENTRY_SIZE_BYTES_MAX, MIB
from dlcore.errors import (
    BookieError,
    BookieOverloadedError,
    BookieUnavailableError,
    DLError,
    EntryTooLargeError,
    MetadataError,
    WrongIncarnationError,
)
from dlcore.transport import wire

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Iterator,
        Sequence,
    )

    from dlcore.config import LedgerClientConfig
    from dlcore.ids import BookieId
    from dlcore.ledger.port import EntryRange, FollowUpdate

    Resolve = Callable[[BookieId], Awaitable[str]]
    _WriteCall = grpc.aio.StreamStreamCall[bytes, bytes]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

BATCH_BYTES_MAX = MIB
"""Adds that wait together travel in one message of about this size."""
_BATCH_REQUESTS_MAX = 1000
_BACKLOG_FACTOR = 4
"""A stream holds at most this many times the ledger client's own bounds on what is pending."""
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 1.0
_KEEPALIVE_MIN_S = 0.5


class GrpcBookieClient:
    """`dlcore.ledger.port.BookieClient` over gRPC; belongs to the event loop it is first used on.

    Args:
        resolve: returns a bookie's address as host:port; asked again for every new connection.
        cluster_id: of the namespace; a bookie of another cluster is refused.
        config: time-outs and bounds.
    """

    def __init__(self, resolve: Resolve, *, cluster_id: str, config: LedgerClientConfig) -> None:
        self._resolve = resolve
        self._cluster_id = cluster_id
        self._config = config
        self._peers: dict[BookieId, _Peer] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<GrpcBookieClient {state} bookies={len(self._peers)}>"

    def add_entry(
        self, bookie: BookieId, frame: bytes, *, is_recovery: bool = False
    ) -> asyncio.Future[None]:
        """Queue an add; see the port."""
        if len(frame) > ENTRY_SIZE_BYTES_MAX:
            return _failed(
                EntryTooLargeError(
                    f"{bookie}: an entry of {len(frame)} bytes, the limit is {ENTRY_SIZE_BYTES_MAX}"
                )
            )
        return self._submit(bookie, _Request(frame=frame, is_recovery=is_recovery))

    def write_lac(
        self, bookie: BookieId, *, ledger_id: int, last_add_confirmed: int
    ) -> asyncio.Future[None]:
        """Queue an explicit LAC; see the port."""
        return self._submit(bookie, _Request(lac=(ledger_id, last_add_confirmed)))

    async def read_lac(self, bookie: BookieId, *, ledger_id: int, fence: bool) -> int:
        """Read the LAC; see the port."""
        request = wire.encode_read_lac(
            incarnation=bookie.incarnation, ledger_id=ledger_id, fence=fence
        )
        return await self._call(bookie, "ReadLac", request, wire.decode_read_lac_response)

    async def read_entry(
        self, bookie: BookieId, *, ledger_id: int, entry_id: int, fence: bool
    ) -> bytes | memoryview:
        """Read one frame; see the port."""
        request = wire.encode_read_entry(
            incarnation=bookie.incarnation, ledger_id=ledger_id, entry_id=entry_id, fence=fence
        )
        return await self._call(bookie, "ReadEntry", request, wire.decode_read_entry_response)

    async def read_entries(
        self,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        last_entry_id: int,
        stride: int = 1,
    ) -> AsyncIterator[Sequence[bytes | memoryview]]:
        """Stream frames; see the port."""
        request = wire.encode_read_entries(
            incarnation=bookie.incarnation,
            ledger_id=ledger_id,
            first_entry_id=first_entry_id,
            last_entry_id=last_entry_id,
            stride=stride,
            chunk_bytes=self._config.read_chunk_bytes,
        )
        stream = self._stream(
            bookie,
            "ReadEntries",
            request,
            wire.decode_read_entries_response,
            timeout_s=self._config.read_timeout_s,
        )
        async with aclosing(stream) as chunks:
            async for frames in chunks:
                yield frames

    async def follow(
        self, bookie: BookieId, *, ledger_id: int, first_entry_id: int
    ) -> AsyncIterator[FollowUpdate]:
        """Follow a ledger; see the port.  A dead connection shows by its keepalive."""
        request = wire.encode_follow(
            incarnation=bookie.incarnation, ledger_id=ledger_id, first_entry_id=first_entry_id
        )
        stream = self._stream(
            bookie, "Follow", request, wire.decode_follow_response, timeout_s=None
        )
        async with aclosing(stream) as updates:
            async for update in updates:
                yield update
        raise BookieUnavailableError(f"{bookie}: it ended the follow stream")

    async def list_entries(self, bookie: BookieId, *, ledger_id: int) -> Sequence[EntryRange]:
        """List the entries held; see the port."""
        request = wire.encode_list_entries(incarnation=bookie.incarnation, ledger_id=ledger_id)
        return await self._call(bookie, "ListEntries", request, wire.decode_list_entries_response)

    async def aclose(self) -> None:
        """Close every connection; pending requests fail with `BookieUnavailableError`."""
        self._is_closed = True
        for peer in self._peers.values():
            await peer.aclose()

    def _peer(self, bookie: BookieId) -> _Peer:
        if self._is_closed:
            raise BookieUnavailableError(f"{bookie}: the bookie client is closed")
        peer = self._peers.get(bookie)
        if peer is None:
            peer = _Peer(bookie, self._resolve, cluster_id=self._cluster_id, config=self._config)
            self._peers[bookie] = peer
        return peer

    def _submit(self, bookie: BookieId, request: _Request) -> asyncio.Future[None]:
        try:
            self._peer(bookie).write_stream().submit(request)
        except BookieError as error:
            return _failed(error)
        return request.future

    async def _call(
        self, bookie: BookieId, method: str, request: bytes, decode: Callable[[bytes], _T]
    ) -> _T:
        timeout_s = self._config.read_timeout_s
        async with self._peer(bookie).reading(timeout_s=timeout_s) as channel:
            unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
            unary = channel.unary_unary(_path(method), None, None)
            async with asyncio.timeout(timeout_s):
                return _decode(bookie, decode, await unary(request))

    async def _stream(
        self,
        bookie: BookieId,
        method: str,
        request: bytes,
        decode: Callable[[bytes], _T],
        *,
        timeout_s: float | None,
    ) -> AsyncGenerator[_T, None]:
        async with self._peer(bookie).reading(timeout_s=self._config.read_timeout_s) as channel:
            streaming: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            streaming = channel.unary_stream(_path(method), None, None)
            call = streaming(request)
            try:
                while True:
                    async with asyncio.timeout(timeout_s):
                        data = await call.read()
                    if not isinstance(data, bytes):  # the end
                        return
                    yield _decode(bookie, decode, data)
            finally:
                call.cancel()


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """An add (`frame`) or an explicit LAC (`lac`: ledger id, LAC) on its way to a bookie."""

    frame: bytes | None = None
    is_recovery: bool = False
    lac: tuple[int, int] = (-1, -1)
    future: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    submitted_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        return 0 if self.frame is None else len(self.frame)


class _Backoff:
    """How long to leave a bookie alone after its connection failed."""

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._retry_s = 0.0

    async def wait(self) -> None:
        """Wait until the next attempt is due."""
        delay_s = self._retry_s - asyncio.get_running_loop().time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    def failed(self) -> None:
        """Note a failure; failures of one outage count once per attempt that was due."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._retry_s:
            self._delay_s = min(max(2 * self._delay_s, _BACKOFF_FIRST_S), _BACKOFF_MAX_S)
            self._retry_s = now_s + self._delay_s

    def succeeded(self) -> None:
        """Note an answer."""
        self._delay_s = self._retry_s = 0.0


@dataclass(slots=True, eq=False)
class _ReadChannel:
    """A channel that reads share; closed by whoever uses it last once it is retired."""

    channel: grpc.aio.Channel
    users: int = 0
    is_retired: bool = False


class _Peer:
    """One bookie: its address, its write stream, its channel for reads."""

    def __init__(
        self, bookie: BookieId, resolve: Resolve, *, cluster_id: str, config: LedgerClientConfig
    ) -> None:
        self.bookie = bookie
        self.config = config
        self.handshake = wire.Handshake(
            protocol_version=wire.PROTOCOL_VERSION,
            cluster_id=cluster_id,
            bookie_name=bookie.name,
            incarnation=bookie.incarnation,
        )
        self.backoff = _Backoff()
        self._resolve = resolve
        self._stream: _WriteStream | None = None
        self._stream_tasks: set[asyncio.Task[None]] = set()
        self._reads: _ReadChannel | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def connect(self) -> grpc.aio.Channel:
        """Return a new channel to the bookie's present address, after the back-off."""
        await self.backoff.wait()
        address = await self._resolve(self.bookie)
        return grpc.aio.insecure_channel(address, options=_channel_options(self.config))

    def write_stream(self) -> _WriteStream:
        """Return the stream in use, or start a new one."""
        if self._stream is None or self._stream.is_broken:
            self._stream = _WriteStream(self)
            task = asyncio.create_task(self._stream.run(), name=f"write-stream {self.bookie}")
            self._stream.task = task
            self._stream_tasks.add(task)
            task.add_done_callback(self._stream_tasks.discard)
        return self._stream

    @asynccontextmanager
    async def reading(self, *, timeout_s: float) -> AsyncIterator[grpc.aio.Channel]:
        """Lend the channel for reads; a failure of the connection retires it for later reads."""
        lent: _ReadChannel | None = None
        try:
            with _map_errors(self.bookie):
                async with asyncio.timeout(timeout_s), self._connecting:
                    lent = await self._read_channel()
                lent.users += 1
                yield lent.channel
            self.backoff.succeeded()
        except (BookieUnavailableError, WrongIncarnationError):
            self.backoff.failed()
            if lent is not None:
                self._retire(lent)
            raise
        finally:
            if lent is not None:
                lent.users -= 1
                if lent.is_retired and not lent.users:
                    await lent.channel.close()

    async def aclose(self) -> None:
        """Close every connection and wait for the tasks."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.fail(BookieUnavailableError(f"{self.bookie}: the client was closed"))
        tasks = list(self._stream_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._reads is not None:
            await self._reads.channel.close()

    async def _read_channel(self) -> _ReadChannel:
        if self._reads is None:
            channel = await self.connect()
            if self._is_closed:
                await channel.close()
                raise BookieUnavailableError(f"{self.bookie}: the client was closed")
            self._reads = _ReadChannel(channel)
        return self._reads

    def _retire(self, lent: _ReadChannel) -> None:
        lent.is_retired = True
        if self._reads is lent:
            self._reads = None


class _WriteStream:
    """One write stream from its handshake to its end; never used again once broken."""

    def __init__(self, peer: _Peer) -> None:
        self._peer = peer
        self._bookie = peer.bookie
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Request] = deque()
        self._sent: dict[int, _Request] = {}
        self._has_queued = asyncio.Event()
        self._pending_bytes = 0
        self._next_request_id = 1
        self._answered_s = -1.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_broken = False
        self.task: asyncio.Task[None] | None = None

    def submit(self, request: _Request) -> None:
        """Queue `request` behind all earlier ones."""
        assert not self.is_broken
        self._check_room(request)
        request.submitted_s = self._loop.time()
        self._pending_bytes += request.size_bytes
        self._queue.append(request)
        self._has_queued.set()
        if self._timer is None:
            self._timer = self._loop.call_later(self._peer.config.add_timeout_s, self._expire)

    def fail(self, error: DLError) -> None:
        """Break the stream: every request not yet answered fails like `error`."""
        self.is_broken = True
        requests = [*self._sent.values(), *self._queue]
        self._sent.clear()
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for request in requests:
            self._settle(request, type(error)(*error.args))  # one each: tracebacks grow on them

    async def run(self) -> None:
        """Carry the stream until it breaks; the owner's task."""
        error: DLError = BookieUnavailableError(f"{self._bookie}: the write stream stopped")
        try:
            with _map_errors(self._bookie):
                await self._converse()
        except DLError as caught:
            self._peer.backoff.failed()
            error = caught
            logger.debug("write stream ended bookie=%s reason=%s", self._bookie, caught)
        finally:
            self.fail(error)

    async def _converse(self) -> None:
        channel = await self._peer.connect()
        try:
            streaming: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
            streaming = channel.stream_stream(_path("Write"), None, None)
            call = streaming()
            await self._shake_hands(call)
            self._peer.backoff.succeeded()
            await self._pump(call)
        finally:
            await channel.close()

    async def _shake_hands(self, call: _WriteCall) -> None:
        await call.write(wire.encode_handshake(self._peer.handshake))
        _, failures = await self._receive(call)
        for _, error in failures:
            raise error

    async def _pump(self, call: _WriteCall) -> None:
        """Send and receive until either side fails."""
        sender = asyncio.create_task(self._send_all(call))
        receiver = asyncio.create_task(self._receive_all(call))
        try:
            await asyncio.wait((sender, receiver), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sender.cancel()
            receiver.cancel()
            outcomes = await asyncio.gather(receiver, sender, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _send_all(self, call: _WriteCall) -> None:
        while True:
            await self._has_queued.wait()
            self._has_queued.clear()
            while self._queue:
                await call.write(self._next_message())

    async def _receive_all(self, call: _WriteCall) -> None:
        while True:
            ok_request_ids, failures = await self._receive(call)
            self._answered_s = self._loop.time()
            for request_id in ok_request_ids:
                self._answer(request_id, None)
            for request_id, error in failures:
                self._answer(request_id, error)

    async def _receive(self, call: _WriteCall) -> tuple[list[int], list[tuple[int, BookieError]]]:
        data = await call.read()
        if not isinstance(data, bytes):
            raise BookieUnavailableError(f"{self._bookie}: it ended the write stream")
        ok_request_ids, failures = wire.decode_write_response(data)
        return ok_request_ids, [(id_, _named(self._bookie, error)) for id_, error in failures]

    def _next_message(self) -> bytes:
        """Move requests from the queue to `_sent`: adds of one kind, then LACs."""
        batch: list[_Request] = []
        size_bytes = 0
        while self._queue and len(batch) < _BATCH_REQUESTS_MAX:
            request = self._queue[0]
            if batch and not _may_follow(batch[-1], request):
                break
            if batch and size_bytes + request.size_bytes > BATCH_BYTES_MAX:
                break
            batch.append(self._queue.popleft())
            size_bytes += request.size_bytes
        first_request_id = self._next_request_id
        self._next_request_id += len(batch)
        self._sent.update(enumerate(batch, first_request_id))
        return wire.encode_write_batch(
            first_request_id=first_request_id,
            is_recovery=batch[0].is_recovery,
            frames=[request.frame for request in batch if request.frame is not None],
            lacs=[request.lac for request in batch if request.frame is None],
        )

    def _answer(self, request_id: int, error: BookieError | None) -> None:
        request = self._sent.pop(request_id, None)
        if request is not None:  # else it timed out before
            self._settle(request, error)

    def _settle(self, request: _Request, error: DLError | None) -> None:
        self._pending_bytes -= request.size_bytes
        if request.future.done():  # the caller cancelled it
            return
        if error is None:
            request.future.set_result(None)
        else:
            request.future.set_exception(error)

    def _check_room(self, request: _Request) -> None:
        config = self._peer.config
        pending = len(self._sent) + len(self._queue)
        if (
            pending >= _BACKLOG_FACTOR * config.pending_entries_max
            or self._pending_bytes + request.size_bytes
            > _BACKLOG_FACTOR * config.pending_bytes_max + ENTRY_SIZE_BYTES_MAX
        ):
            raise BookieOverloadedError(
                f"{self._bookie}: {pending} requests of {self._pending_bytes} bytes are pending"
            )

    def _expire(self) -> None:
        """Fail what waits too long; if the bookie said nothing at all since, give the stream up."""
        self._timer = None
        timeout_s = self._peer.config.add_timeout_s
        due_s = self._loop.time() - timeout_s
        oldest = self._oldest()
        if oldest is not None and oldest.submitted_s <= due_s:
            if self._answered_s < oldest.submitted_s:
                self._peer.backoff.failed()
                self.fail(self._timed_out())
                assert self.task is not None
                self.task.cancel()
                return
            self._fail_submitted_by(due_s)
            oldest = self._oldest()
        if oldest is not None:
            self._timer = self._loop.call_at(oldest.submitted_s + timeout_s, self._expire)

    def _oldest(self) -> _Request | None:
        for request in self._sent.values():  # in the order of submission
            return request
        return self._queue[0] if self._queue else None

    def _fail_submitted_by(self, due_s: float) -> None:
        while (request := self._oldest()) is not None and request.submitted_s <= due_s:
            if self._sent:
                del self._sent[next(iter(self._sent))]
            else:
                self._queue.popleft()
            self._settle(request, self._timed_out())

    def _timed_out(self) -> BookieUnavailableError:
        timeout_s = self._peer.config.add_timeout_s
        return BookieUnavailableError(f"{self._bookie}: no answer within {timeout_s} s")


def _may_follow(previous: _Request, request: _Request) -> bool:
    """Return whether one message can carry both: adds of one kind come before LACs."""
    if request.frame is None:
        return True
    return previous.frame is not None and previous.is_recovery == request.is_recovery


def _path(method: str) -> str:
    return f"/{wire.SERVICE}/{method}"


def _failed(error: BookieError) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def _named(bookie: BookieId, error: BookieError) -> BookieError:
    return type(error)(f"{bookie}: {error}")


def _decode(bookie: BookieId, decode: Callable[[bytes], _T], data: bytes) -> _T:
    try:
        return decode(data)
    except BookieError as error:
        raise _named(bookie, error) from error


@contextmanager
def _map_errors(bookie: BookieId) -> Iterator[None]:
    """Map foreign errors: whatever went wrong on the way, the answer is unknown."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        code = error.code().name
        raise BookieUnavailableError(f"{bookie}: {code}: {error.details()}") from error
    except TimeoutError as error:
        raise BookieUnavailableError(f"{bookie}: no answer in time") from error
    except MetadataError as error:
        raise BookieUnavailableError(f"{bookie}: its address is not known: {error}") from error
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise BookieUnavailableError(f"{bookie}: the connection was closed: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # grpc.aio reports a call whose channel was closed as cancelled, though nobody cancelled us.
        raise BookieUnavailableError(f"{bookie}: the connection was closed") from error


def _channel_options(config: LedgerClientConfig) -> list[tuple[str, int]]:
    keepalive_ms = int(max(config.add_timeout_s / 2, _KEEPALIVE_MIN_S) * 1000)
    return [
        ("grpc.max_send_message_length", wire.REQUEST_BYTES_MAX),
        ("grpc.max_receive_message_length", wire.RESPONSE_BYTES_MAX),
        # A frozen or unreachable peer is noticed within about the add time-out.
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.max_pings_without_data", 0),
        # A new channel is a new connection, without an earlier one's back-off.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.min_reconnect_backoff_ms", int(config.add_timeout_s * 1000)),
        # Bookies are addressed directly, whatever proxy the environment names for the web.
        ("grpc.enable_http_proxy", 0),
    ]
