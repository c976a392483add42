"""Admission of messages: turns to receive them, and the rates, memory and log of one stream."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from dlcore.base.background import side_tasks
from dlcore.base.clock import steady_s
from dlcore.base.errors import LogNotReadyError
from dlcore.base.metrics import Durations
from dlcore.flight.put import PutMessage
from dlcore.proxy.writing.budget import RETRY_AFTER_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    import grpc

    from dlcore.base.proto import flight_pb2 as pb
    from dlcore.proxy.writing.budget import ByteBudget, Holder, ReceivedBytes
    from dlcore.proxy.writing.owned_log import Accepted, OwnedLog
    from dlcore.proxy.writing.rates import StreamRates

STALL_S = 30.0
"""If a log does not accept a message for this time, the stream is ended."""
_SOON_S = 0.01
"""If a stream that may receive gets no message within this time, the next stream may."""

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, pb.PutResult]"


@dataclass(slots=True)
class PutFigures:
    """The counts of all streams of a proxy."""

    append_times: Durations = field(default_factory=Durations)
    """Times of batches, from their acceptance until they are durable."""
    records: int = 0
    """New records that were accepted."""
    size_bytes: int = 0
    """Bytes of the messages with them."""
    repeated_records: int = 0
    """Records that their producer sent again, and that were in the log already."""
    failed_batches: int = 0
    throttled_s: float = 0.0
    """Time for which rates delayed batches."""
    streams: int = 0
    """Streams that are open now."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one stream beside its window: shared memory, waiting messages, and rates."""

    holder: Holder
    budget: ByteBudget
    received: ReceivedBytes
    rates: StreamRates
    figures: PutFigures = field(default_factory=PutFigures)

    @contextlib.asynccontextmanager
    async def hold_here(self, size_bytes: int) -> AsyncGenerator[None, None]:
        """Wait for memory for a message to another proxy, and hold it during the block.

        Raises: LogNotReadyError: too many bytes wait already, or the wait was too long.
        """
        # A message that need not wait shall not count as waiting, and needs no timer.
        if not self.budget.take_now(self.holder, size_bytes):
            async with self.stalled(size_bytes):
                await self.budget.take(self.holder, size_bytes)
        try:
            yield
        finally:
            self.budget.give(self.holder, size_bytes)

    @contextlib.asynccontextmanager
    async def stalled(self, size_bytes: int) -> AsyncGenerator[None, None]:
        """Count a message as waiting during the block, which ends after `STALL_S`.

        Raises: LogNotReadyError: too many bytes wait already, or the wait was too long.
        """
        with self.received.hold(self.holder, size_bytes):
            try:
                async with asyncio.timeout(STALL_S):
                    yield
            except TimeoutError as error:
                raise LogNotReadyError(
                    f"log {self.holder.log!r}: a message waited for {STALL_S:g} s, and was not "
                    "written: write it again",
                    retry_after_s=RETRY_AFTER_S,
                ) from error

    async def write(
        self,
        log: OwnedLog,
        records: int,
        size_bytes: int,
        released: asyncio.Event,
        accept: Callable[[], Awaitable[Accepted]],
    ) -> tuple[Accepted, float]:
        """Let a log accept a batch when it may, and hold memory until it is durable or failed.

        Returns: what `accept` returns, and the seconds for which rates delayed it.

        Raises: as `admit` and `accept`.
        """
        throttled_s = await self.admit(log, records, size_bytes, released)
        try:
            accepted = await accept()
        # Also when cancelled: no future of a batch gives the memory back.
        except BaseException:
            self.budget.give(self.holder, size_bytes)
            raise
        log.room.accepted_bytes += size_bytes
        figures = self.figures
        figures.records += accepted.fresh
        figures.size_bytes += size_bytes
        figures.repeated_records += records - accepted.fresh
        figures.throttled_s += throttled_s
        accepted.future.add_done_callback(partial(self._on_answer, size_bytes, steady_s()))
        return accepted, throttled_s

    def _on_answer(self, size_bytes: int, begun_s: float, future: asyncio.Future[Any]) -> None:
        """Note that a batch is durable, or failed; the client may be gone by then."""
        self.budget.give(self.holder, size_bytes)
        if future.exception() is None:
            self.figures.append_times.note(steady_s() - begun_s)
        else:
            self.figures.failed_batches += 1

    async def admit(
        self, log: OwnedLog, records: int, size_bytes: int, released: asyncio.Event
    ) -> float:
        """Take memory for a batch, when its rates allow it and its log has room.

        `released` ends the delay by rates.

        Returns: the seconds for which its rates delayed it.

        Raises:
            OverCapacityError: a rate refuses the batch.
            LogNotReadyError: too many bytes wait already, or the log had no room for long.
        """
        delay_s = 0.0
        if self.rates.is_limited:
            now_s = asyncio.get_running_loop().time()
            delay_s = self.rates.take(records, size_bytes, now_s=now_s)
        # The usual case, without a timer: nothing is limited, and log and memory have room.
        has_room = not delay_s and log.writer.machine.has_room
        if has_room and self.budget.take_now(self.holder, size_bytes):
            return 0.0
        if delay_s:
            with self.received.hold(self.holder, size_bytes):
                delay_s = await _delayed(delay_s, released)
        async with self.stalled(size_bytes):
            await self._take_memory(log, size_bytes)
        return delay_s

    async def _take_memory(self, log: OwnedLog, size_bytes: int) -> None:
        """Wait for the log, then take memory: a batch that waits for its log holds no memory."""
        holder, budget = self.holder, self.budget
        while True:
            with log.room.waiting():
                await log.writer.wait_for_capacity()
            await budget.take(holder, size_bytes, log.room.waiting)
            # The log may have filled up while memory was awaited; others can use the memory
            # meanwhile.
            if log.writer.machine.has_room:
                return
            budget.give(holder, size_bytes)


async def _delayed(delay_s: float, released: asyncio.Event) -> float:
    """Wait for a time, or for a release of the log; return the seconds."""
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await released.wait()
    return clock() - begun_s


async def read_message(context: Context) -> PutMessage | None:
    """Return the next message; None if the client has sent all."""
    data: Any = await context.read()
    return PutMessage.parse(data) if isinstance(data, bytes) else None


async def receive(context: Context, log: OwnedLog) -> PutMessage | None:
    """Return the next message as `read_message`.

    If the log has no room, only few of its streams receive at once, so that waiting messages
    stay with the clients and take no memory here.
    """
    if log.room.is_free and not log.room.reading_turns.locked():
        return await read_message(context)
    async with side_tasks() as tasks:
        async with log.room.reading_turns:
            await log.room.wait_free()
            reading = tasks.start(read_message(context), name="reading a stream")
            await asyncio.wait([reading], timeout=_SOON_S)
        return await reading
