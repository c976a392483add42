"""Atomic appends through proxies: any proxy stages records, and any proxy commits them.

Staged records are durable, so they survive the loss of the proxy, and another proxy commits them.
Records that were sent but not yet staged are sent again, unless they were too many to be kept for
this.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import pyarrow as pa
from msgspec import structs
from typing_extensions import override

from dlcore.backends.flight.planning import act, arrow_of
from dlcore.backends.flight.streams import (
    Attempts,
    EndedError,
    ended,
    first_message,
    write,
)
from dlcore.base.background import BackgroundTasks, end_tasks, reported_to_callers
from dlcore.base.clock import SystemClock
from dlcore.base.errors import ConfigurationError, WriteError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight import actions
from dlcore.flight.actions import AppendRequest
from dlcore.flight.producer_client import MESSAGE_BYTES, too_long
from dlcore.flight.put import ROWS_MAX, PutMessage, Staged, StagingTarget
from dlcore.flight.replies import StagingReply
from dlcore.flight.sending import framed
from dlcore.log.reading.scan import CommitResult
from dlcore.log.staging.faces import StagedAppend, StagingWriter

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Collection, Iterator, Sequence

    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.log.metadata.commits import AppendRun, SharedStaging
    from dlcore.log.metadata.segment import StagedExtent

KEPT_BYTES_MAX = 8 * 1024 * 1024
"""Most bytes that are kept.  Up to this size records wait in memory for `stage`, and are sent again
if the proxy is lost; beyond it they are sent at once and not kept."""


class _Kept:
    """The messages of a stream that can be sent again, as long as they are not too many."""

    def __init__(self) -> None:
        self.messages: list[bytes] | None = []
        """All messages; None once they are too many."""
        self.size_bytes = 0
        """Bytes of the messages that were kept."""

    def keep(self, message: bytes) -> None:
        """Keep one more."""
        assert self.messages is not None
        self.messages.append(message)
        self.size_bytes += len(message)

    @property
    def is_full(self) -> bool:
        """Whether the next ones are not kept any more."""
        return self.size_bytes > KEPT_BYTES_MAX


class FlightStagingWriter(StagingWriter):
    """Stages records through proxies."""

    def __init__(self, calls: Endpoint, identity: str, *, shared: bool, patience_s: float) -> None:
        super().__init__(identity)
        self._calls = calls
        self._target = StagingTarget(identity, shared)
        self._patience_s = patience_s
        self._tasks = BackgroundTasks(reported_to_callers)
        self._forget()

    def __repr__(self) -> str:
        return f"<StagingWriter identity={self._target.staging!r}>"

    def _forget(self) -> None:
        self._call: Any = None
        self._message_bytes_max = 0  # limit of the proxy
        self._answer: asyncio.Task[list[StagedExtent]] | None = None
        self._schema: pa.Schema | None = None
        self._kept = _Kept()
        self._attempts = Attempts(self._calls, self._target.staging, self._patience_s)

    @override
    async def _write_batches(self, parts: Sequence[tuple[str, pa.RecordBatch]]) -> None:
        for log, batch in parts:
            await self._write_batch(log, batch)

    @override
    async def _write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        self._require_open()
        self._calls.require_open()  # records may be kept for long before they are sent
        schema = batch.schema.remove_metadata()
        if self._schema is None:
            self._schema = schema
        elif self._schema != schema:
            raise ConfigurationError(
                f"batches that are staged together need the same columns: expected "
                f"{self._schema.names}, got {schema.names}; a column of transaction ids is null in "
                "all rows, or filled in every row"
            )
        beside = msgspec.json.encode(Staged(log))
        async with self._whole():
            for piece in _pieces(batch):
                await self._send(framed(piece.serialize(), beside))

    @contextlib.asynccontextmanager
    async def _whole(self) -> AsyncIterator[None]:
        """End the stream if the block fails: otherwise the proxy could stage a part of the records.

        Kept records are then sent again on another stream.  Records that are not kept are lost, and
        the next call raises an error.
        """
        try:
            yield
        except BaseException:
            await self._end_call()
            raise

    async def _send(self, message: bytes) -> None:
        kept = self._kept
        if kept.messages is None:
            try:
                await self._write(message)
            except EndedError as end:
                raise await self._lost(end) from end
            return
        kept.keep(message)
        if kept.is_full:
            await self._send_kept(kept.messages)
            kept.messages = None

    async def _send_kept(self, kept: list[bytes]) -> None:
        """Open streams until one has taken all kept records."""
        while self._call is None:
            self._require_open()
            self._call = call = self._attempts.begin()
            try:
                await write(call, first_message(self._target, self._schema))
                ready = (await _read(call)).ready
                assert ready is not None
                self._message_bytes_max = ready.message_bytes_max
                self._calls.is_reached = True
                self._answer = self._tasks.start(_hear(call), name="hearing of what is staged")
                for message in kept:
                    await self._write(message)
            except EndedError as end:
                await self._end_call()
                await self._attempts.failed(end)

    async def _write(self, message: bytes) -> None:
        # The proxy has ended the stream early: its reason is better than that of a failed write.
        if self._heard().done():
            self._heard().result()
        for part in self._parts(message):
            await write(self._call, part)

    def _parts(self, message: bytes) -> Iterator[bytes]:
        """Yield a message, in parts if it exceeds the proxy's limit."""
        if len(message) <= self._message_bytes_max:
            yield message
            return
        parsed = PutMessage.parse(message)
        batch = pa.ipc.read_record_batch(arrow_of(parsed), self._schema)
        if batch.num_rows == 1:
            raise too_long(message, self._message_bytes_max)
        half = batch.num_rows // 2
        for rows in (batch.slice(0, half), batch.slice(half)):
            yield from self._parts(framed(rows.serialize(), parsed.data.app_metadata))

    def _heard(self) -> asyncio.Task[list[StagedExtent]]:
        if self._answer is None:
            raise WriteError("earlier records are lost: call discard, and write all of them again")
        return self._answer

    async def _end_call(self) -> None:
        call, answer = self._call, self._answer
        self._call = self._answer = None
        if call is not None:
            call.cancel()
        if answer is not None:
            await end_tasks(answer)

    @override
    async def _begin_round(self, number: int) -> None:
        self._require_open()
        self._target = structs.replace(self._target, round=number)

    @override
    async def _stage(self) -> list[StagedExtent]:
        self._require_open()
        if self._schema is None:
            return []
        async with self._whole():
            while True:
                if self._kept.messages is not None:
                    await self._send_kept(self._kept.messages)
                try:
                    if not self._heard().done():
                        await self._call.done_writing()
                    staged = await self._heard()
                except EndedError as end:
                    if self._kept.messages is None:
                        raise await self._lost(end) from end
                    await self._end_call()
                    await self._attempts.failed(end)
                else:
                    self._forget()
                    return staged

    async def _lost(self, end: EndedError) -> Exception:
        await self._end_call()
        if not end.again:
            return end.error
        return WriteError(
            f"the stream that staged {self._kept.size_bytes >> 20} MiB or more was lost: "
            f"{end.error}"
        )

    @override
    async def _discard(self) -> None:
        await self._end_call()
        self._forget()

    @override
    async def _aclose(self, *, delete: bool) -> None:  # proxies delete by themselves
        await self._discard()


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches that fit into a message; a single large row may not fit."""
    rows = batch.num_rows
    if rows <= 1 or (batch.nbytes <= MESSAGE_BYTES and rows <= ROWS_MAX):
        if rows:
            yield batch
        return
    yield from _pieces(batch.slice(0, rows // 2))
    yield from _pieces(batch.slice(rows // 2))


async def _read(call: Any) -> StagingReply:
    try:
        data = await call.read()
    except grpc.aio.AioRpcError as error:
        raise await ended(call) from error
    if data is grpc.aio.EOF:
        raise await ended(call)
    return msgspec.json.decode(pb.PutResult.FromString(data).app_metadata, type=StagingReply)


async def _hear(call: Any) -> list[StagedExtent]:
    """Return the staged extents.  Raises: EndedError."""
    staged = (await _read(call)).staged
    if staged is None:
        # The proxy refuses the records.  If we went on sending, gRPC could lose its status.
        await call.done_writing()
        await _read(call)
        raise AssertionError("a proxy that refuses says why")
    return staged


class FlightStagedAppend(StagedAppend):
    """One atomic append to any number of logs; the counterpart of `StagedAppend` of `dlcore`.

    After a failure the request is retried with the same token, until a proxy reports its result.
    """

    def __init__(self, calls: Endpoint, request: AppendRequest, *, patience_s: float) -> None:
        super().__init__(
            request.identity,
            request.version,
            shared=request.shared,
            run=request.run,
            lock_timeout_s=request.lock_timeout_s,
        )
        self._calls = calls
        self._request = request
        shared = request.shared
        self._writer = FlightStagingWriter(
            calls,
            request.identity if shared is None else shared.identity,
            shared=shared is not None,
            patience_s=patience_s,
        )
        self._staged: list[StagedExtent] = []

    def __repr__(self) -> str:
        return f"<StagedAppend {self._request.identity!r} v{self._request.version}>"

    @classmethod
    def begin(
        cls,
        calls: Endpoint,
        identity: str,
        version: int,
        *,
        shared: SharedStaging | None,
        run: AppendRun | None,
        lock_timeout_s: float | None,
        strict: bool,
        patience_s: float,
    ) -> FlightStagedAppend:
        """Begin an append."""
        request = AppendRequest(
            identity=identity,
            version=version,
            token=SystemClock().new_token(),
            shared=shared,
            run=run,
            lock_timeout_s=lock_timeout_s,
            strict=strict,
        )
        return cls(calls, request, patience_s=patience_s)

    @override
    async def write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        await self._writer.write_batch(log, batch)

    @override
    async def stage(self) -> list[StagedExtent]:
        self._staged += await self._writer.stage()
        return list(self._staged)

    @override
    async def commit(
        self, extents: Sequence[StagedExtent] | None = None, *, replaces: Collection[str] = ()
    ) -> CommitResult:
        if extents is None:
            extents = await self.stage()
        asked = msgspec.structs.replace(
            self._request.with_extents(extents), replaces=sorted(replaces)
        )
        if asked.run is not None:
            run = replace(asked.run, commits_ns=time.monotonic_ns())
            asked = msgspec.structs.replace(asked, run=run)
        # Before it answers, a proxy may wait this long for the locks of the logs.
        wait_s = asked.lock_timeout_s or 0.0
        answer = await act(self._calls, actions.COMMIT_APPEND, asked, extra_s=wait_s)
        is_done = answer.already_committed
        return CommitResult(committed=not is_done, already_committed=is_done)

    @override
    async def abort(self, extents: Sequence[StagedExtent] | None = None) -> None:
        await self.aclose()
        asked = self._request.with_extents(extents or self._staged)
        await act(self._calls, actions.ABORT_APPEND, asked)

    @override
    async def aclose(self) -> None:
        await self._writer.aclose()
