"""Logs whose metadata changes between two looks, or contradicts itself.

Goal: a clear error or another look, never records of another time, and nothing kept without end.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from dlcore.base.errors import (
    AlreadyClosedError,
    LedgerNotFoundError,
    UnexpectedError,
)
from dlcore.base.ids import DLSN
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.log.metadata.commit_records import sweep_commits
from dlcore.log.metadata.values import CommitRecord, LogKey
from dlcore.log.proxied.extension import ProxyExtension
from dlcore.log.proxied.producers import Producers
from dlcore.log.reading import snapshots as snapshots_module
from dlcore.log.reading.tail_driver import Fetcher
from dlcore.log.upkeep.removal import remove_deleted, remove_truncated
from dlcore.log.upkeep.staged import drop_merged
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import decode, encode
from dlcore.ops.upkeep.config import MergePolicy, UpkeepConfig
from dlcore.ops.upkeep.merger import LogMerger
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.aio import until, until_async
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all, record
from tests.fixtures.staged_records import batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dlcore.backends.direct.log import DirectLog
    from dlcore.ledger.reading.reader import LedgerReader
    from dlcore.metadata.port import Op


async def write_segments(log: DirectLog, count: int, *, first: int = 1) -> None:
    """Write so many segments of two records."""
    for segment in range(first, first + count):
        async with await log.open_writer() as writer:
            for number in range(2):
                await writer.write(record(10 * segment + number))


def test_a_reader_and_positions_by_time() -> None:
    """Records written at several times; a manager that is closed answers no more."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        clock = cluster.clocks["a"]
        times = []
        for segment in range(3):
            clock.current_ms += 1_000
            times.append(clock.now_ms())
            await write_segments(log, 1, first=segment + 1)
        for segment, time_ms in enumerate(times, 1):
            for early in (0, 500):
                found = await log.get_dlsn_not_less_than_timestamp(time_ms - early)
                assert found == DLSN(segment, 0, 0)
            async with await log.open_reader(timestamp_ms=time_ms - 500) as reader:
                first = await reader.read_next()
                assert first is not None
                assert first.txid == 10 * segment
        end = await log.get_dlsn_not_less_than_timestamp(times[-1] + 1)
        assert end > DLSN(3, 0, 0)
        assert await log.get_log_record_count(end, DLSN(1, 0, 0)) == 0
        assert await log.get_log_record_count(DLSN(2, 0, 0)) == 4
        await log.aclose()
        for ask in (log.get_snapshot, log.get_last_txid, log.open_writer, log.open_reader):
            with pytest.raises(AlreadyClosedError, match="'clicks' is closed"):
                await ask()

    on_log(body)


def test_a_ledger_that_is_gone_is_an_error_unless_the_log_has_changed() -> None:
    """The first is damage; what was truncated meanwhile needs no ledger, and its removal ends."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, 3)
        (first, *_), store = await log.get_log_segments(), cluster.stores["a"]
        ledger = cluster.paths.ledger(first.extents[0].ledger_id)
        node = await store.get(ledger)
        assert node is not None
        other = await (await cluster.open("b")).open_log("clicks")
        await store.delete(ledger)
        with pytest.raises(LedgerNotFoundError):
            await other.get_snapshot()
        follower = other.readers.follower
        stale = await other._context.logs.read(other._log)
        async with await log.open_writer() as writer:
            await writer.truncate(DLSN(2, 0, 0))
        assert (await follower.take_at(stale)).first == DLSN(2, 0, 0)
        assert len(await read_all(log)) == 4
        await cluster.namespaces[0].delete_log("clicks")

    on_log(body)


def test_a_reader_finds_what_a_merge_moves_while_it_asks_for_the_end() -> None:
    """The open ledger that it found in the list is closed, merged and gone before it is asked."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        writer = await log.open_writer(extension=ProxyExtension(Producers()))
        written = await writer.write(record(writer.last_txid + 1, b"last"))
        other = await cluster.open("b")
        ledgers = other.log_context.ledgers
        open_ledger, is_answered = ledgers.open_ledger, asyncio.Event()
        asked: list[int] = []

        async def late(ledger_id: int) -> LedgerReader:
            asked.append(ledger_id)
            if len(asked) == 1:  # what follows the log hears nothing before the answer
                await is_answered.wait()
            elif len(asked) == 2:
                for version in range(1, 31):
                    async with await namespace.begin_append("job", version) as staged:
                        await staged.write_batch(log.name, batch("more"))
                        await staged.commit()
                context, owner = namespace.log_context, namespace.staging_owner
                policy = MergePolicy(fan_in=4)
                merger = LogMerger(context, owner, policy=policy, bytes_per_s=1e9)
                await merger.merge(log._log)
                cluster.clocks["a"].current_ms += 100_000
                await drop_merged(context, grace_ms=10_000)
                assert await context.store.get(cluster.paths.ledger(ledger_id)) is None
            return await open_ledger(ledger_id)

        learn = Fetcher._learn

        async def learn_late(fetcher: Fetcher, from_lssn: int) -> None:
            await is_answered.wait()
            await learn(fetcher, from_lssn)

        view = await other.open_log(log.name)
        with (
            patch.object(ledgers, "open_ledger", late),
            patch.object(Fetcher, "_learn", learn_late),
        ):
            async with await view.open_reader(dlsn=written) as reader:
                has_more = await reader._fetcher.has_more()
                is_answered.set()
                found = await reader.read_bulk(99, until_caught_up=True)
        assert has_more
        assert [each.payload for each in found] == [b"last", *[b"more"] * 30]
        assert asked[0] == asked[1]

    on_log(body)


