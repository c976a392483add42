"""An idle bookie notices a disk that is full or fails before a writer does."""

from __future__ import annotations

import asyncio
import resource
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bookie.housekeeping import Housekeeping, Place
from bookie.server_config import BookieConfig
from bookie.storage.status import StorageState
from dlcore.base.errors import BookieStorageError
from dlcore.base.ids import BookieId
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.zookeeper import ZooKeeperStore
from tests.bookie.test_full_disk import CONFIG, DISK_BYTES
from tests.fixtures.aio import until, until_async
from tests.fixtures.bookie_process import bookie_process
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.simulated_store import SimulatedTree
from tests.fixtures.storage import ManualClock, make_frame, open_storage
from tests.simulation.loop import run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bookie.ledger_storage import LedgerStorage
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper


class TriedDisk(MemoryDisk):
    """Counts how often the file of trials is written, and can refuse it."""

    tried = 0
    refuses = False

    async def write_file(self, name: str, data: bytes) -> None:
        """Write a file, or fail as without descriptors."""
        if name == "idle-trial":
            self.tried += 1
            if self.refuses:
                raise BookieStorageError("cannot write idle-trial: Too many open files")
        await super().write_file(name, data)


@asynccontextmanager
async def idle_house(disk: MemoryDisk) -> AsyncIterator[tuple[LedgerStorage, Housekeeping]]:
    """Open the storage of a bookie with one entry, idle since, and what keeps its house."""
    tree = SimulatedTree()
    place = Place(tree.connect(), NamespacePaths("/n"), ManualClock(), None)
    config = BookieConfig(
        name="b", metadata_uri="distributedlog://zk:2181/n", data_dir=Path("b"), storage=CONFIG
    )
    async with open_storage(disk, CONFIG) as storage, AsyncExitStack() as running:
        house = Housekeeping(
            storage, config, place, bookie=BookieId("b", "0" * 32), running=running
        )
        await storage.writes.add_entry(make_frame(1, 0))
        queue = storage.core.log.commits.queue
        await until(lambda: storage.core.log.is_marked and not queue.pending_bytes)
        await asyncio.sleep(1)  # until the look at the disk that follows a write
        await house.try_idle_disk()  # sees that there was a write
        yield storage, house


def test_an_idle_bookie_notices_a_disk_that_others_fill() -> None:
    """Goal: no writer chooses a bookie that would refuse its first add."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=DISK_BYTES)
        async with idle_house(disk) as (storage, house):
            disk.room.fill()
            await asyncio.sleep(1)
            assert storage.status.state is StorageState.WRITABLE
            await house.try_idle_disk()
            await until(lambda: storage.status.state is StorageState.READ_ONLY)
            disk.room.filler_bytes = 0
            await until(lambda: storage.status.state is StorageState.WRITABLE)

    run(main())


def test_only_an_idle_disk_is_tried() -> None:
    """Goal: a busy bookie has no further writes, and the log of an idle one does not grow."""

    async def main() -> None:
        disk = TriedDisk(total_bytes=DISK_BYTES)
        async with idle_house(disk) as (storage, house):
            queue, before = storage.core.log.commits.queue, disk.tried
            for entry_id in range(1, 4):
                await storage.writes.add_entry(make_frame(1, entry_id))
                await until(lambda: storage.core.log.is_marked and not queue.pending_bytes)
                await house.try_idle_disk()
            assert disk.tried == before
            end = queue.durable_end
            for _ in range(3):
                await house.try_idle_disk()
            assert disk.tried == before + 3
            assert queue.durable_end == end

    run(main())


def test_a_file_that_cannot_be_written_ends_no_bookie() -> None:
    """Goal: what only new files lack, such as descriptors, does not count; the log decides."""

    async def main() -> None:
        disk = TriedDisk(total_bytes=DISK_BYTES)
        async with idle_house(disk) as (storage, house):
            end = storage.core.log.commits.queue.durable_end
            disk.refuses = True
            await house.try_idle_disk()
            assert storage.core.log.commits.queue.durable_end > end
            assert storage.status.state is StorageState.WRITABLE
            await storage.writes.add_entry(make_frame(1, 1))

    run(main())


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="another process is limited only on Linux")
def test_a_disk_that_fails_while_it_is_idle_ends_the_bookie(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """Goal: writers are not offered a bookie that cannot write.  Method: forbid it all writes."""
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
    node = NamespacePaths(zookeeper_root).bookie_available("b")

    async def main() -> None:
        store = await ZooKeeperStore.connect(zookeeper.servers)
        options = ("--space-check-interval-s", "0.1")
        async with bookie_process(uri, "b", tmp_path / "b", *options) as one:
            assert await store.get(node) is not None
            no_bytes = (0, resource.RLIM_INFINITY)
            resource.prlimit(one.process.pid, resource.RLIMIT_FSIZE, no_bytes)

            async def is_gone() -> bool:
                return await store.get(node) is None

            await until_async(is_gone)
            status, errors = await one.end()
            assert status == 1
            assert "File too large" in errors
        await store.aclose()

    asyncio.run(main())
