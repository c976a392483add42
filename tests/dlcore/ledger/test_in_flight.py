"""Limits over all writers of a client: in turn, none passed over, none held up for good."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.ledger.writing.appender import InFlight, Share
from tests.fixtures.ledger_cluster import CONFIG, Cluster, run
from tests.fixtures.ledgers import quorum_of


def test_all_writers_of_a_client_share_its_limits() -> None:
    """Two have as much in flight together as one alone; then they wait."""

    async def scenario(cluster: Cluster) -> None:
        writers = [await cluster.client.create_ledger(QuorumConfig()) for _ in range(2)]
        for writer in writers:
            cluster.member(writer, 0).is_silent = True
        for number in range(4):
            await writers[number % 2].wait_for_capacity()
            writers[number % 2].append([b"x"])
        waiting = [asyncio.create_task(each.wait_for_capacity()) for each in writers]
        await asyncio.sleep(1.0)
        assert not any(each.done() for each in waiting)
        await asyncio.gather(*waiting)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.1)
        for writer in writers:
            await writer.close()
        total = cluster.client._context().in_flight
        assert (total.size_bytes, total.entry_count, total.line) == (0, 0, {})

    run(scenario, config=replace(CONFIG, pending_entries_max=4))


def test_a_writer_whose_bookies_do_not_answer_holds_up_no_other() -> None:
    """It has all that may be in flight; others append one entry after the other meanwhile."""

    async def scenario(cluster: Cluster) -> None:
        stuck = await cluster.client.create_ledger(QuorumConfig())
        other = await cluster.client.create_ledger(quorum_of(1, 1, 1))
        member = cluster.member(other, 0)
        for bookie in cluster.bookies.values():
            bookie.is_silent = bookie is not member
        for _ in range(4):
            await stuck.wait_for_capacity()
            stuck.append([b"x"])
        for number in range(20):
            await other.wait_for_capacity()
            assert await other.append([b"y"]) == number
        assert asyncio.get_running_loop().time() < 1.0
        abandoned = asyncio.create_task(stuck.wait_for_capacity())
        await asyncio.sleep(0.01)
        abandoned.cancel()
        await asyncio.gather(abandoned, return_exceptions=True)
        assert cluster.client._context().in_flight.line == {}
        await stuck.abandon()
        assert cluster.client._context().in_flight.entry_count == 0
        await other.close()

    run(scenario, config=replace(CONFIG, pending_entries_max=4))


def test_no_caller_overtakes_another_in_line() -> None:
    """The first one goes when there is room, and then the next one may go."""
    total, woken = InFlight(bytes_max=100, entries_max=9), list[str]()
    a, b, c = (Share(total, lambda name=name: woken.append(name)) for name in "abc")  # type: ignore[misc]
    a.changed(size_bytes=60, entry_count=1)
    b.changed(size_bytes=50, entry_count=1)
    assert not b.may_append()
    assert not a.may_append()
    assert c.may_append(), "it has nothing in flight"
    c.changed(size_bytes=10, entry_count=1)
    assert woken == []
    a.changed(size_bytes=20, entry_count=1)
    assert woken == ["b"]
    assert not a.may_append(), "b was first"
    assert not c.may_append()
    assert b.may_append()
    b.leave()
    assert woken == ["b", "a"]
    b.changed(size_bytes=80, entry_count=2)
    assert not a.may_append(), "b took the room"
    assert not b.may_append()
    a.changed(size_bytes=0, entry_count=0)
    assert a.may_append()
    a.leave()
    a.leave()
    assert woken == ["b", "a", "a", "c"]
    assert c.may_append()
    c.leave()
    assert b.may_append()
    b.leave()
    assert total.line == {}


def test_entries_are_bounded_like_bytes() -> None:
    """Whichever of the limits comes first."""
    total = InFlight(bytes_max=1000, entries_max=2)
    share = Share(total, lambda: None)
    share.changed(size_bytes=1, entry_count=1)
    assert share.may_append()
    share.changed(size_bytes=2, entry_count=2)
    assert not share.may_append()
    share.changed(size_bytes=1, entry_count=1)
    assert share.may_append()
