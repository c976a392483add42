"""Logs with a long history: each operation in steps that fit a transaction, and resume.

Goal: nothing that an operator does fails because a log is old.  Method: the metadata of such a log
is built in the store; what remains of it after truncation and deletion is compared with nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from msgspec import structs

from dlcore.base.ids import DLSN
from dlcore.log.metadata.values import CHUNK_EXTENTS_MAX
from dlcore.metadata.port import Delete, require_request_size
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.large_log import Interrupted, LargeLog, die_at
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import memory_cluster, on_log, record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.metadata.port import Op
    from tests.fixtures.memory_namespace import MemoryCluster

SEGMENTS, EXTENTS = 130, 40
"""More than what one step takes, of both."""


def on_large_log(body: Callable[[MemoryCluster, DirectNamespace], Awaitable[None]]) -> None:
    """Run `body` with the large log "old", each of whose transactions must fit."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("a")
            await namespace.create_log("old")
            log = await namespace.log_context.logs.find("old")
            await LargeLog(namespace, log).build(segments=SEGMENTS, extents_per_segment=EXTENTS)
            store = namespace.log_context.store
            multi = store.multi

            async def fitting(ops: Sequence[Op]) -> None:
                require_request_size(ops)
                assert len(ops) < 1500
                await multi(ops)

            store.multi = fitting  # type: ignore[method-assign]
            await body(cluster, namespace)

    run_in_own_time(asyncio.wait_for(run(), 60))


def below(cluster: MemoryCluster, *parts: str) -> list[str]:
    """Return the nodes of the log's history and of its ledgers."""
    return [
        path
        for path in cluster.tree.dump()
        if any(path.startswith(f"/dlog/{part}/") and path.count("/") > 4 for part in parts)
    ]


def test_everyday_work() -> None:
    """Its content is listed and counted, and more is appended and written."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        assert await namespace.get_logs() == ["old"]
        log = await namespace.open_log("old")
        assert len(await log.get_log_segments()) == SEGMENTS
        snapshot = await log.get_snapshot()
        assert snapshot.end == DLSN(SEGMENTS, EXTENTS, 0)
        assert snapshot.count_records(snapshot.first, snapshot.end) == SEGMENTS * EXTENTS
        append = await namespace.begin_append("job", 1)
        await append.write_batch("old", pa.record_batch({"value": [b"new"]}))
        assert (await append.commit()).logs == {
            "old": (DLSN(SEGMENTS + 1, 0, 0), DLSN(SEGMENTS + 1, 1, 0))
        }
        async with await log.open_writer() as writer:
            assert writer.last_txid > 0
        await log.recover()

    on_large_log(body)


@pytest.mark.parametrize("died_at", [1, 2, 5, 10])
def test_truncation(died_at: int) -> None:
    """The next truncation removes what was left; the rest of the log is as it was."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        log = await namespace.open_log("old")
        live = die_at(namespace, died_at)
        with pytest.raises(Interrupted):
            await log.truncate(DLSN(SEGMENTS - 1, 3, 0))
        live()
        other = await (await cluster.open("b")).open_log("old")
        assert await other.truncate(DLSN(SEGMENTS - 1, 5, 0))
        left = [segment.lssn for segment in await other.get_log_segments()]
        assert left == [SEGMENTS - 1, SEGMENTS]
        assert await other.get_first_dlsn() == DLSN(SEGMENTS - 1, 5, 0)
        assert len(below(cluster, "ledgers")) == 4  # two ledgers, and what is known of them
        chunks = len([path for path in below(cluster, "heads") if path.count("/") == 6])
        assert chunks == 2 * EXTENTS / 8

    on_large_log(body)


@pytest.mark.parametrize("died_at", [1, 2, 5, 10])
def test_deletion(died_at: int) -> None:
    """Once the first transaction is done the name is free; a sweep removes what is left."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        live = die_at(namespace, died_at + 1)  # the first one takes the lock
        with pytest.raises(Interrupted):
            await namespace.delete_log("old")
        live()
        if died_at == 1:
            await namespace.delete_log("old")
        assert not await namespace.log_exists("old")
        await namespace.create_log("old")
        anew = await namespace.open_log("old")
        assert await anew.get_log_segments() == []
        await LogUpkeep.of(await cluster.open("b")).sweep()
        assert below(cluster, "ledgers") == []
        assert below(cluster, "heads") == []
        assert [path for path in cluster.tree.dump() if path.startswith("/dlog/deleted/")] == []

    on_large_log(body)


def test_a_step_takes_few_extents_however_full_the_chunks_are() -> None:
    """Each extent may be of a ledger of its own, whose registration the step would write."""
    chunk_counts: list[int] = []

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        async with await namespace.open_staging_writer(identity="job") as writer:
            await writer.write_batch("clicks", pa.record_batch({"value": [b"x"]}))
            (first,) = await writer.stage()
            extents = [
                structs.replace(first, first_entry_id=n, last_entry_id=n)
                for n in range(30 * CHUNK_EXTENTS_MAX)
            ]
            await (await namespace.begin_append("job", 1)).commit(extents)
        async with await log.open_writer() as log_writer:  # completes the segment
            await log_writer.write(record(log_writer.last_txid))
        store = namespace.log_context.store
        multi = store.multi

        async def noted(ops: Sequence[Op]) -> None:
            chunks = [op for op in ops if isinstance(op, Delete) and "/heads/" in op.path]
            chunk_counts.append(len(chunks))
            await multi(ops)

        store.multi = noted  # type: ignore[method-assign]
        await log.truncate(DLSN(2, 0, 0))

    on_log(body)
    assert sum(chunk_counts) == 30 + 1  # and the segment's own node
    assert max(chunk_counts) * CHUNK_EXTENTS_MAX <= 600
