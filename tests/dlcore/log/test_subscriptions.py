"""Positions kept for subscribers: one reader each, moved by compare-and-set, gone with the log."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    AlreadyTruncatedError,
    LogNotFoundError,
    OverCapacityError,
    OwnershipAcquireFailedError,
    SubscriptionMovedError,
)
from dlcore.base.ids import DLSN
from tests.fixtures.aio import cancel_after
from tests.fixtures.interrupted_store import InterruptedStore
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.metadata.port import MetadataStore
    from tests.fixtures.simulated_store import SimulatedStore


async def write(log: DirectLog, count: int = 5) -> None:
    """Write records with transaction ids from 0, an entry each."""
    async with await log.open_writer() as writer:
        for txid in range(count):
            await writer.write(record(txid))


def test_one_reader_for_each_subscriber() -> None:
    """Others wait for it, or are refused; another subscriber is not kept from anything."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log)
        patient = await (
            await cluster.open("b", config=replace(CONFIG, lock_timeout_s=60))
        ).open_log("clicks")
        first = await log.open_reader(subscriber="s")
        with pytest.raises(OwnershipAcquireFailedError, match="subscriber 's'"):
            await log.open_reader(subscriber="s")
        for change in (log.move_subscription("s", txid=3), log.delete_subscription("s")):
            with pytest.raises(OwnershipAcquireFailedError):
                await change
        async with await log.open_reader(subscriber="t") as other:
            assert await other.read_next() is not None
        cancelled = asyncio.create_task(patient.open_reader(subscriber="s"))
        waiting = asyncio.create_task(patient.open_reader(subscriber="s"))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await first.read_next()
        await first.commit()
        await first.aclose()
        async with await waiting as second:
            assert (await second.read_bulk(1))[0].txid == 1
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        async with await log.open_reader(subscriber="s"):
            pass  # the one that was cancelled holds nothing

    on_log(body)


def test_one_who_is_cancelled_leaves_no_lock() -> None:
    """At any turn of the loop, while it opens a reader or closes it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        patient = await (
            await cluster.open("b", config=replace(CONFIG, lock_timeout_s=20))
        ).open_log("clicks")

        async def open_and_close() -> None:
            await (await log.open_reader(subscriber="s")).aclose()

        for turns in range(100):
            task = asyncio.create_task(open_and_close())
            await cancel_after(task, turns)
            await (await patient.open_reader(subscriber="s")).aclose()
            if not task.cancelled():
                break
        else:
            pytest.fail(f"it does not end in {turns} turns")

    on_log(body)


def test_a_reader_that_lost_its_session_commits_nothing_over_another() -> None:
    """It gets the lock again if no one took it; else its reads and commits fail."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log)
        other = await (await cluster.open("b")).open_log("clicks")
        reader = await log.open_reader(subscriber="s")
        await reader.read_next()
        cluster.stores["a"].expire()
        await asyncio.sleep(0.01)  # it hears of it
        assert (await reader.read_bulk(1))[0].txid == 1  # locked again
        await reader.commit()
        with pytest.raises(OwnershipAcquireFailedError):
            await other.open_reader(subscriber="s")
        cluster.stores["a"].expire()
        await asyncio.sleep(0.01)  # it hears of it
        async with await other.open_reader(subscriber="s") as second:
            with pytest.raises(OwnershipAcquireFailedError):
                await reader.read_next()
            with pytest.raises(OwnershipAcquireFailedError):
                await reader.commit()
            assert reader._hold is not None
            with pytest.raises(SubscriptionMovedError):  # one that does not know it yet
                await reader._hold.commit(DLSN.INITIAL)
            assert (await second.read_bulk(1))[0].txid == 2
            await second.commit()
        for late in (reader.read_next(), reader.commit()):
            with pytest.raises(SubscriptionMovedError):
                await late
        await reader.aclose()
        assert await log.get_subscriptions() == {"s": DLSN(1, 3, 0)}

    on_log(body)


def test_a_reader_that_is_closed_while_it_locks_again_leaves_no_lock() -> None:
    """Its session was lost; its lock is made at any turn of the loop after the close began."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        wrapped: list[InterruptedStore] = []

        def wrap(store: SimulatedStore) -> MetadataStore:
            wrapped.append(InterruptedStore(store))
            return cast("MetadataStore", wrapped[0])

        other = await (await cluster.open("b", wrap=wrap)).open_log("clicks")
        for turns in range(10):
            reader = await other.open_reader(subscriber="s")
            cluster.stores["b"].expire()
            is_asked, may_go_on = asyncio.Event(), asyncio.Event()

            async def wait(
                is_asked: asyncio.Event = is_asked, may_go_on: asyncio.Event = may_go_on
            ) -> None:
                is_asked.set()
                await may_go_on.wait()

            wrapped[0].before_each("create", wait)
            reading = asyncio.create_task(reader.read_bulk(1))
            await is_asked.wait()
            wrapped[0].disarm()
            closing = asyncio.create_task(reader.aclose())
            for _ in range(turns):
                await asyncio.sleep(0)
            may_go_on.set()
            await closing
            with pytest.raises(AlreadyClosedError):
                await reading
            await (await log.open_reader(subscriber="s")).aclose()

    on_log(body)


def test_a_reader_does_not_take_another_subscription_of_its_name_for_its_own() -> None:
    """While it was away its subscription was deleted, made again, and moved as often."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log)
        other = await (await cluster.open("b")).open_log("clicks")
        reader = await log.open_reader(subscriber="s")
        assert len(await reader.read_bulk(5)) == 5
        cluster.stores["a"].disconnect()
        cluster.stores["a"].expire()
        await other.delete_subscription("s")
        async with await other.open_reader(subscriber="s") as second:
            await second.read_bulk(3)
        cluster.stores["a"].reconnect()
        await asyncio.sleep(0.01)  # it hears of it
        with pytest.raises(SubscriptionMovedError):
            await reader.commit()
        await reader.aclose()
        assert await log.get_subscriptions() == {"s": DLSN.INITIAL}

    on_log(body)


