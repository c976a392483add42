"""Readers learn the LAC with the next add, by itself, or by publishing it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import LedgerClosedError, LedgerFencedError, NotEnoughBookiesError
from dlcore.ledger.metadata.quorum import first_followed
from dlcore.ledger.writing.appender import (
    AddSucceeded,
    After,
    AppendRecovered,
    Effect,
    Fail,
    FailAdds,
    LacAccepted,
    LacFailed,
    SendLac,
    Signal,
)
from tests.fixtures.append_bench import UNAVAILABLE, Bench, complete
from tests.fixtures.ledger_cluster import CONFIG, Cluster, run, write
from tests.fixtures.ledgers import bookie, entry_of
from tests.fixtures.memory_namespace import on_log, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from tests.fixtures.memory_namespace import MemoryCluster


def test_the_lac_is_sent_without_a_following_entry() -> None:
    """A reader sees the last entry one round trip after its ack; published, surely."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await writer.publish_lac()  # nothing yet: nothing to tell
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert await reader.read_last_add_confirmed() == -1
        await write(writer, 3)
        await writer.publish_lac()
        assert await reader.read_last_add_confirmed() == 2
        await write(writer, 1)
        await asyncio.sleep(0.01)
        assert await reader.read_last_add_confirmed() == 3
        await writer.close()
        await writer.publish_lac()

    run(scenario)


def test_the_lac_goes_with_the_ack_unless_callers_answer_acks() -> None:
    """An explicit LAC costs as much as an add: a writer of single entries sends none between."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        first = first_followed(writer.ledger_id, 3)
        member, other = (cluster.member(writer, p) for p in (first, (first + 1) % 3))
        await writer.append([b"x"])
        assert member.read_lac(writer.ledger_id, fence=False) == 0  # it came with the ack
        before, before_other = member.requests, other.requests
        for _ in range(10):
            await writer.append([b"x"])
        assert (member.requests, other.requests) == (before + 10, before_other + 10)
        assert member.read_lac(writer.ledger_id, fence=False) == 9
        await asyncio.sleep(0)  # no further answer
        assert member.read_lac(writer.ledger_id, fence=False) == 10
        assert other.read_lac(writer.ledger_id, fence=False) == 9
        await asyncio.sleep(1)
        assert other.read_lac(writer.ledger_id, fence=False) == 10
        assert (member.requests, other.requests) == (before + 11, before_other + 11)
        await writer.abandon()

    run(scenario)


def test_a_writer_with_more_records_publishes_its_lac_first() -> None:
    """The next entry would take it along, but only once it is made and on its way to all."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        def sent_alone() -> int:
            """Return how many messages went to one bookie only."""
            counts = sorted(bookie.requests for bookie in cluster.bookies)
            return counts[-1] - counts[-2]

        async with await log.open_writer() as writer:
            for txid in range(10):
                await writer.write(record(txid))  # one after the other: each takes it along
            before = sent_alone()
            for txid in range(10, 20):
                await writer.write(record(txid))
            assert sent_alone() == before
            writer.write(record(20))
            await asyncio.sleep(0)  # it is on its way
            for txid in range(21, 31):
                waiting = writer.write(record(txid))
                await asyncio.sleep(0)
            await waiting
            assert sent_alone() > before

    on_log(body)


