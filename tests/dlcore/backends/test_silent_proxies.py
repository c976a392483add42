"""Proxies that take calls and answer none: a call is given up in time, and another proxy asked."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from dlcore.backends.flight import endpoint
from dlcore.backends.flight.endpoint import Endpoint
from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import ProxyUnavailableError
from dlcore.flight import actions
from dlcore.proxy.service import FLIGHT
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from dlcore.backends.flight.namespace import FlightNamespace

METHODS: dict[str, Any] = {
    "DoAction": grpc.unary_stream_rpc_method_handler,
    "ListFlights": grpc.unary_stream_rpc_method_handler,
    "GetFlightInfo": grpc.unary_unary_rpc_method_handler,
    "GetSchema": grpc.unary_unary_rpc_method_handler,
}


@asynccontextmanager
async def silent_proxy() -> AsyncIterator[str]:
    """Yield the address of a server that takes all calls of Flight, and never answers."""

    async def wait(_: bytes, __: Any) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError("nothing ends it")

    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        name: make(wait) for name, make in METHODS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(FLIGHT, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def opened(namespace: FlightNamespace) -> object:
    """Ask what the log holds."""
    return await namespace.open_log("clicks")


async def changed(namespace: FlightNamespace) -> object:
    """Change a log."""
    return await (await namespace._find("clicks")).truncate(txid=0)


async def listed(namespace: FlightNamespace) -> object:
    """List the logs."""
    return await namespace.get_logs()


@pytest.mark.parametrize("asks", [opened, changed, listed])
def test_one_that_never_answers_is_left(
    asks: Callable[[FlightNamespace], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection, and gives signs of life: only a deadline tells.

    Alone it is an error, once the patience is over; another proxy answers.
    """
    monkeypatch.setattr(endpoint, "ANSWER_S", 0.1)
    for name in ("OWNER", "TRUNCATE"):
        monkeypatch.setattr(actions, name, replace(getattr(actions, name), answer_s=0.1))
    monkeypatch.setattr(endpoint, "LIST_ANSWER_S", 0.1)

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with silent_proxy() as silent:
            async with await open_namespace(f"grpc://{silent}", patience_s=0.1) as namespace:
                with pytest.raises(ProxyUnavailableError):
                    await asks(namespace)
            both = f"grpc://{silent},{served.servers[0].address}"
            async with await open_namespace(both) as namespace:
                await asks(namespace)

    with_proxies("clicks")(scenario)


def test_the_error_names_the_proxy_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call may have passed on to the next one meanwhile."""
    asked: list[str] = []

    async def reason(address: str, *_: object, **__: object) -> str:
        asked.append(address)
        return "it is another one's"

    monkeypatch.setattr(endpoint, "tls_reason", reason)

    async def scenario(_: Proxies) -> None:
        async with Endpoint("grpc://one:1,two:2", patience_s=1.0) as calls:
            call, turn = calls.put("clicks")
            call.cancel()
            calls.locations.failed("clicks", turn, reached=False)
            found = await calls.explained(ProxyUnavailableError("it is away"), turn)
            assert asked == ["one:1"]
            assert str(found) == "the proxy at grpc://one:1: it is another one's"

    with_proxies()(scenario)
