"""Runs a `ProducerClient` on streams of an endpoint: performs its effects, feeds replies back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

from dlcore.backends.flight.streams import Attempts, EndedError, first_message, read, write
from dlcore.base.background import BackgroundTasks, fulfil, refuse
from dlcore.base.errors import DLError, UnexpectedError
from dlcore.flight.producer_client import (
    After,
    Call,
    Effect,
    Ended,
    Event,
    Fail,
    OpenStream,
    Progress,
    Replied,
    Retry,
    RetryDue,
    Send,
    SendDue,
    Sent,
    SilenceDue,
    StreamEnded,
)
from dlcore.flight.put import PutTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.base.ids import DLSN
    from dlcore.flight.producer_client import ProducerClient
    from dlcore.log.metadata.values import LogKey

Position: TypeAlias = "asyncio.Future[DLSN | None]"


class ProducerDriver:
    """A producer and its driver; callers are futures of positions.

    `opened` completes when a proxy has accepted the producer, and `over` when the machine is closed
    or failed.  `progress` is set whenever records became durable, or the machine failed.
    """

    def __init__(
        self, calls: Endpoint, log: LogKey, machine: ProducerClient[Position], patience_s: float
    ) -> None:
        self.machine = machine
        self._calls = calls
        self._log = log
        self._attempts = Attempts(calls, log.name, patience_s)
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks(self._on_defect)
        self._stream = _Stream()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.progress = asyncio.Event()

    def handle(self, event: Event[Position]) -> None:
        """Feed the machine, and perform its effects.  Raises: as `ProducerClient.handle`."""
        if effects := self.machine.handle(event):
            self.perform(effects)

    async def aclose(self) -> None:
        """Stop everything.  Idempotent."""
        self._stream.cancel()
        await self._tasks.aclose()

    def perform(  # noqa: C901 - one case for each kind
        self, effects: Sequence[Effect[Position]]
    ) -> None:
        """Perform effects of the machine."""
        for effect in effects:
            match effect:
                case Call.SEND_SOON if self._stream.tasks:
                    self._stream.orders.put_nowait(effect)  # its task runs in a later turn
                case Call.SEND_SOON:
                    self._loop.call_soon(self._on_send_due)
                case Send() | Call.END_SENDING:
                    self._stream.orders.put_nowait(effect)
                case Progress(answers):
                    self._attempts.succeeded()
                    for future, dlsn in answers:
                        fulfil(future, dlsn)
                    self.progress.set()
                case After(after_s):
                    self._stream.timer = self._loop.call_later(after_s, self._on_silence_due)
                case Call.OPENED:
                    self._calls.is_taken(self._log.name)
                    fulfil(self.opened, None)
                case Call.CLOSE_STREAM:
                    self._stream.cancel()
                case OpenStream():
                    self._stream = stream = _Stream()
                    stream.tasks.append(self._tasks.start(self._run_stream(stream, effect)))
                case Retry():
                    self._tasks.start(self._retry(effect))
                case Ended():
                    self._end(effect)
                case _:
                    assert_never(effect)

    def _end(self, ended: Ended[Position]) -> None:
        if ended.error is not None:
            refuse(self.opened, ended.error)
            for future in ended.tickets:
                refuse(future, ended.error)
        self.progress.set()
        fulfil(self.over, None)

    def _on_send_due(self) -> None:
        self.handle(SendDue(self._loop.time()))

    def _on_silence_due(self) -> None:
        self.handle(SilenceDue(self._loop.time()))

    async def _run_stream(self, stream: _Stream, opening: OpenStream) -> None:
        """Send all that is to be sent on a stream."""
        try:
            stream.call = call = self._attempts.begin()
            target = PutTarget(
                self._log.name,
                self._log.log_id,
                opening.producer,
                expected=opening.expected,
                positions=True,
                unreachable=self._calls.locations.unreached(self._log.name),
            )
            await write(call, first_message(target, opening.schema))
            stream.tasks.append(self._tasks.start(self._hear(call), name="hearing a proxy"))
            while True:
                order = await stream.orders.get()
                if isinstance(order, Send):
                    await write(call, order.data)
                    self.handle(Sent(self._loop.time()))
                elif order is Call.SEND_SOON:
                    self._on_send_due()
                else:
                    await call.done_writing()
        except EndedError as end:
            self._stream_ended(end)
        except DLError as error:
            self.handle(Fail(error))

    async def _hear(self, call: Any) -> None:
        try:
            while True:
                reply = await read(call)
                self.handle(Replied(reply, self._loop.time()))
        except EndedError as end:
            self._stream_ended(end)

    def _stream_ended(self, end: EndedError) -> None:
        self.handle(StreamEnded(end.error, end.again, end.location, end.retry_after_s))

    async def _retry(self, retry: Retry) -> None:
        end = EndedError(retry.error, True, retry.location, retry.retry_after_s)
        try:
            await self._attempts.failed(end)
        except DLError as error:
            self.handle(Fail(error))
        else:
            self.handle(RetryDue(self._loop.time()))

    def _on_defect(self, error: BaseException) -> None:
        # No task does this work now: callers that wait for it must not wait for ever.
        text = f"the writer of log {self._log.name!r} broke: {error!r}"
        self.handle(Fail(UnexpectedError(text)))


class _Stream:
    """One stream, and all that ends with it; it has tasks while it is open."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[Send | Call] = asyncio.Queue()
        self.call: Any = None
        self.tasks: list[asyncio.Task[None]] = []
        self.timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """End the stream.  Idempotent."""
        if self.timer is not None:
            self.timer.cancel()
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        if self.call is not None:
            self.call.cancel()
