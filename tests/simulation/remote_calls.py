"""The real client of an endpoint, above gRPC, on the calls of the simulation.

Answers are lost, requests are carried out late and twice, streams break between any two messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from dlcore.backends.flight.endpoint import Endpoint
from dlcore.base.errors import DLError, ProxyUnavailableError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.statuses import code_of, message_of, metadata_of
from tests.simulation.calls import End
from tests.simulation.proxy_clients import PATIENCE_S, QUIET_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Generator

    from tests.simulation.calls import Call
    from tests.simulation.proxies import Proxies

_BROKEN_CHANCE = 0.05
"""How often an answer is lost."""
_AGAIN_CHANCE = 0.1
"""How often an action is carried out again, some time later."""
_LATE_S_MAX = 4.0


class Calls(Endpoint):
    """The real endpoint, of a client whose calls are those of the simulation."""

    def __init__(self, proxies: Proxies, name: str) -> None:
        self._proxies = proxies
        self._name = name
        locations = proxies.locations()
        if not locations:
            raise ProxyUnavailableError("no proxy serves yet")
        proxies.rng.shuffle(locations)
        addresses = ",".join(each.removeprefix("grpc://") for each in locations)
        super().__init__(f"grpc://{addresses}", patience_s=2 * PATIENCE_S)

    def _call(
        self,
        location: str | None,
        kind: str,
        method: str,
        *request: bytes,
        within_s: float | None = None,  # which `_Answers` has itself
    ) -> Any:
        at: Any = location or self.locations.at(self.locations.turn)
        if method == "DoPut":
            return _Stream(self._proxies, partial(self._put, at))
        return _Answers(self._proxies, partial(self._begin, at, method, *request), method)

    def _put(self, location: str) -> Call:
        return self._proxies.at(location).put(self._name)

    def _begin(self, location: str, method: str, request: bytes) -> Call:
        proxy = self._proxies.at(location)
        if method == "GetFlightInfo":
            return proxy.get_info(self._name, request)
        if method == "DoGet":
            return proxy.get(self._name, pb.Ticket.FromString(request).ticket)
        action = pb.Action.FromString(request)
        rng = self._proxies.rng
        if rng.random() < _AGAIN_CHANCE:
            again = partial(proxy.ask, self._name, action.type, action.body)
            self._proxies.later(rng.uniform(0.0, _LATE_S_MAX), again)
        return proxy.ask(self._name, action.type, action.body)

    async def explained(self, error: DLError, turn: int) -> DLError:
        """Return the error: there is no TLS."""
        return error

    async def aclose(self) -> None:
        """Let no call begin any more."""
        self._closed = True


class _Answers:
    """A call as the real endpoint sees it: what is used of gRPC's."""

    def __init__(self, proxies: Proxies, begin: partial[Call], method: str) -> None:
        self._proxies = proxies
        self._encode = _result if method == "DoAction" else bytes
        self._is_read = method == "DoGet"
        self._begin = begin
        self._call: Call | None = None

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._first().__await__()

    async def _first(self) -> bytes:
        async with contextlib.aclosing(aiter(self)) as answers:
            return await anext(answers)

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        try:
            self._call = call = self._begin()
            while True:
                # A slow metadata store takes seconds for one call; in the end clients wait for it.
                is_patient = self._is_read or self._proxies.is_ending
                silence_s = QUIET_S if is_patient else PATIENCE_S
                message = await asyncio.wait_for(call.take(), silence_s)
                if not self._proxies.is_ending and self._proxies.rng.random() < _BROKEN_CHANCE:
                    raise ProxyUnavailableError("the answer is lost")
                if not isinstance(message, End):
                    yield self._encode(message)
                elif message.error is None:
                    return
                else:
                    raise message.error
        except (DLError, TimeoutError) as error:
            raise _status_of(error) from error

    def cancel(self) -> None:
        """End the call."""
        if self._call is not None:
            self._call.cancel()


def _result(body: bytes) -> bytes:
    return pb.Result(body=body).SerializeToString()


def _status_of(error: BaseException) -> grpc.aio.AioRpcError:
    """Return an error as gRPC's client sees it."""
    failure = error if isinstance(error, DLError) else ProxyUnavailableError("it is silent")
    return grpc.aio.AioRpcError(
        grpc.StatusCode[code_of(failure)],
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*metadata_of(failure)),
        details=message_of(failure),
    )


class _Stream:
    """A DoPut as the real client sees it: what is used of gRPC's."""

    def __init__(self, proxies: Proxies, begin: partial[Call]) -> None:
        self._proxies = proxies
        self._ended = asyncio.Event()
        self._error: grpc.aio.AioRpcError | None = None
        self._call: Call | None = None
        try:
            self._call = begin()
        except ProxyUnavailableError as error:
            self._end(error)

    def _end(self, error: DLError | None) -> None:
        self._error = None if error is None else _status_of(error)
        self._ended.set()
        self.cancel()  # a proxy that lives sees the end of the connection, too

    async def write(self, data: bytes) -> None:
        """Send a message, once there is room for it."""
        if self._call is not None and not self._ended.is_set():
            await _first_of(self._call.room(), self._ended.wait())
        if self._call is None or self._ended.is_set():
            raise asyncio.InvalidStateError("the call has ended")
        self._call.send(data)

    async def done_writing(self) -> None:
        """Say that no message follows."""
        if self._call is not None and not self._ended.is_set():
            self._call.done_writing()

    async def read(self) -> Any:
        """Return the next message, or what is none at the end of a good call."""
        if self._call is not None and not self._ended.is_set():
            try:
                message = await asyncio.wait_for(self._call.take(), QUIET_S)
            except (ProxyUnavailableError, TimeoutError):
                message = End(ProxyUnavailableError("the connection is broken"))
            if not self._proxies.is_ending and self._proxies.rng.random() < _BROKEN_CHANCE:
                message = End(ProxyUnavailableError("the stream broke"))
            if not isinstance(message, End):
                return message.SerializeToString()
            self._end(message.error)
        if self._error is not None:
            raise self._error
        return grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        """Return the status of a call that has ended."""
        return grpc.StatusCode.OK if self._error is None else self._error.code()

    async def details(self) -> str | None:
        """Return the message of its status."""
        return None if self._error is None else self._error.details()

    async def trailing_metadata(self) -> grpc.aio.Metadata | None:
        """Return what goes with its status."""
        return None if self._error is None else self._error.trailing_metadata()

    def cancel(self) -> None:
        """End the call."""
        if self._call is not None:
            self._call.cancel()


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
