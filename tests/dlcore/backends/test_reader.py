"""Readers: that of an endpoint gives out records as the core's does, over the same log."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.backends.flight import planning
from dlcore.backends.flight.log import FlightLog
from dlcore.backends.flight.reader import FlightReader, FlightRows
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    LogNotFoundError,
    ProxyUnavailableError,
)
from dlcore.base.ids import DLSN
from dlcore.base.proto import flight_pb2 as pb
from dlcore.log.metadata.values import LogKey
from dlcore.proxy.service import FLIGHT
from tests.dlcore.backends.test_writing import numbered, remote
from tests.fixtures.aio import cancel_after, until_async
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog


async def write(log: DirectLog, first: int, count: int) -> None:
    """Write records whose transaction ids are their numbers, some to an entry, and commit them."""
    async with await log.open_writer() as writer:
        for number in range(first, first + count, 3):
            writer.write_bulk(numbered(number, min(3, first + count - number)))
            await writer.flush()


async def txids(reader: FlightReader, count: int) -> list[int]:
    """Return the transaction ids of what is read in bulk until it is caught up."""
    return [each.txid for each in await reader.read_bulk(count, until_caught_up=True)]


def test_waiting() -> None:
    """For a record, or for so long; a call that gave up loses nothing."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        direct, log = await served.cluster.namespaces[0].open_log("clicks"), await remote(served)
        async with await log.open_reader() as reader:
            assert await reader.read_bulk(3, timeout_s=0.05) == []
            waiting = asyncio.create_task(reader.read_next())
            await asyncio.wait([waiting], timeout=0.02)
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await write(direct, 0, 4)
            found: list[int] = []
            while len(found) < 4:
                found += [each.txid for each in await reader.read_bulk(10)]
            assert found == [0, 1, 2, 3]
            await write(direct, 4, 2)

            async def is_here() -> bool:
                record = await reader.read_next(non_blocking=True)
                found.extend([] if record is None else [record.txid])
                return record is not None

            await until_async(is_here)
            await until_async(is_here)
            assert found == list(range(6))
            closing = asyncio.create_task(reader.read_next())
            await asyncio.wait([closing], timeout=0.02)
            await reader.aclose()
            with pytest.raises(AlreadyClosedError):
                await closing

    with_proxies("clicks")(scenario)


def test_a_reader_that_failed_goes_on_where_it_was() -> None:
    """Once a proxy answers again."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        direct = await served.cluster.namespaces[0].open_log("clicks")
        await write(direct, 0, 5)
        log = await remote(served, patience_s=0.1)
        async with await log.open_reader() as reader:
            assert await txids(reader, 2) == [0, 1]
            await write(direct, 5, 5)
            await served.servers[0].aclose()
            assert await txids(reader, 3) == [2, 3, 4]
            with pytest.raises(ProxyUnavailableError):
                await reader.read_next()
            with pytest.raises(ProxyUnavailableError):
                await reader.seek()
            await served.start(port=int(served.servers[0].address.rpartition(":")[2]))
            log._calls.patience_s = 60.0
            assert await txids(reader, 100) == list(range(5, 10))
        none = FlightLog(log._calls, LogKey(name="none", log_id="1"))
        with pytest.raises(LogNotFoundError):
            await none.open_reader()

    with_proxies("clicks")(scenario)


def test_a_missing_message_of_a_proxy_is_not_the_end_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that goes on after that error reads the records behind it."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        await write(await served.cluster.namespaces[0].open_log("clicks"), 0, 5)
        async with await (await remote(served)).open_reader() as reader:
            with monkeypatch.context() as patch:
                patch.setattr(planning, "arrow_of", lambda _: b"no message of Arrow")
                with pytest.raises(TypeError):
                    await reader.read_next()
            assert await reader.read_next() is not None

    with_proxies("clicks")(scenario)


def test_rows_without_positions() -> None:
    """The call did not ask for their columns: they are taken together."""
    batch = pa.record_batch({"txid": [1, 2]})
    rows = FlightRows(batch, DLSN(1, 0, 0), DLSN(1, 1, 0), is_typed=False)
    assert (rows.rows_left, rows.position) == (2, DLSN(1, 0, 0))
    with pytest.raises(ConfigurationError, match="read batches"):
        rows.records()
    assert rows.take_batch("clicks") == batch
    assert (rows.rows_left, rows.position) == (0, DLSN(1, 1, 0))


def test_readers_that_stand_still_hold_up_no_other() -> None:
    """Though what they do not take comes on the connection that all calls of a client share."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        async with await log.open_writer() as writer:
            for _ in range(12):
                await writer.submit_batch(pa.record_batch({"value": [bytes(500_000)] * 2}))
            await writer.commit()
        async with AsyncExitStack() as opened:
            for _ in range(16):
                reader = await opened.enter_async_context(await log.open_reader())
                assert await reader.read_next() is not None
            async with asyncio.timeout(10), await log.open_reader() as other:
                assert len(await other.read_bulk(100, until_caught_up=True)) == 24
                assert await log.get_log_record_count() == 24
                async with await log.open_writer() as writer:
                    writer.write_bulk(numbered(2**60, 1))

    with_proxies("clicks")(scenario)