def test_the_memory_for_ledgers_and_logs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes; it is read again when it is asked for."""
    monkeypatch.setattr("dlcore.log.metadata.ledger_cache._LEDGERS_KEPT_MAX", 2)
    monkeypatch.setattr(snapshots_module, "FOLLOWED_LOGS_MAX", 2)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, 6)
        namespace = await cluster.open("b")
        names = ["clicks"]
        for number in range(4):
            names.append(f"log-{number}")
            await namespace.create_log(names[-1])
        for name in [*names, *reversed(names)]:
            found = await namespace.get_snapshots([name, "missing"])
            assert found["missing"] is None
            snapshot = found[name]
            assert snapshot is not None
            assert len(snapshot.segments) == (6 if name == "clicks" else 0)
        followers = namespace.followers
        assert len(followers) == 2
        monkeypatch.setattr(snapshots_module, "FOLLOWED_SEGMENTS_MAX", 6)
        await namespace.get_snapshots(["clicks"])
        assert (list(followers._followers)[-1], followers._segments) == ("clicks", 6)
        await write_segments(log, 1, first=7)
        await namespace.get_snapshots(["clicks"], fresh=True)  # as many as were asked for
        assert (list(followers._followers), followers._segments) == (["clicks"], 7)
        await namespace.get_snapshots(["log-1"])
        assert (list(followers._followers), followers._segments) == (["log-1"], 0)
        other = await namespace.open_log("clicks")
        await other.get_snapshot()
        assert len(namespace.log_context.ledger_cache._known) <= 6 + 2

    on_log(body)


def test_snapshots_name_bookies_where_they_are_now() -> None:
    """A planner of a log that has not changed finds one that comes back elsewhere."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, 2)
        namespace, name = await cluster.open("b"), cluster.bookies[0].bookie.name
        path = cluster.paths.bookie_available(name)

        async def addresses() -> list[dict[str, str]]:
            known = (await namespace.get_snapshots(["clicks"]))["clicks"]
            assert known is not None
            found = known, await log.get_snapshot()
            return [{b.name: a for b, a in each.addresses.items()} for each in found]

        for _ in range(4):
            before = await addresses()
            await asyncio.sleep(0.01)  # the watches have made their first reports
        store = cluster.stores["b"]
        node = await store.get(path)
        assert node is not None
        registration = decode(BookieRegistration, node.value, source=path)
        await store.delete(path)
        moved = replace(registration, address="memory:77")
        await store.create(path, encode(moved))
        await until_async(lambda: is_moved(addresses))
        assert await addresses() == [each | {name: "memory:77"} for each in before]

    async def is_moved(addresses: Callable[[], Awaitable[list[dict[str, str]]]]) -> bool:
        return all("memory:77" in each.values() for each in await addresses())

    on_log(body)


