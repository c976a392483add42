"""One write stream to one bookie: requests queued in call order, futures settled as answers come.

Adds that wait together share a message.  Every request is answered or fails within
`add_timeout_s`: one that alone stays unanswered fails alone; if the bookie said nothing at all in
that time, the whole stream counts as broken.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dlcore.config import ENTRY_SIZE_BYTES_MAX, MIB
from dlcore.errors import BookieError, BookieOverloadedError, BookieUnavailableError, DLError
from dlcore.transport import wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from dlcore.config import LedgerClientConfig
    from dlcore.ids import BookieId
    from dlcore.transport.backoff import Backoff

logger = logging.getLogger(__name__)

BATCH_BYTES_MAX = MIB
"""Adds that wait together travel in one message of about this size."""
_BATCH_REQUESTS_MAX = 1000
_BACKLOG_FACTOR = 4
"""A stream holds at most this many times the ledger client's own bounds on what is pending."""


class WriteCall(Protocol):
    """The part of a gRPC call that a stream uses."""

    async def read(self) -> object:
        """Return the next message, or what is not bytes at the end."""
        ...

    async def write(self, request: bytes) -> None:
        """Send a message; returns when flow control has taken it."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
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
        """Bytes of the frame."""
        return 0 if self.frame is None else len(self.frame)


class WriteStream:
    """One write stream from its handshake to its end; never used again once broken.

    Args:
        bookie: the bookie's name in errors.
        handshake: whom it must be.
        connect: opens the call; maps what goes wrong in it to `DLError`s.
        backoff: the bookie's, told how this stream fares.
        config: time-outs and bounds.
    """

    def __init__(
        self,
        bookie: BookieId,
        *,
        handshake: wire.Handshake,
        connect: Callable[[], AbstractAsyncContextManager[WriteCall]],
        backoff: Backoff,
        config: LedgerClientConfig,
    ) -> None:
        self._bookie = bookie
        self._handshake = handshake
        self._connect = connect
        self._backoff = backoff
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Request] = deque()
        self._sent: dict[int, Request] = {}
        self._has_queued = asyncio.Event()
        self._pending_bytes = 0
        self._next_request_id = 1
        self._answered_s = -1.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_broken = False
        self.task: asyncio.Task[None] | None = None

    def submit(self, request: Request) -> None:
        """Queue `request` behind all earlier ones."""
        assert not self.is_broken
        self._check_room(request)
        request.submitted_s = self._loop.time()
        self._pending_bytes += request.size_bytes
        self._queue.append(request)
        self._has_queued.set()
        if self._timer is None:
            self._timer = self._loop.call_later(self._config.add_timeout_s, self._expire)

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
            async with self._connect() as call:
                await self._shake_hands(call)
                self._backoff.succeeded()
                await self._pump(call)
        except DLError as caught:
            self._backoff.failed()
            error = caught
            logger.debug("write stream ended bookie=%s reason=%s", self._bookie, caught)
        finally:
            self.fail(error)

    async def _shake_hands(self, call: WriteCall) -> None:
        await call.write(wire.encode_handshake(self._handshake))
        _, failures = await self._receive(call)
        for _, error in failures:
            raise error

    async def _pump(self, call: WriteCall) -> None:
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

    async def _send_all(self, call: WriteCall) -> None:
        while True:
            await self._has_queued.wait()
            self._has_queued.clear()
            while self._queue:
                await call.write(self._next_message())

    async def _receive_all(self, call: WriteCall) -> None:
        while True:
            ok_request_ids, failures = await self._receive(call)
            self._answered_s = self._loop.time()
            for request_id in ok_request_ids:
                self._answer(request_id, None)
            for request_id, error in failures:
                self._answer(request_id, error)

    async def _receive(self, call: WriteCall) -> tuple[list[int], list[tuple[int, BookieError]]]:
        data = await call.read()
        if not isinstance(data, bytes):
            raise BookieUnavailableError(f"{self._bookie}: it ended the write stream")
        ok_request_ids, failures = wire.decode_write_response(data)
        return ok_request_ids, [(id_, named(self._bookie, error)) for id_, error in failures]

    def _next_message(self) -> bytes:
        """Move requests from the queue to `_sent`: adds of one kind, then LACs."""
        batch: list[Request] = []
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

    def _settle(self, request: Request, error: DLError | None) -> None:
        self._pending_bytes -= request.size_bytes
        if request.future.done():  # the caller cancelled it
            return
        if error is None:
            request.future.set_result(None)
        else:
            request.future.set_exception(error)

    def _check_room(self, request: Request) -> None:
        config = self._config
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
        timeout_s = self._config.add_timeout_s
        due_s = self._loop.time() - timeout_s
        oldest = self._oldest()
        if oldest is not None and oldest.submitted_s <= due_s:
            if self._answered_s < oldest.submitted_s:
                self._backoff.failed()
                self.fail(self._timed_out())
                assert self.task is not None
                self.task.cancel()
                return
            self._fail_submitted_by(due_s)
            oldest = self._oldest()
        if oldest is not None:
            self._timer = self._loop.call_at(oldest.submitted_s + timeout_s, self._expire)

    def _oldest(self) -> Request | None:
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
        timeout_s = self._config.add_timeout_s
        return BookieUnavailableError(f"{self._bookie}: no answer within {timeout_s} s")


def _may_follow(previous: Request, request: Request) -> bool:
    """Return whether one message can carry both: adds of one kind come before LACs."""
    if request.frame is None:
        return True
    return previous.frame is not None and previous.is_recovery == request.is_recovery


def named(bookie: BookieId, error: BookieError) -> BookieError:
    """Return an answer of `bookie` as an error that says whose answer it is."""
    return type(error)(f"{bookie}: {error}")
