"""A proxy that stops: calls that are open end with the status that lets clients go on elsewhere."""

from __future__ import annotations

import asyncio

import grpc

from tests.fixtures.served_proxies import Proxies, with_proxies


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
