"""The client's side of a DoPut: messages of the proxy, the end of the stream, and retries."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import msgspec

from dlcore.backends.flight.endpoint import Retries, error_of, is_cancelled
from dlcore.base.errors import (
    ConditionFailedError,
    ConfigurationError,
    DLError,
    OverCapacityError,
    ProxyUnavailableError,
    SequenceGapError,
    UnauthenticatedError,
)
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.calls import BROKEN, reply_of
from dlcore.flight.sending import framed
from dlcore.flight.statuses import EXPECTED_KEY, LAST_KEY, LOCATION_KEY, RETRY_KEY

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.flight.put import PutTarget, StagingTarget
    from dlcore.flight.replies import PutReply

logger = logging.getLogger(__name__)

_AGAIN = (
    "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "ABORTED", "UNAUTHENTICATED",
)  # fmt: skip
"""Statuses after which a retry may succeed; it is safe, because a log takes each record once.

After the last one it may with a new token: `Attempts.failed` looks for it."""
_ENDS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError)
"""Exceptions at the end of a call; a cancellation means that the channel was closed."""


@dataclass(eq=False)
class EndedError(Exception):
    """A stream has ended, with an error or in order.

    `location` is the proxy that owns the log, and `retry_after_s` the pause that the proxy asks
    for, if it sent them.
    """

    error: DLError
    again: bool
    location: str | None = None
    retry_after_s: float = 0.0


async def ended(call: Any) -> EndedError:
    """Return the reason why a call has ended.  Raises: CancelledError: this task was cancelled."""
    if is_cancelled():
        raise asyncio.CancelledError
    code, details = await call.code(), await call.details() or ""
    trailing = dict(await call.trailing_metadata() or ())
    location = trailing.get(LOCATION_KEY)
    if code is grpc.StatusCode.OK:
        error: DLError = ProxyUnavailableError("the proxy ended the stream")
        return EndedError(error, again=True, location=location)
    error = error_of(code, details)
    if isinstance(error, SequenceGapError):
        error.expected = int(trailing.get(EXPECTED_KEY, -1))
    if isinstance(error, ConditionFailedError):
        last = trailing.get(LAST_KEY, "none")
        error.last = None if last == "none" else last
    again = code.name in _AGAIN or details == BROKEN or error.retriable
    return EndedError(error, again, location, int(trailing.get(RETRY_KEY, 0)) / 1000)


async def read(call: Any) -> PutReply:
    """Return the next message of a proxy.  Raises: EndedError."""
    try:
        data = await call.read()
    except _ENDS as error:
        raise await ended(call) from error
    if data is grpc.aio.EOF:
        raise await ended(call)
    return reply_of(data)


async def write(call: Any, data: bytes) -> None:
    """Send a message to a proxy.  Raises: EndedError."""
    try:
        await call.write(data)
    except _ENDS as error:
        raise await ended(call) from error


class Attempts:
    """The time and the proxy of the next stream to a log, after one has ended."""

    def __init__(self, calls: Endpoint, log: str, patience_s: float) -> None:
        self._calls = calls
        self._log = log
        self._turn = 0
        self._sent = ""
        self._retries = Retries(patience_s)
        self.succeeded = self._retries.succeeded

    def begin(self) -> Any:
        """Begin a stream to the log."""
        call, self._turn = self._calls.put(self._log)
        self._sent = self._calls.sent
        return call

    async def failed(self, end: EndedError) -> None:
        """Wait until the next attempt.  Raises: the error, if another attempt is useless."""
        error, location, again = end.error, end.location, end.again
        if isinstance(error, UnauthenticatedError):
            again = self._calls.renewed(error, self._sent)
        elif again:
            error = await self._calls.explained(error, self._turn)
            again = not isinstance(error, ConfigurationError)
        pause_s = self._retries.failed(
            error, location, again=again, retry_after_s=end.retry_after_s
        )
        logger.info("log=%s: its stream ended: %s", self._log, error)
        if isinstance(error, OverCapacityError):
            pass  # the refusal comes from the owner of the log: ask it again
        elif location is None:
            reached = not isinstance(error, ProxyUnavailableError)
            self._calls.locations.failed(self._log, self._turn, reached=reached)
        else:
            self._calls.locations.is_owned_by(self._log, location)
        await asyncio.sleep(pause_s)


def first_message(target: PutTarget | StagingTarget, schema: pa.Schema) -> bytes:
    """Return the message that opens a stream for batches of a schema."""
    command = msgspec.json.encode(target)
    descriptor = pb.FlightDescriptor(type=pb.FlightDescriptor.CMD, cmd=command)
    data = pb.FlightData.FromString(framed(schema.serialize(), b""))
    data.flight_descriptor.CopyFrom(descriptor)
    return data.SerializeToString()
