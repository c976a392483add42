"""Streams and actions that come to a proxy which does not own their log, and are forwarded.

Goal: a client that reaches one proxy only writes as at the owner, and gets the owner's answers.
Method: two proxies and more over a cluster in memory; the client never connects to the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from dlcore.base.errors import LogNotReadyError, WriteError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.proxy.rendezvous import preferred_owner
from dlcore.proxy.service import FLIGHT
from dlcore.proxy.writing.forwarding import Forwarding, Relay
from dlcore.proxy.writing.owner import LogOwner
from dlcore.wire.memory_bookies import MemoryBookieClient
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import Proxies, Stream, with_proxies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fixtures.served_proxies import Client

FORWARD = (("dlog-forward", "true"),)
LOGS = [f"log-{number}" for number in range(32)]


async def two(served: Proxies, **settings: Any) -> tuple[Client, Client, str]:
    """Start two proxies; return clients of the one that is asked and of an owner, and its log."""
    clients = [await served.start(**settings) for _ in range(2)]
    both = {each.location for each in served.servers}
    await until(lambda: all(each.reads._membership.live == both for each in served.servers))
    owner = served.servers[1].location
    return clients[0], clients[1], next(x for x in LOGS if preferred_owner(x, both) == owner)


def put(client: Client, *metadata: tuple[str, str | bytes]) -> Stream:
    """Open a stream with metadata, by default one that may be forwarded."""
    method: Any = client.channel.stream_stream(
        f"/{FLIGHT}/DoPut",
        request_serializer=pb.FlightData.SerializeToString,
        response_deserializer=pb.PutResult.FromString,
    )
    return Stream(method(metadata=metadata or FORWARD))


async def opened(client: Client, log: str, **options: object) -> tuple[Stream, dict[str, Any]]:
    """Open a forwarded stream; return it with the reply that makes it ready."""
    stream = put(client)
    await stream.begin(log, **options)
    ready = await stream.next_reply()
    assert ready is not None, await stream.status()
    return stream, ready["ready"]


async def act(client: Client, action: str, *metadata: tuple[str, str], **body: object) -> Any:
    """Perform an action that may be forwarded."""
    method: Any = client.channel.unary_stream(
        f"/{FLIGHT}/DoAction",
        request_serializer=pb.Action.SerializeToString,
        response_deserializer=pb.Result.FromString,
    )
    request = pb.Action(type=action, body=json.dumps(body).encode())
    (result,) = [each async for each in method(request, metadata=metadata or FORWARD)]
    return json.loads(result.body)


async def payloads(served: Proxies, log: str) -> list[bytes]:
    """Return what a log holds."""
    found = await read_all(await served.cluster.namespaces[0].open_log(log))
    return [each.payload for each in found]


def test_a_stream_is_forwarded_if_its_client_asks_for_it() -> None:
    """It gets the owner's answers; one that does not ask is sent there, as ever."""

    async def scenario(served: Proxies) -> None:
        asked, owner, log = await two(served)
        stream, ready = await opened(asked, log, positions=True)
        assert (ready["log"], ready["window_records"]) == (log, 65_536)
        for number in range(20):
            await stream.send(b"%d" % number)
        await stream.acked(20)
        assert await stream.last_reply() is None
        assert (await stream.status())[0] == "OK"
        assert await payloads(served, log) == [b"%d" % number for number in range(20)]
        assert await owner.act("logs") == {"logs": [log]}
        assert await asked.act("logs") == {"logs": []}
        plain = asked.put()
        await plain.begin(log)
        assert await plain.next_reply() is None
        code, _, metadata = await plain.status()
        assert (code, metadata["dlog-location"]) == ("UNAVAILABLE", served.servers[1].location)

    with_proxies(*LOGS)(scenario)