@pytest.mark.parametrize("loses_session", [False, True])
def test_a_commit_that_was_cancelled_is_no_end(*, loses_session: bool) -> None:
    """Though it was carried out: the next one goes on behind it, in another session too."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log)
        store = cluster.stores["a"]
        put, done = store.put, asyncio.Event()

        async def put_unheard(*args: Any, **kwargs: Any) -> None:
            await put(*args, **kwargs)
            done.set()
            await asyncio.Event().wait()

        async with await log.open_reader(subscriber="s") as reader:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store, "put", put_unheard)
                task = asyncio.create_task(reader.commit(DLSN(1, 2, 0)))
                await done.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            if loses_session:
                store.expire()
                await asyncio.sleep(0.01)  # it hears of it
            await reader.commit(DLSN(1, 1, 0))
            assert reader.committed == DLSN(1, 1, 0)
        assert await log.get_subscriptions() == {"s": DLSN(1, 1, 0)}

    on_log(body)


def test_a_subscription_is_moved_and_deleted() -> None:
    """To a position, a transaction id, a time, also back; a truncated one is reported."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        clock = cluster.clocks["a"]
        async with await log.open_writer() as writer:
            for txid in range(5):
                clock.current_ms += 10
                await writer.write(record(txid))
        assert await log.move_subscription("s", txid=3) == DLSN(1, 3, 0)
        assert await log.move_subscription("s", timestamp_ms=clock.current_ms - 30) == DLSN(1, 1, 0)
        async with await log.open_reader(subscriber="s") as reader:
            assert (await reader.read_bulk(1))[0].txid == 1
            await reader.seek(timestamp_ms=0)
            assert await reader.commit() == DLSN.INITIAL
        assert await log.move_subscription("s", dlsn=DLSN(1, 1, 0)) == DLSN(1, 1, 0)
        await log.truncate(DLSN(1, 2, 0))
        with pytest.raises(AlreadyTruncatedError, match="1:1:0 was truncated"):
            await log.open_reader(subscriber="s")
        assert await log.delete_subscription("s")
        assert not await log.delete_subscription("s")
        assert await log.get_subscriptions() == {}

    on_log(body)


def test_subscriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that has too many takes no other."""
    monkeypatch.setattr("dlcore.log.reading.holding.SUBSCRIPTIONS_MAX", 2)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for name in ("a", "b"):
            async with await log.open_reader(subscriber=name):
                pass
        with pytest.raises(OverCapacityError, match="has 2 subscriptions"):
            await log.open_reader(subscriber="c")
        async with await log.open_reader(subscriber="a"):
            pass

    on_log(body)


def test_subscriptions_go_with_their_log() -> None:
    """Also one that is being read, whose reader learns that the log is gone."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log)
        reader = await log.open_reader(subscriber="s")
        await log.move_subscription("t", txid=3)
        await reader.read_bulk(5)
        waiting = asyncio.create_task(reader.read_next())
        await log.delete()
        with pytest.raises(LogNotFoundError):
            await waiting
        with pytest.raises(SubscriptionMovedError):
            await reader.commit()
        await reader.aclose()
        paths = cluster.paths.log_of(log.log_id)
        assert [p for p in cluster.tree.dump() if p.startswith(paths.head)] == []
        for call in (log.open_reader(subscriber="s"), log.get_subscriptions()):
            with pytest.raises(LogNotFoundError):
                await call

    on_log(body)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("at", range(8))
def test_lost_replies_of_the_metadata_store(at: int, *, applied: bool) -> None:
    """Whichever request of opening and committing it is, the position is stored once, as asked."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log)
        wrapped: list[InterruptedStore] = []

        def wrap(store: SimulatedStore) -> MetadataStore:
            wrapped.append(InterruptedStore(store))
            return cast("MetadataStore", wrapped[0])

        other = await (await cluster.open("b", wrap=wrap)).open_log("clicks")

        async def lose() -> None:
            cluster.stores["b"].lose_next_reply(applied=applied)

        wrapped[0].arm(at, lose)
        async with await other.open_reader(subscriber="s") as reader:
            await reader.read_bulk(2)
            wrapped[0].arm(at, lose)
            assert await reader.commit(DLSN(1, 2, 0)) == DLSN(1, 2, 0)
            wrapped[0].disarm()
        assert await log.get_subscriptions() == {"s": DLSN(1, 2, 0)}
        async with await log.open_reader(subscriber="s") as reader:
            assert (await reader.read_bulk(1))[0].txid == 2

    on_log(body)
