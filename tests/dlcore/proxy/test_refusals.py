"""Calls that a proxy refuses, each with the status that says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from dlcore.base.errors import DLError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.proxy.rendezvous import preferred_owner
from dlcore.proxy.service import FLIGHT
from tests.fixtures.aio import until
from tests.fixtures.served_proxies import Client, Proxies, Stream, with_proxies
from tests.fixtures.uncollected import uncollected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def test_an_unknown_action_is_unimplemented() -> None:
    """As gRPC says it of a method, so that a client of a later release can tell."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.act("fly")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "action 'fly': expected one of create" in str(error.value.details())

    with_proxies()(scenario)


async def status_of_put(client: Client, log: str, **options: object) -> tuple[str, dict[str, str]]:
    """Return the status and the trailing metadata of a stream that is refused."""
    stream = client.put()
    await stream.begin(log, **options)
    assert await stream.last_reply() is None
    code, _, metadata = await stream.status()
    return code, metadata


def test_a_put_to_a_log_that_does_not_exist_is_refused_by_any_proxy() -> None:
    """Also by the one that would not own it, which sends no client to another proxy for nothing."""

    async def scenario(served: Proxies) -> None:
        clients = [await served.start(), await served.start()]
        here, there = (server.location for server in served.servers)
        for owner in (here, there):
            names = (f"gone-{number}" for number in range(1000))
            name = next(each for each in names if preferred_owner(each, (here, there)) == owner)
            for client in clients:
                code, metadata = await status_of_put(client, name)
                assert (code, metadata.get("dlog-error")) == ("NOT_FOUND", "510")
        elsewhere = clients[preferred_owner("clicks", (here, there)) == here]
        code, metadata = await status_of_put(elsewhere, "clicks")
        assert (code, "dlog-location" in metadata) == ("UNAVAILABLE", True)
        code, _ = await status_of_put(elsewhere, "clicks", log_id="another")
        assert code == "NOT_FOUND"

    with_proxies("clicks")(scenario)


PATH = pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=["clicks"])
METHODS = {
    "DoAction": ("unary_stream", pb.Action(type="health")),
    "DoGet": ("unary_stream", pb.Ticket(ticket=b'{"log": "clicks"}')),
    "GetFlightInfo": ("unary_unary", PATH),
    "GetSchema": ("unary_unary", PATH),
    "ListFlights": ("unary_stream", pb.Criteria()),
    "ListActions": ("unary_stream", pb.Empty()),
    "Handshake": ("stream_stream", None),
    "DoPut": ("stream_stream", None),
}


@pytest.mark.parametrize(
    ("key", "value"), [("authorization", "Bearer secret"), ("auth-token-bin", b"secret")]
)
def test_a_token_that_no_one_checks_is_refused(key: str, value: str | bytes) -> None:
    """Else its sender believes that it keeps others out; the answer does not repeat it."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        for name, (kind, request) in METHODS.items():
            method = getattr(client.channel, kind)(f"/{FLIGHT}/{name}")
            metadata = ((key, value),)
            if request is None:
                call = method(metadata=metadata)
                stream = Stream(call)
                if name == "DoPut":
                    await call.done_writing()
            else:
                stream = Stream(method(request.SerializeToString(), metadata=metadata))
            code, details, trailer = await stream.status()
            assert (code, trailer.get("dlog-error")) == ("UNAUTHENTICATED", "401"), name
            assert f"metadata {key!r}" in details
            assert "a certificate" in details
            assert "secret" not in details
        assert (await client.act("health"))["serves"]

    with_proxies("clicks")(scenario)


REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "an unknown action": ("fly", {}),
    "an unknown field": ("truncate", {"logg": "clicks"}),
    "a log that does not exist": ("positions", {"log": "none"}),
    "a change of such a log": ("truncate", {"log": "none", "txid": 3}),
}


async def act(client: Client, name: str) -> None:
    """Perform an action that is refused."""
    action, request = REFUSED[name]
    with pytest.raises(grpc.aio.AioRpcError):
        await client.act(action, **request)


async def put(client: Client, log: str) -> None:
    """Write to a log that does not exist."""
    await status_of_put(client, log)


@pytest.mark.parametrize(("call", "what"), [*((act, name) for name in REFUSED), (put, "none")])
def test_a_refused_call_leaves_nothing_to_the_collector(
    call: Callable[[Client, str], Awaitable[None]], what: str
) -> None:
    """Else calls that are refused all the time would take memory until it comes."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        await call(client, what)  # what is made once stays
        with uncollected(lambda each: isinstance(each, DLError)) as left:
            await call(client, what)
            await until(lambda: not left())

    with_proxies("clicks")(scenario)
