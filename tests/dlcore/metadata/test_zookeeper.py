"""The ZooKeeper store under all that a real server and a real network can do to it.

Goal: lost connections are reported as unknown, never retried for a write, no blocked loop.
Method: a server that is killed and paused, and a proxy that swallows replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    MetadataConnectionError,
    MetadataSessionExpiredError,
)
from dlcore.metadata.port import REQUEST_BYTES_MAX, Create, SessionState, Versioned
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.sandbox.process import PortReservation
from tests.fixtures.aio import run, until, until_async
from tests.fixtures.zookeeper import expire_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

pytestmark = pytest.mark.integration


@contextlib.asynccontextmanager
async def connected(
    servers: str, *, session_timeout_s: float = 20
) -> AsyncIterator[ZooKeeperStore]:
    """Open a store and close it at the end."""
    store = await ZooKeeperStore.connect(
        servers, session_timeout_s=session_timeout_s, connect_timeout_s=60
    )
    try:
        yield store
    finally:
        await store.aclose()


class Proxy:
    """A TCP proxy before a server; while `is_mute`, replies are swallowed."""

    def __init__(self, servers: str) -> None:
        self._host, _, port = servers.partition(":")
        self._port = int(port)
        self.is_mute = False
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, server_writer]
        for source, sink, is_reply in (
            (reader, server_writer, False),
            (server_reader, writer, True),
        ):
            task = asyncio.create_task(self._carry(source, sink, is_reply=is_reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if not (is_reply and self.is_mute):
                    sink.write(data)
                    await sink.drain()
        sink.close()
        with contextlib.suppress(OSError):
            await sink.wait_closed()


def test_no_server_is_an_error_that_names_it() -> None:
    """Within the time asked for, and without a thread left."""

    async def scenario() -> None:
        reservation = PortReservation(0)  # bound, without a listener
        servers = f"127.0.0.1:{reservation.port}"
        with pytest.raises(MetadataConnectionError, match=servers):
            await ZooKeeperStore.connect(servers, connect_timeout_s=0.3)
        with pytest.raises(ConfigurationError, match=r"session_timeout_s=0: expected seconds > 0"):
            await ZooKeeperStore.connect(servers, session_timeout_s=0)
        reservation.release()

    run(scenario())


def test_a_silent_server_is_an_error_in_time() -> None:
    """One that takes connections and says nothing: kazoo would wait for as long as a session."""

    async def scenario() -> None:
        hung_up = asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(1000):
                pass
            writer.close()
            hung_up.set()

        async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
            servers = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(MetadataConnectionError, match=servers):
                async with asyncio.timeout(30):
                    await ZooKeeperStore.connect(
                        servers, connect_timeout_s=0.3, session_timeout_s=100
                    )
            await hung_up.wait()

    run(scenario())


def test_cancelling_connect_leaves_no_thread() -> None:
    """`run` looks for threads."""

    async def scenario() -> None:
        reservation = PortReservation(0)
        connecting = asyncio.create_task(
            ZooKeeperStore.connect(f"127.0.0.1:{reservation.port}", connect_timeout_s=60)
        )
        await until(lambda: threading.active_count() > 2)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        reservation.release()

    run(scenario())


def test_cancelling_aclose_leaves_no_thread(zookeeper: EmbeddedZooKeeper) -> None:
    """The closing goes on and can be waited for again."""

    async def scenario() -> None:
        store = await ZooKeeperStore.connect(zookeeper.servers, connect_timeout_s=60)
        closing = asyncio.create_task(store.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await store.aclose()

    run(scenario())


@pytest.mark.parametrize("kind", ["put", "multi", "create", "delete"])
def test_a_lost_reply_is_unknown_and_the_write_is_not_sent_again(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, kind: str
) -> None:
    """The write took effect exactly once; the caller learns only that this is unknown."""

    async def scenario() -> None:
        path = f"{zookeeper_root}/a"
        async with Proxy(zookeeper.servers) as proxy, connected(proxy.address) as store:
            await store.create(path, b"0", make_parents=True)
            states: list[SessionState] = []
            store.on_session(states.append)
            writes: dict[str, Callable[[], asyncio.Task[object]]] = {
                "put": lambda: asyncio.create_task(store.put(path, b"1", version=-1)),
                "multi": lambda: asyncio.create_task(store.multi([Create(f"{path}/b", b"1")])),
                "create": lambda: asyncio.create_task(store.create(f"{path}/b", b"1")),
                "delete": lambda: asyncio.create_task(store.delete(path)),
            }
            async with connected(zookeeper.servers) as witness:
                before = await witness.get(path), await witness.get_children(path)
                proxy.is_mute = True
                writing = writes[kind]()
                while (await witness.get(path), await witness.get_children(path)) == before:
                    await witness.sync(path)
                assert not writing.done()
                proxy.is_mute = False
                proxy.cut()
                with pytest.raises(MetadataConnectionError, match="unknown"):
                    await writing
                await until(lambda: states[-1:] == [SessionState.CONNECTED])
                assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
                await witness.sync(path)
                expected = {
                    "put": Versioned(b"1", 1),
                    "multi": Versioned(b"0", 0),
                    "create": Versioned(b"0", 0),
                    "delete": None,
                }
                assert await witness.get(path) == expected[kind]
                if kind in ("multi", "create"):
                    assert await witness.get(f"{path}/b") == Versioned(b"1", 0)

    run(scenario())


@pytest.mark.parametrize("fresh", [False, True])
def test_a_read_is_sent_again(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, fresh: bool
) -> None:
    """The caller does not notice the lost connection."""

    async def scenario() -> None:
        async with Proxy(zookeeper.servers) as proxy, connected(proxy.address) as store:
            await store.create(zookeeper_root, b"0")
            proxy.is_mute = True
            reading = asyncio.create_task(store.get(zookeeper_root, fresh=fresh))
            await until(lambda: len(store._requests._outstanding) == 1 + fresh)
            await asyncio.sleep(0.05)
            assert not reading.done()
            proxy.is_mute = False
            proxy.cut()
            assert await reading == Versioned(b"0", 0)

    run(scenario())


def test_a_killed_server_suspends_and_comes_back_with_the_session(
    fresh_zookeeper: Callable[[], EmbeddedZooKeeper],
) -> None:
    """Ephemeral nodes, watches and the session token survive; writes meanwhile are unknown."""
    server = fresh_zookeeper()

    async def scenario() -> None:
        async with connected(server.servers, session_timeout_s=60) as store:
            await store.create("/e", ephemeral=True)
            # At the limit: also the server reads it back from its own log.
            many = [Create(f"/n{n:03}", bytes(990)) for n in range(REQUEST_BYTES_MAX // 1060)]
            await store.multi(many)
            states: list[SessionState] = []
            store.on_session(states.append)
            calls: list[None] = []
            store.watch("/e", lambda: calls.append(None))
            await until(lambda: len(calls) > 0)
            token = store.session_token
            server.kill()
            await until(lambda: store.session_state is SessionState.SUSPENDED)
            store._requests.timeout_s = 0.5
            with pytest.raises(MetadataConnectionError, match="create /never"):
                await store.create("/never")
            with pytest.raises(MetadataConnectionError, match="get /e"):
                await store.get("/e")
            store._requests.timeout_s = 60
            calls.clear()
            await asyncio.to_thread(server.start)
            assert await store.get("/e") == Versioned(b"", 0, token)
            assert await store.get("/never") is None  # it waited here, and was never sent
            assert await store.get(many[-1].path) == Versioned(bytes(990), 0)
            assert store.session_token == token
            await until(lambda: len(calls) > 0)
            assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
            count = len(calls)
            await store.put("/e", b"1", version=0)
            await until(lambda: len(calls) > count)

    run(scenario())


def test_an_answer_that_is_too_large_is_logged(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, large_answers: list[str]
) -> None:
    """With the nodes that it was about; the names of very many children are such."""

    async def scenario() -> None:
        async with connected(zookeeper.servers) as store:
            paths = [f"{zookeeper_root}/{'n' * 200}{number:04}" for number in range(5000)]
            await store.create(zookeeper_root)
            for start in range(0, len(paths), 1000):
                await store.multi([Create(path) for path in paths[start : start + 1000]])
            await store.get_many(paths)
            assert large_answers == []
            assert len(await store.get_children(zookeeper_root) or ()) == len(paths)
            assert large_answers.pop().startswith(
                f"a large answer of ZooKeeper: the children of {zookeeper_root}, 1020000 bytes; "
            )
            for path in paths[:2]:
                await store.put(path, bytes(600_000), version=0)
            await store.get_many(paths[:2])
            assert f"2 nodes from {paths[0]}, 1200000 bytes; " in large_answers.pop()

    run(scenario())


def test_a_session_that_expires_while_the_store_is_cut_off(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str
) -> None:
    """The server ends it by time-out; the store learns on its return, and goes on in a new one."""

    async def scenario() -> None:
        async with (
            connected(zookeeper.servers) as witness,
            Proxy(zookeeper.servers) as proxy,
            connected(proxy.address, session_timeout_s=4) as store,
        ):
            await store.create(zookeeper_root)
            await store.create(f"{zookeeper_root}/e", ephemeral=True)
            token = store.session_token
            states: list[SessionState] = []
            store.on_session(states.append)
            proxy.is_mute = True
            proxy.cut()

            async def is_gone() -> bool:
                return await witness.get(f"{zookeeper_root}/e") is None

            await until_async(is_gone)
            assert SessionState.EXPIRED not in states
            proxy.is_mute = False
            proxy.cut()
            await until(lambda: states[-1:] == [SessionState.CONNECTED])
            assert states == [
                SessionState.SUSPENDED,
                SessionState.EXPIRED,
                SessionState.CONNECTED,
            ]
            assert store.session_token != token
            await store.create(f"{zookeeper_root}/e", ephemeral=True)

    run(scenario())


def test_a_flood_of_requests_to_a_paused_server_never_blocks_the_loop(
    fresh_zookeeper: Callable[[], EmbeddedZooKeeper],
) -> None:
    """Requests and watches wait while the loop's own heartbeat goes on.

    The values fill the connection, so kazoo's thread stands still and answers no wake-up.
    """
    server = fresh_zookeeper()

    async def scenario() -> None:
        async with connected(server.servers, session_timeout_s=60) as store:
            await store.create("/a")
            server.pause()
            longest_s = 0.0

            async def beat() -> None:
                nonlocal longest_s
                while True:
                    before = time.monotonic()
                    await asyncio.sleep(0.01)
                    longest_s = max(longest_s, time.monotonic() - before)

            beating = asyncio.create_task(beat())
            value = b"x" * 100_000
            requests = [asyncio.create_task(store.put("/a", value, version=-1)) for _ in range(600)]
            for number in range(500):
                store.watch(f"/w{number}", lambda: None)
            await asyncio.sleep(1.0)
            assert not any(request.done() for request in requests)
            server.resume()
            versions = await asyncio.gather(*requests)
            beating.cancel()
            # In the order in which they were made, each once.
            assert versions == list(range(1, 601))
            # kazoo's thread would hold it until its session is in doubt, or for ever.
            assert longest_s < 20.0, f"the loop stood still for {longest_s:.1f} s"

    run(scenario())


def test_requests_in_flight_are_unknown_when_the_store_closes(
    fresh_zookeeper: Callable[[], EmbeddedZooKeeper],
) -> None:
    """No call waits for ever: neither the sent one nor those behind it."""
    server = fresh_zookeeper()

    async def scenario() -> None:
        store = await ZooKeeperStore.connect(
            server.servers, session_timeout_s=4, connect_timeout_s=60
        )
        server.pause()
        requests = [asyncio.create_task(store.create(f"/{number}")) for number in range(300)]
        await until(lambda: len(store._requests._outstanding) == 100)
        await store.aclose()
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(result) for result in results} <= {
            MetadataConnectionError,
            MetadataSessionExpiredError,
            AlreadyClosedError,
        }
        server.resume()

    run(scenario())


def test_many_sessions_of_one_process_expire_apart(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str
) -> None:
    """Ephemeral nodes go with their own session only."""

    async def scenario() -> None:
        async with connected(zookeeper.servers) as one, connected(zookeeper.servers) as two:
            await one.create(zookeeper_root)
            await one.create(f"{zookeeper_root}/one", ephemeral=True)
            await two.create(f"{zookeeper_root}/two", ephemeral=True)
            await expire_session(one, zookeeper.servers)
            await two.sync(zookeeper_root)
            assert await two.get_children(zookeeper_root) == ["two"]
            assert two.session_state is SessionState.CONNECTED

    run(scenario())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_connection_thread_is_replaced(
    zookeeper: EmbeddedZooKeeper,
    zookeeper_root: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """kazoo's thread ends on an error it did not expect; the store gets another session."""

    async def scenario() -> None:
        async with connected(zookeeper.servers) as store:
            await store.create(zookeeper_root)
            connection = store._client._connection
            with monkeypatch.context() as patch:

                def fail(_: float) -> None:
                    patch.undo()
                    raise RuntimeError("planted")

                patch.setattr(connection, "_read_socket", fail)
                with pytest.raises((MetadataConnectionError, MetadataSessionExpiredError)):
                    await store.create(f"{zookeeper_root}/a")
            await until(lambda: store.session_state is SessionState.CONNECTED)
            await store.create(f"{zookeeper_root}/b")
            assert "kazoo's thread died" in caplog.text

    caplog.set_level(logging.ERROR)
    run(scenario())
