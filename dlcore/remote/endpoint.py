"""Calls to whichever of some proxies answers: errors are the core's, outages are waited out."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc

from dlcore import errors
from dlcore.backoff import Backoff
from dlcore.closing import AsyncClosing
from dlcore.errors import AlreadyClosedError, ConfigurationError, DLError, ProxyUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager

    from google.protobuf.message import Message

_METHOD = "/arrow.flight.protocol.FlightService/"
_ADDRESSES = re.compile(r"grpc://[^\s/,:]+:\d+(,[^\s/,:]+:\d+)*")
_NAMED = re.compile(r"(\w+Error): (.*)", re.DOTALL)
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    # A log that is followed may be silent for long, and so is a proxy that was cut off.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_FIRST_PAUSE_S, _PAUSE_MAX_S = 0.05, 1.0


def addresses_of(endpoint: str) -> list[str]:
    """Return what an endpoint like ``grpc://host:port,host:port`` names.

    Raises: ConfigurationError: it is something else.
    """
    if _ADDRESSES.fullmatch(endpoint) is None:
        raise ConfigurationError(
            f"endpoint {endpoint!r}: expected grpc://host:port, or several proxies as in "
            "grpc://host:port,host:port"
        )
    return endpoint.removeprefix("grpc://").split(",")


def error_of(status: grpc.StatusCode, details: str) -> DLError:
    """Return the error that a proxy told, or that it cannot be reached, or answers no proxy's."""
    named = _NAMED.fullmatch(details)
    kind = None if named is None else getattr(errors, named[1], None)
    if named is not None and isinstance(kind, type) and issubclass(kind, DLError):
        return kind(named[2])
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return ProxyUnavailableError(f"no proxy answers: {details}")
    return errors.UnexpectedError(f"a proxy answered {status.name}: {details}")


class Endpoint(AsyncClosing):
    """Some proxies, one of which is asked until it fails."""

    def __init__(self, endpoint: str, *, patience_s: float) -> None:
        self._channels = [
            grpc.aio.insecure_channel(address, options=_OPTIONS)
            for address in addresses_of(endpoint)
        ]
        self._patience_s = patience_s
        self._turn = 0
        self._closed = False

    async def ask(self, method: str, request: Message, answer: type[Message]) -> Any:
        """Return the answer of a method that gives one."""
        async with aclosing(self._messages("unary_unary", method, lambda: request)) as answers:
            return answer.FromString(await anext(answers))

    def stream(
        self, method: str, request: Callable[[], Message]
    ) -> AbstractAsyncContextManager[AsyncGenerator[bytes, None]]:
        """Return the messages of a method that gives many.

        After an outage the call is made again, with what `request` returns then, and goes on.
        """
        return aclosing(self._messages("unary_stream", method, request))

    async def _messages(
        self, kind: str, method: str, request: Callable[[], Message]
    ) -> AsyncGenerator[bytes, None]:
        clock = asyncio.get_running_loop().time
        backoff, failed_at = Backoff(_FIRST_PAUSE_S, _PAUSE_MAX_S), None
        while True:
            self._require_open()
            stub = getattr(self._channels[self._turn], kind)(f"{_METHOD}{method}")
            call = stub(request().SerializeToString())
            try:
                if kind == "unary_unary":
                    yield await call
                    return
                async for data in call:
                    backoff, failed_at = Backoff(_FIRST_PAUSE_S, _PAUSE_MAX_S), None
                    yield data
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or not task.cancelling():
                    self._require_open()  # which ended the call
                raise
            except grpc.aio.AioRpcError as failure:
                error = error_of(failure.code(), failure.details() or "")
                failed_at = clock() if failed_at is None else failed_at
                if not error.retriable or clock() - failed_at >= self._patience_s:
                    raise error from failure
            else:
                return
            finally:
                call.cancel()
            self._turn = (self._turn + 1) % len(self._channels)
            await asyncio.sleep(backoff.failed(clock()))

    def _require_open(self) -> None:
        if self._closed:
            raise AlreadyClosedError("the remote namespace is closed")

    async def aclose(self) -> None:
        """Close the connections; calls that wait end."""
        self._closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels))
