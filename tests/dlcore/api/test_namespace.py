"""Namespaces: creating, finding and deleting logs."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from dlcore.backends.direct.namespace import open_namespace
from dlcore.backends.scanning import ScanClients, scan
from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import (
    AlreadyClosedError,
    AlreadyTruncatedError,
    CorruptMetadataError,
    InvalidNamespaceUriError,
    LedgerReadError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.log.metadata.ledger_cache import LedgerCache
from dlcore.log.reading.snapshot import LogFollower
from dlcore.wire.memory_bookies import MemoryBookieClient
from tests.fixtures import aio
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import ManualClock, MemoryCluster, memory_cluster
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.store import ReadLedgers
    from dlcore.log.context import LogContext
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Versioned


def on_namespace(body: Callable[[MemoryCluster, DirectNamespace], Awaitable[None]]) -> None:
    """Run `body` with a cluster and a namespace on it."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            await body(cluster, await cluster.open("a"))

    run_in_own_time(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_reply_of_a_creation(*, applied: bool) -> None:
    """If it was applied it is ours, and no error; else the caller learns of no answer."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        cluster.stores["a"].lose_next_reply(applied=applied)
        if applied:
            await namespace.create_log("clicks")
        else:
            with pytest.raises(Exception, match="connection"):
                await namespace.create_log("clicks")
        assert await namespace.log_exists("clicks") is applied

    on_namespace(body)


def test_a_damaged_log_is_named() -> None:
    """A node that is missing below the log is not taken for an empty log."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        await namespace.create_log("clicks")
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(1, b"a"))
        await cluster.stores["a"].delete(cluster.paths.log_of(log.log_id).segment(1))
        with pytest.raises(CorruptMetadataError, match="'clicks': segment 1 is missing"):
            await log.get_snapshot()

    on_namespace(body)


def test_a_bad_uri_is_refused_before_anything_is_contacted() -> None:
    """The message shows the form."""
    with pytest.raises(InvalidNamespaceUriError, match="distributedlog://host:port"):
        asyncio.run(open_namespace("kafka://localhost/x"))


def test_closing_a_namespace_stops_what_was_opened_on_it() -> None:
    """No task is left running, and a writer that was forgotten frees the log."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        await namespace.create_log("clicks")
        log = await namespace.open_log("clicks")
        writer = await log.open_writer()
        reader = await log.open_reader()
        await writer.write(LogRecord(1, b"a"))
        waiting = asyncio.create_task(reader.read_bulk(5))
        assert len(await waiting) == 1
        waiting = asyncio.create_task(reader.read_bulk(5))
        await asyncio.sleep(0)
        await namespace.aclose()
        with pytest.raises(AlreadyClosedError):
            await waiting
        with pytest.raises(AlreadyClosedError):
            writer.write(LogRecord(2, b"b"))
        left = [t for t in asyncio.all_tasks() if t.get_name().startswith(("log-", "writer-"))]
        assert left == []
        again = await (await cluster.open("b")).open_log("clicks")
        async with await again.open_writer() as writer:
            await writer.write(LogRecord(2, b"b"))
        assert await again.get_log_record_count() == 2

    on_namespace(body)


def test_closing_goes_on_after_a_failure() -> None:
    """Every writer is stopped and every connection closed; the failure is still raised."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        writers = []
        for name in ("clicks", "orders"):
            await namespace.create_log(name)
            writers.append(await (await namespace.open_log(name)).open_writer())

        async def fail() -> None:
            raise LedgerReadError("planted")

        closed: list[str] = []

        async def close_bookies() -> None:
            closed.append("bookies")

        for writer in writers:
            writer._lock.release = fail  # type: ignore[union-attr, method-assign]
        namespace.ports.ledgers.aclose = fail  # type: ignore[method-assign]
        namespace.ports.bookies.aclose = close_bookies  # type: ignore[method-assign]
        with pytest.raises(LedgerReadError, match="planted"):
            await namespace.aclose()
        assert closed == ["bookies"]
        for writer in writers:
            with pytest.raises(AlreadyClosedError):
                writer.write(LogRecord(1, b"a"))
        with pytest.raises(AlreadyClosedError):
            await cluster.stores["a"].get("/dlog")

    on_namespace(body)