def test_a_log_that_is_listed_as_deleted_and_is_not() -> None:
    """Its records stay; removing it twice at once is no error."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, 2)
        before = await read_all(log)
        namespace = cluster.namespaces[0]
        context, key = namespace.log_context, log._log
        await remove_deleted(context, key)  # it was a fork that was being made, and is whole now
        listed = context.paths.deleted_log(key.log_id)
        await context.store.create(listed, make_parents=True)
        with pytest.raises(UnexpectedError, match="listed as deleted, but its head is not"):
            await remove_deleted(context, key)
        await context.store.delete(listed)
        assert await read_all(log) == before
        await namespace.delete_log("clicks")
        await asyncio.gather(*(remove_deleted(context, key) for _ in range(3)))
        await remove_deleted(context, LogKey(name="clicks", log_id="none"))
        assert await context.store.get(context.logs.paths_of(key).head) is None

    on_log(body)


def test_a_segment_that_is_not_as_its_head_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removal looks again, as the head may be old; nothing that is readable goes."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, 3)
        context = cluster.namespaces[0].log_context
        at = await context.logs.read(log._log)
        old = replace(at, head=replace(at.head, first_active=(3, 0, 0)), version=at.version - 1)
        path = context.logs.paths_of(log._log).segment(1)
        node = await context.store.get(path)
        assert node is not None
        await context.store.delete(path)
        looked = 0
        read = context.logs.read

        async def restore(key: LogKey) -> object:
            nonlocal looked
            looked += 1
            await context.store.create(path, node.value)
            return await read(key)

        monkeypatch.setattr(context.logs, "read", restore)
        after = await remove_truncated(context, old)
        monkeypatch.undo()
        assert looked == 1
        assert after.head == at.head
        assert len(await read_all(log)) == 6

    on_log(body)


def test_upkeep_leaves_alone_what_another_worker_does() -> None:
    """A sweep that another process has begun, and records that change while they are looked at."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        for version in (1, 2):
            async with await namespace.begin_append("job", version) as append:
                await append.write_batch("clicks", batch(f"{version}"))
                await append.commit()
        await namespace.log_context.tidier.settled()
        context = namespace.log_context
        path = context.paths.commit("job")
        upkeep: LogUpkeep = LogUpkeep.of(namespace, UpkeepConfig())
        lock = context.paths.upkeep_lock("sweep")
        await context.store.create(lock, b"theirs", make_parents=True)
        cluster.clocks["a"].current_ms += 10**12
        await upkeep.sweep()
        node = await context.store.get(path)
        assert node is not None
        await context.store.delete(lock)
        now_ms = cluster.clocks["a"].now_ms()
        get_many = context.store.get_many

        async def change(paths: list[str]) -> object:
            nodes = await get_many(paths)
            record = decode(CommitRecord, node.value, source=path)
            changed = encode(replace(record, committed_ms=now_ms))
            await context.store.put(path, changed, version=ANY_VERSION)
            return nodes

        context.store.get_many = change  # type: ignore[assignment, method-assign]
        assert await sweep_commits(context.store, context.paths, before_ms=now_ms) == 0
        context.store.get_many = get_many  # type: ignore[method-assign]
        assert await context.store.get(path) is not None
        assert await sweep_commits(context.store, context.paths, before_ms=now_ms + 1) == 1
        assert await context.store.get(path) is None

    on_log(body)


@pytest.mark.parametrize("lock_timeout_s", [0.0, 5.0])
@pytest.mark.parametrize("is_asked_in", ["no session", "the next session"])
def test_a_session_ends_while_the_lock_is_asked_for(
    lock_timeout_s: float, is_asked_in: str
) -> None:
    """The next one gets it, before the writer's lock hears that there is a next one."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        config = dataclasses.replace(CONFIG, lock_timeout_s=lock_timeout_s)
        log = await (await cluster.open("b", config=config)).open_log("clicks")
        store = cluster.stores["b"]

        async def expire_once(ops: Sequence[Op]) -> None:
            expiring.stop()
            token = store.session_token
            store.expire()
            if is_asked_in == "the next session":
                await until(lambda: store.session_token != token)
            await store.multi(ops)

        expiring = patch.object(store, "multi", expire_once)
        expiring.start()
        writer = await asyncio.wait_for(log.open_writer(), 10.0)
        await writer.write(record(1))
        await writer.aclose()

    on_log(body)


def test_a_lock_that_breaks_is_no_secret() -> None:
    """A waiting caller gets the defect as its error, instead of waiting for ever."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        with (
            patch.object(cluster.stores["a"], "multi", side_effect=ValueError("a defect")),
            pytest.raises(UnexpectedError, match="a defect"),
        ):
            await asyncio.wait_for(log.open_writer(), 10.0)

    on_log(body)


def test_a_close_that_is_cancelled_twice_lets_go_of_the_log() -> None:
    """Wherever it is: no one else would."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        config = dataclasses.replace(CONFIG, lock_timeout_s=5.0)
        log = await cluster.namespaces[0].open_log("clicks", config=config)
        for turns in range(12):
            closing = asyncio.create_task((await log.open_writer()).aclose())
            for turn in range(1, 2 * turns + 3):
                await asyncio.sleep(0)
                if turn % (turns + 1) == 0:
                    closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            assert "AsyncLogWriter" not in cluster.namespaces[0].get_statistics().open_objects

    on_log(body)
