"""Rot on one bookie's disk, met by a client: the client notices nothing, and the bookie mends."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc
import pytest

from dlcore.clock import SystemClock
from dlcore.config import LedgerClientConfig, QuorumConfig
from dlcore.errors import BookieStorageError, BookieUnavailableError
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.registry import BookieRegistry
from dlcore.ledger.store import LedgerStore
from dlcore.metadata.binding import read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.proto import bookie_pb2 as pb
from dlcore.proto.bookie_pb2_grpc import BookieStub
from dlcore.transport.grpc import GrpcBookieClient
from tests.fixtures.aio import until_async
from tests.fixtures.bookie_process import BookieProcess, bookie_process
from tests.fixtures.ledger_cluster import bodies, read_all, write
from tests.fixtures.served_bookie import run

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.sandbox.zookeeper import EmbeddedZooKeeper

ENTRIES = 40
DAMAGED_ID = 23


async def info_of(process: BookieProcess) -> pb.InfoResponse:
    """Ask a bookie how it is."""
    async with grpc.aio.insecure_channel(process.address) as channel:
        info: pb.InfoResponse = await BookieStub(channel).GetInfo(pb.InfoRequest())
        return info


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
        uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
        async with AsyncExitStack() as stack:
            processes: dict[str, BookieProcess] = {}
            for name in "abc":
                processes[name] = await stack.enter_async_context(
                    bookie_process(uri, name, tmp_path / name)
                )
            store = await ZooKeeperStore.connect(zookeeper.servers)
            stack.push_async_callback(store.aclose)
            paths = NamespacePaths(zookeeper_root)
            registry = BookieRegistry(store, paths)
            stack.callback(registry.close)
            cluster_id = (await read_binding(store, paths)).cluster_id
            bookies = GrpcBookieClient(
                registry.resolve, cluster_id=cluster_id, config=LedgerClientConfig()
            )
            client = LedgerClient(
                ledgers=LedgerStore(store, paths),
                registry=registry,
                bookies=bookies,
                config=LedgerClientConfig(),
                clock=SystemClock(),
                rng=random.Random(1),
            )
            stack.push_async_callback(client.aclose)
            writer = await client.create_ledger(QuorumConfig())
            await write(writer, ENTRIES)
            await writer.close()
            reader = await client.open_ledger(writer.ledger_id)
            expected = bodies(0, ENTRIES - 1)
            met_by_client = 0
            for name in "abc":
                victim = processes[name]
                flip_byte(tmp_path / name, expected[DAMAGED_ID])
                assert await read_all(reader, 0, ENTRIES - 1) == expected
                info = await info_of(victim)
                if info.damaged_entries or info.repaired_entries:
                    met_by_client += 1
                else:  # the client prefers another replica of this entry
                    with pytest.raises(BookieStorageError):
                        await bookies.read_entry(
                            victim.bookie,
                            ledger_id=writer.ledger_id,
                            entry_id=DAMAGED_ID,
                            fence=False,
                        )

                async def is_repaired(victim: BookieProcess = victim) -> bool:
                    return bool((await info_of(victim)).repaired_entries == 1)

                await until_async(is_repaired)
                assert (await info_of(victim)).damaged_entries == 0
                frame = await bookies.read_entry(
                    victim.bookie, ledger_id=writer.ledger_id, entry_id=DAMAGED_ID, fence=False
                )
                assert bytes(frame).endswith(expected[DAMAGED_ID])
            assert met_by_client
            victim = processes["a"]
            victim.process.kill()
            await victim.end()
            again = await stack.enter_async_context(bookie_process(uri, "a", tmp_path / "a"))

            async def answers() -> bool:
                try:
                    frame = await bookies.read_entry(
                        again.bookie, ledger_id=writer.ledger_id, entry_id=DAMAGED_ID, fence=False
                    )
                except BookieUnavailableError:  # the client still tries the old address
                    return False
                assert bytes(frame).endswith(expected[DAMAGED_ID])
                return True

            await until_async(answers)

    run(scenario)