class PlannedClients(ScanClients):
    """Bookies of a plan are gone: the reader finds the present ones in the metadata store."""

    def __init__(self, namespace: DirectNamespace) -> None:
        super().__init__()
        self._namespace = namespace

    def client_of(self, cluster_id: str, addresses: Mapping[BookieId, str]) -> LedgerClient:
        """Return a client that reaches no server."""
        return LedgerClient(
            ledger_store=None,
            registry=None,
            bookies=MemoryBookieClient([]),
            config=LedgerClientConfig(),
            clock=ManualClock("scan"),
            rng=random.Random(0),
        )

    async def fresh_context(self, uri: str) -> LogContext:
        """Return the one of the test."""
        return self._namespace.log_context


@pytest.mark.parametrize("change", ["truncated", "deleted"])
def test_a_scan_of_what_is_gone_meanwhile_says_so(change: str) -> None:
    """It names the log and the range."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        await namespace.create_log("clicks")
        log = await namespace.open_log("clicks")
        for _ in range(2):
            async with await log.open_writer() as writer:
                await writer.write(LogRecord(1, b"a"))
        snapshot = await log.get_snapshot()
        scans = snapshot.scans(snapshot.first, snapshot.end)
        found = [b async for b in scan(scans, uri="memory", clients=PlannedClients(namespace))]
        assert [b.lssn for b in found] == [1, 2]
        if change == "truncated":
            await log.truncate(DLSN(2, 0, 0))
        else:
            await log.delete()
        with pytest.raises(AlreadyTruncatedError, match=r"'clicks': .* 1:0:0 to 1:1:0"):
            [b async for b in scan(scans, uri="memory", clients=PlannedClients(namespace))]
        with pytest.raises(LedgerReadError):
            [b async for b in scan(scans, clients=PlannedClients(namespace))]

    on_namespace(body)


def test_a_scan_finds_its_log_under_another_name() -> None:
    """It was renamed since it was planned, and another has its name."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        await namespace.create_log("clicks")
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(1, b"a"))
        snapshot = await log.get_snapshot()
        scans = snapshot.scans(snapshot.first, snapshot.end)
        await log.rename("visits")
        await namespace.create_log("clicks")
        found = [b async for b in scan(scans, uri="memory", clients=PlannedClients(namespace))]
        assert [b.batch["value"].to_pylist() for b in found] == [[b"a"]]

    on_namespace(body)


def test_snapshots_of_one_log_that_several_ask_for() -> None:
    """It comes and goes: each gets the same answer; asked for again it is watched, once."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        async def ask() -> list[bool]:
            asked = (namespace.get_snapshots(["clicks"], fresh=True) for _ in range(3))
            return [each["clicks"] is not None for each in await asyncio.gather(*asked)]

        def watches() -> int:
            heads = cluster.paths.heads
            return sum(watch.path.startswith(heads) for watch in cluster.stores["a"]._watches)

        await namespace.create_log("clicks")
        assert await ask() == [True] * 3
        assert watches() == 0
        assert await ask() == [True] * 3
        assert watches() == 1
        await namespace.delete_log("clicks")
        assert await ask() == [False] * 3
        assert watches() == 0

    on_namespace(body)


class LateLedgerStore(LedgerStore):
    """Answers two questions at once."""

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        super().__init__(store, paths)
        self._left = 2
        self._may_answer = asyncio.Event()

    async def read_many(self, ledger_ids: Sequence[int], *, fresh: bool = False) -> ReadLedgers:
        """Return what is stored, later."""
        found = await super().read_many(ledger_ids, fresh=fresh)
        self._left -= 1
        if not self._left:
            self._may_answer.set()
        await self._may_answer.wait()
        return found


def test_an_older_head_does_not_hide_a_later_one() -> None:
    """A call that read it before another call did comes to its end after that one."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        await namespace.create_log("clicks")
        log = await namespace.open_log("clicks")
        follower = LogFollower(namespace.log_context, log._log)
        follower.watch()
        early = await namespace.log_context.logs.read(log._log)
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(1, b"a"))
        assert not (await follower.take()).is_empty
        assert not (await follower.take_at(early)).is_empty
        known = follower.unchanged()
        assert known is not None
        assert not known.is_empty

    on_namespace(body)


