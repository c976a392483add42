"""Runs a `ProducerServer` on a DoPut: receives, writes and replies as it asks for.

A stream has two tasks: one receives messages and waits until they may be written, the other sends
replies.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, assert_never

import msgspec

from dlcore.base.background import side_tasks
from dlcore.base.errors import DLError
from dlcore.flight.calls import send_reply
from dlcore.flight.producer_server import (
    Accepted,
    After,
    AwaitEnd,
    BatchDurable,
    BatchFailed,
    BeginProducer,
    Begun,
    Call,
    Effect,
    EndStream,
    Event,
    LogEnding,
    LoseLog,
    Received,
    Refused,
    Reply,
    Signal,
    Write,
)
from dlcore.proxy.writing.admission import read_message, receive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.flight.producer_server import ProducerServer
    from dlcore.log.entries.stamp import Claim
    from dlcore.proxy.callers import Stay
    from dlcore.proxy.writing.admission import Context, Limits
    from dlcore.proxy.writing.owned_log import OwnedLog


class Custody(Protocol):
    """The service that has acquired the logs of this proxy."""

    async def begin(self, name: str, log: OwnedLog, producer: str | Claim) -> tuple[Claim, int]:
        """Begin or continue an incarnation of a producer; see `OwnedLog.begin`."""
        ...

    def lost(self, name: str, log: OwnedLog, error: DLError) -> DLError:
        """Release a log that cannot be written any more; return the error for its clients."""
        ...


class ProducerStream:
    """One client's stream to a log that the proxy owns, and its driver."""

    def __init__(
        self,
        context: Context,
        log: OwnedLog,
        machine: ProducerServer,
        limits: Limits,
        custody: Custody,
    ) -> None:
        self._context = context
        self._log = log
        self._machine = machine
        self._limits = limits
        self._custody = custody
        self._taking: asyncio.Queue[Call | AwaitEnd | Write] = asyncio.Queue()
        self._replies: asyncio.Queue[BeginProducer | Reply | EndStream | Exception] = (
            asyncio.Queue()
        )
        self._released = asyncio.Event()
        self._parting: asyncio.TimerHandle | None = None

    async def serve(self, stay: Stay) -> None:
        """Serve the stream to its end, or to that of the stay.

        Raises: the error with which it ends.
        """
        self._log.streams.join(self._on_release)
        async with side_tasks() as tasks:
            tasks.start(self._take(), name="taking a stream")
            try:
                self._handle(Signal.BEGIN)
                if self._log.ending is not None:
                    self._on_release()
                stay.when_ended(self._on_stay_ended)
                while await self._reply(await self._replies.get()):
                    pass
            finally:
                self._log.streams.leave(self._on_release)
                if self._parting is not None:
                    self._parting.cancel()

    def _handle(self, event: Event) -> None:
        self._perform(self._machine.handle(event))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply() | BeginProducer() | EndStream():
                    self._replies.put_nowait(effect)
                case Call() | AwaitEnd() | Write():
                    self._taking.put_nowait(effect)
                case LoseLog(error):
                    self._custody.lost(self._limits.holder.log, self._log, error)
                case After(after_s):
                    over = partial(self._handle, Signal.PARTING_OVER)
                    self._parting = asyncio.get_running_loop().call_later(after_s, over)
                case _:
                    assert_never(effect)

    def _on_release(self) -> None:
        """Note that the log accepts no more records, for a reason that may have changed."""
        log = self._log
        assert log.ending is not None
        self._released.set()
        self._handle(LogEnding(log.ending, log.is_lost))

    def _on_stay_ended(self, reason: DLError) -> None:
        """Take no more records, as on a release of the log."""
        self._released.set()
        self._handle(LogEnding(reason, is_lost=False))

    # Replies

    async def _reply(self, effect: BeginProducer | Reply | EndStream | Exception) -> bool:
        """Perform an effect towards the client; return False at the end of the stream."""
        match effect:
            case Reply(reply):
                await send_reply(self._context, reply)
                self._handle(Signal.REPLIED)
            case BeginProducer(producer):
                try:
                    begun = await self._custody.begin(self._limits.holder.log, self._log, producer)
                except DLError as error:
                    self._handle(Refused(error))
                else:
                    self._handle(Begun(*begun))
            case EndStream(error):
                if error is not None:
                    raise error
                return False
            case Exception():
                raise effect
            case _:
                assert_never(effect)
        return True

    # Messages

    async def _take(self) -> None:
        try:
            while True:
                await self._take_one()
        except Exception as error:  # noqa: BLE001 - a defect must not leave the client waiting
            self._replies.put_nowait(error)

    async def _take_one(self) -> None:
        """Receive or write one message, and free it."""
        effect = await self._taking.get()
        try:
            event = await self._answer_of(effect)
        except DLError as error:
            event = Refused(error)
        self._handle(event)

    async def _answer_of(self, effect: Call | AwaitEnd | Write) -> Event:
        match effect:
            case Write():
                return await self._write(effect)
            case Call.RECEIVE:
                message = await receive(self._context, self._log)
            case AwaitEnd(size_bytes):
                async with self._limits.stalled(size_bytes):
                    message = await read_message(self._context)
            case _:
                assert_never(effect)
        return Signal.ALL_SENT if message is None else Received(message)

    async def _write(self, write: Write) -> Accepted:
        """Write a batch when it may be, and hold its memory until it is durable or failed."""
        batch, expected, mark = write.batch, write.expected, write.mark
        if isinstance(expected, msgspec.UnsetType):
            accept = partial(self._log.accept, batch, mark)
        else:
            accept = partial(self._log.accept_if, batch, expected, mark)
        accepted, throttled_s = await self._limits.write(
            self._log, batch.num_rows, write.size_bytes, self._released, accept
        )
        answered = partial(self._on_answer, is_placed=accepted.is_placed)
        accepted.future.add_done_callback(answered)
        return Accepted(accepted.fresh, throttled_s)

    def _on_answer(self, future: asyncio.Future[Any], *, is_placed: bool) -> None:
        """Note that a batch is durable, or failed; the client may be gone by then."""
        error = future.exception()
        if error is None:
            self._handle(BatchDurable(future.result() if is_placed else None))
        else:
            assert isinstance(error, DLError)
            self._handle(BatchFailed(error))
