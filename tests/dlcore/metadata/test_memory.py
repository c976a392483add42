"""The faults of the store in memory: what the simulator asks for is what happens."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    MetadataConnectionError,
    MetadataError,
    MetadataSessionExpiredError,
    MetadataVersionError,
    NodeExistsError,
)
from dlcore.metadata.port import Create, Put, SessionState, Versioned
from tests.fixtures.aio import run, until
from tests.fixtures.simulated_store import SimulatedTree
from tests.simulation.loop import run as run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_reply_is_unknown_to_the_caller_only(applied: bool) -> None:
    """The tree knows; the next write is answered again."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store = tree.connect()
        store.lose_next_reply(applied=applied)
        with pytest.raises(MetadataConnectionError):
            await store.create("/a", b"1")
        assert (await store.get("/a") is not None) is applied
        store.lose_next_reply(applied=applied)
        assert await store.get("/a") == tree.dump().get("/a")  # reads do not use it up
        with pytest.raises(MetadataConnectionError):
            await store.multi([Create("/b"), Create("/c")])
        assert ("/b" in tree.dump(), "/c" in tree.dump()) == (applied, applied)
        await store.create("/d")

    run(scenario())


def test_a_lost_reply_hides_an_error_as_well() -> None:
    """Even a refusal is unknown when it is not heard."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        store.lose_next_reply(applied=True)
        with pytest.raises(MetadataConnectionError):
            await store.put("/none", b"", version=0)

    run(scenario())


def test_disconnection_keeps_the_session() -> None:
    """Nothing works, nothing is lost, and the return makes every watch due."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store, other = tree.connect(), tree.connect()
        states: list[SessionState] = []
        calls: list[int] = []
        store.on_session(states.append)
        store.watch("/a", lambda: calls.append(1))
        await store.create("/a", ephemeral=True)
        token = store.session_token
        store.disconnect()
        store.disconnect()
        for request in (store.get("/a"), store.create("/b"), store.sync("/")):
            with pytest.raises(MetadataConnectionError):
                await request
        await other.put("/a", b"1", version=0)
        await asyncio.sleep(0.01)
        calls.clear()
        await asyncio.sleep(0.01)
        assert calls == []
        store.reconnect()
        store.reconnect()
        await until(lambda: calls == [1])
        assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
        assert store.session_token == token
        assert await store.get("/a") == Versioned(b"1", 1, token)

    run(scenario())