def test_ledgers_that_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are kept: none is taken for gone because another's took its place."""
    monkeypatch.setattr("dlcore.log.metadata.ledger_cache._LEDGERS_KEPT_MAX", 1)

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        await namespace.create_log("clicks")
        log = await namespace.open_log("clicks")
        for txid in range(6):
            async with await log.open_writer() as writer:
                await writer.write(LogRecord(txid, b"a"))
        segments = await log.get_log_segments()
        ids = [extent.ledger_id for segment in segments for extent in segment.extents]
        cache = LedgerCache(LateLedgerStore(cluster.stores["a"], cluster.paths))
        first = asyncio.create_task(cache.read(dict.fromkeys(ids[:3], 0)))
        for _ in range(10):  # it has asked
            await asyncio.sleep(0)
        assert list(await cache.read(dict.fromkeys(ids[3:], 0))) == ids[3:]
        assert list(await first) == ids[:3]

    on_namespace(body)


def test_a_list_has_what_others_completed_before() -> None:
    """Also beside a server that lags; what goes while it is listed is left out."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        long = "x" * 300
        await namespace.create_log(long)
        store = cluster.stores["a"]
        get_many = store.get_many

        async def delete_first(paths: Sequence[str]) -> list[Versioned | None]:
            store.get_many = get_many  # type: ignore[method-assign]
            await (await cluster.open("b")).delete_log(long)
            return await get_many(paths)

        store.get_many = delete_first  # type: ignore[method-assign, assignment]
        assert await namespace.get_logs() == []

    on_namespace(body)


def test_a_new_log_is_listed_beside_a_server_that_lags() -> None:
    """A list that begins after a log was created has it."""

    async def run() -> None:
        tree = SimulatedTree(latency=lambda: 0.001, lag=lambda: 3600.0)
        cluster = MemoryCluster(tree=tree)
        await cluster.start()
        try:
            one, other = await cluster.open("a"), await cluster.open("b")
            await one.create_log("clicks")
            assert await other.get_logs() == ["clicks"]
        finally:
            await cluster.aclose()

    run_in_own_time(asyncio.wait_for(run(), 60))


def test_statistics_tell_what_was_done_and_what_is_held() -> None:
    """Closed writers count, too; unacknowledged records are pending; a lost session is counted."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        nothing = namespace.get_statistics()
        assert (nothing.entries_written, nothing.open_objects) == (0, {})
        assert nothing.is_connected
        await namespace.create_log("clicks")
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(1, b"x" * 1000))
        writer = await log.open_writer()
        await writer.write(LogRecord(2, b"x" * 1000))
        for bookie in cluster.bookies:
            bookie.is_silent = True
        writer.write(LogRecord(3, b"x" * 1000))
        await asyncio.sleep(0)
        now = namespace.get_statistics()
        assert (now.entries_written, now.open_ledgers) == (2, 1)
        assert 2000 < now.bytes_written < 4000
        assert now.open_objects == {"AsyncLogWriter": 1}
        for bookie in cluster.bookies:
            bookie.is_silent = False
        await writer.abort()
        async with await log.open_reader() as reader:
            assert len(await reader.read_bulk(2, until_caught_up=True)) == 2
            now = namespace.get_statistics()
            assert (now.entries_read, now.open_objects) == (2, {"AsyncLogReader": 1})
            assert now.bytes_read >= 2000
        await namespace.get_snapshots(["clicks"])
        store = cluster.stores["a"]
        store.disconnect()
        assert not namespace.get_statistics().is_connected
        store.expire()
        store.reconnect()
        await aio.until(lambda: namespace.get_statistics().is_connected)
        now = namespace.get_statistics()
        assert (now.sessions_lost, now.is_connected, now.followed_logs) == (1, True, 1)

    on_namespace(body)
