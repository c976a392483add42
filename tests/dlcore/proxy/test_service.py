"""Calls that end while they are answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from dlcore.proto import flight_pb2 as pb
from dlcore.proxy.service import FlightService

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Reads:
    """Has one message for any ticket."""

    get_flight_info = get_schema = list_flights = None

    async def do_get(self, _: bytes, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send it."""
        await send(b"message")


class EndedCall:
    """A call that ended, which nobody was told yet."""

    async def write(self, _: bytes) -> None:
        """Fail as gRPC does then."""
        raise grpc.aio.InternalError


def test_a_call_that_ended_is_no_defect() -> None:
    """Its handler ends as by the cancellation that is on its way, so that no defect is logged."""
    service = FlightService(cast("Any", None), cast("Any", None), cast("Any", Reads()))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(service._do_get(pb.Ticket(ticket=b"{}"), cast("Any", EndedCall())))
