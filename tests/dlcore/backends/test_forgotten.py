"""Writers over an endpoint that were silent for so long that their log has forgotten them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.errors import ProducerFencedError, WriteError
from dlcore.base.records import LogRecord
from dlcore.flight import producer_client
from dlcore.flight.calls import send_reply
from dlcore.log.entries.stamp import PRODUCERS_KEPT_MS
from dlcore.log.proxied import producers
from dlcore.proxy.writing import producer_driver
from tests.dlcore.backends.test_writing import payloads, remote
from tests.fixtures.aio import until_async
from tests.fixtures.served_proxies import Client, Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.flight.replies import PutReply


@pytest.fixture(autouse=True)
def _each_entry_lists_producers() -> Iterator[None]:
    """Let a log forget with each entry those that it may forget."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(producers, "_SNAPSHOT_ENTRIES", 1)
        patched.setattr(producers, "_SNAPSHOT_SHARE", 0)
        yield


async def forgets(served: Proxies, client: Client, *, after_ms: int) -> None:
    """Let time pass, and others write to the log."""
    for server in served.servers:
        served.cluster.clocks[server.location].current_ms += after_ms
    before = len(await payloads(served))
    stream, _ = await client.opened_with("clicks", producer="other")
    await stream.send(b"other")

    async def is_there() -> bool:
        return len(await payloads(served)) > before

    await until_async(is_there)
    stream.call.cancel()


@pytest.mark.parametrize("moves", [False, True], ids=["its stream is open", "the log moves"])
@pytest.mark.parametrize("count", [0, 2], ids=["that wrote nothing yet", "that wrote"])
def test_a_writer_without_a_name_begins_anew(count: int, *, moves: bool) -> None:
    """Each of its records is there once; it has another name, under which it counts from 0."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        async with await (await remote(served)).open_writer() as writer:
            name = writer.producer
            for number in range(count):
                await writer.write(LogRecord(0, b"%d" % number))
            if moves:
                await client.act("release", log="clicks")
            await forgets(served, client, after_ms=producers.GENERATED_FORGOTTEN_MS)
            later = writer.write_bulk([LogRecord(2**60, b"a"), LogRecord(2**60, b"b")])
            assert all(await asyncio.gather(*later))
            assert writer.next_sequence == 2
            # A producer that has written nothing may go on: it looks like a new one.
            assert (writer.producer == name) == (moves and not count)
        before = [b"%d" % number for number in range(count)]
        assert await payloads(served) == [*before, b"other", b"a", b"b"]

    with_proxies("clicks")(scenario)


def test_a_writer_with_a_name_gets_an_error() -> None:
    """Where it goes on is for its program to say, which opens the next one."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        log = await remote(served)
        writer = await log.open_writer(producer="meter")
        await writer.write(LogRecord(0, b"0"))
        await client.act("release", log="clicks")
        await forgets(served, client, after_ms=PRODUCERS_KEPT_MS)
        with pytest.raises(ProducerFencedError, match=r"know producer 'meter' any more$"):
            await writer.write(LogRecord(0, b"1"))
        with pytest.raises(WriteError):
            await writer.flush()
        await writer.aclose()
        async with await log.open_writer(producer="meter") as again:
            assert again.next_sequence == 0

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize("name", [None, "meter"])
@pytest.mark.parametrize("is_first", [False, True], ids=["later records", "its first record"])
def test_doubtful_records_are_not_sent_to_a_log_that_forgot(
    monkeypatch: pytest.MonkeyPatch, name: str | None, *, is_first: bool
) -> None:
    """It would be there twice: the writer gets an error which says that it may be there."""
    forgotten_ms = producers.GENERATED_FORGOTTEN_MS if name is None else PRODUCERS_KEPT_MS

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        asked = asyncio.Event()

        async def late(context: Any, reply: PutReply) -> None:
            if reply.acked is None:
                await send_reply(context, reply)
                return
            monkeypatch.setattr(producer_driver, "send_reply", send_reply)
            await forgets(served, client, after_ms=forgotten_ms)
            asked.set()
            await asyncio.sleep(3600)

        monkeypatch.setattr(producer_client, "SILENCE_S", 0.5)
        monkeypatch.setattr(
            producer_client, "GENERATED_KEPT_MS" if name is None else "KEPT_MS", 100
        )
        writer = await (await remote(served)).open_writer(producer=name)
        if not is_first:
            await writer.write(LogRecord(0, b"acknowledged"))
        monkeypatch.setattr(producer_driver, "send_reply", late)
        doubted = writer.write(LogRecord(0, b"doubted"))
        with pytest.raises(ProducerFencedError, match="may hold some of 1 record that it sent"):
            await doubted
        assert asked.is_set()
        await writer.abort()
        assert (await payloads(served)).count(b"doubted") == 1

    with_proxies("clicks")(scenario)