def test_an_expiry_while_disconnected_is_noticed_on_return() -> None:
    """At the server the ephemeral nodes vanish at once."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store, other = tree.connect(), tree.connect()
        states: list[SessionState] = []
        store.on_session(states.append)
        await store.create("/a", ephemeral=True)
        store.disconnect()
        store.expire()
        assert await other.get("/a") is None
        assert store.session_state is SessionState.SUSPENDED
        store.reconnect()
        with pytest.raises(MetadataSessionExpiredError):
            await store.get("/a")
        await until(lambda: states[-1] is SessionState.CONNECTED)
        assert states == [
            SessionState.SUSPENDED,
            SessionState.EXPIRED,
            SessionState.CONNECTED,
        ]
        assert await store.get("/a") is None

    run(scenario())


def test_a_disconnection_before_the_new_session_is_open_does_not_lose_it() -> None:
    """The return brings a new session, and says so."""

    async def scenario() -> None:
        store = SimulatedTree(latency=lambda: 0.001).connect()
        token = store.session_token
        states: list[SessionState] = []
        store.on_session(states.append)
        store.expire()
        store.disconnect()
        store.reconnect()
        await until(lambda: states[-1:] == [SessionState.CONNECTED])
        assert states[:2] == [SessionState.EXPIRED, SessionState.SUSPENDED]
        assert states.count(SessionState.CONNECTED) == 1
        assert store.session_token != token
        await store.create("/a", ephemeral=True)

    run(scenario())


def test_requests_in_flight_when_the_connection_breaks_are_unknown() -> None:
    """A request still on its way never arrives; one whose reply is on its way did."""

    async def scenario() -> None:
        delays = [0.01, 1000.0, 1000.0]  # the first request arrives; nothing after it does
        tree = SimulatedTree(latency=lambda: delays.pop(0) if delays else 0.001)
        store, other = tree.connect(), tree.connect()
        answered_late = asyncio.create_task(store.create("/a"))
        await until(lambda: "/a" in tree.dump())
        never_arrives = asyncio.create_task(store.create("/b"))
        await asyncio.sleep(0.01)
        store.disconnect()
        for request in (answered_late, never_arrives):
            with pytest.raises(MetadataConnectionError):
                await request
        store.reconnect()
        await store.create("/c")
        assert await other.get_children("/") == ["a", "c"]

    run(scenario())


def test_requests_of_a_session_stay_in_order_whatever_their_delays() -> None:
    """As in ZooKeeper: first sent, first applied, first answered."""

    async def scenario() -> None:
        rng = random.Random(7)
        store = SimulatedTree(latency=lambda: rng.random() / 1000).connect()
        await store.create("/a")
        answered: list[int] = []

        async def put(number: int) -> None:
            version = await store.put("/a", b"%d" % number, version=number)
            answered.append(version)

        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(put(number))
        assert answered == list(range(1, 101))

    run(scenario())


def test_a_request_outlives_the_caller_that_stops_waiting() -> None:
    """A cancelled write may still happen: that is what callers must reckon with."""

    async def scenario() -> None:
        tree = SimulatedTree(latency=lambda: 0.01)
        store = tree.connect()
        creating = asyncio.create_task(store.create("/a"))
        await asyncio.sleep(0)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        await until(lambda: "/a" in tree.dump())

    run(scenario())


def trace_of(seed: int) -> list[str]:
    """Run three sessions against each other with faults; return all that is seen."""

    async def main() -> list[str]:
        rng = random.Random(seed)
        tree = SimulatedTree()
        trace: list[str] = []
        stores = [tree.connect() for _ in range(3)]
        for number, store in enumerate(stores):
            store.on_session(lambda state, n=number: trace.append(f"{n} {state.name}"))  # type: ignore[misc]  # a default binds the turn's number
            store.watch("/a", lambda n=number: trace.append(f"{n} watch"))  # type: ignore[misc]  # as above

        async def work(number: int) -> None:
            store = stores[number]
            for turn in range(50):
                fault: Callable[[], None] = rng.choice(
                    [store.disconnect, store.reconnect, store.reconnect, store.expire]
                )
                if rng.random() < 0.2:
                    fault()
                try:
                    if rng.random() < 0.5:
                        await store.create("/a", ephemeral=rng.random() < 0.5)
                    else:
                        await store.multi([Put("/a", b"%d" % turn, -1)])
                    trace.append(f"{number} done")
                except MetadataError as error:
                    trace.append(f"{number} {type(error).__name__}")
                    await asyncio.sleep(0)

        await asyncio.gather(*(work(number) for number in range(3)))
        for store in stores:
            await store.aclose()
        return trace

    return run(main())


def test_a_run_is_a_function_of_its_inputs() -> None:
    """The same seed gives the same trace, callbacks included."""
    traces = [trace_of(seed) for seed in range(5)]
    assert [trace_of(seed) for seed in range(5)] == traces
    assert len({tuple(trace) for trace in traces}) == 5
    assert any("EXPIRED" in line for trace in traces for line in trace)


def test_a_failed_transaction_calls_no_watcher() -> None:
    """Nothing happened, so there is nothing to look at."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        calls: list[int] = []
        await store.create("/a")
        store.watch("/a", lambda: calls.append(1))
        await asyncio.sleep(0.01)
        assert calls == [1]
        with pytest.raises(MetadataVersionError):
            await store.multi([Put("/a", b"", 0), Create("/a/b"), Put("/a", b"", 0)])
        await asyncio.sleep(0.01)
        assert calls == [1]

    run(scenario())


def behind_by(seconds: float) -> SimulatedTree:
    """Return a tree whose sessions read from servers that are so far behind."""
    return SimulatedTree(latency=lambda: 0.0001, lag=lambda: seconds)


def test_a_server_that_lags_answers_with_what_was_until_a_sync() -> None:
    """Values, absence and lists are old; the writer's own session sees what it wrote."""

    async def scenario() -> None:
        tree = behind_by(1000.0)
        writer, reader = tree.connect(), tree.connect()
        await writer.create("/a", b"0")
        await writer.create("/a/b", ephemeral=True)
        assert await writer.get("/a") == Versioned(b"0", 0)
        assert await reader.get("/a") is None
        assert await reader.get_children("/") == []
        await reader.sync("/")
        assert await reader.get_children("/") == ["a"]
        await writer.put("/a", b"1", version=0)
        await writer.aclose()
        assert await reader.get("/a") == Versioned(b"0", 0)
        assert await reader.get_children("/a") == ["b"]
        await reader.sync("/a")
        assert await reader.get("/a") == Versioned(b"1", 1)
        assert await reader.get_children("/a") == []
        await tree.connect().put("/a", b"2", version=1)
        assert await reader.get("/a") == Versioned(b"1", 1)
        assert await reader.get("/a", fresh=True) == Versioned(b"2", 2)

    run(scenario())


