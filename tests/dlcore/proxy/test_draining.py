"""A proxy that releases its logs: all accepted records are durable and acknowledged; it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dlcore.log.writing.writer import Pump
from dlcore.proxy.writing import owner
from dlcore.proxy.writing.owned_log import OwnedLog
from dlcore.proxy.writing.owner import LogOwner
from dlcore.wire.memory_bookies import MemoryBookieClient
from tests.dlcore.proxy.test_put import until_owned
from tests.fixtures.memory_namespace import TIME_LIMIT_S, read_all
from tests.fixtures.served_proxies import Proxies, with_proxies


@pytest.mark.parametrize("change", [{"action": "release", "log": "clicks"}, {"action": "drain"}])
def test_accepted_records_are_acknowledged_before_their_log_is_released(
    change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for bookies that take their time, and tells the client before it ends the stream."""
    add_entry = MemoryBookieClient.add_entry

    async def scenario(served: Proxies) -> None:
        asked, may_answer = asyncio.Event(), asyncio.Event()

        def held(*args: Any, **kwargs: Any) -> asyncio.Future[None]:
            asked.set()

            async def answer() -> None:
                async with asyncio.timeout(TIME_LIMIT_S / 10):
                    await may_answer.wait()
                await add_entry(*args, **kwargs)

            return asyncio.ensure_future(answer())

        client = await served.start()
        stream = await client.opened("clicks")
        monkeypatch.setattr(MemoryBookieClient, "add_entry", held)
        await stream.send(b"a", b"b")
        await asked.wait()
        letting_go = asyncio.create_task(client.act(**change))
        await until_owned(client)
        assert not letting_go.done()
        may_answer.set()
        reply = await stream.next_reply()
        assert reply is not None
        assert (reply["acked"], await stream.next_reply()) == (2, {"draining": {"location": None}})
        assert await stream.last_reply() is None
        await letting_go
        found = await read_all(await served.cluster.namespaces[0].open_log("clicks"))
        assert [each.payload for each in found] == [b"a", b"b"]
        assert reply["dlsn"] == str(found[-1].dlsn)

    with_proxies("clicks")(scenario)


def test_an_append_on_a_condition_does_not_lose_a_log_that_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It finds the writer closed when it asks whether the log is still ours.

    It is not written, and the records of another stream are still acknowledged.
    """
    add_entry, verify = MemoryBookieClient.add_entry, Pump.verify
    asks, may_ask, is_written = asyncio.Event(), asyncio.Event(), asyncio.Event()
    has_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def late(pump: Pump) -> None:
        asks.set()
        await may_ask.wait()
        try:
            await verify(pump)
        finally:
            has_asked.set()

    def held(*args: Any, **kwargs: Any) -> asyncio.Future[None]:
        is_written.set()

        async def answer() -> None:
            await may_answer.wait()
            await add_entry(*args, **kwargs)

        return asyncio.ensure_future(answer())

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("clicks")
        await stream.send(b"a")
        await stream.acked(1)
        monkeypatch.setattr(Pump, "verify", late)
        conditional, _ = await client.opened_with("clicks", expected=None)
        await conditional.send(b"b")
        await conditional.call.done_writing()
        await asks.wait()
        monkeypatch.setattr(MemoryBookieClient, "add_entry", held)
        await stream.send(b"c")
        await is_written.wait()
        letting_go = asyncio.create_task(client.act("release", log="clicks"))
        await until_owned(client)
        may_ask.set()
        await has_asked.wait()
        may_answer.set()
        reply = await stream.next_reply()
        assert reply is not None, await stream.status()
        assert (reply["acked"], await stream.next_reply()) == (2, {"draining": {"location": None}})
        assert await stream.last_reply() is None
        assert (await stream.status())[0] == "OK"
        await letting_go
        assert await conditional.next_reply() == {"draining": {"location": None}}
        assert await conditional.next_reply() is None
        code, message, _ = await conditional.status()
        assert (code, message.partition(":")[0]) == ("UNAVAILABLE", "LogNotReadyError")
        found = await read_all(await served.cluster.namespaces[0].open_log("clicks"))
        assert [each.payload for each in found] == [b"a", b"c"]

    with_proxies("clicks")(scenario)


def test_a_change_that_breaks_does_not_keep_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log that it was to release goes with the session."""

    def broken(self: OwnedLog, *_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    async def scenario(served: Proxies) -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context)
        )
        client = await served.start()
        stream = await client.opened("a")
        await stream.last_reply()
        monkeypatch.setattr(OwnedLog, "end", broken)
        assert await client.act("drain") == {}
        assert [str(context["exception"]) for context in reported] == ["a defect"]

    with_proxies("a")(scenario)


def test_logs_that_are_written_are_let_go_of_first_and_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that wait for their turn are served meanwhile."""
    names = [f"log-{number:02}" for number in range(30)]
    busy = names[17]
    ended: list[str] = []
    closing: set[str] = set()
    most = begun_by_then = 0
    close = LogOwner._close

    async def noting(self: LogOwner, name: str) -> None:
        nonlocal most, begun_by_then
        ended.append(name)
        closing.add(name)
        most = max(most, len(closing))
        await close(self, name)
        closing.discard(name)
        if name == busy:
            begun_by_then = len(ended)

    monkeypatch.setattr(LogOwner, "_close", noting)

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        for name in names:
            stream = await client.opened(name)
            await stream.send(b"x")
            await stream.acked(1)
            if name == busy:
                written = stream
            else:
                await stream.last_reply()
        draining = asyncio.create_task(client.act("drain"))
        await written.last_reply()
        await draining
        assert ended[0] == busy
        assert begun_by_then < len(names)
        assert sorted(ended) == names
        assert most == owner._DRAINED_AT_ONCE

    with_proxies(*names)(scenario)
