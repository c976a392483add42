"""Readers that stand still cost a bookie little, however many they are.

A bookie process with 10,000 followers that wait, and 1,000 readers each of which asked for all
there is and takes nothing, stays below 300 MB, one with 3,000 and 300 of them below 150; then it
serves another.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import MIB
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.metadata.binding import read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.wire.client import WireBookieClient
from dlcore.wire.messages import Follow, Hello, ReadEntries, Update, Welcome
from tests.fixtures.bookie_process import bookie_process
from tests.fixtures.lengths import amount
from tests.fixtures.raw_wire import HELLO, raw_connection
from tests.fixtures.served_bookie import CLIENT, frame_of, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.ids import BookieId
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper
    from tests.fixtures.raw_wire import RawEnd

pytestmark = pytest.mark.integration

FOLLOWERS, FOLLOWING_CONNECTIONS = amount(10_000, sampled=3_000), 30
READERS = amount(1_000, sampled=300)
MEMORY_MB_MAX = amount(300, sampled=150)
LEDGER_BYTES = 64 * MIB
ENTRY_BYTES = 512 * 1024


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Let this process and the bookie have a connection for each reader."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, min(4096, most)), most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def memory_mb(pid: int) -> float:
    """Return the largest resident size a process ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError(f"the kernel tells nothing of process {pid}")


def test_readers_that_stand_still_cost_their_windows(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """Goal: the bound of the bookie's memory; afterwards a reader that reads gets everything."""

    async def scenario() -> None:
        uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
        async with AsyncExitStack() as stack:
            process = await stack.enter_async_context(
                bookie_process(uri, "bookie-1", tmp_path / "data", is_forked=False)
            )
            store = await ZooKeeperStore.connect(zookeeper.servers)
            stack.push_async_callback(store.aclose)
            paths = NamespacePaths(zookeeper_root)
            await LedgerStore(store, paths).new_ledger_id()  # a range of them
            registry = BookieRegistry(store, paths)
            stack.push_async_callback(registry.aclose)
            cluster_id = (await read_binding(store, paths)).cluster_id
            client = WireBookieClient(registry.resolve, cluster_id=cluster_id, config=CLIENT)
            stack.push_async_callback(client.aclose)
            bookie = process.bookie
            await fill(client, bookie)
            hello = HELLO._replace(
                cluster_id=cluster_id, bookie_name=bookie.name, incarnation=bookie.incarnation
            )
            await follow_much(stack, process.address, hello)
            await read_nothing(stack, process.address, hello)
            got = 0
            async for frames in client.read_entries(
                bookie, ledger_id=1, first_entry_id=0, last_entry_id=LEDGER_BYTES // ENTRY_BYTES - 1
            ):
                got += sum(map(len, frames))
            assert got > LEDGER_BYTES
            used_mb = memory_mb(process.process.pid)
            assert used_mb < MEMORY_MB_MAX

    run(scenario)


async def fill(client: WireBookieClient, bookie: BookieId) -> None:
    """Write a ledger that is larger than what any reader may have on its way."""
    body = b"x" * ENTRY_BYTES
    for first in range(0, LEDGER_BYTES // ENTRY_BYTES, 16):
        frames = [frame_of(1, entry_id, body) for entry_id in range(first, first + 16)]
        await asyncio.gather(*(client.add_entry(bookie, frame) for frame in frames))


async def connect(stack: AsyncExitStack, address: str, hello: Hello) -> RawEnd:
    """Open a connection."""
    end = await stack.enter_async_context(raw_connection(address, hello=False))
    end.send(hello)
    assert isinstance(await end.receive(), Welcome)
    return end


async def follow_much(stack: AsyncExitStack, address: str, hello: Hello) -> None:
    """Follow ledgers in which nothing happens."""
    each = FOLLOWERS // FOLLOWING_CONNECTIONS
    for _ in range(FOLLOWING_CONNECTIONS):
        end = await connect(stack, address, hello)
        end.send(*(Follow(number, 1000 + number, 0, MIB) for number in range(1, each + 1)))
        for _ in range(each):
            assert isinstance(await end.receive(), Update)


async def read_nothing(stack: AsyncExitStack, address: str, hello: Hello) -> None:
    """Ask for everything, and take nothing of it."""
    for _ in range(READERS):
        end = await connect(stack, address, hello)
        end.writer.transport.pause_reading()  # type: ignore[attr-defined]
        end.send(ReadEntries(1, 1, 0, LEDGER_BYTES // ENTRY_BYTES - 1, 1, MIB, 2 * MIB))
