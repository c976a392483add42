"""A proxy that stops: calls that are open end with the status that lets clients go on elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from dlcore.backends.flight.streams import first_message
from dlcore.flight.put import StagingTarget
from dlcore.proxy.service import FLIGHT
from tests.fixtures.served_proxies import PAYLOADS, Client, Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def test_a_proxy_that_stops_ends_all_readers_as_unavailable() -> None:
    """None of them as CANCELLED, which says that the client itself gave up."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        followers = [client.follow("clicks") for _ in range(20)]
        for each in followers:
            assert await each.read() is not grpc.aio.EOF
        stopping = asyncio.create_task(served.servers[0].aclose())
        codes = [(await each.code()).name for each in followers]
        await stopping
        assert codes == ["UNAVAILABLE"] * 20
        trailer = dict(await followers[0].trailing_metadata() or ())
        assert "dlog-error" in trailer

    with_proxies("clicks")(scenario)


async def stages(client: Client) -> Any:
    """Begin to stage, and send no more."""
    method: Any = client.channel.stream_stream(f"/{FLIGHT}/DoPut")
    call = method()
    await call.write(first_message(StagingTarget("job"), PAYLOADS))
    await call.read()
    return call


async def says_nothing(client: Client) -> Any:
    """Open a stream, and send nothing."""
    call = client.put().call
    await call.wait_for_connection()
    return call


async def follows_and_stands(client: Client) -> Any:
    """Follow a log, and take nothing of what comes."""
    call = client.follow("clicks")
    await call.wait_for_connection()
    return call


@pytest.mark.parametrize("begins", [stages, says_nothing, follows_and_stands])
def test_no_call_that_is_open_ends_as_if_its_client_had_given_up(
    begins: Callable[[Client], Awaitable[Any]],
) -> None:
    """Whatever it waits for, and whether or not it takes what it is sent."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        call = await begins(client)
        await client.act("health")  # so that the call has come
        await served.servers[0].aclose()
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert (await call.code()).name == "UNAVAILABLE"

    with_proxies("clicks")(scenario)
