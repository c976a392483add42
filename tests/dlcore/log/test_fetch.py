"""Readers that are at work while the log changes under them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.errors import AlreadyTruncatedError, LogNotFoundError
from dlcore.ids import DLSN
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, record

if TYPE_CHECKING:
    from dlcore.log.manager import DistributedLogManager


async def write_segments(log: DistributedLogManager, payloads: list[bytes]) -> None:
    """Write one segment for each of `payloads`, with that record in it."""
    for payload in payloads:
        async with await log.open_writer() as writer:
            await writer.write(record(writer.last_txid + 1, payload))


@pytest.mark.parametrize("until_caught_up", [True, False])
def test_a_log_that_was_made_anew_is_not_the_one_that_was_read(*, until_caught_up: bool) -> None:
    """The reader was away meanwhile: its position means nothing in the log of the same name."""

    async def body(cluster: MemoryCluster, log: DistributedLogManager) -> None:
        await write_segments(log, [b"old"])
        other = await (await cluster.open("b")).open_log("clicks")
        async with await other.open_reader() as reader:
            assert len(await reader.read_bulk(9, until_caught_up=True)) == 1
            cluster.stores["b"].disconnect()
            await log.delete()
            await cluster.namespaces[0].create_log("clicks")
            anew = await cluster.namespaces[0].open_log("clicks")
            await write_segments(anew, [b"new"] * 3)
            cluster.stores["b"].reconnect()
            with pytest.raises(LogNotFoundError, match="created again"):
                await asyncio.wait_for(reader.read_next(until_caught_up=until_caught_up), 20)

    on_log(body)


@pytest.mark.parametrize("start", [None, DLSN(1, 1, 0)])
def test_the_segment_being_followed_is_truncated_inside(start: DLSN | None) -> None:
    """A slow reader from the beginning goes on behind what was dropped; another one is told."""

    async def body(cluster: MemoryCluster, log: DistributedLogManager) -> None:
        config = replace(CONFIG, entry_bytes=100, read_ahead_bytes=300)
        slow = await (await cluster.open("b", config=config)).open_log("clicks")
        async with await slow.open_writer() as writer, await slow.open_reader(dlsn=start) as reader:
            for txid in range(50):
                await writer.write(record(txid, b"x" * 80))
            await writer.commit()
            first = await reader.read_next()
            assert first is not None
            for _ in range(100):
                await asyncio.sleep(0)  # it follows, and its buffer is full
            await log.truncate(DLSN(1, 40, 0))
            for _ in range(100):
                await asyncio.sleep(0)  # it sees the truncation
            if start is not None:
                with pytest.raises(AlreadyTruncatedError):
                    await reader.read_bulk(100, until_caught_up=True)
                return
            txids = [r.txid for r in await reader.read_bulk(100, until_caught_up=True)]
            assert txids[-10:] == list(range(40, 50))
            assert txids[:-10] == list(range(1, len(txids) - 9))  # what was fetched before
            assert len(txids) < 40
            await writer.write(record(50))
            after = await reader.read_next()
            assert after is not None
            assert after.txid == 50

    on_log(body)
