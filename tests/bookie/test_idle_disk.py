"""An idle bookie notices a disk that is full or fails before a writer does."""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import TYPE_CHECKING

import pytest

from bookie.files.format import RECORD_HEADER_BYTES
from bookie.storage.status import StorageState
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.zookeeper import ZooKeeperStore
from tests.bookie.test_full_disk import CONFIG, DISK_BYTES
from tests.fixtures.aio import until, until_async
from tests.fixtures.bookie_process import bookie_process
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, read_all
from tests.simulation.loop import run

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper


def test_an_idle_bookie_notices_a_disk_that_others_fill() -> None:
    """Goal: no writer chooses a bookie that would refuse its first add."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=DISK_BYTES)
        async with open_storage(disk, CONFIG) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            await asyncio.sleep(1)  # until the look at the disk that follows a write
            disk.room.fill()
            await asyncio.sleep(1)
            assert storage.status.state is StorageState.WRITABLE
            await storage.writes.try_disk()  # sees that there was a write
            await storage.writes.try_disk()
            await until(lambda: storage.status.state is StorageState.READ_ONLY)
            disk.room.filler_bytes = 0
            await until(lambda: storage.status.state is StorageState.WRITABLE)

    run(main())


def test_only_an_idle_disk_is_tried() -> None:
    """Goal: a trial costs some bytes, and no more than one write in its interval."""

    async def main() -> None:
        disk = MemoryDisk(total_bytes=DISK_BYTES)
        async with open_storage(disk, CONFIG) as storage:
            queue = storage.core.log.commits.queue
            for entry_id in range(3):
                await storage.writes.add_entry(make_frame(1, entry_id))
                await until(lambda: storage.core.log.is_marked and not queue.pending_bytes)
                before = queue.durable_end
                await storage.writes.try_disk()
                assert queue.durable_end == before
            for _ in range(3):
                before = queue.durable_end
                await storage.writes.try_disk()
                assert queue.durable_end == before + RECORD_HEADER_BYTES
        async with open_storage(disk, CONFIG) as storage:
            assert await read_all(storage, 1, first=0, last=2) == [
                make_frame(1, entry_id) for entry_id in range(3)
            ]

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