def test_a_reader_that_is_closed_while_it_turns_to_follow_opens_no_stream() -> None:
    """A waiting reader learns that it is closed, and waits for no record."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        for turns in range(4):
            reader = await log.open_reader()
            following = asyncio.create_task(reader.read_next())
            await asyncio.wait([following], timeout=0.01)
            following.cancel()
            turning = asyncio.create_task(reader.read_next(until_caught_up=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            await reader.aclose()
            with pytest.raises(AlreadyClosedError):
                await asyncio.wait_for(turning, 10)
            assert reader._feed is None

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize("again", range(3))
def test_a_cancelled_reader_leaves_no_stream_to_the_collector(again: int) -> None:
    """Neither one of ours nor gRPC's own."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        await write(await served.cluster.namespaces[0].open_log("clicks"), 0, 10)
        log = await remote(served)
        left: list[str] = []
        sys.set_asyncgen_hooks(finalizer=lambda each: left.append(repr(each)))

        async def read() -> None:
            async with await log.open_reader() as reader:
                await txids(reader, 3)
                await reader.read_next(until_caught_up=True)
                while await reader.read_next():
                    pass

        for turns in range(0, 150, 5):
            await cancel_after(asyncio.create_task(read()), turns, again)
        gc.collect()
        assert not left

    with_proxies("clicks")(scenario)


def test_a_start_behind_the_last_record_of_an_entry() -> None:
    """As for a reader behind the last record that it read: nothing is there, and nothing waits."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        direct = await served.cluster.namespaces[0].open_log("clicks")
        await write(direct, 0, 3)
        behind = (await direct.get_last_dlsn()).next_slot()
        log = await remote(served)
        async with await log.open_reader(dlsn=behind) as reader:
            assert await reader.read_batch(until_caught_up=True) is None
            assert reader.position == DLSN(1, 1, 0)
            await write(direct, 3, 1)
            assert [each.txid for each in await reader.read_bulk(9)] == [3]
        ticket = {"log": "clicks", "start": {"dlsn": str(behind)}, "end": {"dlsn": "1:1:0"}}
        path = f"/{FLIGHT}/DoGet"
        asked = pb.Ticket(ticket=json.dumps(ticket).encode()).SerializeToString()
        read: Any = client.channel.unary_stream(path)
        call = read(asked)
        _schema, *rows = [each async for each in call]
        assert not rows
        # A log without records: a reader from its beginning gets what is left of it later.
        await served.cluster.namespaces[0].create_log("empty")
        log = await remote(served, "empty")
        async with await log.open_reader(dlsn=DLSN.INITIAL) as reader:
            assert await reader.read_batch(until_caught_up=True) is None

    with_proxies("clicks")(scenario)
