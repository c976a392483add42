"""gRPC's standard health service; SERVING means that the proxy acquires logs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from dlcore.base.errors import ConfigurationError
from dlcore.base.proto import health_pb2 as pb
from dlcore.flight.calls import abort
from dlcore.flight.requests import parsed
from dlcore.proxy.service import FLIGHT, refuse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dlcore.proxy.service import Context

_SERVICES = ("", FLIGHT)


class Health:
    """Reports the state of the proxy to clients and load balancers; `report` sets it."""

    def __init__(self) -> None:
        self._serves = False
        self._changed = asyncio.Event()

    @property
    def serves(self) -> bool:
        """Whether the proxy acquires logs, by the last `report`."""
        return self._serves

    def report(self, *, serves: bool) -> None:
        """Set whether the proxy acquires logs, and notify all watching clients."""
        self._serves = serves
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the table of methods, for a server."""
        coding: dict[str, Any] = {
            "response_serializer": pb.HealthCheckResponse.SerializeToString,
        }
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **coding),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **coding),
        }
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)

    def _answer(self) -> pb.HealthCheckResponse:
        kinds = pb.HealthCheckResponse
        return kinds(status=kinds.SERVING if self._serves else kinds.NOT_SERVING)

    async def _check(self, data: bytes, context: Context) -> pb.HealthCheckResponse:
        request = await _asked(data, context)
        # By gRPC's protocol of health: Check fails for an unknown service, while Watch reports it
        # and goes on, because the service may come later.
        if request.service not in _SERVICES:
            text = f"no service {request.service!r}, only {FLIGHT}"
            await abort(context, grpc.StatusCode.NOT_FOUND, text)
        return self._answer()

    async def _watch(self, data: bytes, context: Context) -> AsyncIterator[pb.HealthCheckResponse]:
        request = await _asked(data, context)
        if request.service not in _SERVICES:
            yield pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
            await asyncio.Event().wait()  # the standard keeps the stream open
        while True:
            # Taken before the answer: a change while the answer is being sent must not be missed.
            changed = self._changed
            yield self._answer()
            await changed.wait()


async def _asked(data: bytes, context: Context) -> pb.HealthCheckRequest:
    """Return the request of a client; a call without a valid one is refused."""
    try:
        return parsed(pb.HealthCheckRequest, data)
    except ConfigurationError as error:
        await refuse(context, error)