def test_a_server_that_lags_comes_after() -> None:
    """Without a sync it takes as long as the lag, and no longer."""

    async def scenario() -> None:
        tree = behind_by(0.05)
        writer, reader = tree.connect(), tree.connect()
        await writer.create("/a")
        assert await reader.get("/a") is None
        began = asyncio.get_running_loop().time()
        node = None
        while node is None:
            node = await reader.get("/a")
        assert 0.03 < asyncio.get_running_loop().time() - began < 10.0

    run(scenario())


def test_a_refused_write_shows_what_it_met() -> None:
    """The refusal comes through the session's server, after what it was refused for."""

    async def scenario() -> None:
        tree = behind_by(1000.0)
        writer, other = tree.connect(), tree.connect()
        await writer.create("/a", b"0")
        with pytest.raises(NodeExistsError):
            await other.create("/a", b"1")
        assert await other.get("/a") == Versioned(b"0", 0)

    run(scenario())


def test_a_lost_reply_is_read_back_after_a_sync_only() -> None:
    """A read at once may find the node as it was before the own write."""

    async def scenario() -> None:
        store = behind_by(1000.0).connect()
        await store.create("/a", b"0")
        store.lose_next_reply(applied=True)
        with pytest.raises(MetadataConnectionError):
            await store.put("/a", b"1", version=0)
        assert await store.get("/a") == Versioned(b"0", 0)
        await store.sync("/a")
        assert await store.get("/a") == Versioned(b"1", 1)

    run(scenario())


def test_a_session_never_goes_back_and_a_new_one_begins_with_all() -> None:
    """A connection to another server shows nothing older; nothing is kept for ended sessions."""

    async def scenario() -> None:
        rng = random.Random(3)
        tree = SimulatedTree(
            latency=lambda: rng.random() / 10_000, lag=lambda: rng.choice((0.0, 0.002, 0.02))
        )
        writer, reader = tree.connect(), tree.connect()
        await writer.create("/a")
        seen = [-1]
        for version in range(200):
            await writer.put("/a", b"", version=version)
            if version % 20 == 10:
                reader.disconnect()
                reader.reconnect()
            node = await reader.get("/a")
            seen.append(-1 if node is None else node.version)
        assert seen == sorted(seen)
        assert len(set(seen)) > 3
        assert seen[-1] < 200
        reader.expire()
        await until(lambda: reader.session_state is SessionState.CONNECTED)
        assert await reader.get("/a") == Versioned(b"", 200)
        await reader.aclose()
        await writer.put("/a", b"", version=200)
        assert len(tree._log) <= 5

    run(scenario())


def test_servers_without_requests_do_not_keep_everything() -> None:
    """The queue for them is bounded."""

    async def scenario() -> None:
        tree = SimulatedTree(lag=lambda: 0.001)
        writer, _ = tree.connect(), tree.connect()
        await writer.create("/a")
        for version in range(3000):
            await writer.put("/a", b"", version=version)
        await asyncio.sleep(0.01)
        await writer.put("/a", b"", version=3000)
        assert len(tree._log) <= 2000

    run(scenario())


def test_a_watch_speaks_when_its_server_learns_and_before_it_is_read() -> None:
    """A change is reported also where no client reads, and never after a read showed it."""

    async def scenario() -> None:
        tree = behind_by(0.02)
        writer, reader = tree.connect(), tree.connect()
        heard: list[str] = []
        await writer.create("/early")
        reader.watch("/a", lambda: heard.append("watch"))
        reader.watch("/early", lambda: heard.append("early"))
        await until(lambda: len(heard) == 2)
        await until(lambda: heard.count("early") == 2)
        heard.clear()
        await writer.create("/a")
        await until(lambda: heard == ["watch"])
        assert await reader.get("/a") == Versioned(b"", 0)
        await writer.put("/a", b"1", version=0)
        await reader.sync("/a")
        assert await reader.get("/a") == Versioned(b"1", 1)
        assert heard == ["watch", "watch"]

    run(scenario())


def test_a_run_with_servers_that_lag_is_a_function_of_its_inputs() -> None:
    """Two trees with the same chance answer alike."""

    async def play() -> list[object]:
        rng = random.Random(11)
        tree = SimulatedTree(latency=lambda: 1.0, lag=lambda: rng.choice((0.0, 3.0, 30.0)))
        stores = [tree.connect() for _ in range(3)]
        seen: list[object] = []
        await stores[0].create("/a")
        for turn in range(60):
            await rng.choice(stores).put("/a", b"%d" % turn, version=-1)
            seen.append(await rng.choice(stores).get("/a"))
        return seen

    first = run_virtual(play())[0]
    assert run_virtual(play())[0] == first
    assert len(set(map(str, first))) > 20
