"""Streams that stage at a proxy: whose writers are kept, what bounds them, and what is left."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import NotEnoughBookiesError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight import calls
from dlcore.log.staging.writer import DirectStagingWriter
from dlcore.proxy.writing import staging
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import PAYLOADS, Client, Proxies, data_of, with_proxies
from tests.fixtures.staged_records import batch, ledgers, staged_nodes

if TYPE_CHECKING:
    import pytest

    from tests.fixtures.served_proxies import Stream


async def opened(client: Client, identity: str, *, shared: bool = False) -> Stream:
    """Begin to stage."""
    stream = client.put()
    first = data_of(PAYLOADS.serialize())
    first.flight_descriptor.type = pb.FlightDescriptor.CMD
    first.flight_descriptor.cmd = json.dumps({"staging": identity, "shared": shared}).encode()
    await stream.call.write(first)
    return stream


async def send(stream: Stream, *payloads: bytes, log: str = "a") -> None:
    """Send a batch for a log."""
    data = data_of(pa.record_batch([pa.array(payloads, pa.binary())], schema=PAYLOADS).serialize())
    data.app_metadata = json.dumps({"log": log}).encode()
    await stream.call.write(data)


async def staged(client: Client, identity: str, payload: bytes, *, shared: bool = True) -> Any:
    """Stage one record; return the reply."""
    stream = await opened(client, identity, shared=shared)
    reply = await stream.next_reply()
    assert reply is not None
    assert reply["ready"]["staging"] == identity
    await send(stream, payload)
    reply = await stream.last_reply()
    assert reply is not None, await stream.status()
    return reply["staged"]


async def refused(stream: Stream, log: str) -> tuple[str, str, dict[str, str]]:
    """Send what cannot be staged; return the status."""
    assert await stream.next_reply() is not None
    await send(stream, b"x")
    await send(stream, b"x", log=log)
    assert await stream.last_reply() == {"refused": True}
    return await stream.status()


def test_streams_of_one_identity_share_ledgers() -> None:
    """If they say so; also after one was refused."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        first = await staged(client, "query", b"1")
        code, details, _ = await refused(await opened(client, "query", shared=True), "none")
        assert (code, "none" in details) == ("NOT_FOUND", True)
        second = await staged(client, "query", b"2")
        assert len(ledgers(served.cluster)) == 1
        await staged(client, "write", b"never", shared=False)
        await refused(await opened(client, "failed"), "none")
        assert len(ledgers(served.cluster)) == 2  # of what was refused nothing is left
        for number in range(2):
            answer = await client.act(
                "commit_append",
                identity="query>a",
                version=1,
                token="t",
                shared={"identity": "query", "round": "1"},
                extents=[*first, *second],
            )
            assert answer == {"already_committed": number == 1}
        log = await served.cluster.namespaces[0].open_log("a")
        assert [bytes(each.payload) for each in await read_all(log)] == [b"1", b"2"]

    with_proxies("a")(scenario)


def test_writers_that_wait_for_long_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no stream comes any more; one that comes has a ledger of its own."""
    closed: list[DirectStagingWriter] = []
    aclose = DirectStagingWriter.aclose

    async def noted(self: DirectStagingWriter, **options: bool) -> None:
        await aclose(self, **options)
        closed.append(self)

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        monkeypatch.setattr(staging, "KEPT_S", 0.01)
        monkeypatch.setattr(DirectStagingWriter, "aclose", noted)
        for count in (1, 2):
            await staged(client, "query", b"%d" % count)
            await until(lambda count=count: len(closed) == count)  # type: ignore[misc]
        assert len(staged_nodes(served.cluster)) == 2

    with_proxies("a")(scenario)


def test_records_that_streams_of_lower_rounds_staged_in_vain_are_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stream fills a ledger here; of the uncommitted ones one round's are left."""
    monkeypatch.setattr(DirectStagingWriter, "_is_due_for_another", lambda *_: True)

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with await open_namespace(served.servers[0].location) as remote:
            writer = await remote.open_staging_writer(identity="query", shared=True)
            for number in range(1, 6):
                await writer.begin_round(number)
                for _ in range(2):
                    await writer.write_batch("a", batch(f"{number}"))
                    await writer.stage()
            assert len(staged_nodes(served.cluster)) == 2 + 1

    with_proxies("a")(scenario)


