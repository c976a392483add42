"""Readers learn the LAC with the next add, by itself, or by publishing it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import BookieUnavailableError, NotEnoughBookiesError
from dlcore.ledger.metadata.quorum import first_followed
from dlcore.ledger.writing.lac import LacPublisher
from dlcore.transport.memory import MemoryBookieClient
from tests.fixtures.ledger_cluster import CONFIG, Cluster, run, write
from tests.fixtures.ledgers import bookie
from tests.fixtures.memory_namespace import on_log, record
from tests.simulation.loop import run as run_loop

if TYPE_CHECKING:
    from dlcore.api.manager import DistributedLogManager
    from dlcore.base.ids import BookieId
    from tests.fixtures.memory_namespace import MemoryCluster


def test_the_lac_is_told_without_a_following_entry() -> None:
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
    """An explicit LAC costs as much as an add: whoever appends one by one has none between."""

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


def test_who_has_more_to_write_tells_first_what_is_durable() -> None:
    """The next entry would take it along, but only once it is made and on its way to all."""

    async def body(cluster: MemoryCluster, log: DistributedLogManager) -> None:
        def told_alone() -> int:
            """Return how many messages went to one bookie only."""
            counts = sorted(bookie.requests for bookie in cluster.bookies)
            return counts[-1] - counts[-2]

        async with await log.open_writer() as writer:
            for txid in range(10):
                await writer.write(record(txid))  # one after the other: each takes it along
            before = told_alone()
            for txid in range(10, 20):
                await writer.write(record(txid))
            assert told_alone() == before
            writer.write(record(20))
            await asyncio.sleep(0)  # it is on its way
            for txid in range(21, 31):
                waiting = writer.write(record(txid))
                await asyncio.sleep(0)
            await waiting
            assert told_alone() > before

    on_log(body)


def test_a_lac_that_adds_take_along_is_not_spread() -> None:
    """Whoever appends again soon makes no messages to bookies that nobody follows there."""

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


class SlowBookies(MemoryBookieClient):
    """Takes LACs, and answers when it is told to."""

    def __init__(self) -> None:
        super().__init__([], add_timeout_s=1, read_timeout_s=1)
        self.asked: list[tuple[str, int, asyncio.Future[None]]] = []

    def write_lac(
        self, bookie: BookieId, *, ledger_id: int, last_add_confirmed: int
    ) -> asyncio.Future[None]:
        """Note it."""
        answer = asyncio.get_running_loop().create_future()
        self.asked.append((bookie.name, last_add_confirmed, answer))
        return answer

    async def answer_all(self, *broken: str) -> list[tuple[str, int]]:
        """Answer what was asked; return it."""
        asked, self.asked = self.asked, []
        for name, _, answer in asked:
            if name in broken:
                answer.set_exception(BookieUnavailableError("away"))
            else:
                answer.set_result(None)
        await asyncio.sleep(0)
        return [(name, lac) for name, lac, _ in asked]


def test_a_lac_told_to_one_bookie_keeps_none_from_the_others() -> None:
    """Who published one waits for them, and would for ever where adds take the next ones along."""

    async def scenario() -> None:
        bookies = SlowBookies()
        publisher = LacPublisher(
            bookies, ledger_id=1, on_accepted=lambda: None, on_fenced=lambda _: None
        )
        members = tuple(bookie(name) for name in "ABC")
        publisher.publish(1, members)
        publisher.publish(2, members)
        publisher.publish(3, members, only=members[0])
        assert await bookies.answer_all("C") == [("A", 1), ("B", 1), ("C", 1)]
        assert await bookies.answer_all() == [("A", 3), ("B", 2)]
        publisher.publish(4, members, only=members[0])
        assert await bookies.answer_all() == [("A", 4), ("C", 2)]  # at once, after it had failed
        publisher.publish(5, members)
        assert await bookies.answer_all("C") == [("A", 5), ("B", 5), ("C", 5)]
        await asyncio.sleep(1)
        assert await bookies.answer_all() == [("C", 5)]  # by itself
        publisher.publish(6, members)
        publisher.publish(7, members[:2], only=members[0])  # C was replaced
        assert await bookies.answer_all("C") == [("A", 6), ("B", 6), ("C", 6)]
        await asyncio.sleep(1)
        assert await bookies.answer_all() == [("A", 7)]
        publisher.close()

    run_loop(scenario())


def test_publishing_waits_for_enough_bookies() -> None:
    """With 3/3/2 two must accept: a LAC read that reaches coverage meets one of them."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        await asyncio.sleep(0.1)  # the LAC is told
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
