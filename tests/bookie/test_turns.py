"""Turns among connections that have requests: who asks for little waits for few."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bookie.serving import turns as module
from bookie.serving.turns import Turns
from tests.fixtures.aio import run, until

if TYPE_CHECKING:
    import pytest


class Client:
    """A connection with so many requests, of which it takes `size` at a time."""

    def __init__(self, turns: Turns, taken: list[Client], *, count: int = 0, size: int = 1) -> None:
        self.waits_for_turn = self.left_some = False
        self.count = count
        self.is_aborted = False
        self._size = size
        self._turns = turns
        self._taken = taken

    def sends(self, count: int) -> None:
        """Let requests come."""
        self.count += count
        self._turns.take(self)

    def take_some(self) -> bool:
        """Take a few."""
        if self.count < 0:
            raise OverflowError("a defect")
        self._taken.append(self)
        self.count = max(0, self.count - self._size)
        return self.count > 0

    def abort(self) -> None:
        """End."""
        self.is_aborted = True


def test_who_is_alone_is_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a turn of the event loop; what is left of its requests comes in later ones."""
    monkeypatch.setattr(module, "_TURN_S", 0.0)

    async def main() -> None:
        taken: list[Client] = []
        client = Client(Turns(), taken, size=2)
        client.sends(5)
        assert (len(taken), client.count, client.waits_for_turn) == (1, 3, True)
        client.sends(0)  # it has its place already
        await asyncio.sleep(0)
        assert (len(taken), client.count) == (2, 1)
        await until(lambda: not client.waits_for_turn)
        assert (len(taken), client.count) == (3, 0)

    run(main())


def test_who_has_taken_some_waits_for_more_as_busy_ones_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind those that ask for little."""
    monkeypatch.setattr(module, "_TURN_S", 0.0)

    async def main() -> None:
        turns, taken = Turns(), list[Client]()
        busy, modest = Client(turns, taken), Client(turns, taken)
        busy.count = 1
        turns.wait(busy)
        modest.sends(1)
        assert not taken
        await until(lambda: len(taken) == 2)
        assert taken == [modest, busy]

    run(main())


def test_who_asks_for_little_comes_before_those_that_always_have_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many these are: at most one of them is served before it.

    They are served in turn, and go on while many ask for little.
    """
    monkeypatch.setattr(module, "_TURN_S", 0.0)

    async def main() -> None:
        turns, taken = Turns(), list[Client]()
        greedy = [Client(turns, taken) for _ in range(100)]
        for each in greedy:
            each.sends(50)
        await until(lambda: set(taken) == set(greedy))
        modest = [Client(turns, taken) for _ in range(20)]
        del taken[:]
        for each in modest:
            each.sends(1)
        await until(lambda: not any(each.count for each in modest))
        places = [taken.index(each) for each in modest]
        assert places == list(range(0, 2 * len(modest), 2))
        await until(lambda: not any(each.count for each in greedy))
        shares = [taken[: len(taken) // 2].count(each) for each in greedy]
        assert max(shares) - min(shares) <= 1
        assert not any(each.waits_for_turn for each in (*greedy, *modest))

    run(main())


def test_a_defect_ends_one_connection_and_no_other() -> None:
    """It is told, and the queue goes on."""

    async def main() -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: told.append(about))
        turns, taken = Turns(), list[Client]()
        first, broken, last = (Client(turns, taken) for _ in range(3))
        first.sends(3)
        broken.sends(-1)
        last.sends(2)
        await until(lambda: not (first.count or last.count))
        assert broken.is_aborted
        assert not first.is_aborted
        assert len(told) == 1

    run(main())