def test_streams_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is silent loses it, and learns of it; a client that is gone gives it back."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(staging_max=1)
        gone = await opened(client, "gone")
        assert await gone.next_reply() is not None
        waiting = await opened(client, "waiting")
        reading = asyncio.create_task(waiting.next_reply())
        await asyncio.sleep(0.05)
        assert not reading.done()
        gone.call.cancel()
        found = await reading
        assert found is not None
        assert found["ready"]["staging"] == "waiting"
        waiting.call.cancel()
        monkeypatch.setattr(staging, "SILENCE_S", 0.05)
        silent = await opened(client, "silent")
        assert await silent.next_reply() is not None
        assert await silent.next_reply() == {"refused": True}
        await silent.call.done_writing()
        assert await silent.next_reply() is None
        code, details, _ = await silent.status()
        assert code == "RESOURCE_EXHAUSTED"
        assert "sent nothing for 0.05 s" in details

    with_proxies("a")(scenario)


def test_a_client_that_does_not_read_its_staged_parts_holds_no_other_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be more than gRPC sends unasked; the turn is another one's by then."""
    read = asyncio.Event()
    send_on = calls.send

    async def slow(context: Any, message: pb.PutResult) -> None:
        if b'"staged"' in message.app_metadata and not read.is_set():
            read.set()
            await asyncio.Event().wait()
        await send_on(context, message)

    async def scenario(served: Proxies) -> None:
        client = await served.start(staging_max=1)
        monkeypatch.setattr(calls, "send", slow)
        deaf = await opened(client, "deaf")
        await send(deaf, b"x")
        await deaf.call.done_writing()
        await read.wait()
        assert await staged(client, "another", b"y")
        deaf.call.cancel()

    with_proxies("a")(scenario)


def test_a_stream_is_delayed_by_one_rate_for_all_its_logs() -> None:
    """And the last message says for how long."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(stream_records_per_s=50.0)
        stream = await opened(client, "job")
        await stream.next_reply()
        for log in ("a", "b", "c"):
            await send(stream, *[b"x"] * 50, log=log)
        reply = await stream.last_reply()
        assert reply is not None
        assert len(reply["staged"]) == 3
        assert reply["throttled_ms"] > 500
        quick = await opened(client, "quick")
        await quick.next_reply()
        await send(quick, b"y")
        assert "throttled_ms" not in (await quick.last_reply() or {})

    with_proxies("a", "b", "c")(scenario)


def test_kept_writers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that waits for longest is closed; what it staged can be committed."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        monkeypatch.setattr(staging, "KEPT_MAX", 1)
        first = await staged(client, "first", b"1")
        await staged(client, "second", b"2")
        again = await staged(client, "first", b"3")
        answer = await client.act(
            "commit_append", identity="first", version=1, token="t", extents=[*first, *again]
        )
        assert answer == {"already_committed": False}
        assert len(ledgers(served.cluster)) == 3

    with_proxies("a")(scenario)


def test_a_writer_is_closed_whatever_the_client_does_that_put_back_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for no bookie of that other writer, and may go away."""
    gate, ended = asyncio.Event(), list[DirectStagingWriter]()
    close = DirectStagingWriter.aclose

    async def slow(self: DirectStagingWriter, *, delete: bool = False) -> None:
        await gate.wait()
        await close(self, delete=delete)
        ended.append(self)

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        monkeypatch.setattr(staging, "KEPT_MAX", 1)
        monkeypatch.setattr(DirectStagingWriter, "aclose", slow)
        await staged(client, "first", b"1")
        await asyncio.wait_for(staged(client, "second", b"2"), 10)
        assert not ended
        gate.set()
        await until(lambda: len(ended) == 1)

    with_proxies("a")(scenario)


def test_a_shared_writer_that_cannot_go_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bookies do not answer when a refused stream is to be forgotten; the next has another one."""

    async def scenario(served: Proxies) -> None:
        async def fail(*_: object, **__: object) -> None:
            raise NotEnoughBookiesError("no bookie answers")

        client = await served.start()
        await staged(client, "query", b"1")
        with monkeypatch.context() as patched:
            patched.setattr(DirectStagingWriter, "discard", fail)
            patched.setattr(DirectStagingWriter, "aclose", fail)
            code, _, _ = await refused(await opened(client, "query", shared=True), "none")
            assert code == "NOT_FOUND"
        assert len(ledgers(served.cluster)) == 1
        await staged(client, "query", b"2")
        assert len(ledgers(served.cluster)) == 2

    with_proxies("a")(scenario)