def test_a_producer_goes_on_over_forwarded_and_direct_streams() -> None:
    """Each record is in the log once, whichever way it came, and a gap fails as at the owner."""

    async def scenario(served: Proxies) -> None:
        asked, owner, log = await two(served)
        stream, ready = await opened(asked, log, producer="meter")
        assert ready["sequence"] == -1
        await stream.send(b"0", b"1", sequence=0)
        await stream.acked(2)
        direct, again = await owner.opened_with(log, producer=ready["producer"])
        assert again["sequence"] == 1
        await direct.send(b"1", b"2", sequence=1)
        await direct.acked(2)
        await direct.last_reply()
        stream, again = await opened(asked, log, producer=ready["producer"])
        assert again["sequence"] == 2
        await stream.send(b"2", b"3", sequence=2)
        await stream.acked(2)
        await stream.send(b"9", sequence=9)
        assert await stream.next_reply() is None
        code, message, metadata = await stream.status()
        assert (code, metadata["dlog-expected-sequence"]) == ("FAILED_PRECONDITION", "4")
        assert message.startswith("SequenceGapError: ")
        assert await payloads(served, log) == [b"0", b"1", b"2", b"3"]

    with_proxies(*LOGS)(scenario)


@pytest.mark.parametrize("is_first", [True, False])
def test_errors_of_the_owner_are_passed_on_unchanged(*, is_first: bool) -> None:
    """One that refuses the stream, and one in the middle, after what was accepted before."""

    async def scenario(served: Proxies) -> None:
        asked, _, log = await two(served)
        if is_first:
            stream = put(asked)
            await stream.begin(log, log_id="no-such-id")
            wanted = ("NOT_FOUND", "LogNotFoundError")
        else:
            stream, _ = await opened(asked, log)
            await stream.send(b"fine")
            await stream.acked(1)
            await stream.call.write(pb.FlightData(data_header=b"no Arrow"))
            wanted = ("INVALID_ARGUMENT", "ConfigurationError")
        assert await stream.next_reply() is None
        code, message, metadata = await stream.status()
        assert (code, message.partition(":")[0]) == wanted
        assert metadata["dlog-error"].isdecimal()
        assert await payloads(served, log) == ([] if is_first else [b"fine"])

    with_proxies(*LOGS)(scenario)


def test_a_forwarded_stream_is_not_forwarded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two proxies each take the other for the owner: the client soon learns of it."""
    get, begun = LogOwner.get, []

    async def scenario(served: Proxies) -> None:
        asked, _, log = await two(served)
        here, there = (each.location for each in served.servers)

        async def mistaken(owner: LogOwner, name: str, **options: Any) -> Any:
            begun.append(owner.location)
            live = frozenset({there if owner.location == here else here})
            monkeypatch.setattr(owner._membership, "live", live)
            return await get(owner, name, **options)

        monkeypatch.setattr(LogOwner, "get", mistaken)
        stream = put(asked)
        await stream.begin(log)
        assert await stream.next_reply() is None
        code, message, metadata = await stream.status()
        assert (code, metadata["dlog-retry-after-ms"]) == ("UNAVAILABLE", "1000")
        assert f"the proxy at {there} should serve it and does not" in message
        assert begun == [here, there] * 4 + [here]
        monkeypatch.setattr(LogOwner, "get", get)

    with_proxies(*LOGS)(scenario)


def test_the_proxy_that_holds_the_lock_is_found_by_way_of_the_one_that_should() -> None:
    """A proxy that came later should own the log, and names the owner."""

    async def scenario(served: Proxies) -> None:
        first = await served.start()
        for log in LOGS:
            stream = await first.opened(log)
            await stream.last_reply()
        asked, _, _ = await two(served)
        live = {each.location for each in served.servers}
        should = served.servers[2].location
        log = next(each for each in LOGS if preferred_owner(each, live) == should)
        stream, _ = await opened(asked, log)
        await stream.send(b"x")
        await stream.acked(1)
        await stream.last_reply()
        assert log in (await first.act("logs"))["logs"]

    with_proxies(*LOGS)(scenario)


def test_an_owner_that_lets_go_tells_the_client() -> None:
    """All that it accepted is acknowledged, then it is draining; the next stream is served."""

    async def scenario(served: Proxies) -> None:
        asked, owner, log = await two(served)
        stream, _ = await opened(asked, log)
        await stream.send(b"a")
        await stream.acked(1)
        draining = asyncio.create_task(owner.act("drain"))
        assert await stream.next_reply() == {"draining": {"location": served.servers[0].location}}
        assert await stream.last_reply() is None
        await draining
        stream, _ = await opened(asked, log)
        await stream.send(b"b")
        await stream.acked(1)
        await stream.last_reply()
        assert await payloads(served, log) == [b"a", b"b"]

    with_proxies(*LOGS)(scenario)


def test_a_forwarder_that_stops_ends_its_streams_in_order() -> None:
    """Forwarded messages are acknowledged; the client learns that it is draining, and goes on."""

    async def scenario(served: Proxies) -> None:
        asked, _, log = await two(served)
        stream, _ = await opened(asked, log)
        await stream.send(b"a")
        await stream.acked(1)
        closing = asyncio.create_task(served.servers[0].aclose())
        reply = await stream.next_reply()
        assert reply == {"draining": {"location": served.servers[1].location}}
        await stream.send(b"late")
        assert await stream.last_reply() is None
        assert (await stream.status())[0] == "UNAVAILABLE"
        await closing
        assert await payloads(served, log) == [b"a"]

    with_proxies(*LOGS)(scenario)


class Ended:
    """A call to an owner that ends in order once nothing more is sent; `said` is what it says."""

    def __init__(self, *said: dict[str, object]) -> None:
        self.said = [
            pb.PutResult(app_metadata=json.dumps(each).encode()).SerializeToString()
            for each in said
        ]
        self.sent: list[bytes] = []
        self._has_ended = asyncio.Event()

    async def write(self, data: bytes) -> None:
        """Take a message, unless the last one was said to be sent."""
        if self._has_ended.is_set():
            raise asyncio.InvalidStateError
        self.sent.append(data)

    async def done_writing(self) -> None:
        """End."""
        self._has_ended.set()

    async def read(self) -> Any:
        """Return the next answer, or the end."""
        if self.said:
            return self.said.pop(0)
        await self._has_ended.wait()
        return grpc.aio.EOF


class Sender:
    """A client that sends these messages and no more."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)
        self.next_reply: list[Any] = []

    async def read(self) -> Any:
        """Return what it sends next."""
        return self._messages.pop(0) if self._messages else grpc.aio.EOF

    async def write(self, message: Any) -> None:
        """Take an answer."""
        self.next_reply.append(message)


