"""Readers that are at work while the log changes under them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.errors import LogNotFoundError
from tests.fixtures.memory_namespace import MemoryCluster, on_log, record

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