def test_a_lac_that_adds_take_along_is_not_spread() -> None:
    """A writer that appends again soon sends no messages to bookies without followers."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        first = first_followed(writer.ledger_id, 3)
        member, other = (cluster.member(writer, p) for p in (first, (first + 1) % 3))
        before, before_other = member.requests, other.requests
        for _ in range(20):
            await writer.append([b"x"])
            await asyncio.sleep(0.003)
        assert (member.requests, other.requests) == (before + 40, before_other + 20)
        await asyncio.sleep(0.011)
        assert other.read_lac(writer.ledger_id, fence=False) == 19
        assert (member.requests, other.requests) == (before + 40, before_other + 21)
        await writer.abandon()

    run(scenario)


def published(bench: Bench) -> list[tuple[str, int]]:
    """Publish the LAC; return the messages that this sends."""
    return sent(bench.machine.handle(Signal.PUBLISH_LAC))


def sent(effects: list[Effect]) -> list[tuple[str, int]]:
    """Return (bookie, LAC) of the messages."""
    return [(each.bookie.name, each.lac) for each in effects if isinstance(each, SendLac)]


def grow(bench: Bench) -> list[tuple[str, int]]:
    """Append an entry that all bookies acknowledge; return the messages that this sends."""
    entry_id = bench.machine.window.last_add_pushed + 1
    bench.append()
    add = (AddSucceeded(entry_id, position, bookie(name)) for position, name in enumerate("ABC"))
    return sent([effect for event in add for effect in bench.machine.handle(event)])


def test_a_lac_sent_to_one_bookie_keeps_none_from_the_others() -> None:
    """A publisher waits for them, and would for ever where adds take the next ones along."""
    bench = Bench()

    def accept(name: str, lac: int) -> list[tuple[str, int]]:
        return sent(bench.machine.handle(LacAccepted(bookie(name), lac)))

    assert grow(bench) == [("B", 0)]  # B is followed
    assert published(bench) == [("A", 0), ("C", 0)]
    assert grow(bench) == []  # one message to a bookie at a time
    assert published(bench) == []
    assert grow(bench) == []
    assert accept("A", 0) == [("A", 1)]
    assert accept("B", 0) == [("B", 2)]  # as the newest one went to it alone
    retry = [After(0.5, Signal.LAC_RETRY_DUE)]
    failed = LacFailed(bookie("C"), UNAVAILABLE)
    assert bench.machine.handle(failed) == retry
    assert not bench.machine.is_published(1)
    assert accept("B", 2) == []
    assert accept("A", 1) == []
    assert bench.machine.is_published(1)
    assert sent(bench.machine.handle(Signal.LAC_RETRY_DUE)) == [("C", 1)]
    assert bench.machine.handle(failed) == retry
    assert published(bench) == [("A", 2), ("C", 2)]  # at once, for the caller that waits for it
    assert bench.machine.handle(failed) == []  # a pause has begun
    bench.handle(Fail(LedgerClosedError("enough")))
    assert bench.machine.handle(failed) == []
    assert bench.machine.handle(Signal.LAC_RETRY_DUE) == []


def test_a_replaced_bookie_gets_nothing_more() -> None:
    """Only the members of the last ensemble count for what is published."""
    bench = Bench()
    grow(bench)
    published(bench)
    bench.append()
    bench.fail(1, "A")
    bench.ok(1, "B")
    bench.ok(1, "C")
    bench.stored(bench.planned(bench.listed("D")))
    assert published(bench) == [("D", 1)]
    assert bench.machine.handle(LacAccepted(bookie("A"), 0)) == []
    assert sent(bench.machine.handle(LacAccepted(bookie("B"), 0))) == [("B", 1)]


def test_a_fence_that_meets_a_lac_ends_the_machine() -> None:
    """The explicit LAC of an idle writer may be what meets it first."""
    bench = Bench()
    grow(bench)
    error = LedgerFencedError("fenced")
    assert bench.handle(LacFailed(bookie("B"), error)) == [FailAdds(error)]
    assert bench.machine.handle(Signal.PUBLISH_LAC) == []
    assert bench.machine.handle(Signal.CALLERS_ANSWERED) == []


def test_the_lac_of_an_older_ensemble_is_published_by_the_metadata() -> None:
    """A change starts at LAC + 1, which says that all before it is confirmed."""
    bench = Bench()
    grow(bench)
    bench.append()
    bench.fail(1, "A")
    bench.stored(bench.planned(bench.listed("D")))
    assert bench.machine.metadata.last_ensemble.first_entry_id == 1
    assert bench.machine.is_published(0)
    assert not bench.machine.is_published(1)


def test_publishing_waits_for_enough_bookies() -> None:
    """With 3/3/2 two must accept: a LAC read that reaches coverage meets one of them."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        await asyncio.sleep(0.1)  # the LAC is sent
        await write(writer, 1)
        await write(writer, 1)
        for position in (0, 1):
            cluster.member(writer, position).is_silent = True
        with pytest.raises(NotEnoughBookiesError, match="too few bookies accepted the LAC 2"):
            await writer.publish_lac()
        cluster.member(writer, 0).is_silent = False
        await writer.publish_lac()  # it is tried again by itself
        cluster.member(writer, 1).is_silent = False
        await writer.abandon()

    run(scenario, "ABC", replace(CONFIG, add_timeout_s=3.0))


def test_a_recovery_tells_no_lac() -> None:
    """Its closing write says the end; a LAC sent before could be of entries that it gives up."""
    bench = Bench(is_recovery=True)
    bench.handle(AppendRecovered(entry_of(0)))
    bench.ok(0, "A")
    effects = bench.machine.handle(AddSucceeded(0, 1, bookie("B")))
    assert effects == [complete(0, 0)]
    assert bench.machine.handle(Signal.CALLERS_ANSWERED) == []
