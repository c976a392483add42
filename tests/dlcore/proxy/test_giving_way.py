"""A writer beside the proxies that waits for the log of a proxy: the proxy releases it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from dlcore.base.errors import LogModeError, OwnershipAcquireFailedError
from dlcore.base.records import LogRecord
from dlcore.log.metadata.values import LockHolder, Turn
from dlcore.metadata.port import Put
from dlcore.metadata.stored import decode, encode
from tests.dlcore.backends.test_writing import numbered, remote
from tests.fixtures.aio import until, until_async
from tests.fixtures.memory_namespace import CONFIG, read_all
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from dlcore.backends.flight.writing import FlightWriter

PATIENT = replace(CONFIG, lock_timeout_s=30.0)
TIMES = 3


class Producer:
    """Writes through the proxies without a pause."""

    def __init__(self, writer: FlightWriter) -> None:
        self.writer = writer
        self.done = 0
        self.is_ending = False

    async def run(self) -> None:
        """Do so until the end."""
        while not self.is_ending:
            await self.writer.write(numbered(self.done, 1)[0])
            self.done += 1


@pytest.mark.parametrize("count", [1, 2])
def test_it_gets_the_log_from_a_proxy_under_load_and_gives_it_back(count: int) -> None:
    """Again and again; what producers wrote is there once, in order, and they go on."""

    async def scenario(served: Proxies) -> None:
        for _ in range(count):
            await served.start()
        direct = await served.cluster.open("beside")
        log = await direct.open_log("clicks", config=PATIENT)
        async with await (await remote(served)).open_writer() as writer:
            producer = Producer(writer)
            running = asyncio.create_task(producer.run())
            for number in range(TIMES):
                before = producer.done
                await until(lambda before=before: producer.done > before + 5)  # type: ignore[misc]
                async with await log.open_writer() as own:
                    for _ in range(5):
                        await own.write(LogRecord(own.last_txid, b"own %d" % number))
            before = producer.done
            await until(lambda: producer.done > before)
            producer.is_ending = True
            await running
        found = [each.payload for each in await read_all(log)]
        for number in range(TIMES):  # between those of one writer no other's
            first = found.index(b"own %d" % number)
            assert found[first : first + 5] == [b"own %d" % number] * 5
        assert [each for each in found if not each.startswith(b"own")] == [
            b"%d" % number for number in range(producer.done)
        ]

    with_proxies("clicks")(scenario)


def test_a_writer_that_does_not_wait_or_may_not_write_asks_for_nothing() -> None:
    """The proxy keeps the log."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        direct = await served.cluster.open("beside")
        stream = await client.opened("clicks")
        with pytest.raises(OwnershipAcquireFailedError):
            await (await direct.open_log("clicks")).open_writer()
        log = await direct.open_log("clicks", config=PATIENT)
        await log.update_settings(mode="proxied")
        with pytest.raises(LogModeError):
            await log.open_writer()
        assert await client.act("logs") == {"logs": ["clicks"]}
        await stream.send(b"a")
        await stream.acked(1)
        await stream.last_reply()

    with_proxies("clicks")(scenario)


def test_a_log_that_no_writer_takes_is_the_proxys_again() -> None:
    """The waiting writer may be gone."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        await (await client.opened("clicks")).last_reply()
        direct = await served.cluster.open("beside")
        opening = asyncio.create_task(
            (await direct.open_log("clicks", config=PATIENT)).open_writer()
        )
        server = served.servers[0]
        context = server.reads._namespace.log_context
        key = await context.logs.find("clicks")
        is_wanted = False
        while not is_wanted:
            holder = await context.logs.locks.holder_of(key)
            is_wanted = holder is None or bool(holder.wanted_by)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        after = await client.opened("clicks")
        await after.send(b"a")
        await after.acked(1)
        await after.last_reply()

    with_proxies("clicks")(scenario)


def test_a_writer_that_asks_during_the_turn_of_an_append_gets_the_log() -> None:
    """Its request is not lost among the news of the turn."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("clicks")
        await stream.send(b"a")
        await stream.acked(1)
        context = served.servers[0].reads._namespace.log_context
        key = await context.logs.find("clicks")
        path = context.logs.paths_of(key).lock

        async def set_turn(turn: Turn) -> None:
            node = await context.store.get(path, fresh=True)
            assert node is not None
            holder = decode(LockHolder, node.value, source=path)
            value = encode(structs.replace(holder, turn=turn))
            await context.store.multi([Put(path, value, node.version)])

        async def holder() -> LockHolder:
            found = await context.logs.locks.holder_of(key)
            assert found is not None
            return found

        await set_turn("asked")

        async def is_given() -> bool:
            return (await holder()).turn == "given"

        async def is_wanted() -> bool:
            return bool((await holder()).wanted_by)

        await until_async(is_given)
        direct = await served.cluster.open("beside")
        log = await direct.open_log("clicks", config=PATIENT)
        opening = asyncio.create_task(log.open_writer())
        await until_async(is_wanted)
        await asyncio.sleep(0.1)  # the proxy sees that first, and by itself
        await set_turn("free")
        await (await opening).aclose()
        await stream.last_reply()

    with_proxies("clicks")(scenario)
