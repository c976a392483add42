"""A proxy without its metadata store: what needs it is refused soon, with when to come again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from dlcore.base.errors import LogNotReadyError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.metadata.port import SessionState
from dlcore.proxy import outages
from dlcore.proxy.outages import Outages
from dlcore.proxy.service import FLIGHT
from tests.fixtures.aio import run
from tests.fixtures.memory_namespace import memory_cluster
from tests.fixtures.served_proxies import Client, Proxies, with_proxies
from tests.fixtures.simulated_store import SimulatedStore

if TYPE_CHECKING:
    from collections.abc import Callable


def get(client: Client) -> Any:
    """Begin to read a log."""
    method: Any = client.channel.unary_stream(f"/{FLIGHT}/DoGet")
    return method(pb.Ticket(ticket=b'{"log": "clicks"}').SerializeToString())


def info(client: Client) -> Any:
    """Ask what a log holds."""
    asked = pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=["clicks"])
    method: Any = client.channel.unary_unary(f"/{FLIGHT}/GetFlightInfo")
    return method(asked.SerializeToString())


def listing(client: Client) -> Any:
    """List the logs."""
    method: Any = client.channel.unary_stream(f"/{FLIGHT}/ListFlights")
    return method(b"")


@pytest.fixture(autouse=True)
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for a session that is suspended, as those to ZooKeeper do; not for long."""
    monkeypatch.setattr(outages, "PATIENCE_S", 0.05)
    ask = SimulatedStore._request

    async def request(store: SimulatedStore, *args: Any, **options: Any) -> Any:
        if store.session_state is SessionState.SUSPENDED:
            back = asyncio.Event()
            store.on_session(lambda _: back.set())
            await back.wait()
        return await ask(store, *args, **options)

    monkeypatch.setattr(SimulatedStore, "_request", request)


async def refusal(call: Any) -> tuple[str, bool]:
    """Return the status of a call, and whether it says when to come again."""
    code, trailer = await call.code(), await call.trailing_metadata()
    return code.name, "dlog-retry-after-ms" in dict(trailer)


@pytest.mark.parametrize("begin", [get, info, listing])
def test_a_new_reader_is_refused_while_the_metadata_store_is_away(
    begin: Callable[[Client], Any],
) -> None:
    """It hung until the store was back; then it is served again."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        writing = await client.opened("clicks")
        await writing.send(b"x")
        await writing.acked(1)
        store = served.cluster.stores[served.servers[0].location]
        store.disconnect()
        await writing.send(b"x")
        assert await writing.next_reply() == {"acked": 2, "dlsn": "1:1:0"}  # it owns the log
        assert await refusal(begin(client)) == ("UNAVAILABLE", True)
        assert "not answered for" in (await client.act("health"))["degraded"]
        store.reconnect()
        call = begin(client)
        if begin is not info:
            assert [each async for each in call]
        assert (await call.code()).name == "OK"
        assert "degraded" not in await client.act("health")

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize(("action", "body"), [("owner", "clicks"), ("create", "new")])
def test_an_action_is_also_refused(action: str, body: str) -> None:
    """Also one that began before."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        store = served.cluster.stores[served.servers[0].location]
        store.disconnect()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.act(action, log=body)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "dlog-retry-after-ms" in dict(error.value.trailing_metadata() or ())
        stream = client.put()
        await stream.begin("clicks")
        assert await stream.last_reply() is None
        assert (await stream.status())[0] == "UNAVAILABLE"
        store.reconnect()

    with_proxies("clicks")(scenario)


def test_a_producer_that_begins_is_also_refused() -> None:
    """Whether the log is still this proxy's is not known; one that goes on need not know it yet."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream, ready = await client.opened_with("clicks", producer="meter")
        await stream.send(b"a")
        await stream.acked(1)
        store = served.cluster.stores[served.servers[0].location]
        store.disconnect()
        again, _ = await client.opened_with("clicks", producer=ready["producer"])
        await again.send(b"b", sequence=1)
        await again.acked(1)
        stream = client.put()
        await stream.begin("clicks", producer="meter")
        assert await stream.next_reply() is None
        code, _, trailer = await stream.status()
        assert (code, "dlog-retry-after-ms" in trailer) == ("UNAVAILABLE", True)
        store.reconnect()
        _, ready = await client.opened_with("clicks", producer="meter")
        assert ready["sequence"] == 1

    with_proxies("clicks")(scenario)


def test_earlier_streams_wait_for_so_long_only() -> None:
    """A session that is back in time costs nothing; a time-out of another is its own."""

    async def body() -> None:
        async with memory_cluster() as cluster:
            await cluster.open("a")
            store = cluster.stores["a"]
            found = Outages(store)
            async with found.bounded():
                store.disconnect()
                store.reconnect()
                await asyncio.sleep(0.1)
            with pytest.raises(TimeoutError):
                async with found.bounded():
                    raise TimeoutError

            async def wait() -> None:
                async with found.bounded():
                    store.disconnect()
                    await asyncio.Event().wait()

            with pytest.raises(LogNotReadyError, match="has not answered for"):
                await wait()
            store.reconnect()
            found.close()

    run(body())
