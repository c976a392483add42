"""Channels to proxies that redirects name, and what is noted of logs: bounded, whatever comes."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from dlcore.backends.flight import endpoint
from dlcore.backends.flight.namespace import open_namespace
from tests.dlcore.backends.test_writing import numbered, payloads, remote
from tests.fixtures.aio import until
from tests.fixtures.ports import free_ports
from tests.fixtures.served_proxies import Proxies, with_proxies

AWAY_S = 11.5
"""gRPC looks a fifth time after 8 to 11 seconds, and once more after 13 to 19."""


def test_rolling_restarts_leave_no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each proxy hands its log over to one of another address, and the writer follows."""
    monkeypatch.setattr("dlcore.flight.calls._IDLE_MAX", 1)

    async def scenario(served: Proxies) -> None:
        clients = [await served.start()]
        log = await remote(served)
        async with await log.open_writer() as writer:
            for number in range(5):
                clients.append(await served.start())
                await clients.pop(0).act("drain")
                await writer.write(numbered(number, 1)[0])
                assert len(log._calls._channels.known) <= 2
        assert await payloads(served) == [b"%d" % number for number in range(5)]

    with_proxies("clicks")(scenario)


def test_a_channel_with_a_call_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others were used since; those are closed, and used again they are opened."""
    monkeypatch.setattr("dlcore.flight.calls._IDLE_MAX", 1)

    async def scenario(served: Proxies) -> None:
        first = await served.start()
        log = await remote(served)
        await served.start()
        await first.act("drain")
        calls = log._calls
        async with await log.open_writer() as writer:
            await writer.write(numbered(0, 1)[0])
            known = calls._channels.known
            (owner,) = (each for each in known.items() if each[1].calls)
            for _ in range(2):
                await served.start()
            closed = []
            for server in [*served.servers[2:]] * 2:
                calls.locations.is_owned_by("other", server.location)
                call, _ = calls.put("other")
                closed.append(known[server.location].channel)
                call.cancel()
                assert next(iter(known.items())) == owner
                assert len(known) == 2
            *closed, last = closed
            await until(
                lambda: all(
                    each.get_state() is grpc.ChannelConnectivity.SHUTDOWN for each in closed
                )
            )
            assert last.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
            monkeypatch.setattr(calls, "put", None)  # the stream is still the same
            await writer.write(numbered(1, 1)[0])
        assert await payloads(served) == [b"0", b"1"]

    with_proxies("clicks")(scenario)


def test_where_logs_are_written_is_noted_of_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other calls ask the proxies anew; failures stay noted until one was reached."""
    monkeypatch.setattr(endpoint, "_LOGS_MAX", 2)

    async def scenario() -> None:
        async with endpoint.Endpoint("grpc://host:1", patience_s=1) as calls:
            for log in ("a", "b", "a", "c"):
                calls.locations.is_owned_by(log, f"grpc://{log}:1")
            assert calls.locations._owners == {"a": "grpc://a:1", "c": "grpc://c:1"}
            for log in ("a", "b", "c"):
                calls.locations.is_owned_by(log, f"grpc://{log}:2")
                calls.locations.failed(log, 0, reached=False)
            assert [calls.locations.unreached(log) for log in "abc"] == [
                (),
                ("grpc://b:2",),
                ("grpc://c:2",),
            ]
            calls.is_taken("b")
            assert list(calls.locations._unreached) == ["c"]
            assert not calls.locations._owners

    asyncio.run(scenario())


def test_streams_that_lost_one_proxy_do_not_come_back_to_it() -> None:
    """The second one that fails does not take the next proxy for the one that failed.

    Nor does another proxy learn that it was not reached.
    """

    async def scenario() -> None:
        async with endpoint.Endpoint("grpc://host:1,host:2", patience_s=1) as calls:
            first, turn = calls.put("a")
            second, same_turn = calls.put("a")
            calls.locations.failed("a", turn, reached=False)
            third, next_turn = calls.put("a")
            calls.locations.failed("a", same_turn, reached=False)
            assert (turn, same_turn, next_turn, calls.locations.turn) == (0, 0, 1, 1)
            assert calls.locations.unreached("a") == ("grpc://host:1",)
            for stream in (first, second, third):
                stream.cancel()

    asyncio.run(scenario())


@pytest.mark.prove  # less than seconds does not tell its pauses from gRPC's own
def test_a_proxy_that_is_back_is_found_soon() -> None:
    """By itself gRPC leaves it alone for a second first, then for longer and longer."""

    async def scenario(served: Proxies) -> None:
        clock, port = asyncio.get_running_loop().time, free_ports(1)
        async with await open_namespace(f"grpc://127.0.0.1:{port}") as namespace:
            asking = asyncio.create_task(namespace.log_exists("clicks"))
            await asyncio.sleep(AWAY_S)
            await served.start(port=port)
            back_s = clock()
            assert await asking
            assert clock() - back_s < 2.5

    with_proxies("clicks")(scenario)