def test_a_message_that_waits_for_memory_is_not_lost_when_its_forwarder_stops() -> None:
    """The stream does not end in order: its client learns that it was not written."""

    async def scenario() -> None:
        has_room, waits = asyncio.Event(), asyncio.Event()

        @contextlib.asynccontextmanager
        async def held(_: int) -> AsyncIterator[None]:
            waits.set()
            await has_room.wait()
            yield

        call = Ended()
        context: Any = Sender(b"message")
        relay = Relay(context, call, "grpc://owner:1", held)
        running = asyncio.create_task(relay.run(b""))
        await waits.wait()
        relay.end()
        has_room.set()
        with pytest.raises(LogNotReadyError, match="this proxy stops"):
            await running
        assert call.sent == []

    asyncio.run(scenario())


def test_a_lost_stream_says_how_much_was_acknowledged_before_the_owner_drained() -> None:
    """A message without a number does not make it none."""

    async def scenario() -> None:
        call = Ended({"acked": 5}, {"draining": {"location": None}})
        context: Any = Sender()
        relay = Relay(context, call, "grpc://owner:1", lambda _: contextlib.nullcontext())
        with contextlib.suppress(WriteError):
            await relay.run(await call.read())
        assert "of 5 records" in str(relay.lost("it is killed"))

    asyncio.run(scenario())


def test_a_forwarder_drains_with_the_bytes_of_an_owner() -> None:
    """A client needs one parser: both send the struct of the protocol, without spaces."""

    async def scenario() -> None:
        context: Any = Sender()
        relay = Relay(context, Ended(), "grpc://owner:1", lambda _: contextlib.nullcontext())
        relay.end()
        with contextlib.suppress(LogNotReadyError):
            await relay.run(b"")
        assert context.next_reply[-1].app_metadata == b'{"draining":{"location":"grpc://owner:1"}}'

    asyncio.run(scenario())


