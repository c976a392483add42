"""The memory of all streams together: in turn, never more than there is, shared by logs."""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial
from typing import TYPE_CHECKING

from dlcore.proxy.writing.budget import ByteBudget, Holder
from tests.fixtures.aio import run

if TYPE_CHECKING:
    from collections.abc import Iterator


async def turns() -> None:
    """Let tasks go on that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_request_that_finds_it_full_waits_in_turn() -> None:
    """Also a small one behind a large one; what is larger than all passes alone."""

    async def scenario() -> None:
        budget = ByteBudget(100)
        await budget.take(Holder("a"), 60)
        large = asyncio.create_task(budget.take(Holder("b"), 500))
        small = asyncio.create_task(budget.take(Holder("c"), 1))
        await turns()
        assert not large.done()
        assert not small.done(), "the large one would wait for ever"
        budget.give(Holder("a"), 60)
        await turns()
        assert large.done()
        assert not small.done()
        budget.give(Holder("b"), 500)
        await turns()
        assert small.done()
        assert budget._taken == 1

    run(scenario())


def test_a_budget_that_changes_lets_in_who_fits() -> None:
    """A smaller one takes nothing back, and lets no call in until there is room."""

    async def scenario() -> None:
        budget = ByteBudget(100, principal_bytes_max=50)
        await budget.take(Holder("a", "p"), 50)
        of_principal = asyncio.create_task(budget.take(Holder("b", "p"), 30))
        other = asyncio.create_task(budget.take(Holder("c"), 60))
        await turns()
        assert not of_principal.done()
        assert not other.done()
        budget.resize(200, principal_bytes_max=80)
        await turns()
        assert of_principal.done()
        assert other.done()
        budget.resize(20)
        assert not budget.take_now(Holder("d"), 1)
        for holder, size_bytes in ((Holder("a", "p"), 50), (Holder("b", "p"), 30)):
            budget.give(holder, size_bytes)
        assert not budget.take_now(Holder("d"), 1)
        budget.give(Holder("c"), 60)
        assert budget.take_now(Holder("d"), 1)

    run(scenario())


def test_logs_that_stand_still_leave_room_for_others() -> None:
    """Each holds a quarter of what is free, whatever it wants; a smaller request is not held up."""

    async def scenario() -> None:
        budget = ByteBudget(1250)
        still = ["x", "y", "z"]
        wanting = [
            asyncio.create_task(budget.take(Holder(log), 10)) for log in still for _ in range(200)
        ]
        await turns()
        assert [budget._taken_by[log] for log in still] == [250, 200, 160]
        for _ in range(20):
            async with asyncio.timeout(5):
                await budget.take(Holder("lively"), 600)
            budget.give(Holder("lively"), 600)
        for task in wanting:
            task.cancel()
        await asyncio.gather(*wanting, return_exceptions=True)
        assert not budget._waiting

    run(scenario())


def test_a_log_and_a_principal_hold_no_more_than_they_may() -> None:
    """Limits are as configured, and a waiting principal holds up no other of the same log."""

    async def scenario() -> None:
        budget = ByteBudget(10_000, log_bytes_max=100, principal_bytes_max=50)
        greedy = [Holder("a", "greedy"), Holder("b", "greedy")]
        assert not budget.is_due_to_principal(greedy[0], 500), "a log that holds nothing may begin"
        await budget.take(greedy[0], 40)
        waiting = [asyncio.create_task(budget.take(each, 20)) for each in greedy]
        await turns()
        assert not any(task.done() for task in waiting)
        assert budget.is_due_to_principal(greedy[1], 20)
        for other in (Holder("a", "modest"), Holder("a")):
            async with asyncio.timeout(5):
                await budget.take(other, 30)
        late = asyncio.create_task(budget.take(Holder("a", "late"), 1))
        await turns()
        assert not late.done(), "of the log"
        budget.give(greedy[0], 40)
        await turns()
        assert all(task.done() for task in (*waiting, late))
        budget.give(Holder("a", "late"), 1)
        for each in greedy:
            budget.give(each, 20)
        for other in (Holder("a", "modest"), Holder("a")):
            budget.give(other, 30)
        assert not budget._taken_by | budget._taken_by_principal

    run(scenario())


def test_a_call_that_waits_for_its_own_bytes_holds_up_no_other() -> None:
    """Others held it up first; then the bytes that it took itself meanwhile, for another log."""
    holding_up: list[str] = []

    @contextlib.contextmanager
    def hold_up(what: str) -> Iterator[None]:
        holding_up.append(what)
        yield
        holding_up.remove(what)

    async def scenario() -> None:
        budget = ByteBudget(1000, principal_bytes_max=100)
        mine, mine_elsewhere, other = Holder("a", "me"), Holder("b", "me"), Holder("c")
        await budget.take(other, 1000)
        elsewhere = asyncio.create_task(budget.take(mine_elsewhere, 90))
        first, second = (
            asyncio.create_task(budget.take(mine, size_bytes, partial(hold_up, name)))
            for name, size_bytes in (("first", 20), ("second", 5))
        )
        await turns()
        assert holding_up == ["first", "second"]
        budget.give(other, 1000)
        await turns()
        assert elsewhere.done()
        assert second.done(), "it has room"
        assert not first.done()
        behind = asyncio.create_task(budget.take(mine, 1, partial(hold_up, "behind")))
        await turns()
        assert not behind.done()
        assert not holding_up
        first.cancel()
        await turns()
        assert behind.done()
        for holder, size_bytes in ((mine_elsewhere, 90), (mine, 5), (mine, 1)):
            budget.give(holder, size_bytes)
        assert not budget._taken
        assert not budget._waiting

    run(scenario())


def test_one_that_is_cancelled_holds_nothing() -> None:
    """Before its turn, and in the moment of it."""

    async def scenario() -> None:
        budget = ByteBudget(10)
        await budget.take(Holder("a"), 10)
        first, second, third = (asyncio.create_task(budget.take(Holder("a"), 10)) for _ in range(3))
        await turns()
        first.cancel()
        await turns()
        budget.give(Holder("a"), 10)
        second.cancel()
        await turns()
        assert second.cancelled()
        assert third.done()
        assert budget._taken == 10
        budget.give(Holder("a"), 10)
        assert not budget._taken_by

    run(scenario())


def test_any_order_keeps_within_the_limit() -> None:
    """Random takers of some logs, some of which give up."""

    async def scenario() -> None:
        rng = random.Random(5)
        budget = ByteBudget(100)

        async def use(log: str, size_bytes: int) -> None:
            await budget.take(Holder(log), size_bytes)
            try:
                assert sum(budget._taken_by.values()) == budget._taken <= 100
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                budget.give(Holder(log), size_bytes)

        tasks = [
            asyncio.create_task(use(rng.choice("abc"), rng.randrange(1, 100))) for _ in range(300)
        ]
        while not all(task.done() for task in tasks):
            if rng.random() < 0.1:
                rng.choice(tasks).cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget._taken == 0
        assert not budget._waiting

    run(scenario())
