"""Logs that take records slowly or not at all: what a proxy holds for them, and what it says.

Goal: a client that is not served holds little, whatever is sent, and learns when to come again.
Method: the writer of one log stands still, by a patch, until it is released.
"""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dlcore.flight.put import PutDecoder
from dlcore.log.writing.writer import Pump
from dlcore.proxy.writing import admission
from dlcore.proxy.writing.budget import Holder, ReceivedBytes
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import CONFIG, read_all
from tests.fixtures.served_proxies import Proxies, Stream, with_proxies

if TYPE_CHECKING:
    import pytest


class Still:
    """The log "still" takes nothing until it is released; then each entry takes a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = asyncio.Event()
        append = Pump._append

        async def slow(pump: Pump) -> None:
            if pump.machine.log.name == "still":
                await self.goes_on.wait()
                await asyncio.sleep(0.001)
            await append(pump)

        monkeypatch.setattr(Pump, "_append", slow)


async def end_of(stream: Stream) -> tuple[str, str, str | None]:
    """Return the status, its message, and when to come again."""
    code, message, metadata = await stream.status()
    return code, message, metadata.get("dlog-retry-after-ms")


def small_writers(served: Proxies) -> None:
    """Let a writer have room for 1000 bytes."""
    config = replace(CONFIG, pending_bytes_max=4000)
    served.cluster.open = partial(served.cluster.open, config=config)  # type: ignore[method-assign]


def test_more_than_may_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a stalled log end; another one is served, and accepted records are written."""

    async def scenario(served: Proxies) -> None:
        still = Still(monkeypatch)
        small_writers(served)
        client = await served.start(received_bytes_max=10_000)
        streams = [await client.opened("still") for _ in range(6)]
        for stream in streams:
            await stream.send(bytes(1500))
        ends = [asyncio.create_task(stream.last_reply()) for stream in streams]
        try:
            async with asyncio.timeout(20):
                await until(lambda: sum(task.done() for task in ends) == 4)
        except TimeoutError:
            still.goes_on.set()  # the proxy waits for it when it ends
            raise
        lively = await client.opened("lively")
        for _ in range(10):
            await lively.send(bytes(1500))
        assert (await lively.last_reply() or {})["acked"] == 10
        still.goes_on.set()
        reply = await asyncio.gather(*ends)
        assert [last["acked"] for last in reply if last] == [1, 1]
        for stream, last in zip(streams, reply, strict=True):
            code, message, retry_after_ms = await end_of(stream)
            if last is None:
                assert (code, retry_after_ms) == ("UNAVAILABLE", "1000")
                assert "log 'still': too many bytes wait already" in message
        assert len(await read_all(await served.cluster.namespaces[0].open_log("still"))) == 2

    with_proxies("still", "lively")(scenario)


def test_messages_that_waited_for_long_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the log, or for the client to say that this was all; it holds nothing any more."""

    async def scenario(served: Proxies) -> None:
        still = Still(monkeypatch)
        small_writers(served)
        batches = decoded(monkeypatch)
        client = await served.start()
        stream, other = await client.opened("still"), await client.opened("still")
        await stream.send(b"accepted")
        await until(lambda: len(batches) == 1)
        await other.send(bytes(1500))
        await until(lambda: len(batches) == 2)
        await stream.send(bytes(1500))
        await until(lambda: len(batches) == 3)
        await until(lambda: batches[2]() is None)
        still.goes_on.set()
        await stream.acked(1)
        assert (await other.last_reply() or {})["acked"] == 1
        unfinished, _ = await client.opened_with("lively", expected=None)
        await unfinished.send(b"is this all?")
        for each in (stream, unfinished):
            assert await each.next_reply() is None
            code, message, retry_after_ms = await end_of(each)
            assert (code, retry_after_ms) == ("UNAVAILABLE", "1000")
            assert "a message waited for 0.05 s" in message

    monkeypatch.setattr(admission, "STALL_S", 0.05)
    with_proxies("still", "lively")(scenario)


def test_streams_that_are_idle_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch that was written, or had no rows."""

    async def scenario(served: Proxies) -> None:
        batches = decoded(monkeypatch)
        client = await served.start()
        stream = await client.opened("lively")
        await stream.send(b"x")
        await stream.acked(1)
        await stream.send()
        await until(lambda: len(batches) == 2)
        await until(lambda: all(each() is None for each in batches))
        await stream.last_reply()

    with_proxies("lively")(scenario)


def test_streams_of_a_slow_log_wait_with_their_messages_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All send at once what they have; then few read at a time, each in its turn."""

    async def scenario(served: Proxies) -> None:
        still = Still(monkeypatch)
        still.goes_on.set()
        small_writers(served)
        waiting: list[int] = []

        def noted(self: ReceivedBytes, holder: Holder, size_bytes: int) -> Any:
            waiting.append(self._budget._taken)
            return hold(self, holder, size_bytes)

        hold = ReceivedBytes.hold
        monkeypatch.setattr(ReceivedBytes, "hold", noted)
        client = await served.start()
        streams = [await client.opened("still") for _ in range(40)]

        async def push(stream: Stream) -> None:
            for _ in range(20):
                await stream.send(bytes(1000))
            assert (await stream.last_reply() or {})["acked"] == 20

        # On a busy machine a turn would often end before what was sent has come.
        monkeypatch.setattr(admission, "_SOON_S", 60.0)
        await asyncio.gather(*map(push, streams))
        assert max(waiting) > 20_000, "what came at once"
        assert max(waiting[len(waiting) // 2 :]) < 20_000

    with_proxies("still")(scenario)


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Return the batches that are decoded from now on, as long as they are referred to."""
    decode = PutDecoder.decode
    batches: list[weakref.ref[Any]] = []

    def noted(decoder: PutDecoder, message: Any) -> Any:
        batch = decode(decoder, message)
        batches.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(PutDecoder, "decode", noted)
    return batches
