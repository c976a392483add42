"""A bookie that stays registered and answers nothing.

Goal: a writer that cannot replace it goes on beside it, and takes it back once it works.  Method:
memory bookies in virtual time, one of which swallows adds.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlcore.config import QuorumConfig
from dlcore.ids import BookieId
from dlcore.ledger.placing.probation import PAUSE_S, PAUSE_S_MAX, Probation
from dlcore.transport.memory import MemoryBookieClient
from tests.fixtures.memory_namespace import memory_cluster
from tests.simulation.loop import run

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import pytest

A = BookieId("a", "a" * 32)
STEPS = 1200
STEP_S = 0.5


def test_pause_grows_with_each_failure_and_is_forgiven() -> None:
    """Failures are counted by readmission; a long good conduct clears the record."""
    probation = Probation(conduct_s=8)
    now, pauses = 0.0, []
    for _ in range(10):
        probation.note_failed([A], now)
        probation.note_failed([A], now + 0.5)  # still the same failure
        since = now
        while not probation.is_over(A, now):
            assert probation.is_last_hope(A, now) == (now >= since + PAUSE_S)
            now += 0.25
        pauses.append(now - since)
        probation.note_admitted([])
        now += 2
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 120, 120, 120]
    now += PAUSE_S_MAX + 10
    probation.note_failed([A], now)
    assert probation.is_over(A, now + PAUSE_S)


def test_hung_bookie_is_tried_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ten minutes it gets a few entries; after it works again it is taken back."""
    hung: set[BookieId] = set()
    swallowed = 0
    add_entry = MemoryBookieClient.add_entry

    def count(
        client: MemoryBookieClient, bookie: BookieId, frame: bytes, **options: Any
    ) -> Awaitable[None]:
        nonlocal swallowed
        swallowed += bookie in hung
        return add_entry(client, bookie, frame, **options)

    monkeypatch.setattr(MemoryBookieClient, "add_entry", count)

    async def scenario() -> None:
        async with memory_cluster(bookie_count=3) as cluster:
            writer = await (await cluster.open("a")).ledgers.create_ledger(QuorumConfig())
            victim = cluster.bookies[0]
            hung.add(victim.bookie)
            victim.is_silent = True
            for _ in range(STEPS):
                await writer.append([b"x"])
                await asyncio.sleep(STEP_S)
            assert 0 < swallowed < STEPS / 4
            hung.clear()
            victim.is_silent = False
            for _ in range(STEPS):
                await writer.append([b"x"])
                await asyncio.sleep(STEP_S)
            assert writer.last_add_confirmed in victim.entries(writer.ledger_id)
            await writer.close()

    run(scenario(), seconds_max=4 * STEPS * STEP_S)
