"""A bookie that stays registered and answers nothing.

Goal: a writer that cannot replace it goes on beside it, and takes it back once it works.  Method:
memory bookies in virtual time, one of which swallows adds.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlcore.base.config import QuorumConfig
from dlcore.wire.memory_bookies import MemoryBookieClient
from tests.fixtures.memory_namespace import memory_cluster
from tests.simulation.loop import run

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import pytest

    from dlcore.base.ids import BookieId

STEPS = 1200
STEP_S = 0.5


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
            writer = await (await cluster.open("a")).ports.ledgers.create_ledger(QuorumConfig())
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
