"""Large payloads that are not whole: so much of them at once, in turn, and a holder goes on.

Goal: clients that send parts of adds cost a bookie a bounded memory, all of them together, and hold
up no other client.  Method: the budget itself, and a bookie whose clients stop in the middle.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie.serving import service as service_module
from bookie.serving.receive_budget import ReceiveBudget, ReceiveRoom
from bookie.serving.session import Patience, Relieve
from dlcore.wire.messages import Add, Durable, encode
from tests.fixtures.aio import until
from tests.fixtures.raw_wire import RawEnd, raw_connection
from tests.fixtures.served_bookie import frame_of, run, serve

if TYPE_CHECKING:
    from pathlib import Path

ENTRY_BYTES = 1_000_000


def test_a_waiting_reader_gets_its_turn() -> None:
    """No client overtakes; one that leaves wants nothing; if none holds any, any size is right."""

    async def scenario() -> None:
        waits: list[int] = []
        granted: list[str] = []
        budget = ReceiveBudget(1000, on_wait=lambda: waits.append(1))

        def room(name: str) -> ReceiveRoom:
            return budget.room(lambda: granted.append(name))

        first, second, third, fourth = map(room, ("first", "second", "third", "fourth"))
        assert first.take(700)
        assert first.take(700)  # what it has, it has
        assert not any(each.take(size) for each, size in ((second, 2000), (third, 200)))
        assert not fourth.take(300)
        assert not second.take(2000)
        assert (len(waits), budget.is_exhausted, second.is_waiting) == (3, True, True)
        first.give()
        assert second.held_bytes == 2000
        assert third.is_waiting
        assert (first.held_s(), second.held_s() >= 0) == (0.0, True)
        fourth.give()
        second.give()
        await until(lambda: granted == ["second", "third"])
        assert not budget.is_exhausted
        third.give()
        assert budget._held_bytes == 0

    run(scenario)


async def begin(end: RawEnd, ledger_id: int) -> bytes:
    """Send half of an add; return the rest."""
    frame = frame_of(ledger_id, 0, b"x" * ENTRY_BYTES)
    data = b"".join(encode(Add(1, False, [frame])))
    end.send(data[: len(data) // 2])
    await end.writer.drain()
    return data[len(data) // 2 :]


def test_adds_that_have_begun_to_come_are_bounded_over_all_connections(tmp_path: Path) -> None:
    """Two fit at once, the others are not read until one is whole or its client gone."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            served = await stack.enter_async_context(
                serve(tmp_path, receive_bytes_max=5 * ENTRY_BYTES // 2)
            )
            budget = served.service.receive_budget
            ends = [
                await stack.enter_async_context(raw_connection(served.address)) for _ in range(6)
            ]
            rests = [await begin(end, number) for number, end in enumerate(ends)]
            await until(lambda: len(budget._waiters) == 4)
            assert budget._held_bytes < 5 * ENTRY_BYTES // 2
            connections = list(served.service.connections)
            assert sum(not each.session.intake.is_reading for each in connections) == 4
            holders = [n for n, each in enumerate(connections) if each._room.held_bytes]
            ends[holders[0]].writer.transport.abort()
            for number, end in enumerate(ends):
                if number != holders[0]:
                    end.send(rests[number])
            for number, end in enumerate(ends):
                if number != holders[0]:
                    assert await end.receive() == Durable((1,))
            assert (budget._held_bytes, budget.is_exhausted) == (0, False)

    run(scenario)


@pytest.mark.parametrize("trickles", [False, True])
def test_a_stopped_sender_is_given_up_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trickles: bool
) -> None:
    """Nothing comes any more, or a byte now and then: that connection ends, the other add is taken.

    While no client waits, it may take its time.
    """
    monkeypatch.setattr(service_module, "_RELIEF_INTERVAL_S", 0.02)
    monkeypatch.setattr(service_module, "_STALL_S_MAX", 100.0 if trickles else 0.1)
    monkeypatch.setattr(service_module, "_HELD_S_MAX", 0.4)
    # Readers that stand still hold nothing that adds wait for.
    monkeypatch.setattr(Patience, "stalled_s", lambda *_: 1000.0)

    async def scenario() -> None:
        async with (
            serve(tmp_path, receive_bytes_max=ENTRY_BYTES, silence_s=2000.0) as served,
            raw_connection(served.address) as slow,
        ):
            budget = served.service.receive_budget
            await begin(slow, 1)
            await until(lambda: budget._held_bytes > 0)
            async with raw_connection(served.address) as other:
                rest = await begin(other, 2)
                await until(lambda: budget.is_exhausted)
                while trickles and budget.is_exhausted:
                    slow.send(b"x")
                    await asyncio.sleep(0.02)
                other.send(rest)
                assert await other.receive() == Durable((1,))
            assert await slow.receive() is None

    run(scenario)


