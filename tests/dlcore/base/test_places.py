"""Places whose number changes while they are held: never more holders than there should be."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from dlcore.base.places import Places
from tests.fixtures.aio import run


class Holder:
    """A task that holds a place from when it gets one until it must leave."""

    def __init__(self, places: Places) -> None:
        self.has_it = False
        self._leaves = asyncio.Event()
        self.task = asyncio.create_task(self._hold(places))

    async def _hold(self, places: Places) -> None:
        async with places:
            self.has_it = True
            await self._leaves.wait()
            self.has_it = False

    async def leave(self) -> None:
        """Give the place back."""
        self._leaves.set()
        await self.task


async def holders(places: Places, count: int) -> list[Holder]:
    """Return tasks that came one after the other."""
    made = [Holder(places) for _ in range(count)]
    await settled()
    return made


async def settled() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_more_places_let_those_in_who_wait() -> None:
    """In their order."""

    async def scenario() -> None:
        places = Places(1)
        found = await holders(places, 4)
        assert [each.has_it for each in found] == [True, False, False, False]
        places.resize(3)
        await settled()
        assert [each.has_it for each in found] == [True, True, True, False]
        assert places.locked()
        await found[0].leave()
        await settled()
        assert found[3].has_it
        for each in found[1:]:
            await each.leave()
        assert not places.locked()

    run(scenario())


def test_fewer_places_are_reached_as_holders_leave() -> None:
    """No holder is put out, and no new one is admitted until there are few enough."""

    async def scenario() -> None:
        places = Places(4)
        found = await holders(places, 3)
        places.resize(2)
        (late,) = await holders(places, 1)
        await found[0].leave()
        await settled()
        assert (places.locked(), late.has_it) == (True, False)
        await found[1].leave()
        await settled()
        assert (places.locked(), late.has_it) == (True, True)
        for each in (found[2], late):
            await each.leave()
        async with AsyncExitStack() as stack:
            for _ in range(2):
                assert not places.locked()
                await stack.enter_async_context(places)
            assert places.locked()

    run(scenario())


def test_a_cancelled_task_leaves_no_place_taken() -> None:
    """While it waits, or at the moment at which it is let in."""

    async def scenario() -> None:
        places = Places(1)
        async with places:
            waiting, let_in, other = await holders(places, 3)
            waiting.task.cancel()
            await settled()
        let_in.task.cancel()
        await settled()
        assert (let_in.has_it, other.has_it) == (False, True)
        await other.leave()
        assert not places.locked()

    run(scenario())


def test_a_place_is_free_although_all_who_waited_were_cancelled() -> None:
    """No caller waits behind those that are gone."""

    async def scenario() -> None:
        places = Places(1)
        first, *waiting = await holders(places, 3)
        for each in waiting:
            each.task.cancel()
        await settled()
        await first.leave()
        assert not places.locked()
        async with places:
            assert places.locked()

    run(scenario())
