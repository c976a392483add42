"""Rot on one bookie's disk, met by a client: the client notices nothing, and the bookie mends."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest

from dlcore.base.clock import SystemClock
from dlcore.base.config import LedgerClientConfig, QuorumConfig
from dlcore.base.errors import BookieStorageError, BookieUnavailableError
from dlcore.base.proto import bookie_pb2 as pb
from dlcore.base.proto.bookie_pb2_grpc import BookieControlStub
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.metadata.binding import read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.wire.client import WireBookieClient
from dlcore.wire.frames import decode_frame
from tests.fixtures.aio import until_async
from tests.fixtures.bookie_process import BookieProcess, bookie_process
from tests.fixtures.ledger_cluster import bodies, read_all, write
from tests.fixtures.served_bookie import run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dlcore.ledger.reading.reader import LedgerReader
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

ENTRIES = 40
DAMAGED_ID = 23
FILE_BYTES_MAX = "1000"
"""Files are so small that the damaged entry is in a sealed one: the newest's end is in memory."""


def flip_byte(directory: Path, body: bytes) -> None:
    """Change a byte of the entry with that body in the files of a bookie."""
    for path in directory.glob("*.log"):
        position = path.read_bytes().find(body)
        if position >= 0:
            with path.open("r+b") as file:
                file.seek(position)
                file.write(b"E")
            return
    raise AssertionError(f"{body!r} is in none of the files")


@dataclass
class Cluster:
    """Three bookies and a client of theirs."""

    uri: str
    processes: dict[str, BookieProcess]
    registry: BookieRegistry
    bookies: WireBookieClient
    client: LedgerClient

    async def info_of(self, name: str) -> pb.InfoResponse:
        """Ask a bookie how it is."""
        address = await self.registry.resolve_control(self.processes[name].bookie)
        async with grpc.aio.insecure_channel(address) as channel:
            info: pb.InfoResponse = await BookieControlStub(channel).GetInfo(pb.InfoRequest())
            return info

    async def body_at(self, name: str, ledger_id: int) -> bytes:
        """Ask one bookie for the damaged entry."""
        bookie = self.processes[name].bookie
        frame = await self.bookies.read_entry(
            bookie, ledger_id=ledger_id, entry_id=DAMAGED_ID, fence=False
        )
        return bytes(decode_frame(frame, ledger_id=ledger_id, entry_id=DAMAGED_ID).body)


@asynccontextmanager
async def cluster_of(servers: str, root: str, directory: Path) -> AsyncIterator[Cluster]:
    """Start the bookies and connect."""
    uri = f"distributedlog://{servers}{root}"
    async with AsyncExitStack() as stack:
        processes = {
            name: await stack.enter_async_context(
                bookie_process(uri, name, directory / name, "--file-bytes-max", FILE_BYTES_MAX)
            )
            for name in "abc"
        }
        store = await ZooKeeperStore.connect(servers)
        stack.push_async_callback(store.aclose)
        paths = NamespacePaths(root)
        registry = BookieRegistry(store, paths)
        stack.push_async_callback(registry.aclose)
        cluster_id = (await read_binding(store, paths)).cluster_id
        config = LedgerClientConfig()
        bookies = WireBookieClient(registry.resolve, cluster_id=cluster_id, config=config)
        client = LedgerClient(
            ledger_store=LedgerStore(store, paths),
            registry=registry,
            bookies=bookies,
            config=config,
            clock=SystemClock(),
            rng=random.Random(1),
        )
        stack.push_async_callback(client.aclose)
        yield Cluster(uri, processes, registry, bookies, client)


async def damage_and_mend(
    cluster: Cluster, reader: LedgerReader, name: str, directory: Path
) -> bool:
    """Damage an entry of one bookie, wait for its repair; return whether the reader met it."""
    expected = bodies(0, ENTRIES - 1)
    flip_byte(directory / name, expected[DAMAGED_ID])
    assert await read_all(reader, 0, ENTRIES - 1) == expected
    info = await cluster.info_of(name)
    is_met = info.damaged_entries + info.repaired_entries > 0
    if not is_met:  # the reader prefers another replica of this entry
        with pytest.raises(BookieStorageError):
            await cluster.body_at(name, reader.metadata.ledger_id)

    async def is_repaired() -> bool:
        return bool((await cluster.info_of(name)).repaired_entries == 1)

    await until_async(is_repaired)
    assert (await cluster.info_of(name)).damaged_entries == 0
    assert await cluster.body_at(name, reader.metadata.ledger_id) == expected[DAMAGED_ID]
    return is_met


@pytest.mark.integration
def test_a_clients_read_of_a_damaged_entry_leads_to_its_repair(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """Goal: the client reads on from other replicas; soon the bookie has the right bytes again.

    Method: a byte is flipped in each bookie's file in turn, and a client reads, which asks for the
    entry only the one that it prefers; the bookie is asked itself once it says that it repaired,
    one of them after a kill and a restart, too.
    """

    async def scenario() -> None:
        async with cluster_of(zookeeper.servers, zookeeper_root, tmp_path) as cluster:
            writer = await cluster.client.create_ledger(QuorumConfig(ack_quorum_size=3))
            await write(writer, ENTRIES)
            await writer.close()
            reader = await cluster.client.open_ledger(writer.ledger_id)
            met = [await damage_and_mend(cluster, reader, name, tmp_path) for name in "abc"]
            assert any(met)
            victim = cluster.processes["a"]
            victim.process.kill()
            await victim.end()

            async def answers() -> bool:
                try:
                    body = await cluster.body_at("a", writer.ledger_id)
                except BookieUnavailableError:  # the client still tries the old address
                    return False
                assert body == bodies(DAMAGED_ID, DAMAGED_ID)[0]
                return True

            async with bookie_process(cluster.uri, "a", tmp_path / "a"):
                await until_async(answers)

    run(scenario)
