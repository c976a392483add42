"""Logs that are deleted and made anew under a handle: reported, and the new one is left alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import LogNotFoundError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.proxy.writing.owned_log import OwnedLog
from tests.dlcore.backends.test_writing import numbered, remote
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import Awaitable


async def write(served: Proxies, first: int, count: int) -> None:
    """Write to the log that there is now, beside the proxies."""
    log = await served.cluster.namespaces[0].open_log("clicks")
    async with await log.open_writer() as writer:
        for each in numbered(first, count):
            await writer.write(each)


async def make_anew(served: Proxies) -> None:
    """Delete the log, by a proxy, and create another one, which has ten records."""
    namespace = served.cluster.namespaces[0]
    async with await open_namespace(served.servers[0].location) as other:
        await other.delete_log("clicks")
    await namespace.create_log("clicks")
    await write(served, 100, 10)


async def reported(call: Awaitable[object]) -> None:
    """Require that a call tells that its log was deleted."""
    with pytest.raises(LogNotFoundError, match=r"it is another one|is gone"):
        await call


@pytest.mark.parametrize("follow", [False, True])
def test_readers_read_nothing_of_another_log(*, follow: bool) -> None:
    """Neither at the position where they were, nor from the start."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        await write(served, 0, 5)
        log = await remote(served)
        reader, fresh = await log.open_reader(), await log.open_reader(txid=3)
        read = await reader.read_bulk(5, until_caught_up=True)
        assert [each.txid for each in read] == list(range(5))
        waiting = asyncio.create_task(reader.read_next()) if follow else None
        await asyncio.sleep(0)
        await make_anew(served)
        if waiting is not None:
            with pytest.raises(LogNotFoundError):
                await waiting
        for _ in range(2):
            await reported(reader.read_next(until_caught_up=not follow))
            await reported(fresh.read_bulk(5))
        for start in ({}, {"txid": 0}, {"dlsn": DLSN.INITIAL}):
            await reported(reader.seek(**start))
            await reported(log.open_reader(**start))
        for each in (reader, fresh):
            await each.aclose()

    with_proxies("clicks")(scenario)


def test_writers_write_nothing_to_another_log() -> None:
    """Their sequences are of the log that they were opened on, and so are conditions."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        writer = await log.open_writer(producer="p")
        for each in numbered(0, 3):
            await writer.write(each)
        idle = await log.open_writer()
        await make_anew(served)
        await reported(writer.commit())  # nothing waits, and readers would find nothing of it
        for late in (writer, idle):
            with pytest.raises(LogNotFoundError, match="it is another one"):
                await late.write(LogRecord(200, b"late"))
        await reported(log.open_writer())
        await reported(log.open_writer(producer="p"))
        await reported(log.append([LogRecord(200, b"late")], expected=DLSN(1, 9, 0)))
        await reported(log.open_stream_writer())
        for late in (writer, idle):
            await late.abort()
        direct = await served.cluster.namespaces[0].open_log("clicks")
        assert [each.txid for each in await read_all(direct)] == list(range(100, 110))
        async with await (await remote(served)).open_writer(producer="p") as anew:
            assert anew.next_sequence == 0
            await anew.write(LogRecord(200, b"new"))
        assert len(await read_all(direct)) == 11

    with_proxies("clicks")(scenario)


def test_a_proxy_lets_go_of_a_log_that_is_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy has not heard of that yet: a client that writes to the new log releases the old."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        seen: list[OwnedLog] = []

        def log_id(owned: OwnedLog) -> str:
            seen.append(owned)
            return "gone" if owned is seen[0] else owned.writer.log_id

        monkeypatch.setattr(OwnedLog, "log_id", property(log_id))
        async with await (await remote(served)).open_writer() as writer:
            await writer.write(LogRecord(1, b"one"))
        assert seen[0].is_lost
        assert not seen[-1].is_lost
        direct = await served.cluster.namespaces[0].open_log("clicks")
        assert len(await read_all(direct)) == 1

    with_proxies("clicks")(scenario)
