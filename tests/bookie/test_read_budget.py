"""Bytes on their way to readers: in turn, and none is lost when a reader goes."""

from __future__ import annotations

import asyncio

from bookie.serving.read_budget import ReadBudget
from tests.fixtures.aio import run

MAX = 1_000


def test_who_waits_gets_its_turn() -> None:
    """Nobody overtakes, also who wants less."""

    async def main() -> None:
        waits: list[int] = []
        budget = ReadBudget(MAX, on_wait=lambda: waits.append(1))
        await budget.take(700)
        taken: list[str] = []

        async def take(name: str, size: int) -> None:
            await budget.take(size)
            taken.append(name)

        async with asyncio.TaskGroup() as group:
            for name, size in (("large", 600), ("small", 100), ("other", 300)):
                group.create_task(take(name, size))
            await asyncio.sleep(0)
            assert (taken, len(waits), budget.is_exhausted) == ([], 3, True)
            budget.give(300)
            await asyncio.sleep(0)
            assert taken == ["large"]
            budget.give(400)
        assert taken == ["large", "small", "other"]
        assert (budget.free, budget.is_exhausted) == (0, False)

    run(main())


def test_who_goes_while_it_waits_takes_nothing_along() -> None:
    """Before its turn, and in the very moment of it; those behind it go on."""

    async def main() -> None:
        budget = ReadBudget(MAX, on_wait=lambda: None)
        await budget.take(MAX)
        first, second, third = (asyncio.create_task(budget.take(400)) for _ in range(3))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        budget.give(400)  # the second has its turn, and does not know it yet
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await asyncio.wait_for(third, 60)
        assert (first.cancelled(), second.cancelled()) == (True, True)
        assert (budget.free, budget.is_exhausted) == (0, False)

    run(main())
