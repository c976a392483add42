"""Namespaces: creating, finding and deleting logs."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
import pytest

from dlcore.backends.direct.namespace import open_namespace
from dlcore.backends.scanning import ScanClients, scan
from dlcore.base.config import LedgerClientConfig, LogConfig, QuorumConfig
from dlcore.base.errors import (
    AlreadyClosedError,
    AlreadyTruncatedError,
    ConfigurationError,
    CorruptMetadataError,
    InvalidLogNameError,
    InvalidNamespaceUriError,
    LedgerReadError,
    LogExistsError,
    LogNotFoundError,
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

    from dlcore.backends.direct.log import DirectLog
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


def test_logs_are_created_listed_and_deleted() -> None:
    """Names are paths; lists are sorted, and filtered by prefix."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        for name in ("orders", "/clicks/eu", "clicks/us", "ä"):
            await namespace.create_log(name)
        assert await namespace.get_logs() == ["clicks/eu", "clicks/us", "orders", "ä"]
        assert await namespace.get_logs("clicks/") == ["clicks/eu", "clicks/us"]
        assert await namespace.log_exists("clicks/eu")
        with pytest.raises(LogExistsError, match="clicks/eu"):
            await namespace.create_log("clicks/eu")
        await namespace.delete_log("clicks/eu")
        assert not await namespace.log_exists("clicks/eu")
        for call in (namespace.delete_log, namespace.open_log):
            with pytest.raises(LogNotFoundError, match="clicks/eu"):
                await call("clicks/eu")

    on_namespace(body)


@pytest.mark.parametrize("name", ["", "a//b", "a b", ".hidden", "a/../b", "tail/"])
def test_bad_names_are_refused(name: str) -> None:
    """By every call that takes one."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        await namespace.create_log("clicks")
        for call in (
            namespace.create_log,
            namespace.open_log,
            namespace.log_exists,
            namespace.delete_log,
            lambda name: namespace.rename_log(name, "visits"),
            lambda name: namespace.rename_log("clicks", name),
            lambda name: anext(namespace.list_logs(after=name)),
            lambda name: namespace.get_snapshots([name]),
        ):
            with pytest.raises(InvalidLogNameError):
                await call(name)
        assert await namespace.get_logs() == ["clicks"]

    on_namespace(body)


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


def test_the_quorum_is_stored_with_the_log() -> None:
    """Each writer that opens the log uses it."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        quorum = QuorumConfig(ensemble_size=2, write_quorum_size=2, ack_quorum_size=2)
        await namespace.create_log("clicks", config=LogConfig(quorum=quorum))
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(1, b"a"))
        (segment,) = await log.get_log_segments()
        metadata = await namespace.get_ledger(segment.extents[0].ledger_id)
        assert metadata.quorum == quorum
        assert len(await namespace.get_bookies()) == 4

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


def test_a_closed_namespace_says_so() -> None:
    """Closing twice is harmless."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        await namespace.aclose()
        await namespace.aclose()
        with pytest.raises(AlreadyClosedError):
            await namespace.get_logs()

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


def test_logs_are_listed_in_pages() -> None:
    """Each once, also those with long names; a page has its size, and another goes on after it."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        names = {f"many/{i}" for i in range(40)} | {"ä" * 250 + str(i) for i in range(10)}
        for name in names:
            await namespace.create_log(name)
        pages = [page async for page in namespace.list_logs(page_size=15)]
        assert [len(page) for page in pages] == [15, 15, 15, 5]
        listed = [name for page in pages for name in page]
        assert len(listed) == len(set(listed))
        assert set(listed) == names
        assert await namespace.get_logs() == sorted(names)
        for at in (0, 17, 48, 49):
            rest = [page async for page in namespace.list_logs(after=listed[at])]
            assert [name for page in rest for name in page] == listed[at + 1 :]
        of_prefix = [page async for page in namespace.list_logs("/many/1")]
        assert {n for p in of_prefix for n in p} == {n for n in names if n.startswith("many/1")}
        assert [page async for page in namespace.list_logs("nothing")] == []
        with pytest.raises(ConfigurationError, match="page_size=0"):
            [page async for page in namespace.list_logs(page_size=0)]
        with pytest.raises(InvalidLogNameError):
            namespace.list_logs(after="a b")

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


Calls: TypeAlias = "list[Callable[[], Awaitable[object]]]"


def calls_of_namespace(namespace: DirectNamespace) -> Calls:
    """Return what can be asked of a namespace."""

    async def next_page() -> list[str]:
        return await anext(namespace.list_logs())

    async def watch_again() -> None:
        namespace.watch_logs()

    return [
        lambda: namespace.create_log("orders"),
        lambda: namespace.delete_log("clicks"),
        lambda: namespace.rename_log("clicks", "visits"),
        lambda: namespace.log_exists("clicks"),
        lambda: namespace.open_log("clicks", create_if_missing=True),
        lambda: namespace.get_snapshots(["clicks"]),
        lambda: namespace.begin_append("job", 2),
        lambda: namespace.open_staging_writer(identity="job"),
        namespace.get_logs,
        next_page,
        watch_again,
        namespace.get_bookies,
        lambda: namespace.get_ledger(1),
    ]


def calls_of_log(log: DirectLog) -> Calls:
    """Return what can be asked of a log."""
    return [
        log.open_writer,
        log.open_reader,
        log.open_stream_writer,
        log.open_stream_reader,
        log.read,
        log.get_snapshot,
        log.get_first_dlsn,
        log.get_last_dlsn,
        log.get_last_txid,
        log.get_log_record_count,
        log.get_log_segments,
        log.get_first_active_dlsn,
        log.is_end_of_stream_marked,
        log.get_settings,
        lambda: log.update_settings(compression="lz4"),
        lambda: log.get_dlsn_not_less_than_txid(1),
        lambda: log.get_dlsn_not_less_than_timestamp(1),
        log.recover,
        lambda: log.truncate(DLSN(1, 0, 1)),
        lambda: log.purge_logs_older_than(1),
        log.mark_end_of_stream,
        lambda: log.rename("visits"),
        log.delete,
    ]


def test_after_the_namespace_is_closed_everything_fails_fast_with_one_error() -> None:
    """Each object that was opened on it: no caller waits, and no error names its parts."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        await namespace.create_log("clicks")
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(1, b"a"))
        reader, stream = await log.open_reader(), await log.open_stream_reader()
        append = await namespace.begin_append("job", 1)
        staging = await namespace.open_staging_writer(identity="job")
        watch = namespace.watch_logs()
        batch = pa.record_batch({"value": [b"a"]})
        await append.write_batch("clicks", batch)
        await staging.write_batch("clicks", batch)

        calls: Calls = [
            *calls_of_namespace(namespace),
            *calls_of_log(log),
            reader.read_next,
            lambda: reader.seek(txid=1),
            stream.read,
            lambda: stream.seek(9),
            lambda: append.write_batch("clicks", batch),
            append.commit,
            append.abort,
            lambda: staging.write_batch("clicks", batch),
            staging.stage,
            watch.take,
        ]
        await namespace.aclose()
        for call in calls:
            with pytest.raises(AlreadyClosedError, match=r"closed") as caught:
                async with asyncio.timeout(60):
                    await call()
            assert "metadata store" not in str(caught.value)
        for each in (log, reader, stream, append, staging, watch, namespace):
            await each.aclose()

    on_namespace(body)


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
