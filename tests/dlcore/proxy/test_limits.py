"""Limits of one log and of one principal: whom they concern, and whom they do not.

Method: a header of the call is taken for the principal in the certificate.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dlcore.base.access.rights import ANONYMOUS, Principal, Proof
from dlcore.base.errors import LogElsewhereError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.log.writing.writer import Pump
from dlcore.proxy.callers import Callers
from dlcore.proxy.service import FLIGHT
from dlcore.proxy.writing.budget import ByteBudget
from dlcore.proxy.writing.owner import LogOwner
from tests.fixtures.served_proxies import Client, Proxies, Stream, with_proxies


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the metadata as the caller's identity."""

    def said(_: Callers, context: Any) -> Principal:
        name = dict(context.invocation_metadata()).get("who")
        return ANONYMOUS if name is None else Principal(Proof.CERTIFICATE, name)

    monkeypatch.setattr(Callers, "_principal_of", said)


async def opened(client: Client, log: str, who: str | None) -> Stream:
    """Open a stream as this principal."""
    method: Any = client.channel.stream_stream(
        f"/{FLIGHT}/DoPut",
        request_serializer=pb.FlightData.SerializeToString,
        response_deserializer=pb.PutResult.FromString,
    )
    stream = Stream(method(metadata=() if who is None else (("who", who),)))
    await stream.begin(log)
    return stream


async def ready(client: Client, log: str, who: str | None) -> Stream:
    """Open a stream that is let in."""
    stream = await opened(client, log, who)
    assert "ready" in (await stream.next_reply() or {}), await stream.status()
    return stream


@pytest.mark.parametrize(
    ("limit", "refused", "let_in", "whose"),
    [
        ("log_streams_max", ("a", "other"), ("b", "me"), "log 'a'"),
        ("principal_streams_max", ("b", "me"), ("a", "other"), "certificate:me"),
    ],
)
def test_streams_above_the_limit_are_refused(
    limit: str, refused: tuple[str, str], let_in: tuple[str, str], whose: str
) -> None:
    """Until one ends; those of another log, or principal, and of unknown callers are let in."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**{limit: 2})
        streams = [await ready(client, "a", "me") for _ in range(2)]
        above = await opened(client, *refused)
        assert await above.next_reply() is None
        code, message, metadata = await above.status()
        assert (code, metadata["dlog-retry-after-ms"]) == ("RESOURCE_EXHAUSTED", "1000")
        assert f"{whose} has 2 streams open" in message
        streams.append(await ready(client, *let_in))
        streams.append(await ready(client, "b", None))
        await streams[0].last_reply()
        await streams[0].status()
        streams.append(await ready(client, *refused))
        for each in streams[1:]:
            await each.send(b"x")
            assert (await each.last_reply() or {})["acked"] == 1

    with_proxies("a", "b")(scenario)


def test_clients_with_too_many_streams_learn_which_proxy_owns_a_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner may have room for one more."""
    get = LogOwner.get

    async def elsewhere(owner: LogOwner, log: str, **options: Any) -> Any:
        if log == "b":
            raise LogElsewhereError("another one has it", location="grpc://other:1")
        return await get(owner, log, **options)

    monkeypatch.setattr(LogOwner, "get", elsewhere)

    async def scenario(served: Proxies) -> None:
        client = await served.start(principal_streams_max=1)
        first = await ready(client, "a", "me")
        second = await opened(client, "b", "me")
        assert await second.next_reply() is None
        code, _, metadata = await second.status()
        assert (code, metadata["dlog-location"]) == ("UNAVAILABLE", "grpc://other:1")
        assert await first.last_reply() is None

    with_proxies("a", "b")(scenario)


def test_a_principal_at_its_limit_waits_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the same log, and whatever it sends."""
    has_bytes, goes_on = asyncio.Event(), asyncio.Event()
    append = Pump._append

    async def slow(pump: Pump) -> None:
        if pump.machine.log.name == "still":
            has_bytes.set()
            await goes_on.wait()
        await append(pump)

    monkeypatch.setattr(Pump, "_append", slow)
    waits, take = asyncio.Event(), ByteBudget.take

    async def noted(budget: ByteBudget, *holder_and_bytes: Any) -> None:
        waits.set()
        await take(budget, *holder_and_bytes)

    monkeypatch.setattr(ByteBudget, "take", noted)

    async def scenario(served: Proxies) -> None:
        client = await served.start(principal_pending_bytes_max=1000)
        first = await ready(client, "still", "greedy")
        await first.send(bytes(900))
        await has_bytes.wait()
        second = await ready(client, "a", "greedy")
        await second.send(bytes(900))
        await waits.wait()  # else the third may be first, and the second is refused
        third = await ready(client, "a", "greedy")
        await third.send(bytes(900))
        assert await third.next_reply() is None
        code, message, _ = await third.status()
        assert (code, "too many bytes wait already" in message) == ("UNAVAILABLE", True)
        others = [await ready(client, "a", who) for who in ("modest", None)]
        for number in range(1, 6):
            for each in others:
                await each.send(bytes(800))
                assert (await each.next_reply() or {})["acked"] == number
        goes_on.set()
        for each in (first, second):
            assert (await each.last_reply() or {})["acked"] == 1

    with_proxies("still", "a")(scenario)
