"""Rolls: one change of the metadata each, whatever happens at that moment."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.errors import (
    NotEnoughBookiesError,
    WriteError,
)
from dlcore.ledger.metadata.values import LedgerState
from dlcore.log.metadata.segment import SegmentState
from dlcore.log.writing.append import Acknowledge, AwaitCapacity, StartSegment
from dlcore.ops.inspection import inspect_log
from tests.fixtures.aio import until
from tests.fixtures.appenders import closed, sent, started, writing
from tests.fixtures.interrupted_store import InterruptedStore
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.config import LogConfig
    from dlcore.log.writing.writer import DirectWriter

SMALL = replace(CONFIG, segment_bytes_max=100)
"""Each record fills a segment."""


async def interrupted(
    cluster: MemoryCluster, config: LogConfig = SMALL, *, name: str = "b"
) -> tuple[DirectNamespace, InterruptedStore]:
    """Open a namespace before whose requests something else can be made to happen."""
    stores: list[InterruptedStore] = []

    def wrap(store: Any) -> Any:
        stores.append(InterruptedStore(store))
        return stores[0]

    return await cluster.open(name, config=config, wrap=wrap), stores[0]


def is_placing(writer: DirectWriter) -> bool:
    """Return whether it is looking for the place of its next ledger."""
    return bool(writer.pump.segment.next_place._looks)


def has_place(writer: DirectWriter) -> bool:
    """Return whether it knows that place."""
    return writer.pump.segment.next_place._place is not None


async def state_of(cluster: MemoryCluster, ledger_id: int) -> LedgerState:
    """Return the state of a ledger."""
    return (await cluster.namespaces[0].get_ledger(ledger_id)).state


def test_a_roll_is_one_metadata_request() -> None:
    """It ends the segment, closes its ledger, and starts the next one in a place found before."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace, store = await interrupted(cluster, replace(SMALL, segment_bytes_max=4000))
        log = await namespace.open_log("clicks")
        made = []
        async with await log.open_writer() as writer:
            for txid in range(80):
                store.made = 0
                dlsn = await writer.write(record(txid))
                made.append((dlsn.lssn, store.made))
                await until(lambda: not is_placing(writer))
            segments = await log.get_log_segments()
            ledgers = [segment.extents[0].ledger_id for segment in segments]
            *before, last = [await state_of(cluster, each) for each in ledgers]
            assert set(before) == {LedgerState.CLOSED}
            assert last is LedgerState.OPEN
        assert await state_of(cluster, ledgers[-1]) is LedgerState.CLOSED
        rolls = [now for earlier, now in itertools.pairwise(made) if now[0] > earlier[0]]
        assert len(rolls) > 2
        assert {requests for _, requests in rolls} == {1}
        assert [each.txid for each in await read_all(log)] == list(range(80))

    on_log(body)


def test_a_place_that_is_not_found_in_time_is_looked_for_by_the_roll() -> None:
    """Too few bookies for a while do no harm; a choice that is old is made again."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = await cluster.open("b", config=replace(SMALL, segment_bytes_max=3000))
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            nodes = await without_bookies(cluster, namespace)
            machine = writer.machine
            while not (
                machine.log.segment
                and machine.log.segment.is_nearly_full(
                    machine._maker.limits, now_ms=cluster.clocks["b"].current_ms
                )
            ):
                await writer.write(record(1))
            await until(lambda: not is_placing(writer))
            assert not has_place(writer)
            await with_bookies(cluster, namespace, nodes)
            cluster.clocks["b"].current_ms += 31_000
            await writer.write(record(2))
            await until(lambda: not is_placing(writer))
            assert has_place(writer)
            while (await writer.write(record(3))).lssn == 1:
                pass
        assert len(await log.get_log_segments()) == 2

    on_log(body)


async def without_bookies(
    cluster: MemoryCluster, namespace: DirectNamespace, count: int = 3
) -> dict[str, bytes]:
    """Let some of four bookies seem gone; return what brings them back."""
    paths = [cluster.paths.bookie_available(each.bookie.name) for each in cluster.bookies[:count]]
    nodes = {}
    for path in paths:
        node = await cluster.stores["a"].get(path)
        assert node is not None
        nodes[path] = node.value
        await cluster.stores["a"].delete(path)
    assert len(await namespace.get_bookies()) == 4 - count
    return nodes


async def with_bookies(
    cluster: MemoryCluster, namespace: DirectNamespace, nodes: dict[str, bytes]
) -> None:
    """Let them be there again."""
    for path, value in nodes.items():
        await cluster.stores["a"].create(path, value)
    assert len(await namespace.get_bookies()) == 4


@pytest.mark.parametrize("applied", [True, False])
def test_a_roll_whose_answer_is_lost_is_made_once(*, applied: bool) -> None:
    """Applied or not: no record twice, no segment without its ledger closed."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = await cluster.open("b", config=SMALL)
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            cluster.stores["b"].lose_next_reply(applied=applied)
            await writer.write(record(2))
            cluster.stores["b"].lose_next_reply(applied=applied)
        segments = await log.get_log_segments()
        assert [each.state for each in segments] == [SegmentState.COMPLETED] * 2
        for segment in segments:
            assert await state_of(cluster, segment.extents[0].ledger_id) is LedgerState.CLOSED
        assert [each.txid for each in await read_all(log)] == [1, 2]

    on_log(body)


