"""Turns among connections that have requests: a client of few bytes waits for few others."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, strategies as st

from bookie.serving import connection as module
from bookie.serving.connection import Turns
from tests.fixtures.aio import run, until


class Client:
    """A connection with so many requests, of which it takes `size` at a time."""

    def __init__(self, turns: Turns, taken: list[Client], *, count: int = 0, size: int = 1) -> None:
        self.waits_for_turn = self.left_some = self.is_distrusted = False
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


def test_a_lone_stream_is_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_stream_that_has_taken_some_waits_for_more_as_busy_ones_do(
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


def test_a_stream_that_asks_for_little_comes_before_busy_ones(
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
    """The error is reported, and the queue goes on."""

    async def main() -> None:
        logged: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: logged.append(about))
        turns, taken = Turns(), list[Client]()
        first, broken, last = (Client(turns, taken) for _ in range(3))
        first.sends(3)
        broken.sends(-1)
        last.sends(2)
        await until(lambda: not (first.count or last.count))
        assert broken.is_aborted
        assert not first.is_aborted
        assert len(logged) == 1

    run(main())


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), data=st.data())
def test_a_stream_without_debt_waits_for_one_turn_of_another(
    sizes: list[int], data: st.DataObject
) -> None:
    """And of the greedy ones none has two turns while another that waits has none."""

    async def main() -> None:
        turns, taken = Turns(), list[Client]()
        greedy = [Client(turns, taken, size=size) for size in sizes]
        modest = Client(turns, taken)
        for each in greedy:
            each.left_some = True
            each.sends(data.draw(st.integers(20, 40)))
        for _ in range(data.draw(st.integers(1, 10))):
            await asyncio.sleep(0)
            del taken[:]
            if turns.are_free:
                break
            modest.sends(1)
            await until(lambda: not modest.count)
            assert taken.index(modest) == 0
        del taken[:]
        waiting = [each for each in greedy if each.waits_for_turn]
        await until(lambda: len(taken) >= len(waiting))
        assert len(set(taken[: len(waiting)])) == len(waiting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TURN_S", 0.0)
        run(main())


def test_the_distrusted_wait_for_a_turn_in_a_while() -> None:
    """One after the other; others do not wait behind them, and one that is trusted again is as
    others."""

    async def main() -> None:
        turns, taken = Turns(), list[Client]()
        strangers = [Client(turns, taken) for _ in range(3)]
        for each in strangers:
            each.is_distrusted = True
            each.sends(2)
            each.sends(0)  # it has its place already
        assert turns.are_free
        assert not taken
        modest = Client(turns, taken)
        modest.sends(1)
        assert taken == [modest]
        await until(lambda: len(taken) == 7)
        assert taken[1:] == strangers * 2
        first, *_ = strangers
        first.sends(2)
        first.is_distrusted = False
        await until(lambda: not first.count)
        first.sends(1)
        assert taken[7:] == [first] * 3

    run(main())


def test_distrusted_clients_wait_also_when_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between their turns is for others, which may come."""
    monkeypatch.setattr(module, "_DISTRUSTED_PAUSE_S", 3600.0)

    async def main() -> None:
        turns, taken = Turns(), list[Client]()
        stranger = Client(turns, taken, count=3)
        stranger.is_distrusted = True
        turns.wait(stranger)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not taken
        assert stranger.waits_for_turn

    run(main())