def test_a_client_that_goes_leaves_nothing_at_either_proxy() -> None:
    """Its stream at the owner ends with its own, and makes room for the next one."""

    async def scenario(served: Proxies) -> None:
        asked, _, log = await two(served, log_streams_max=1)
        stream, _ = await opened(asked, log)
        stream.call.cancel()
        code = "RESOURCE_EXHAUSTED"
        while code == "RESOURCE_EXHAUSTED":
            stream = put(asked)
            await stream.begin(log)
            if await stream.next_reply() is not None:
                break
            code, _, _ = await stream.status()
        assert await stream.last_reply() is None
        assert (await stream.status())[0] == "OK"

    with_proxies(*LOGS)(scenario)


def test_messages_that_the_owner_does_not_take_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The forwarder of a stalled log holds a message of a stream, and counts it."""
    goes_on = asyncio.Event()
    held: list[int] = []

    async def scenario(served: Proxies) -> None:
        asked, _, log = await two(served, window_bytes=1000)
        put_: Any = Forwarding.put

        async def watched(*args: Any) -> Any:
            *given, hold = args

            def counted(size_bytes: int) -> Any:
                held.append(size_bytes)
                return hold(size_bytes)

            return await put_(*given, counted)

        monkeypatch.setattr(Forwarding, "put", watched)
        add_entry = MemoryBookieClient.add_entry

        def slow(*args: Any, **kwargs: Any) -> asyncio.Future[None]:
            async def answer() -> None:
                await goes_on.wait()
                await add_entry(*args, **kwargs)

            return asyncio.ensure_future(answer())

        monkeypatch.setattr(MemoryBookieClient, "add_entry", slow)
        stream, _ = await opened(asked, log)
        sent = 0

        async def send_all() -> None:
            nonlocal sent
            for _ in range(200):
                await stream.send(bytes(100_000))
                sent += 1

        sending = asyncio.create_task(send_all())
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.3)
        assert 0 < sent < 50
        assert len(held) <= sent
        goes_on.set()
        await sending
        await stream.acked(200)
        await stream.last_reply()

    with_proxies(*LOGS)(scenario)


def test_actions_that_need_the_owner_are_forwarded() -> None:
    """With its answer, or its error; one that is not asked to be is sent there."""

    async def scenario(served: Proxies) -> None:
        asked, owner, log = await two(served, lock_timeout_s=0.1)
        reply = await act(asked, "producer_init", log=log, producer="meter")
        assert reply["sequence"] == -1
        stream = await owner.opened(log)
        with pytest.raises(grpc.aio.AioRpcError, match="is served by"):
            await asked.act("seal", log=log)
        with pytest.raises(grpc.aio.AioRpcError, match="expected true or false") as refused:
            await act(asked, "seal", ("dlog-forward", "1"), log=log)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        sealing = asyncio.create_task(act(asked, "seal", log=log))
        assert "draining" in (await stream.next_reply() or {})
        await stream.last_reply()
        assert await sealing == {}
        with pytest.raises(grpc.aio.AioRpcError) as sealed:
            await act(asked, "producer_init", log=log, producer="meter")
        assert sealed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (sealed.value.details() or "").startswith("EndOfStreamError: ")

    with_proxies(*LOGS)(scenario)


def test_limits_of_clients_count_those_for_whom_a_proxy_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, at the owner; a caller that only claims to be a proxy is counted as itself."""

    async def scenario(served: Proxies) -> None:
        asked, owner, log = await two(served, principal_streams_max=1)
        first, _ = await opened(asked, log)
        assert await is_refused(put(asked), log) == "host '127.0.0.1' has 1 streams open"
        forged = (
            ("dlog-forwarded-by", served.servers[0].location),
            ("dlog-forwarder-secret", "x"),
        )
        reply = (*forged, ("dlog-forwarded-for-bin", b"user:other"))
        assert await is_refused(put(owner, *reply), log) == "host '127.0.0.1' has 1 streams open"
        secret = served.servers[0].reads._membership.presence.secret
        proved = (*reply[:1], ("dlog-forwarder-secret", secret), reply[2])
        stream = put(owner, *proved)
        await stream.begin(log)
        assert "ready" in (await stream.next_reply() or {})
        for each in (first, stream):
            await each.last_reply()

    async def is_refused(stream: Stream, log: str) -> str:
        await stream.begin(log)
        assert await stream.next_reply() is None
        code, message, _ = await stream.status()
        assert code == "RESOURCE_EXHAUSTED"
        return message.partition(": ")[2].partition(" at this proxy")[0]

    with_proxies(*LOGS)(scenario)