def test_a_roll_overtaken_by_a_truncation_goes_on() -> None:
    """The ledger is closed by itself then, and the roll planned from the log as it is."""

    async def body(cluster: MemoryCluster, other: DirectLog) -> None:
        namespace, store = await interrupted(cluster)
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            first = await writer.write(record(1))

            async def truncate() -> None:
                store.disarm()
                assert await other.truncate(first.next_slot())

            store.before_each("multi", truncate)
            await writer.write(record(2))
        assert [each.txid for each in await read_all(log)] == [2]

    on_log(body)


def test_a_roll_overtaken_by_a_recovery_goes_on_behind_it() -> None:
    """Nothing was lost: the recovery of our ledger found all that we had acknowledged."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace, store = await interrupted(cluster)
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(record(1))

            async def recover() -> None:
                store.disarm()
                other = await cluster.open("c", config=UNLOCKED)
                await (await (await other.open_log("clicks")).open_writer()).write(record(1, b"c"))

            store.before_each("multi", recover)
            await writer.write(record(2))
        assert [each.payload for each in await read_all(log)] == [b"x", b"c", b"x"]

    on_log(body)


def test_a_segment_begins_with_two_of_three_bookies_and_that_is_logged() -> None:
    """While it is written, and after; a segment with all three has nothing to be counted."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = await cluster.open("b", config=SMALL)
        log = await namespace.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            assert await inspect_log(namespace.log_context, "clicks") == []
            await without_bookies(cluster, namespace, 2)
            cluster.clocks["b"].current_ms += 31_000  # what was chosen before is old
            await writer.write(record(2))
            (open_one,) = await inspect_log(namespace.log_context, "clicks")
            assert "has bookies for 2/2/2 where 3/3/2 is wanted" in open_one.detail
            assert open_one.detail.endswith("adds some once it is closed")
        (finding,) = await inspect_log(namespace.log_context, "clicks")
        assert (finding.kind, finding.repair) == ("copies", "")
        assert finding.detail.endswith("adds some when bookies are there")
        assert [each.txid for each in await read_all(log)] == [1, 2]

    on_log(body)


UNLOCKED = replace(SMALL, lock_enabled=False)


async def closed_in_error(writer: DirectWriter) -> None:
    """Close a writer that failed."""
    with pytest.raises(WriteError):
        await writer.aclose()


def test_a_roll_for_which_there_are_no_bookies_fails_clearly() -> None:
    """Acknowledged records stay; the next writer goes on when there are some."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = await cluster.open("b", config=SMALL)
        log = await namespace.open_log("clicks")
        writer = await log.open_writer()
        await writer.write(record(1))
        nodes = await without_bookies(cluster, namespace)
        cluster.clocks["b"].current_ms += 31_000  # what was chosen before does not count any more
        with pytest.raises(NotEnoughBookiesError):
            await writer.write(record(2))
        with pytest.raises(WriteError, match="NotEnoughBookiesError"):
            writer.write(record(3))
        await closed_in_error(writer)
        await with_bookies(cluster, namespace, nodes)
        async with await log.open_writer() as again:
            await again.write(record(2))
        assert [each.txid for each in await read_all(log)] == [1, 2]

    on_log(body)


def test_a_writer_that_is_aborted_in_a_roll_leaves_a_log_to_recover() -> None:
    """At every request of it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        written = 0
        for at in range(1, 4):
            namespace, store = await interrupted(cluster, name=f"b{at}")
            mine = await namespace.open_log("clicks")
            writer = await mine.open_writer()
            written += 1
            await writer.write(record(written))
            reached, go = asyncio.Event(), asyncio.Event()

            async def stop(reached: asyncio.Event = reached, go: asyncio.Event = go) -> None:
                reached.set()
                await go.wait()

            store.arm(at, stop)
            future = writer.write(record(written + 1))
            await until(lambda: reached.is_set() or future.done())  # noqa: B023
            go.set()
            await writer.abort()
            if not future.exception():
                written += 1
        async with await log.open_writer() as last:
            written = max(written, last.last_txid) + 1
            await last.write(record(written))
        txids = [each.txid for each in await read_all(log)]
        assert txids == sorted(set(txids))
        assert txids[-1] == written

    on_log(body)


def test_a_segment_that_becomes_old_while_an_entry_waits_takes_it_no_more() -> None:
    """The bookies had no room for the entry meanwhile; it begins the next segment."""
    machine = writing()
    machine.add_record(2, b"b", "b")
    assert machine.next_step(now_ms=0) == AwaitCapacity()
    assert machine.next_entry(now_ms=1000) is None
    step = closed(machine, 0, now_ms=1000)
    assert isinstance(step, StartSegment)
    started(machine, 2, now_ms=1000)
    assert sent(machine, now_ms=1000) == 1
    assert machine.durable() == [Acknowledge(2, 0, [0], ["b"])]
