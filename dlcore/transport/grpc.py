"""The bookie client over gRPC: one write stream and one channel for reads per bookie.

Every failure of a connection is `BookieUnavailableError`: unknown.  Reads have a channel of their
own, so that a chunk on its way to a slow reader does not delay the results of adds.

gRPC's own reconnection and retries stay out of it: a connection that failed is dropped with its
channel, and the bookie's address is asked for again: a bookie that restarted has another port.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc

from dlcore.config import ENTRY_SIZE_BYTES_MAX
from dlcore.errors import (
    BookieError,
    BookieUnavailableError,
    EntryTooLargeError,
    MetadataError,
    WrongIncarnationError,
)
from dlcore.transport import wire
from dlcore.transport.backoff import Backoff
from dlcore.transport.write_stream import Request, WriteStream, named

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
    from dlcore.transport.write_stream import WriteCall

    Resolve = Callable[[BookieId], Awaitable[str]]

_T = TypeVar("_T")

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
        return self._submit(bookie, Request(frame=frame, is_recovery=is_recovery))

    def write_lac(
        self, bookie: BookieId, *, ledger_id: int, last_add_confirmed: int
    ) -> asyncio.Future[None]:
        """Queue an explicit LAC; see the port."""
        return self._submit(bookie, Request(lac=(ledger_id, last_add_confirmed)))

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
        stream = self._stream(
            bookie,
            "ListEntries",
            request,
            wire.decode_list_entries_response,
            timeout_s=self._config.read_timeout_s,
        )
        ranges: list[EntryRange] = []
        pages = 0
        async with aclosing(stream) as answers:
            async for page in answers:
                ranges += page
                pages += 1
        if not pages:
            raise BookieUnavailableError(f"{bookie}: it ended the list before its first page")
        return ranges

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

    def _submit(self, bookie: BookieId, request: Request) -> asyncio.Future[None]:
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
        self._config = config
        self._handshake = wire.Handshake(
            protocol_version=wire.PROTOCOL_VERSION,
            cluster_id=cluster_id,
            bookie_name=bookie.name,
            incarnation=bookie.incarnation,
        )
        self._backoff = Backoff()
        self._resolve = resolve
        self._stream: WriteStream | None = None
        self._stream_tasks: set[asyncio.Task[None]] = set()
        self._reads: _ReadChannel | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def _connect(self) -> grpc.aio.Channel:
        """Return a new channel to the bookie's present address, after the back-off."""
        await self._backoff.wait()
        address = await self._resolve(self.bookie)
        return grpc.aio.insecure_channel(address, options=_channel_options(self._config))

    def write_stream(self) -> WriteStream:
        """Return the stream in use, or start a new one."""
        if self._stream is None or self._stream.is_broken:
            self._stream = WriteStream(
                self.bookie,
                handshake=self._handshake,
                connect=self._open_write_call,
                backoff=self._backoff,
                config=self._config,
            )
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
            self._backoff.succeeded()
        except (BookieUnavailableError, WrongIncarnationError):
            self._backoff.failed()
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

    @asynccontextmanager
    async def _open_write_call(self) -> AsyncIterator[WriteCall]:
        with _map_errors(self.bookie):
            channel = await self._connect()
            try:
                streaming: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
                streaming = channel.stream_stream(_path("Write"), None, None)
                yield streaming()
            finally:
                await channel.close()

    async def _read_channel(self) -> _ReadChannel:
        if self._reads is None:
            channel = await self._connect()
            if self._is_closed:
                await channel.close()
                raise BookieUnavailableError(f"{self.bookie}: the client was closed")
            self._reads = _ReadChannel(channel)
        return self._reads

    def _retire(self, lent: _ReadChannel) -> None:
        lent.is_retired = True
        if self._reads is lent:
            self._reads = None


def _path(method: str) -> str:
    return f"/{wire.SERVICE}/{method}"


def _failed(error: BookieError) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def _decode(bookie: BookieId, decode: Callable[[bytes], _T], data: bytes) -> _T:
    try:
        return decode(data)
    except BookieError as error:
        raise named(bookie, error) from error


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
        # gRPC also pings to measure bandwidth, and while such a ping is out it sends no other.
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.http2.max_pings_without_data", 0),
        # A new channel is a new connection, without an earlier one's back-off.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.min_reconnect_backoff_ms", int(config.add_timeout_s * 1000)),
        # Bookies are addressed directly, whatever proxy the environment names for the web.
        ("grpc.enable_http_proxy", 0),
    ]