def test_a_connection_that_is_lost_lets_go_of_what_it_had_received(tmp_path: Path) -> None:
    """Its objects refer to each other, and would hold the payload until the collector comes."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            async with raw_connection(served.address) as end:
                (connection,) = served.service.connections
                await begin(end, 1)
                await until(lambda: connection._end._assembly._partial is not None)
            await connection.closed.wait()
            assert connection._end._assembly._partial is None
            assert served.service.receive_budget._held_bytes == 0

    run(scenario)


def test_a_connection_that_ended_is_freed_without_the_collector(tmp_path: Path) -> None:
    """Thousands of them would else wait for it, for long."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            gc.disable()
            try:
                async with raw_connection(served.address):
                    await until(lambda: len(served.service.connections) == 1)
                    ended = [weakref.ref(each) for each in served.service.connections]
                await until(lambda: ended[0]() is None)
            finally:
                gc.enable()

    run(scenario)


def test_memory_is_given_back_once_no_client_has_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given back once after each wait of a client, and not while others wait again."""
    monkeypatch.setattr(service_module, "_RELIEF_INTERVAL_S", 0.01)
    monkeypatch.setattr(service_module, "_CALM_S", 0.05)
    given: list[float] = []

    def has_given(count: int) -> bool:
        return len(given) == count

    async def scenario() -> None:
        time = asyncio.get_running_loop().time
        monkeypatch.setattr(service_module, "give_back_what_is_free", lambda: given.append(time()))
        async with serve(tmp_path, read_bytes_max=1000) as served:
            budget = served.service.read_budget
            for count in (1, 2):
                for _ in range(3):
                    await budget.take(1000)
                    waiting = asyncio.create_task(budget.take(1))
                    await asyncio.sleep(0)
                    budget.give(1000)
                    await waiting
                    budget.give(1)
                    quiet_s = time()
                await until(partial(has_given, count))
                assert given[-1] - quiet_s >= 0.05

    run(scenario)
    assert len(given) == 2


def test_memory_is_given_back_after_a_client_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given back once for all that leave together: none waited, but all took memory."""
    monkeypatch.setattr(service_module, "_CALM_S", 0.05)
    given: list[object] = []

    async def scenario() -> None:
        monkeypatch.setattr(service_module, "give_back_what_is_free", lambda: given.append(0))
        async with serve(tmp_path) as served:
            for count in (1, 2):
                async with raw_connection(served.address), raw_connection(served.address):
                    await until(lambda: len(served.service.connections) == 2)
                    assert len(given) == count - 1
                await until(partial(has_given, count))
        assert len(given) == 2

    def has_given(count: int) -> bool:
        return len(given) >= count

    run(scenario)


def test_a_client_that_is_not_read_as_it_takes_no_answers_sends_slowly_too(tmp_path: Path) -> None:
    """Else a client could hold room as long as it likes; one that waits for room holds none."""

    async def scenario() -> None:
        async with (
            serve(tmp_path, receive_bytes_max=ENTRY_BYTES) as served,
            raw_connection(served.address) as end,
        ):
            (connection,) = served.service.connections

            def sends_slowly(stall_s: float, held_s_max: float) -> bool:
                event = Relieve(
                    unsent_bytes=0,
                    now_s=asyncio.get_running_loop().time(),
                    held_s=connection._room.held_s(),
                    reads_wait=False,
                    adds_wait=True,
                    stall_s=stall_s,
                    held_s_max=held_s_max,
                )
                return bool(connection.session.handle(event))

            assert not sends_slowly(1.0, 1.0)
            await begin(end, 1)
            await until(lambda: connection._room.held_bytes > 0)
            connection.socket.set_reading(is_reading=False)
            connection.session.intake.is_reading = False
            assert not sends_slowly(100.0, 0.0)
            connection.pause_writing()
            assert sends_slowly(100.0, 0.0)
            connection.abort()

    run(scenario)
