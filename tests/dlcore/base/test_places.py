"""Places whose number changes while they are held: never more holders than there should be."""

from __future__ import annotations

import asyncio

from dlcore.base.places import Places
from tests.fixtures.aio import run


def test_more_places_let_those_in_who_wait() -> None:
    """In their order."""

    async def scenario() -> None:
        places = Places(1)
        await places.acquire()
        waiting = [asyncio.create_task(places.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        places.resize(3)
        await asyncio.wait(waiting[:2])
        assert [each.done() for each in waiting] == [True, True, False]
        assert places.locked()
        places.release()
        await waiting[2]

    run(scenario())


def test_fewer_places_are_reached_as_holders_leave() -> None:
    """Free ones go at once, held ones when they are given back, unless there are more again."""

    async def scenario() -> None:
        places = Places(4)
        for _ in range(3):
            await places.acquire()
        places.resize(2)  # one was free, one of three is too many
        places.release()
        assert places.locked()
        places.release()
        assert not places.locked()
        await places.acquire()
        places.resize(1)
        assert places.locked()
        places.resize(2)  # the place that was to go stays
        places.release()
        await places.acquire()
        assert places.locked()

    run(scenario())
