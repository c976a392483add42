"""One DoPut: batches in, acknowledgements out, until the client has sent all or the log moves.

A stream has two tasks: one receives messages while there is room, the other sends acknowledgements.
The server sends JSON objects: first `ready`, then cumulative acknowledgements, and `draining`
before it ends a stream because the log is released.  A stream to a log of another proxy is refused,
or forwarded to that proxy if the client asks for this.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    LogElsewhereError,
    LogNotReadyError,
    SequenceGapError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.calls import send_reply
from dlcore.flight.put import (
    PutDecoder,
    PutMessage,
    PutTarget,
    StagingTarget,
    parse_target,
    sequence_of,
)
from dlcore.flight.replies import Draining, End, PutReply, Ready
from dlcore.log.writing.producers import Mark
from dlcore.proxy.writing.acks import Ack, StreamAcks
from dlcore.proxy.writing.budget import (
    RETRY_AFTER_S,
    ByteBudget,
    Holder,
    ReceivedBytes,
    StreamCounts,
)
from dlcore.proxy.writing.rates import Rate, Rates
from dlcore.proxy.writing.route import Route

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractContextManager

    import grpc
    import pyarrow as pa

    from dlcore.log.entries.stamp import Claim
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.writing.forwarding import Forwarding, Refusal
    from dlcore.proxy.writing.owned_log import OwnedLog
    from dlcore.proxy.writing.owner import LogOwner
    from dlcore.proxy.writing.rates import StreamRates
    from dlcore.proxy.writing.staging import Stagings

_PARTING_S = 1.0
STALL_S = 30.0
"""If a log does not accept a message for this time, the stream is ended."""
_SOON_S = 0.01
"""If a stream that may receive gets no message within this time, the next stream may."""
_SCHEMA_BYTES = 64 * 1024
"""A larger schema counts as a waiting message."""

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, pb.PutResult]"


@dataclass(frozen=True, slots=True)
class _Condition:
    """The expected position of the log's last record; None: the log must be empty."""

    last: DLSN | None


