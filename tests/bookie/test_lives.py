"""Goal: of all copies of a bookie's folder only the one that acknowledged last is the bookie.

Method: folders and a metadata store in memory, copied and started in every order.
"""

from __future__ import annotations

from typing import Any

import pytest

from bookie.disks.port import DiskFullError
from bookie.membership.identity import begin_life, establish_identity
from dlcore.base.errors import ConfigurationError, MetadataConnectionError
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.metadata.stored import encode
from tests.bookie.test_registration import CLOCK, PATHS, boot, connect
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk


async def copy_of(disk: MemoryDisk) -> MemoryDisk:
    """Return another disk with the same files."""
    other = MemoryDisk()
    for name in disk.names():
        data = await disk.read_file(name)
        assert data is not None
        await other.write_file(name, data)
    return other


def test_an_older_copy_of_a_folder_is_not_the_bookie() -> None:
    """It lacks the entries acknowledged since; the newest one starts as before."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk = MemoryDisk()
        await boot(disk, store, cluster_id, "bookie-1")
        older = await copy_of(disk)
        await boot(disk, store, cluster_id, "bookie-1")
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"older copy .* life 1, .* life 2"):
                await boot(older, store, cluster_id, "bookie-1")
        await boot(disk, store, cluster_id, "bookie-1")
        await store.aclose()

    run(scenario())


def test_a_bookie_on_a_full_disk_starts_as_often_as_it_likes() -> None:
    """Each start is counted in space that was held back, which is held back again."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk = MemoryDisk(total_bytes=1 << 20)
        await boot(disk, store, cluster_id, "bookie-1")
        await disk.hold(100_000)
        disk.room.fill()
        for _ in range(20):
            await boot(disk, store, cluster_id, "bookie-1")
        assert disk.held_bytes >= 99_000
        while await disk.release(100_000):
            pass
        disk.room.fill()
        with pytest.raises(DiskFullError):
            await boot(disk, store, cluster_id, "bookie-1")
        await store.aclose()

    run(scenario())


def test_the_first_started_of_two_copies_of_one_life_is_the_bookie() -> None:
    """Though both count the same."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk = MemoryDisk()
        await boot(disk, store, cluster_id, "bookie-1")
        other = await copy_of(disk)
        arguments: dict[str, Any] = {"name": "bookie-1", "cluster_id": cluster_id, "clock": CLOCK}
        first = await establish_identity(disk, store, PATHS, **arguments)
        second = await establish_identity(other, store, PATHS, **arguments)
        await begin_life(other, store, PATHS, second, clock=CLOCK)
        with pytest.raises(ConfigurationError, match="older copy"):
            await begin_life(disk, store, PATHS, first, clock=CLOCK)
        with pytest.raises(ConfigurationError, match="older copy"):
            await boot(disk, store, cluster_id, "bookie-1")
        await boot(other, store, cluster_id, "bookie-1")
        await store.aclose()

    run(scenario())


@pytest.mark.parametrize("applied", [True, False])
def test_a_start_whose_count_was_not_answered_is_no_copy(*, applied: bool) -> None:
    """The folder knows its life before the cluster does."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk = MemoryDisk()
        await boot(disk, store, cluster_id, "bookie-1")
        arguments: dict[str, Any] = {"name": "bookie-1", "cluster_id": cluster_id, "clock": CLOCK}
        cookie = await establish_identity(disk, store, PATHS, **arguments)
        put, calls = store.put, 0

        async def interrupted(*about: Any, **more: Any) -> int:
            nonlocal calls
            calls += 1
            if applied:
                await put(*about, **more)
            raise MetadataConnectionError("no answer")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "put", interrupted)
            if applied:
                await begin_life(disk, store, PATHS, cookie, clock=CLOCK)
            else:
                with pytest.raises(MetadataConnectionError):
                    await begin_life(disk, store, PATHS, cookie, clock=CLOCK)
        assert calls
        await boot(disk, store, cluster_id, "bookie-1")
        await store.aclose()

    run(scenario())


def test_a_copy_beside_a_bookie_that_answers_is_refused() -> None:
    """Before it counts a life, so that the bookie itself can start again."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk = MemoryDisk()
        cookie = await boot(disk, store, cluster_id, "bookie-1")
        registration = BookieRegistration(
            name="bookie-1", incarnation=cookie.incarnation, address="10.0.0.1:3181"
        )
        await store.create(PATHS.bookie_available("bookie-1"), encode(registration))
        asked: list[str] = []

        async def answers(address: str) -> bool:
            asked.append(address)
            return len(asked) == 1

        arguments: dict[str, Any] = {"name": "bookie-1", "cluster_id": cluster_id, "clock": CLOCK}
        copied = await copy_of(disk)
        with pytest.raises(ConfigurationError, match=r"runs already, at 10\.0\.0\.1:3181"):
            await establish_identity(copied, store, PATHS, is_answered=answers, **arguments)
        await establish_identity(disk, store, PATHS, is_answered=answers, **arguments)
        assert asked == ["10.0.0.1:3181"] * 2
        # Another process answers for one that is gone, until its registration has vanished.
        asked.clear()

        async def answers_for_it(address: str) -> bool:
            await store.delete(PATHS.bookie_available("bookie-1"))
            return await answers(address)

        await establish_identity(
            disk, store, PATHS, is_answered=answers_for_it, patience_s=60, **arguments
        )
        assert len(asked) == 1
        await store.aclose()

    run(scenario())
