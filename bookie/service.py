"""The bookie's gRPC service: requests in, storage calls, statuses out.

Whatever a client sends gets an answer of its own and harms nobody else: a request that makes no
sense is BAD_REQUEST, and nothing of it is stored.  A failure of the service itself is never "no".
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import grpc

from bookie.write_stream import WriteStream
from dlcore.errors import (
    BadRequestError,
    BookieUnavailableError,
    DLError,
    WrongIncarnationError,
)
from dlcore.proto import bookie_pb2 as pb
from dlcore.transport import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bookie.storage import LedgerStorage
    from dlcore.ids import BookieId
    from dlcore.ledger.port import FollowUpdate

    _Context = grpc.aio.ServicerContext[bytes, bytes]

LISTED_RANGES_MAX = 4096
"""Ranges of entries in one page of a list: small enough that making it delays nobody."""
_SHUTTING_DOWN = "the bookie is shutting down"
_Response = TypeVar(
    "_Response",
    pb.ReadLacResponse,
    pb.ReadEntryResponse,
    pb.ReadEntriesResponse,
    pb.FollowResponse,
    pb.ListEntriesResponse,
)


class BookieService:
    """Serves one storage.

    Args:
        storage: what to serve; stays its opener's.
        bookie: who this is; requests meant for another incarnation are refused.
        cluster_id: of the namespace.
        connection_bytes_max: entry bytes of one write stream that are not yet durable; beyond it
            the stream is not read.
    """

    def __init__(
        self,
        storage: LedgerStorage,
        *,
        bookie: BookieId,
        cluster_id: str,
        connection_bytes_max: int,
    ) -> None:
        self._storage = storage
        self._connection_bytes_max = connection_bytes_max
        self._handshake = wire.Handshake(
            protocol_version=wire.PROTOCOL_VERSION,
            cluster_id=cluster_id,
            bookie_name=bookie.name,
            incarnation=bookie.incarnation,
        )
        self._write_streams: set[WriteStream] = set()
        self._idle_followers: set[asyncio.Task[object]] = set()
        self._is_draining = False

    def rpc_handler(self) -> grpc.GenericRpcHandler:
        """Return the handlers to register with a gRPC server."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            wire.SERVICE,
            {
                "Write": grpc.stream_stream_rpc_method_handler(self._write, None, None),
                "ReadLac": unary(self._read_lac, None, None),
                "ReadEntry": unary(self._read_entry, None, None),
                "ReadEntries": stream(self._read_entries, None, None),
                "Follow": stream(self._follow, None, None),
                "ListEntries": stream(self._list_entries, None, None),
                "GetInfo": unary(self._get_info, None, None),
            },
        )

    async def drain(self) -> None:
        """Take nothing more that writes; return when all that was taken is durable and answered."""
        self._is_draining = True
        for follower in self._idle_followers:
            follower.cancel()
        await asyncio.gather(*(stream.drain() for stream in list(self._write_streams)))

    async def _write(self, _requests: object, context: _Context) -> None:
        stream = WriteStream(
            context,
            self._storage,
            expected=self._handshake,
            bytes_max=self._connection_bytes_max,
        )
        self._write_streams.add(stream)
        if self._is_draining:
            stream.begin_drain()
        try:
            await stream.run()
        finally:
            self._write_streams.discard(stream)

    async def _read_lac(self, data: bytes, _context: _Context) -> bytes:
        try:
            request = wire.decode_request(pb.ReadLacRequest, data)
            self._check_ledger(request.incarnation, request.ledger_id)
            if request.fence:
                self._refuse_if_draining()
            lac = await self._storage.read_lac(request.ledger_id, fence=request.fence)
        except DLError as error:
            return _failure(pb.ReadLacResponse, error)
        return pb.ReadLacResponse(status=pb.OK, last_add_confirmed=lac).SerializeToString()

    async def _read_entry(self, data: bytes, _context: _Context) -> bytes:
        try:
            request = wire.decode_request(pb.ReadEntryRequest, data)
            self._check_ledger(request.incarnation, request.ledger_id)
            _check_at_least(0, entry_id=request.entry_id)
            if request.fence:
                self._refuse_if_draining()
            frame = await self._storage.read_entry(
                request.ledger_id, request.entry_id, fence=request.fence
            )
        except DLError as error:
            return _failure(pb.ReadEntryResponse, error)
        return pb.ReadEntryResponse(status=pb.OK, frame=bytes(frame)).SerializeToString()

    async def _read_entries(self, data: bytes, context: _Context) -> None:
        try:
            request = wire.decode_request(pb.ReadEntriesRequest, data)
            self._check_ledger(request.incarnation, request.ledger_id)
            _check_at_least(0, first_entry_id=request.first_entry_id)
            _check_at_least(request.first_entry_id, last_entry_id=request.last_entry_id)
            _check_at_least(1, stride=request.stride, chunk_bytes=request.chunk_bytes)
            chunks = self._storage.read_entries(
                request.ledger_id,
                first_entry_id=request.first_entry_id,
                last_entry_id=request.last_entry_id,
                stride=request.stride,
                chunk_bytes=min(request.chunk_bytes, wire.CHUNK_BYTES_MAX),
            )
            async with aclosing(chunks):
                async for frames in chunks:
                    await context.write(wire.encode_read_entries_response(frames))
        except DLError as error:
            await context.write(_failure(pb.ReadEntriesResponse, error))

    async def _follow(self, data: bytes, context: _Context) -> None:
        try:
            request = wire.decode_request(pb.FollowRequest, data)
            self._check_ledger(request.incarnation, request.ledger_id)
            _check_at_least(0, first_entry_id=request.first_entry_id)
            updates = self._storage.follow(request.ledger_id, first_entry_id=request.first_entry_id)
            async with aclosing(updates):
                while (update := await self._next_update(updates)) is not None:
                    await context.write(wire.encode_follow_response(update))
        except DLError as error:
            await context.write(_failure(pb.FollowResponse, error))

    async def _next_update(self, updates: AsyncIterator[FollowUpdate]) -> FollowUpdate | None:
        """Wait for an update; a drain ends the wait by cancelling the task that waits."""
        self._refuse_if_draining()
        task = asyncio.current_task()
        assert task is not None
        self._idle_followers.add(task)
        try:
            return await anext(updates, None)
        except asyncio.CancelledError:
            if not self._is_draining or task.uncancel():  # the client cancelled, too
                raise
            raise BookieUnavailableError(_SHUTTING_DOWN) from None
        finally:
            self._idle_followers.discard(task)

    async def _list_entries(self, data: bytes, context: _Context) -> None:
        try:
            request = wire.decode_request(pb.ListEntriesRequest, data)
            self._check_ledger(request.incarnation, request.ledger_id)
            ranges = self._storage.list_entries(request.ledger_id)
        except DLError as error:
            await context.write(_failure(pb.ListEntriesResponse, error))
            return
        for start in range(0, max(len(ranges), 1), LISTED_RANGES_MAX):
            page = ranges[start : start + LISTED_RANGES_MAX]
            await context.write(wire.encode_list_entries_response(page))

    async def _get_info(self, _data: bytes, _context: _Context) -> bytes:
        stats = self._storage.stats()
        return pb.InfoResponse(
            bookie_name=self._handshake.bookie_name,
            incarnation=self._handshake.incarnation,
            read_only=stats.is_read_only,
            ledger_count=stats.ledger_count,
            stored_bytes=stats.stored_bytes,
            disk_free_bytes=stats.disk_free_bytes,
            disk_total_bytes=stats.disk_total_bytes,
            damaged_entries=stats.damaged_entry_count,
            repaired_entries=stats.repaired_entry_count,
        ).SerializeToString()

    def _check_ledger(self, incarnation: str, ledger_id: int) -> None:
        if incarnation != self._handshake.incarnation:
            raise WrongIncarnationError(
                f"this is {self._handshake.bookie_name}, incarnation "
                f"{self._handshake.incarnation}; not {incarnation}"
            )
        _check_at_least(0, ledger_id=ledger_id)

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise BookieUnavailableError(_SHUTTING_DOWN)


def _check_at_least(lowest: int, **values: int) -> None:
    for name, value in values.items():
        if value < lowest:
            raise BadRequestError(f"{name}={value}: expected at least {lowest}")


def _failure(kind: type[_Response], error: DLError) -> bytes:
    status, detail = wire.status_of(error)
    return kind(status=status, detail=detail).SerializeToString()