class PutService:
    """Serves the streams of one proxy."""

    def __init__(
        self, owner: LogOwner, forwarding: Forwarding, stagings: Stagings, config: ProxyConfig
    ) -> None:
        self._owner = owner
        self._forwarding = forwarding
        self._stagings = stagings
        self._config = config
        self._budget = ByteBudget(
            config.pending_bytes_max,
            log_bytes_max=config.log_pending_bytes_max,
            principal_bytes_max=config.principal_pending_bytes_max,
        )
        self._received = ReceivedBytes(
            config.received_bytes_max, principal_bytes_max=config.principal_pending_bytes_max
        )
        self._streams = StreamCounts()

        def rate(scope: str) -> Rate:
            per_s = (getattr(config, f"{scope}{unit}_per_s") for unit in ("records", "bytes"))
            return Rate(records_per_s=next(per_s), bytes_per_s=next(per_s))

        self._rates = Rates(
            stream=rate("stream_"),
            log=rate("log_"),
            principal=rate("principal_"),
            proxy=rate(""),
            wait_max_s=config.throttle_max_s,
        )

    async def serve(self, context: Context) -> None:
        """Serve one stream to its end.

        Raises:
            DLError: the stream is refused, after the acknowledgement of all accepted records; or
                no more records can be acknowledged.
            OwnerStatusError: the status of a forwarded stream.
        """
        wish = self._forwarding.wish(context)
        first = await _read(context)
        if first is None:
            return
        target, decoder = parse_target(first.told.flight_descriptor), PutDecoder(first)
        schema_bytes = len(first.told.data_header)
        opening = first.told if wish.forward else None
        del first  # free its memory during the waits
        name = target.staging if isinstance(target, StagingTarget) else target.log
        principal = await self._forwarding.client_of(context, wish)
        holder, rates = Holder(name, principal), self._rates.join(name, principal)
        with self._received.hold(holder, schema_bytes if schema_bytes > _SCHEMA_BYTES else 0):
            if isinstance(target, StagingTarget):
                with self._count(principal):
                    await self._stagings.serve(context, decoder, target, rates)
            else:
                limits = _Limits(holder, self._budget, self._received, rates)
                # Before the limits here are checked: the owner may be another proxy with room.
                log = await self._find(context, target, opening, limits)
                if log is None:
                    return
                with (
                    self._count(principal),
                    self._streams.join(f"log {name!r}", self._config.log_streams_max),
                ):
                    await self._serve(context, decoder, target, limits, log)

    async def _find(
        self,
        context: Context,
        target: PutTarget,
        opening: pb.FlightData | None,
        limits: _Limits,
    ) -> OwnedLog | None:
        """Return the log to write to; None after another proxy has served the stream.

        Args:
            context: the client's call.
            target: the stream's target.
            opening: the stream's first message for another proxy, if it may be forwarded.
            limits: the stream's limits.

        Raises: as `LogOwner.get` and `Forwarding.put`.
        """
        client = limits.holder.principal
        route = Route(self._owner.location, target.unreachable)
        while True:
            try:
                return await self._owner.get(
                    target.log, log_id=target.log_id, unreachable=route.unreachable
                )
            except LogElsewhereError as error:
                if opening is None or client is None:
                    raise
                ask = partial(self._forward, context, target, opening, limits, route)
                if await self._forwarding.follow(f"log {target.log!r}", error, route, ask):
                    return None

    async def _forward(
        self,
        context: Context,
        target: PutTarget,
        opening: pb.FlightData,
        limits: _Limits,
        route: Route,
        location: str,
    ) -> Refusal | None:
        passing_over = msgspec.structs.replace(target, unreachable=route.unreachable)
        opening.flight_descriptor.type = pb.FlightDescriptor.CMD
        opening.flight_descriptor.cmd = msgspec.json.encode(passing_over)
        client = str(limits.holder.principal)
        first = opening.SerializeToString()
        return await self._forwarding.put(context, location, first, client, limits.hold_here)

    def _count(self, principal: str | None) -> AbstractContextManager[None]:
        streams_max = 0 if principal is None else self._config.principal_streams_max
        return self._streams.join(str(principal), streams_max)

    async def _serve(
        self,
        context: Context,
        decoder: PutDecoder,
        target: PutTarget,
        limits: _Limits,
        log: OwnedLog,
    ) -> None:
        log.check(decoder.schema)
        config = self._config
        ready = Ready(
            log=target.log,
            window_records=config.window_records,
            window_bytes=config.window_bytes,
            message_bytes_max=config.message_bytes_max,
        )
        acks = StreamAcks(
            window_records=config.window_records,
            window_bytes=config.window_bytes,
            positions=target.positions,
        )
        stream = _Stream(context, log, acks, limits, partial(self._lost, target.log, log))
        log.join(stream.rouse)
        try:
            if target.producer is not None:
                claim, last = await self.begin(target.log, log, target.producer)
                ready = msgspec.structs.replace(ready, producer=claim, sequence=last)
                stream.number(claim, last + 1)
            if not isinstance(target.expected, msgspec.UnsetType):
                stream.expect(None if target.expected is None else DLSN.parse(target.expected))
            await send_reply(context, PutReply(ready=ready))
            await stream.exchange(decoder)
        finally:
            log.leave(stream.rouse)

    async def begin(self, name: str, log: OwnedLog, producer: str | Claim) -> tuple[Claim, int]:
        """Begin or continue an incarnation of a producer; see `OwnedLog.begin`."""
        try:
            async with self._owner.bounded():
                return await log.begin(producer)
        except (WriteError, AlreadyClosedError) as error:
            raise log.ending or self._lost(name, log, error) from error

    def _lost(self, name: str, log: OwnedLog, error: DLError) -> DLError:
        """Release a log that cannot be written any more; return the error for its clients."""
        told = WriteError(
            f"log {name!r} is lost to this proxy, and unacknowledged records may be in it or not: "
            f"{type(error).__name__}: {error}"
        )
        self._owner.lost(name, log, told)
        return told


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits of one stream beside its window: shared memory, waiting messages, and rates."""

    holder: Holder
    budget: ByteBudget
    received: ReceivedBytes
    rates: StreamRates

    @contextlib.asynccontextmanager
    async def hold_here(self, size_bytes: int) -> AsyncGenerator[None, None]:
        """Wait for memory for a message to another proxy, and hold it during the block.

        Raises: LogNotReadyError: too many bytes wait already, or the wait was too long.
        """
        if not self.budget.take_now(self.holder, size_bytes):
            with self.received.hold(self.holder, size_bytes):
                try:
                    async with asyncio.timeout(STALL_S):
                        await self.budget.take(self.holder, size_bytes)
                except TimeoutError as error:
                    raise _given_up(self.holder.log) from error
        try:
            yield
        finally:
            self.budget.give(self.holder, size_bytes)


class _Stream:
    """One client's stream to a log that the proxy owns."""

    def __init__(
        self,
        context: Context,
        log: OwnedLog,
        acks: StreamAcks,
        limits: _Limits,
        lost: Callable[[DLError], DLError],
    ) -> None:
        self._context = context
        self._log = log
        self._acks = acks
        self._holder = limits.holder
        self._budget = limits.budget
        self._received = limits.received
        self._rates = limits.rates
        self._throttled_s = 0.0  # since the last acknowledgement
        self._lost = lost
        self._room = asyncio.Event()
        self._wake = asyncio.Event()
        self._failure: DLError | None = None
        self._has_dropped = False  # messages that came during the log's release
        self._claim: Claim | None = None
        self._sequence = 0  # the next record's sequence, with a claim
        self._has_numbered = False
        self._condition: _Condition | None = None

    def number(self, claim: Claim, first: int) -> None:
        """Number the records for a producer, from `first` on unless a message has its sequence."""
        self._claim, self._sequence = claim, first

    def expect(self, last: DLSN | None) -> None:
        """Write the batch only if `last` is the position of the log's last record."""
        self._condition = _Condition(last)

    def rouse(self) -> None:
        """Wake both tasks, after a change of the log or of the stream."""
        self._room.set()
        self._wake.set()

    async def exchange(self, decoder: PutDecoder) -> None:
        """Receive batches and send acknowledgements until the end of the stream."""
        taking = asyncio.create_task(self._take(decoder), name="taking a stream")
        taking.add_done_callback(lambda _: self.rouse())
        try:
            await self._tell(taking)
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def _take(self, decoder: PutDecoder) -> None:
        """Receive batches until the client has sent all; drop them once the log is released."""
        try:
            while await self._take_one(decoder):
                pass
        except DLError as error:
            _forget_frames(error)
            raise error.with_traceback(None) from error.__cause__

    async def _take_one(self, decoder: PutDecoder) -> bool:
        """Receive a message and free it; return False if the client has sent all."""
        await self._wait_for_room()
        message = await self._next()
        if message is None:
            return False
        log = self._log
        if log.ending is not None:
            self._has_dropped = True
            return True
        batch = decoder.decode(message)
        if not batch.num_rows:
            return True
        mark = self._mark_of(message, batch.num_rows)
        size_bytes = len(message.body)
        del message  # only the batch is needed during the wait
        try:
            await self._accept(batch, size_bytes, mark)
        except DLError as error:
            if error is not self._log.ending:
                raise
            self._has_dropped = True
        return True

    def _mark_of(self, message: PutMessage, count: int) -> Mark | None:
        """Return the claim and first sequence of a batch; they continue those of the last batch."""
        if self._claim is None:
            return None
        told = sequence_of(message)
        if told is not None and told != self._sequence and self._has_numbered:
            raise SequenceGapError(
                f"producer {self._claim.name!r}: sequence {told} does not follow in this stream, "
                f"expected {self._sequence}",
                expected=self._sequence,
            )
        mark = Mark(self._claim, self._sequence if told is None else told)
        self._sequence = mark.first + count
        self._has_numbered = True
        return mark

    async def _wait_for_room(self) -> None:
        while not (self._acks.has_room or self._log.ending):
            self._room.clear()
            await self._room.wait()

    async def _next(self) -> PutMessage | None:
        """Return the next message.

        If the log has no room, only few of its streams receive at once, so that waiting messages
        stay with the clients and take no memory here.
        """
        log = self._log
        if log.has_room and not log.reading_turns.locked():
            return await _read(self._context)
        async with log.reading_turns:
            await log.wait_for_room()
            reading = asyncio.create_task(_read(self._context), name="reading a stream")
            try:
                await asyncio.wait([reading], timeout=_SOON_S)
            except BaseException:
                reading.cancel()
                raise
        try:
            return await reading
        finally:
            reading.cancel()

    async def _admit(self, records: int, size_bytes: int) -> None:
        """Take memory for a batch, when its rates allow it and its log has room.

        Raises:
            OverCapacityError: a rate refuses the batch.
            LogNotReadyError: too many bytes wait already, or the log had no room for long.
        """
        delay_s = 0.0
        if self._rates.is_limited:
            now_s = asyncio.get_running_loop().time()
            delay_s = self._rates.take(records, size_bytes, now_s=now_s)
        log = self._log
        if (
            not delay_s
            and self._condition is None
            and log.writer.has_capacity
            and self._budget.take_now(self._holder, size_bytes)
        ):
            return
        with self._received.hold(self._holder, size_bytes):
            await self._wait_for_rate(delay_s)
            try:
                async with asyncio.timeout(STALL_S):
                    if self._condition is not None:
                        await self._require_end()
                    await self._take_memory(size_bytes)
            except TimeoutError as error:
                raise _given_up(log.name) from error

    async def _require_end(self) -> None:
        if await _read(self._context) is not None:
            raise ConfigurationError(
                "a conditional write comes in one message, but a second one arrived"
            )

    async def _wait_for_rate(self, delay_s: float) -> None:
        """Delay a batch by its rate, and count the delay; a release of the log ends the delay."""
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        until_s = begun_s + delay_s
        while not self._log.ending and (left_s := until_s - clock()) > 0:
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._room.wait()
        if until_s > begun_s:
            self._throttled_s += clock() - begun_s

    async def _accept(self, batch: pa.RecordBatch, size_bytes: int, mark: Mark | None) -> None:
        await self._admit(batch.num_rows, size_bytes)
        try:
            if self._condition is None:
                accepted = await self._log.accept(batch, mark)
            else:
                accepted = await self._log.accept_if(batch, self._condition.last, mark)
        except BaseException as error:
            self._budget.give(self._holder, size_bytes)
            ending = self._log.ending
            if isinstance(error, AlreadyClosedError) and ending is not None:
                raise ending from error  # the log was released in order while the batch waited
            if isinstance(error, (WriteError, AlreadyClosedError)):
                raise self._lost(error) from error
            raise
        self._log.accepted_bytes += size_bytes
        self._acks.accepted(batch.num_rows, size_bytes, fresh=accepted.fresh)
        answered = partial(self._answered, size_bytes, is_placed=accepted.is_placed)
        accepted.future.add_done_callback(answered)

    async def _take_memory(self, size_bytes: int) -> None:
        """Wait for the log, then take memory: a batch that waits for its log holds no memory."""
        log, holder = self._log, self._holder
        while True:
            with log.waiting():
                await log.writer.wait_for_capacity()
            await self._budget.take(holder, size_bytes, log.waiting)
            if log.writer.has_capacity:
                return
            self._budget.give(holder, size_bytes)

    def _answered(self, size_bytes: int, future: asyncio.Future[Any], *, is_placed: bool) -> None:
        """Note that a batch is durable, or failed; the client may be gone by then."""
        self._budget.give(self._holder, size_bytes)
        error = future.exception()
        if error is None:
            self._acks.durable(future.result() if is_placed else None)
        else:
            assert isinstance(error, DLError)
            self._failure = self._failure or self._lost(error)
        self.rouse()

    async def _tell(self, taking: asyncio.Task[None]) -> None:
        """Send acknowledgements until the stream or the log has ended, and all is acknowledged."""
        log = self._log
        await self._tell_durable(taking)
        if not (taking.done() or log.is_lost):
            await self._part(taking)
            if taking.done():
                await self._tell_durable(taking)  # batches may have been accepted meanwhile
        if taking.done():
            taking.result()
        if log.ending is not None and (log.is_lost or self._has_dropped or not taking.done()):
            raise log.ending

    async def _tell_durable(self, taking: asyncio.Task[None]) -> None:
        while True:
            # Cleared before the state is read: a change after this line wakes the wait below.
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            if self._log.is_lost:
                return
            ack = self._acks.next_ack()
            if ack is not None:
                await self._acknowledge(ack)
            elif self._acks.is_settled and (taking.done() or self._log.ending is not None):
                return
            else:
                await self._wake.wait()

    async def _acknowledge(self, ack: Ack) -> None:
        throttled_ms, self._throttled_s = math.ceil(self._throttled_s * 1000), 0.0
        reply = PutReply(
            acked=ack.records,
            dlsn=_text(ack.dlsn),
            ends=[End(each.records, _text(each.dlsn), each.together) for each in ack.ends],
            throttled_ms=throttled_ms,
        )
        await send_reply(self._context, reply)

    async def _part(self, taking: asyncio.Task[None]) -> None:
        """Tell a client that its log is released, and give it some time to end the stream.

        If the stream ended at once, some clients would not read the last acknowledgements.
        """
        ending = self._log.ending
        location = ending.location if isinstance(ending, LogElsewhereError) else None
        await send_reply(self._context, PutReply(draining=Draining(location)))
        await asyncio.wait([taking], timeout=_PARTING_S)


def _given_up(log: str) -> LogNotReadyError:
    return LogNotReadyError(
        f"log {log!r}: a message waited for {STALL_S:g} s, and was not written: write it again",
        retry_after_s=RETRY_AFTER_S,
    )


def _forget_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error and of its causes.

    Their frames would keep the refused message in memory until the stream ends.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _text(dlsn: DLSN | None) -> str | None:
    return None if dlsn is None else str(dlsn)


async def _read(context: Context) -> PutMessage | None:
    """Return the next message; None if the client has sent all."""
    data: Any = await context.read()
    return PutMessage.parse(data) if isinstance(data, bytes) else None
