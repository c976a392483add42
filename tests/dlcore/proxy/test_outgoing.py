"""Sends of a proxy to its readers are bounded: those that take nothing make room."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from dlcore.base.errors import ReaderStalledError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.calls import close_connection
from dlcore.flight.tickets import Ticket
from dlcore.proxy import service
from dlcore.proxy.reading import outgoing
from dlcore.proxy.reading.outgoing import Outgoing, _Sending
from dlcore.proxy.service import FLIGHT
from tests.fixtures.aio import run, until
from tests.fixtures.memory_namespace import record
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import Callable


class Reader:
    """A client that takes its message when it is let."""

    def __init__(self, sending: Outgoing, size_bytes: int) -> None:
        self.takes = asyncio.Event()
        self.was_sent = False
        self.task = asyncio.create_task(sending.send(self._send, bytes(size_bytes)))

    async def _send(self, _: bytes) -> None:
        self.was_sent = True
        await self.takes.wait()


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Say after how long a client stands still."""

    def set_to(stall_s: float) -> None:
        monkeypatch.setattr(outgoing, "STALL_S", stall_s)

    return set_to


def test_new_messages_wait_for_room_in_turn(stall: Callable[[float], None]) -> None:
    """A small message does not overtake a large one; no client that reads on is ended."""
    stall(60.0)

    async def scenario() -> None:
        sending = Outgoing(10)
        first, second = Reader(sending, 4), Reader(sending, 6)
        large, small = Reader(sending, 8), Reader(sending, 1)
        await until(lambda: first.was_sent and second.was_sent)
        first.takes.set()
        await first.task
        assert sending.size_bytes == 6
        late = Reader(sending, 1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert [each.was_sent for each in (large, small, late)] == [False] * 3
        second.task.cancel()
        await until(lambda: large.was_sent and small.was_sent and late.was_sent)
        for each in (large, small, late):
            each.takes.set()
            await each.task
        assert sending.size_bytes == 0
        with pytest.raises(asyncio.CancelledError):
            await second.task

    run(scenario())


def test_waiting_messages_go_on_when_there_is_more_room(stall: Callable[[float], None]) -> None:
    """The bound is changed while messages are in transit."""
    stall(60.0)

    async def scenario() -> None:
        sending = Outgoing(10)
        first, second = Reader(sending, 8), Reader(sending, 8)
        await until(lambda: first.was_sent)
        assert not second.was_sent
        sending.resize(16)
        await until(lambda: second.was_sent)
        for each in (first, second):
            each.takes.set()
            await each.task

    run(scenario())


def test_a_client_that_takes_nothing_makes_room(stall: Callable[[float], None]) -> None:
    """Those that stand still for the longest are ended, as many as need be, with the reason."""
    stall(0.01)

    async def scenario() -> None:
        sending = Outgoing(10)
        still = [Reader(sending, 3) for _ in range(3)]
        await until(lambda: all(each.was_sent for each in still))
        other = Reader(sending, 6)
        await until(lambda: other.was_sent)
        for each in still[:2]:
            with pytest.raises(ReaderStalledError, match=r"received nothing for 0\.01 s"):
                await each.task
        assert not still[2].task.done(), "no one needs what it holds"
        assert sending.size_bytes == 9
        larger_than_all = Reader(sending, 100)
        await until(lambda: larger_than_all.was_sent)
        for each in (still[2], other):
            with pytest.raises(ReaderStalledError):
                await each.task
        for each in (*still, other, larger_than_all):  # the connections of those before are closed
            each.takes.set()
        await larger_than_all.task
        await until(lambda: sending.size_bytes == 0 and len(asyncio.all_tasks()) == 1)

    run(scenario())


def test_the_bytes_of_ended_streams_in_grpc_are_counted(
    stall: Callable[[float], None],
) -> None:
    """No other is ended meanwhile whose room would not be needed then."""
    stall(0.5)

    async def scenario() -> None:
        sending = Outgoing(10)
        first, second = Reader(sending, 5), Reader(sending, 5)
        await until(lambda: first.was_sent and second.was_sent)
        other = Reader(sending, 5)
        with pytest.raises(ReaderStalledError):
            await first.task
        for _ in range(5):
            await asyncio.sleep(0)
        assert [each.was_sent for each in (first, second, other)] == [True, True, False]
        assert not second.task.done(), "its room will not be needed"
        first.takes.set()  # which drops it
        await until(lambda: other.was_sent)
        assert sending.size_bytes == 10
        assert not second.task.done()
        for each in (second, other):
            each.takes.set()
            await each.task
        assert sending.size_bytes == 0

    run(scenario())


def test_readers_ahead_leave_room_for_messages() -> None:
    """Two read ahead in any case, more as memory allows; the next one begins when one ends."""

    async def scenario() -> None:
        sending = Outgoing(7 * outgoing._READER_BYTES // 2)
        begun: list[int] = []
        ends = [asyncio.Event() for _ in range(4)]

        async def read(number: int) -> None:
            async with sending.reading():
                begun.append(number)
                await ends[number].wait()

        large = Reader(sending, 2 * outgoing._READER_BYTES)
        await until(lambda: large.was_sent)
        reading = [asyncio.create_task(read(number)) for number in range(4)]
        await until(lambda: len(begun) == 2)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (begun, sending.readers_waiting) == ([0, 1], 2)
        seen = [sending.is_short]
        large.takes.set()
        await until(lambda: len(begun) == 3)
        seen.append(sending.is_short)
        assert seen == [True, False]
        ends[0].set()
        await until(lambda: len(begun) == 4)
        for each in ends:
            each.set()
        await asyncio.gather(*reading, large.task)

    run(scenario())


def test_clients_that_never_read_are_ended_where_others_need_the_room(
    stall: Callable[[float], None],
) -> None:
    """Those that read get the whole log beside them; the others learn what became of them."""
    stall(0.05)
    count, size = 20, 60_000

    async def scenario(served: Proxies) -> None:
        log = await served.cluster.namespaces[0].open_log("clicks")
        async with await log.open_writer() as writer:
            for number in range(count):
                await writer.write(record(number, bytes(size)))
        client = await served.start(sending_bytes_max=5 * size)
        sending = served.servers[0].reads.outgoing
        # Windows that do not grow: else this process would hold what the proxy should not.
        async with grpc.aio.insecure_channel(
            served.servers[0].address, options=[("grpc.http2.bdp_probe", 0)]
        ) as narrow:
            ticket = pb.Ticket(ticket=Ticket(log="clicks").encode())
            still = [do_get(narrow)(ticket) for _ in range(12)]
            await until(lambda: sending.size_bytes > 3 * size)
            got = [len(each.data_body) async for each in do_get(client.channel)(ticket)]
            assert sum(got) > count * size
            assert sending.size_bytes <= sending.bytes_max
            for each in still:
                with suppress(grpc.aio.AioRpcError):
                    assert [data async for data in each]
            ends = {(await each.code()).name for each in still}
            assert {"UNAVAILABLE"} <= ends <= {"UNAVAILABLE", "OK"}
        assert sending.size_bytes == 0

    with_proxies("clicks")(scenario)


def test_a_client_whose_connection_is_not_found_learns_why(
    stall: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it takes what is on its way."""
    stall(0.02)
    monkeypatch.setattr(service, "close_connection", lambda _: False)

    async def scenario(served: Proxies) -> None:
        log = await served.cluster.namespaces[0].open_log("clicks")
        async with await log.open_writer() as writer:
            for number in range(20):
                await writer.write(record(number, bytes(60_000)))
        client = await served.start(sending_bytes_max=1)
        sending = served.servers[0].reads.outgoing
        async with grpc.aio.insecure_channel(
            served.servers[0].address, options=[("grpc.http2.bdp_probe", 0)]
        ) as narrow:
            ticket = pb.Ticket(ticket=Ticket(log="clicks").encode())
            still = do_get(narrow)(ticket)
            (stalled,) = await until_stalled(sending)
            assert [data async for data in do_get(client.channel)(ticket)]
            assert stalled.answer.done()
            with suppress(grpc.aio.AioRpcError):
                assert [data async for data in still]
            assert (await still.code()).name == "UNAVAILABLE"
            assert (await still.details()).startswith(
                "ReaderStalledError: the client received nothing"
            )

    with_proxies("clicks")(scenario)


async def until_stalled(sending: Outgoing) -> list[_Sending]:
    """Wait until the one message that is on its way is not taken; return it."""
    seen: list[_Sending] = []
    while not seen or list(sending._in_transit) != seen:
        seen = list(sending._in_transit)
        await asyncio.sleep(0.1)
    return seen


@pytest.mark.parametrize(
    ("host", "named"), [("127.0.0.1", "ipv4:127.0.0.1:{}"), ("::1", "ipv6:%5B::1%5D:{}")]
)
def test_a_connection_is_closed_by_its_peers_name(host: str, named: str) -> None:
    """As gRPC spells it; others stay open."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server, ExitStack() as stack:
        address = server.getsockname()[:2]
        connect = partial(socket.create_connection, address)
        ends = [
            (stack.enter_context(connect()), stack.enter_context(server.accept()[0]))
            for _ in range(2)
        ]
        (first, _), (second, at_server) = ends
        context: Any = SimpleNamespace(peer=lambda: named.format(first.getsockname()[1]))
        assert close_connection(context)
        assert first.recv(1) == b""
        at_server.send(b"x")
        assert second.recv(1) == b"x"
        context.peer = lambda: "unix:"
        assert not close_connection(context)


def do_get(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryStreamMultiCallable[pb.Ticket, pb.FlightData]:
    """Return the method."""
    return channel.unary_stream(
        f"/{FLIGHT}/DoGet",
        request_serializer=pb.Ticket.SerializeToString,
        response_deserializer=pb.FlightData.FromString,
    )
