"""Depth of metadata work: round trips that follow one another, and the number of requests.

Goal: what a caller waits for does not grow with logs, tasks or history.  Method: the real code over
the store in memory, through one that counts; depth is what a network's latency is multiplied by.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest

from dlcore.base.errors import TransactionTooLargeError
from dlcore.base.ids import DLSN
from dlcore.log.staging.commit import LOGS_PER_APPEND
from dlcore.metadata.port import REQUEST_BYTES_MAX
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.memory_namespace import MemoryCluster, memory_cluster, record
from tests.fixtures.recording_store import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.log.writing.writer import DirectWriter
    from tests.fixtures.simulated_store import SimulatedStore

COMMITS = amount(1000, sampled=60)


class Counted:
    """A namespace whose requests are counted."""

    def __init__(self, namespace: DirectNamespace, store: RecordingStore) -> None:
        self.namespace = namespace
        self.store = store
        self.versions = 0

    async def commit(self, logs: list[str]) -> tuple[int, int]:
        """Stage a record for each log and commit them; return depth and bytes of the commit."""
        self.versions += 1
        append = await self.namespace.begin_append("job", self.versions)
        async with await self.namespace.open_staging_writer(identity="job") as writer:
            for log in logs:
                await writer.write_batch(log, pa.record_batch({"value": [b"x"]}))
            extents = await writer.stage()
        with self.store.record() as requests:
            assert (await append.commit(extents)).committed
            depth, written = requests.depth, requests.bytes_written
        await self.namespace.log_context.tidier.settled()
        return depth, written


def counting(body: Callable[[MemoryCluster, Counted], Awaitable[None]]) -> None:
    """Run `body` with a client whose requests are counted."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            stores: list[RecordingStore] = []
            connect = cluster.tree.connect

            def counted() -> SimulatedStore:
                stores.append(RecordingStore(connect()))
                return cast("SimulatedStore", stores[-1])

            cluster.tree.connect = counted  # type: ignore[method-assign]
            namespace = await cluster.open("counted")
            cluster.tree.connect = connect  # type: ignore[method-assign]
            await body(cluster, Counted(namespace, stores[0]))

    run_in_own_time(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("count", [1, 5, 200])
def test_a_commit(count: int) -> None:
    """One round trip to look, one to write, whatever the number of logs."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        logs = [f"log{number}" for number in range(count)]
        for log in logs:
            await client.namespace.create_log(log)
        for _ in range(amount(12, sampled=4)):
            depth, _ = await client.commit(logs)
            assert depth == 2

    counting(body)


@pytest.mark.prove  # with few logs, `test_a_late_commit…` has the bytes for each
def test_a_commit_over_as_many_logs_as_are_promised() -> None:
    """It fits into one transaction, also when all logs need a chunk at once."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        logs = [f"log{number}" for number in range(LOGS_PER_APPEND)]
        for log in logs:
            await client.namespace.create_log(log)
        sizes = [(await client.commit(logs))[1] for _ in range(9)]
        assert max(sizes) < REQUEST_BYTES_MAX
        assert sum(sizes[:8]) / 8 / LOGS_PER_APPEND <= 300

    counting(body)


def test_a_late_commit_is_as_small_as_the_first_ones() -> None:
    """Nothing that a commit writes grows with what came before."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        logs = [f"log{number}" for number in range(5)]
        for log in logs:
            await client.namespace.create_log(log)
        sizes = [(await client.commit(logs))[1] for _ in range(COMMITS)]
        periods = [sum(sizes[at : at + 8]) / 8 / len(logs) for at in range(0, COMMITS, 8)]
        assert max(periods) <= 300  # with the record of the identity and one registration
        assert periods[-1] <= 1.1 * periods[1]
        assert max(sizes[-8:]) <= 1.1 * max(sizes[8:16])

    counting(body)


def test_more_logs_than_are_promised_are_refused_before_anything_is_staged() -> None:
    """By the writer that is given too many, and by the commit of what several staged."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        logs = [f"log{number}" for number in range(LOGS_PER_APPEND + 1)]
        for log in logs:
            await client.namespace.create_log(log)
        rows = pa.record_batch({"value": [b"x"]})
        parts = [(log, rows) for log in logs]
        async with await client.namespace.open_staging_writer(identity="job") as writer:
            with client.store.record() as requests:
                with pytest.raises(TransactionTooLargeError, match="1001 logs: 1000 fit"):
                    await writer.write_batches(parts)
                assert requests.count == 0
            await writer.write_batches(parts[:-1])
            with pytest.raises(TransactionTooLargeError, match="1001 logs"):
                await writer.write_batch(*parts[-1])
            extents = await writer.stage()
            await writer.write_batch(*parts[-1])
            last = await writer.stage()
            append = await client.namespace.begin_append("job", 1)
            with client.store.record() as requests:
                with pytest.raises(TransactionTooLargeError, match="1001 logs"):
                    await append.commit(extents + last)
                assert requests.count == 0
            assert len((await append.commit(extents)).logs) == LOGS_PER_APPEND

    counting(body)


def test_opening_a_writer_and_its_first_write() -> None:
    """At most four each, also the very first ones of a client."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        await client.namespace.create_log("clicks")
        log = await client.namespace.open_log("clicks")
        for _ in range(3):
            with client.store.record() as requests:
                writer = await log.open_writer()
                assert requests.depth <= 3
            with client.store.record() as requests:
                await writer.write(record(max(0, writer.last_txid)))
                assert requests.depth <= 4
            await writer.aclose()

    counting(body)


def test_snapshots() -> None:
    """Unchanged logs cost no request; the heads of changed ones are read at once."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        logs = [f"log{number}" for number in range(50)]
        for log in logs:
            await client.namespace.create_log(log)
        await client.commit(logs)
        assert list(await client.namespace.get_snapshots(logs)) == logs
        for _ in range(2):  # asked for again they are watched
            await client.namespace.get_snapshots(logs)
            await asyncio.sleep(0.01)  # the watches have made their first reports
        with client.store.record() as requests:
            same = await client.namespace.get_snapshots(logs)
            assert requests.count == 0
        await client.commit(logs[:20])
        with client.store.record() as requests:
            after = await client.namespace.get_snapshots(logs)
            assert requests.kinds["get_many"] <= 2
            assert requests.depth <= 2
        for number, log in enumerate(logs):
            before, now = same[log], after[log]
            assert before is not None
            assert now is not None
            assert now.end.entry_id == before.end.entry_id + (number < 20)
        with client.store.record() as requests:
            await client.namespace.get_snapshots(logs, fresh=True)
            assert (requests.count, requests.depth) == (1, 1)

    counting(body)


def test_snapshots_of_a_log_that_is_written() -> None:
    """Its head is not asked for again before a change of it is heard; records are at bookies."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        await client.namespace.create_log("clicks")
        log = await client.namespace.open_log("clicks")

        async def end() -> DLSN:
            snapshot = (await client.namespace.get_snapshots(["clicks"], fresh=True))["clicks"]
            assert snapshot is not None
            return snapshot.end

        async with await log.open_writer() as writer:
            for txid in range(5):
                await writer.write(record(txid))
                await writer.commit()
                with client.store.record() as requests:
                    assert await end() == DLSN(1, txid + 1, 0)
                await asyncio.sleep(0.01)  # the watch has made its first report
            assert requests.kinds["sync"] == 1
            assert requests.kinds["get_many"] == 0
            assert requests.depth == 1
        await log.mark_end_of_stream()
        snapshot = (await client.namespace.get_snapshots(["clicks"], fresh=True))["clicks"]
        assert snapshot is not None
        assert snapshot.sealed

    counting(body)


def test_known_facts_of_a_written_log_are_not_read_again() -> None:
    """Bookies are asked for its last entry if there are new ones, else only whether there are."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        await client.namespace.create_log("clicks")
        log = await client.namespace.open_log("clicks")

        async def look() -> tuple[LogSnapshot | None, int]:
            before = sum(bookie.requests for bookie in cluster.bookies)
            snapshot = (await client.namespace.get_snapshots(["clicks"], fresh=True))["clicks"]
            await asyncio.sleep(0.01)
            return snapshot, sum(bookie.requests for bookie in cluster.bookies) - before

        async with await log.open_writer() as writer:
            await writer.write(record(1))
            await writer.commit()
            for _ in range(3):  # until the watch has made its first report
                snapshot, asked = await look()
            assert await look() == (snapshot, asked)
            for txid in (2, 3):
                await writer.write(record(txid))
            await writer.commit()
            grown, asked_more = await look()
            assert asked_more == asked + 1
            assert grown == (await client.namespace.get_snapshots(["clicks"]))["clicks"]
            assert grown is not None
            (extent,) = grown.segments[0].extents
            assert (extent.record_count, extent.first_txid, extent.last_txid) == (3, 1, 3)

    counting(body)


async def looked_at(client: Counted) -> tuple[DirectLog, DirectWriter]:
    """Return a log that has a record, and its writer; its snapshots have been asked for."""
    await client.namespace.create_log("clicks")
    log = await client.namespace.open_log("clicks")
    writer = await log.open_writer()
    await writer.write(record(1))
    await writer.commit()
    for _ in range(3):
        await client.namespace.get_snapshots(["clicks"], fresh=True)
        await asyncio.sleep(0.01)
    return log, writer


def test_a_change_while_a_log_is_looked_at_is_not_missed() -> None:
    """Answers of bookies before the notice do not count."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        _, writer = await looked_at(client)
        async with writer:
            sync = client.store.sync

            async def late(path: str) -> None:
                await asyncio.sleep(0.1)  # the bookies have answered
                await writer.write(record(2))
                await writer.mark_end_of_stream()
                await sync(path)

            client.store.sync = late  # type: ignore[method-assign]
            snapshot = (await client.namespace.get_snapshots(["clicks"], fresh=True))["clicks"]
            assert snapshot is not None
            assert snapshot.sealed
            assert snapshot.end == DLSN(1, 2, 0)

    counting(body)


def test_answers_of_bookies_for_an_earlier_head_do_not_count() -> None:
    """Not even if another call has covered by then what was heard of since."""

    async def body(cluster: MemoryCluster, client: Counted) -> None:
        log, writer = await looked_at(client)
        sync = client.store.sync

        async def late(path: str) -> None:
            await asyncio.sleep(0.1)  # the bookies have answered
            await writer.aclose()
            writers.append(await log.open_writer())
            await writers[0].write(record(2))
            await writers[0].commit()
            another = (await client.namespace.get_snapshots(["clicks"]))["clicks"]
            assert another is not None
            assert another.end == DLSN(2, 1, 0)
            await sync(path)

        writers: list[DirectWriter] = []
        client.store.sync = late  # type: ignore[method-assign]
        snapshot = (await client.namespace.get_snapshots(["clicks"], fresh=True))["clicks"]
        assert snapshot is not None
        assert snapshot.end == DLSN(2, 1, 0)
        await writers[0].aclose()

    counting(body)
