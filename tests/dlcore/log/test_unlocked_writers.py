"""Writers that no lock keeps apart: ledgers and compare-and-set alone keep the log whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    DLError,
    LedgerFencedError,
    OwnershipAcquireFailedError,
    WriteError,
)
from dlcore.base.ids import DLSN
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.log.writing.writer import DirectWriter


async def other(cluster: MemoryCluster, **changes: object) -> DirectLog:
    """Open the log as another client."""
    name = f"b{len(cluster.namespaces)}"
    namespace = await cluster.open(name, config=replace(CONFIG, **changes))  # type: ignore[arg-type]
    return await namespace.open_log("clicks")


@pytest.mark.parametrize("loss", ["disabled", "removed"])
def test_two_writers_without_a_lock(loss: str) -> None:
    """Exactly one goes on; no record is lost or doubled."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        first_log = await other(cluster, lock_enabled=loss == "removed")
        second_log = await other(cluster, lock_enabled=loss == "removed")
        first = await first_log.open_writer()
        await first.write(record(1, b"first"))
        if loss == "removed":
            path = cluster.paths.log_of(log.log_id).lock
            await cluster.stores["a"].delete(path)
        second = await second_log.open_writer()
        await second.write(record(2, b"second"))
        late = first.write(record(3, b"late"))
        with pytest.raises((LedgerFencedError, OwnershipAcquireFailedError)):
            await late
        with pytest.raises(WriteError):
            first.write(record(4))
        with pytest.raises(WriteError):
            await first.aclose()
        await second.write(record(5, b"third"))
        await second.aclose()
        assert [r.payload for r in await read_all(log)] == [b"first", b"second", b"third"]

    on_log(body)


def test_two_idle_writers_without_a_lock() -> None:
    """Both think the log is theirs and start a segment at once: one of them wins it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writers = [await (await other(cluster, lock_enabled=False)).open_writer() for _ in range(2)]
        futures = [w.write(record(1, b"%d" % i)) for i, w in enumerate(writers)]
        acked = {
            i
            for i, r in enumerate(await asyncio.gather(*futures, return_exceptions=True))
            if isinstance(r, DLSN)
        }
        again = await asyncio.gather(
            *(_write_again(w, b"again-%d" % i) for i, w in enumerate(writers))
        )
        assert again.count(True) == 1
        wanted = {b"%d" % i for i in acked} | {b"again-%d" % again.index(True)}
        for writer in writers:
            await writer.abort()
        await log.recover()
        found = [r.payload for r in await read_all(log)]
        assert len(found) == len(set(found))
        assert set(found) >= wanted

    on_log(body)


@pytest.mark.parametrize("end", ["seal", "write", "close"])
def test_truncation_by_an_idle_writer_without_a_lock(end: str) -> None:
    """It saw the other's open segment when it truncated: that does not make it its own."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            for txid in range(3):
                await writer.write(record(txid))
        idle, busy = [
            await (await other(cluster, lock_enabled=False)).open_writer() for _ in range(2)
        ]
        acked = [await busy.write(record(10 + i)) for i in range(3)]
        assert await idle.truncate(DLSN(1, 2, 0))
        acked.append(await busy.write(record(13)))  # the truncation did not take the log over
        if end == "seal":
            await idle.mark_end_of_stream()
        elif end == "write":
            acked.append(await idle.write(record(14)))
        await idle.aclose()
        if end == "close":
            await busy.aclose()
        else:
            with pytest.raises(DLError):
                await busy.write(record(15))
            await busy.abort()
        assert [r.dlsn for r in await read_all(log)] == [DLSN(1, 2, 0), *acked]
        assert await log.is_end_of_stream_marked() is (end == "seal")

    on_log(body)


def test_truncation_tells_a_writer_that_it_was_replaced() -> None:
    """Its ledger was recovered by another one: it cannot go on."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        first, second = [await other(cluster, lock_enabled=False) for _ in range(2)]
        replaced = await first.open_writer()
        await replaced.write(record(1))
        async with await second.open_writer() as writer:
            last = await writer.write(record(2))
            with pytest.raises(OwnershipAcquireFailedError, match="another writer"):
                await replaced.truncate(DLSN(1, 1, 0))
            with pytest.raises(WriteError):
                replaced.write(record(3))
        with pytest.raises(WriteError):
            await replaced.aclose()
        assert [r.dlsn for r in await read_all(log)] == [last]

    on_log(body)


async def _write_again(writer: DirectWriter, payload: bytes) -> bool:
    try:
        await writer.write(record(2, payload))
    except DLError:
        return False
    return True


def test_a_cancelled_writer_stays_cancelled_although_it_had_failed() -> None:
    """A caller that retries on errors of the cluster must not take its own cancellation for one."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        first_log = await other(cluster, lock_enabled=False)
        second_log = await other(cluster, lock_enabled=False)
        fenced = asyncio.Event()

        async def write_until_cancelled() -> None:
            async with await first_log.open_writer() as first:
                await first.write(record(1))
                async with await second_log.open_writer() as second:
                    await second.write(record(2))
                with pytest.raises(LedgerFencedError):
                    await first.write(record(3))
                fenced.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(write_until_cancelled())
        await fenced.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    on_log(body)
