"""A writer whose ledger was taken from it while it closed.

Goal: its end is reported, and nothing of it stays in the client.  Method: memory bookies, and
the metadata changed behind its back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import (
    BookieError,
    DLError,
    LedgerClosedError,
    LedgerFencedError,
    LedgerNotFoundError,
)
from dlcore.ledger.metadata.store import LedgerStore
from tests.fixtures.aio import run
from tests.fixtures.ledger_cluster import Cluster, run as run_cluster, write
from tests.fixtures.memory_namespace import MemoryCluster, memory_cluster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata


async def close_elsewhere(cluster: MemoryCluster, ledger_id: int) -> None:
    """Close the ledger before the writer's last entry, as a faulty client would."""
    store = LedgerStore(cluster.tree.connect(), cluster.paths)
    stored = await store.read(ledger_id)
    closed = stored.metadata.closed(last_entry_id=0, length_bytes=1)
    await store.write(closed, version=stored.version)


async def recover_elsewhere(cluster: MemoryCluster, ledger_id: int) -> None:
    """Fence the writer and close the ledger without what the writer adds next."""
    other = await cluster.open("b")
    await other.ports.ledgers.recover_ledger(ledger_id)


async def delete_elsewhere(cluster: MemoryCluster, ledger_id: int) -> None:
    """Delete the ledger."""
    await LedgerStore(cluster.tree.connect(), cluster.paths).delete(ledger_id)


@pytest.mark.parametrize(
    ("take", "is_noticed_before", "error"),
    [
        (close_elsewhere, False, LedgerClosedError),
        (delete_elsewhere, False, LedgerNotFoundError),
        (recover_elsewhere, True, LedgerFencedError),
    ],
)
def test_a_close_that_comes_too_late_ends_the_writer(
    take: Callable[[MemoryCluster, int], Awaitable[None]],
    is_noticed_before: bool,
    error: type[DLError],
) -> None:
    """It is reported each time, and neither the client nor a timer keeps the writer."""

    async def scenario() -> None:
        async with memory_cluster(bookie_count=3) as cluster:
            ledgers = (await cluster.open("a")).ports.ledgers
            writer = await ledgers.create_ledger(QuorumConfig())
            await asyncio.gather(*(writer.append([b"x"]) for _ in range(3)))
            await take(cluster, writer.ledger_id)
            if is_noticed_before:
                with pytest.raises(error):
                    await writer.append([b"x"])
            assert ledgers.writers.open == {writer}
            for _ in range(2):
                with pytest.raises(error):
                    await writer.close()
            assert not ledgers.writers.open
            assert not writer._driver._timers
            with pytest.raises(error):
                await writer.wait_for_capacity()

    run(scenario())


@pytest.mark.parametrize("error", [BookieError("no bookies today"), RuntimeError("a bug")])
def test_no_flush_waits_for_a_search_that_failed(error: Exception) -> None:
    """Goal: an error of the search for a replacement ends the writer and all waiting calls.

    Method: a member dies, and the list of bookies raises what is no error of the metadata store.
    """

    async def scenario(cluster: Cluster) -> None:
        errors: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        writer = await cluster.client.create_ledger(QuorumConfig(ack_quorum_size=3))
        await write(writer, 1)

        async def fail() -> list[BookieId]:
            raise error

        writer._driver._context.placer.list_writable = fail  # type: ignore[method-assign]
        cluster.member(writer, 0).stop()
        entry = writer.append([b"x"])
        with pytest.raises(DLError, match=str(error)):
            await writer.flush()
        with pytest.raises(DLError, match=str(error)):
            await entry
        assert errors == ([] if isinstance(error, DLError) else [error])

    run_cluster(scenario)


def test_an_answer_after_the_end_starts_no_work() -> None:
    """Goal: nothing goes on that a closed driver began.  Method: a silent bookie fails late."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig(ack_quorum_size=3))
        await write(writer, 1)
        searches: list[str] = []

        async def search() -> list[BookieId]:
            searches.append("search")
            return []

        writer._driver._context.placer.list_writable = search  # type: ignore[method-assign]
        cluster.member(writer, 0).is_silent = True
        writer.append([b"x"])
        await asyncio.sleep(0.5)
        await writer._driver.aclose()
        await asyncio.sleep(60.0)
        assert searches == []
        assert not writer._driver._tasks

    run_cluster(scenario)


def test_a_close_whose_caller_was_cancelled_can_be_waited_for_again() -> None:
    """Goal: the end is stored once, and each caller that waits for it learns of it.

    Method: the metadata store answers late, and the first caller does not wait so long.
    """

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        store = cluster.client._context().ledger_store
        store_now, writes = store.write, 0

        async def late(metadata: LedgerMetadata, *, version: int, **_: Any) -> int:
            nonlocal writes
            writes += 1
            await asyncio.sleep(5)
            return await store_now(metadata, version=version)

        store.write = late  # type: ignore[method-assign]
        first = asyncio.create_task(writer.close())
        await asyncio.sleep(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        metadata = await writer.close()
        assert (metadata.last_entry_id, writes) == (2, 1)
        assert await writer.close() == metadata

    run_cluster(scenario)


def test_a_close_that_is_under_way_when_the_client_ends_is_answered() -> None:
    """Goal: no caller waits for a store that is not asked any more.

    Method: as before, but the client is closed meanwhile.
    """

    async def scenario(cluster: Cluster) -> None:
        client = cluster.new_client()
        writer = await client.create_ledger(QuorumConfig())
        await write(writer, 3)
        store = client._context().ledger_store

        async def never(metadata: LedgerMetadata, *, version: int, **_: Any) -> int:
            await asyncio.sleep(1e6)
            return version

        store.write = never  # type: ignore[method-assign]
        closing = asyncio.create_task(writer.close())
        await asyncio.sleep(1)
        await client.aclose()
        with pytest.raises(LedgerClosedError, match="abandoned"):
            await closing

    run_cluster(scenario)
