"""DoPut of a task of an atomic append: its records become durable extents outside of any log.

The last message has the staged extents.  They enter logs when an append with them commits
(`appends.py`), which may happen at another proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from dlcore.base.access.rights import Right
from dlcore.base.background import BackgroundTasks, outcome_of, side_tasks
from dlcore.base.errors import DLError, OverCapacityError
from dlcore.base.places import Places
from dlcore.flight.calls import send_reply
from dlcore.flight.needs import Need
from dlcore.flight.put import PutMessage, log_of
from dlcore.flight.replies import StagingReady, StagingReply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.flight.calls import Context
    from dlcore.flight.needs import Pass
    from dlcore.flight.put import PutDecoder, StagingTarget
    from dlcore.log.staging.faces import StagingWriter
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.writing.rates import StreamRates

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
SILENCE_S = 300.0
"""A stream that sends nothing for this time is ended, so that a waiting one is served."""
_PARTING_S = 1.0
KEPT_MAX = 64
KEPT_S = 600.0
"""Most writers that are kept for the next stream of their identity, and for how long."""


@dataclass(frozen=True, slots=True)
class _Kept:
    identity: str
    writer: StagingWriter
    since_s: float


class Stagings:
    """Serves the streams of one proxy that stage.

    Each stream needs the memory of a staging writer.  Therefore `staging_max` streams are served at
    once, and others wait in order.  The writer of a shared identity stays open for the identity's
    next stream, so that the number of ledgers does not grow with the streams.
    """

    def __init__(self, namespace: DirectNamespace, config: ProxyConfig) -> None:
        self._namespace = namespace
        self._turns = Places(config.staging_max)
        self._message_bytes_max = config.message_bytes_max
        self._kept: list[_Kept] = []  # the longest unused first
        self._loop = asyncio.get_running_loop()
        self._looking: asyncio.TimerHandle | None = None
        self._closings = BackgroundTasks()

    def configure(self, config: ProxyConfig) -> None:
        """Serve another number of streams at once."""
        self._turns.resize(config.staging_max)

    async def serve(
        self,
        context: Context,
        decoder: PutDecoder,
        target: StagingTarget,
        rates: StreamRates,
        entry: Pass,
    ) -> None:
        """Serve one stream to its end; each of its logs needs the right to append.

        Raises:
            DLError: the stream is refused; nothing of it can be committed.
        """
        throttled_s, known = 0.0, set[str]()
        async with self._turns, self._lend(target) as writer:
            ready = StagingReady(target.staging, self._message_bytes_max)
            await send_reply(context, StagingReply(ready=ready))
            try:
                while (message := await _read(context)) is not None:
                    batch, log = decoder.decode(message), log_of(message)
                    if log not in known:
                        await entry.require([Need(Right.APPEND, log)])
                        known.add(log)
                    records, size_bytes = batch.num_rows, len(message.body)
                    delay_s = rates.to(log).take(records, size_bytes, now_s=self._loop.time())
                    await asyncio.sleep(delay_s)
                    throttled_s += delay_s
                    await _to_its_end(writer.write_batch(log, batch))
                staged = await _to_its_end(writer.stage())
            except DLError:
                await _part(context)
                raise
        # Outside of the block: a client that does not receive must not delay waiting streams.
        throttled_ms = math.ceil(throttled_s * 1000)
        await send_reply(context, StagingReply(staged=staged, throttled_ms=throttled_ms))

    @contextlib.asynccontextmanager
    async def _lend(self, target: StagingTarget) -> AsyncIterator[StagingWriter]:
        writer = self._take(target) or await self._namespace.open_staging_writer(
            identity=target.staging
        )
        try:
            await writer.begin_round(target.round)
            yield writer
        except BaseException:
            await self._give_up(target, writer)
            raise
        if target.shared:
            self._put_back(target, writer)
        else:
            await writer.aclose()

    def _take(self, target: StagingTarget) -> StagingWriter | None:
        found = [each for each in self._kept if target.shared and each.identity == target.staging]
        if not found:
            return None
        # The last used one, so that the others become old and are closed.
        self._kept.remove(found[-1])
        return found[-1].writer

    async def _give_up(self, target: StagingTarget, writer: StagingWriter) -> None:
        if not target.shared:
            await _close_quietly(writer, delete=True)
            return
        # Keep the ledger: earlier streams may have staged uncommitted extents in it.
        try:
            await writer.discard()
        except DLError:
            await _close_quietly(writer)
        else:
            self._put_back(target, writer)

    def _put_back(self, target: StagingTarget, writer: StagingWriter) -> None:
        self._kept.append(_Kept(target.staging, writer, self._loop.time()))
        self._look_later()
        while len(self._kept) > KEPT_MAX:
            self._close_later(self._kept.pop(0).writer)

    def _close_later(self, writer: StagingWriter) -> None:
        # A task, because the client that put back another writer may go away meanwhile.
        self._closings.start(_close_quietly(writer), name=f"closing {writer!r}")

    def _look_later(self) -> None:
        if self._kept and self._looking is None:
            self._looking = self._loop.call_at(self._kept[0].since_s + KEPT_S, self._look)

    def _look(self) -> None:
        """Close the writers that were unused for long; a timer calls this."""
        self._looking = None
        # The same sum as for the timer: with other rounding it could stay due for ever.
        now_s = self._loop.time()
        while self._kept and self._kept[0].since_s + KEPT_S <= now_s:
            self._close_later(self._kept.pop(0).writer)
        self._look_later()

    async def aclose(self) -> None:
        """Close the kept writers; staged extents can still be committed."""
        if self._looking is not None:
            self._looking.cancel()
        while self._kept:
            await _close_quietly(self._kept.pop().writer)
        await self._closings.finish()


async def _to_its_end(call: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of a writer's call; if the client goes away, the call still completes."""
    async with side_tasks() as tasks:
        task = tasks.start(call, name="staging")
        try:
            return await outcome_of(task)
        # The writer may be kept for another stream, so no call of it may be cut off in the middle.
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise


async def _close_quietly(writer: StagingWriter, *, delete: bool = False) -> None:
    try:
        await writer.aclose(delete=delete)
    except DLError as error:
        logger.info("%r was not closed, auto-recovery removes its leftovers: %s", writer, error)


async def _read(context: Context) -> PutMessage | None:
    try:
        async with asyncio.timeout(SILENCE_S):
            data: Any = await context.read()
    except TimeoutError as error:
        raise OverCapacityError(
            f"a stream that stages sent nothing for {SILENCE_S:g} s, and other streams wait: stage "
            "again, and send all records without pauses"
        ) from error
    return PutMessage.parse(data) if isinstance(data, bytes) else None


async def _part(context: Context) -> None:
    """Tell a client that it is refused, and give it some time to end the stream.

    If the stream ended at once, clients that are sending could lose the status.
    """
    await send_reply(context, StagingReply(refused=True))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PARTING_S):
            while await context.read() is not grpc.aio.EOF:
                pass
