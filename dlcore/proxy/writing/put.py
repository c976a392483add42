"""One DoPut: batches in, acknowledgements out, until the client has sent all or the log moves.

Two tasks: one takes messages while there is room, the other tells what has become durable.  What
the server sends are JSON objects: first `ready`, then cumulative acknowledgements, and `draining`
before it ends a stream of a log that it lets go of.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from dlcore.errors import AlreadyClosedError, DLError, LogElsewhereError, WriteError
from dlcore.proto import flight_pb2 as pb
from dlcore.proxy.flight.calls import send
from dlcore.proxy.flight.put import PutDecoder, parse_target
from dlcore.proxy.writing.acks import StreamAcks
from dlcore.proxy.writing.budget import ByteBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc
    import pyarrow as pa

    from dlcore.ids import DLSN
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.writing.owned_log import OwnedLog
    from dlcore.proxy.writing.owner import LogOwner

_PARTING_S = 1.0

Context: TypeAlias = "grpc.aio.ServicerContext[pb.FlightData, pb.PutResult]"


class PutService:
    """Serves the streams of one proxy."""

    def __init__(self, owner: LogOwner, config: ProxyConfig) -> None:
        self._owner = owner
        self._config = config
        self._budget = ByteBudget(config.pending_bytes_max)

    async def serve(self, context: Context) -> None:
        """Serve one stream to its end.

        Raises:
            DLError: what refused it, once all that was accepted before is acknowledged; or why
                nothing more is.
        """
        first = await _read(context)
        if first is None:
            return
        target = parse_target(first.flight_descriptor)
        decoder = PutDecoder(first)
        log = await self._owner.get(target.log)
        log.check(decoder.schema)
        config = self._config
        ready = {
            "log": target.log,
            "window_records": config.window_records,
            "window_bytes": config.window_bytes,
        }
        acks = StreamAcks(window_records=config.window_records, window_bytes=config.window_bytes)
        stream = _Stream(context, log, acks, self._budget, partial(self._lost, target.log, log))
        log.join(stream.rouse)
        try:
            await _send(context, ready=ready)
            await stream.exchange(decoder)
        finally:
            log.leave(stream.rouse)

    def _lost(self, name: str, log: OwnedLog, error: DLError) -> DLError:
        """Let go of a log that cannot be written to any more; return what to tell of it."""
        told = WriteError(
            f"log {name!r} is lost to this proxy, and what was not acknowledged may be in it or "
            f"not: {type(error).__name__}: {error}"
        )
        self._owner.lost(name, log, told)
        return told


class _Stream:
    """One client's stream to a log that the proxy owns."""

    def __init__(
        self,
        context: Context,
        log: OwnedLog,
        acks: StreamAcks,
        budget: ByteBudget,
        lost: Callable[[DLError], DLError],
    ) -> None:
        self._context = context
        self._log = log
        self._acks = acks
        self._budget = budget
        self._lost = lost
        self._room = asyncio.Event()
        self._wake = asyncio.Event()
        self._failure: DLError | None = None
        self._has_dropped = False  # messages that came when the log was let go of

    def rouse(self) -> None:
        """Look at what has changed."""
        self._room.set()
        self._wake.set()

    async def exchange(self, decoder: PutDecoder) -> None:
        """Take and tell, to the end."""
        taking = asyncio.create_task(self._take(decoder), name="taking a stream")
        taking.add_done_callback(lambda _: self.rouse())
        try:
            await self._tell(taking)
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def _take(self, decoder: PutDecoder) -> None:
        """Take batches until the client has sent all; once the log is let go of, drop them."""
        log = self._log
        while True:
            await self._wait_for_room()
            data = await _read(self._context)
            if data is None:
                return
            if log.ending is not None:
                self._has_dropped = True
                continue
            batch = decoder.decode(data)
            if not batch.num_rows:
                continue
            try:
                await self._accept(batch, len(data.data_body))
            except DLError as error:
                if error is not self._log.ending:
                    raise
                self._has_dropped = True

    async def _wait_for_room(self) -> None:
        while not (self._acks.has_room or self._log.ending):
            self._room.clear()
            await self._room.wait()

    async def _accept(self, batch: pa.RecordBatch, size_bytes: int) -> None:
        await self._budget.take(size_bytes)
        try:
            await self._log.writer.wait_for_capacity()
            future = await self._log.accept(batch)
        except BaseException as error:
            self._budget.give(size_bytes)
            if isinstance(error, (WriteError, AlreadyClosedError)):
                raise self._lost(error) from error
            raise
        self._acks.accepted(batch.num_rows, size_bytes)
        future.add_done_callback(partial(self._answered, size_bytes))

    def _answered(self, size_bytes: int, future: asyncio.Future[DLSN]) -> None:
        """Note that a batch is durable, or failed; also when the client has gone meanwhile."""
        self._budget.give(size_bytes)
        error = future.exception()
        if error is None:
            self._acks.durable(future.result())
        else:
            assert isinstance(error, DLError)
            self._failure = self._failure or self._lost(error)
        self.rouse()

    async def _tell(self, taking: asyncio.Task[None]) -> None:
        """Tell what is durable, until all is that was taken and nothing more will be."""
        log = self._log
        while True:
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            if log.is_lost:
                break
            ack = self._acks.next_ack()
            if ack is not None:
                await _send(self._context, acked=ack.records, dlsn=str(ack.dlsn))
            elif self._acks.is_settled and (taking.done() or log.ending is not None):
                break
            else:
                await self._wake.wait()
        if taking.done():
            taking.result()
        elif not log.is_lost:
            await self._part(taking)
        if log.ending is not None and (log.is_lost or self._has_dropped or not taking.done()):
            raise log.ending

    async def _part(self, taking: asyncio.Task[None]) -> None:
        """Tell a client that its log is let go of, and let it end the stream, for a while.

        Ended at once, some clients would not read what they were told before.
        """
        ending = self._log.ending
        location = ending.location if isinstance(ending, LogElsewhereError) else None
        await _send(self._context, draining={"location": location})
        await asyncio.wait([taking], timeout=_PARTING_S)


async def _read(context: Context) -> pb.FlightData | None:
    """Return the next message; None if the client has sent all."""
    message: Any = await context.read()
    return message if isinstance(message, pb.FlightData) else None


async def _send(context: Context, **message: object) -> None:
    await send(context, pb.PutResult(app_metadata=msgspec.json.encode(message)))
