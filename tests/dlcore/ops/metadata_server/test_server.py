"""The metadata server over real sockets and files, and as a process that is killed and paused."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import struct
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from kazoo.protocol import serialization as kazoo

from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    DLError,
    MetadataConnectionError,
)
from dlcore.metadata.port import SessionState, Versioned
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.metadata_server import server as server_module
from dlcore.ops.metadata_server.server import METRICS, MetadataServer
from dlcore.ops.sandbox.metadata_server import EmbeddedMetadataServer
from tests.dlcore.ops.metadata_server.frames import connected, connecting, create, frame, header
from tests.fixtures.aio import run, until
from tests.fixtures.operators import WAIT_S, asked_json, scraped, url_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path


SESSION_S = 5.0
"""A client that the machine keeps from its turn for less keeps its session."""


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[MetadataServer, str, int]]:
    """Run a server in this process; yield it with its host and port."""
    server = MetadataServer(folder)
    host, port = (await server.start("127.0.0.1", 0)).split(":")
    try:
        yield server, host, int(port)
    finally:
        server.close()


class Peer:
    """A raw client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, host: str, port: int) -> Peer:
        """Connect."""
        return cls(*await asyncio.open_connection(host, port))

    def send(self, data: bytes) -> None:
        """Send a frame."""
        self.writer.write(struct.pack("!i", len(data)) + data)

    async def receive(self) -> bytes:
        """Return the next frame, with its length."""
        head = await self.reader.readexactly(4)
        return head + await self.reader.readexactly(int.from_bytes(head))

    async def require_end(self) -> None:
        """Wait for the end of the connection."""
        try:
            assert await self.reader.read() == b""
        except ConnectionError:
            pass
        finally:
            self.writer.close()


def raising(error: Exception) -> Callable[..., None]:
    """Return a function that raises."""

    def fail(*_: object) -> None:
        raise error

    return fail


async def ask_again_and_again(peer: Peer, request: bytes) -> None:
    """Send a request as often as a server should not bear, and read no answer."""
    for _ in range(100):
        peer.send(request)
        await peer.writer.drain()
        await asyncio.sleep(0)  # the server, on the same loop, would find thousands of them


def test_a_client_may_say_hello_in_small_pieces(tmp_path: Path) -> None:
    """Byte by byte, and then two requests at once."""

    async def scenario() -> None:
        async with served(tmp_path) as (_, host, port):
            peer = await Peer.open(host, port)
            data = connecting()
            for byte in struct.pack("!i", len(data)) + data:
                peer.writer.write(bytes([byte]))
                await peer.writer.drain()
            assert connected(await peer.receive()).session_id > 0
            for path in ("/a", "/a/b"):
                peer.send(frame(1, create(path)))
            assert [header(await peer.receive())[2] for _ in range(2)] == [0, 0]
            peer.writer.close()

    run(scenario())


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4abcd"], ids=["HTTP", "short"]
)
def test_another_protocol_is_let_go(tmp_path: Path, sent: bytes) -> None:
    """A length above the limit, and a first frame that is none."""

    async def scenario() -> None:
        async with served(tmp_path) as (_, host, port):
            peer = await Peer.open(host, port)
            peer.writer.write(sent)
            await peer.require_end()

    run(scenario())


def test_strangers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one does not read, and one is more than there may be."""
    monkeypatch.setattr(server_module, "_SILENT_S", 0.2)
    monkeypatch.setattr(server_module, "_CONNECTIONS_MAX", 2)
    monkeypatch.setattr(server_module, "_UNSENT_BYTES_MAX", 100_000)

    async def scenario() -> None:
        async with served(tmp_path) as (_, host, port):
            await (await Peer.open(host, port)).require_end()
            greedy = await Peer.open(host, port)
            greedy.send(connecting())
            await greedy.receive()
            other = await Peer.open(host, port)
            other.send(connecting())
            await other.receive()
            await (await Peer.open(host, port)).require_end()
            greedy.send(frame(1, create("/large", bytes(1_000_000))))
            await greedy.receive()
            with pytest.raises(ConnectionError):
                await ask_again_and_again(greedy, frame(2, kazoo.GetData("/large", None)))
            other.send(frame(1, create("/other")))
            assert header(await other.receive())[2] == 0
            other.writer.close()

    run(scenario())


def test_a_server_that_cannot_write_ends_and_reports_no_success(tmp_path: Path) -> None:
    """The node is in memory then, and not on disk."""

    async def scenario() -> None:
        async with served(tmp_path) as (server, host, port):
            peer = await Peer.open(host, port)
            peer.send(connecting())
            await peer.receive()
            full = sqlite3.OperationalError("database or disk is full")
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(server._database, "store", raising(full))
                peer.send(frame(1, create("/a")))
                with pytest.raises(DLError, match=r"metadata\.sqlite: database or disk is full"):
                    await server.ended
            peer.send(frame(2, create("/b")))
        await peer.require_end()

    run(scenario())


def test_a_trial_writes_the_file_and_changes_nothing(tmp_path: Path) -> None:
    """A failure is reported, and does not end the server."""

    async def scenario() -> None:
        async with served(tmp_path) as (server, _, _):
            before = server._database.load()[2]
            await server.try_file()
            assert server._database.load()[2] == before
            server._database._connection.execute("PRAGMA query_only = 1")
            with pytest.raises(DLError, match=r"cannot write .*metadata\.sqlite: attempt to write"):
                await server.try_file()
            server._database._connection.execute("PRAGMA query_only = 0")
            await server.try_file()
            assert server.not_serving() is None
            assert [each.metric for each in server.samples()] == list(METRICS)
            server.stop()
            assert server.not_serving() == "it ends"

    run(scenario())


def test_a_start_that_fails_leaves_the_folder_free(tmp_path: Path) -> None:
    """A taken port, and a file in place of the folder."""

    async def scenario() -> None:
        async with served(tmp_path / "one") as (_, host, port):
            with pytest.raises(ConfigurationError, match=f"cannot listen on {host}:{port}"):
                await MetadataServer(tmp_path / "two").start(host, port)
        with pytest.raises(ConfigurationError, match=r"cannot listen on a\.\.b:1: .* address"):
            await MetadataServer(tmp_path / "two").start("a..b", 1)
        async with served(tmp_path / "two"):
            pass
        (tmp_path / "two" / "metadata.sqlite").write_bytes(b"no database at all" * 99)
        with pytest.raises(CorruptMetadataError):
            await MetadataServer(tmp_path / "two").start("127.0.0.1", 0)
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match=r"cannot use .*file"):
            await MetadataServer(tmp_path / "file").start("127.0.0.1", 0)

    run(scenario())


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EmbeddedMetadataServer]:
    """A server of the test's own."""
    with EmbeddedMetadataServer(tmp_path / "server") as server:
        yield server


@pytest.mark.integration
def test_a_killed_server_has_all_it_acknowledged(process: EmbeddedMetadataServer) -> None:
    """Values, and the session with its ephemeral node, which a watcher never misses."""

    async def scenario() -> None:
        store = await ZooKeeperStore.connect(process.servers, session_timeout_s=30)
        other = await ZooKeeperStore.connect(process.servers, session_timeout_s=30)
        token, changes = store.session_token, [0]
        try:
            await store.create("/mine", b"x", ephemeral=True)
            await store.create("/kept")
            for version in range(20):
                await store.put("/kept", b"%d" % version, version=version)
            await asyncio.to_thread(process.kill)
            await until(lambda: store.session_state is SessionState.SUSPENDED)
            await asyncio.to_thread(process.start)
            await until(lambda: store.session_state is SessionState.CONNECTED)
            await until(lambda: other.session_state is SessionState.CONNECTED)
            assert store.session_token == token
            assert await store.get("/kept") == Versioned(b"19", 20)
            assert await other.get("/mine") == Versioned(b"x", 0, token)

            def count() -> None:
                changes[0] += 1

            other.watch("/mine", count)
            await until(lambda: changes[0] == 1)
            await store.aclose()
            await until(lambda: changes[0] > 1)
            assert await other.get("/mine") is None
        finally:
            await store.aclose()
            await other.aclose()

    run(scenario())


@pytest.mark.integration
def test_a_paused_server_ends_no_session(process: EmbeddedMetadataServer) -> None:
    """Its pause is longer than the time-out of the session."""

    async def scenario() -> None:
        store = await ZooKeeperStore.connect(process.servers, session_timeout_s=SESSION_S)
        token = store.session_token
        try:
            await store.create("/mine", ephemeral=True)
            await asyncio.to_thread(process.pause)
            await until(lambda: store.session_state is SessionState.SUSPENDED)
            await asyncio.sleep(SESSION_S + 1.5)  # the pause itself is under test
            await asyncio.to_thread(process.resume)
            await until(lambda: store.session_state is SessionState.CONNECTED)
            assert store.session_token == token
            assert await store.get("/mine") == Versioned(b"", 0, token)
        finally:
            await store.aclose()

    run(scenario())


@pytest.mark.integration
def test_one_folder_has_one_server(process: EmbeddedMetadataServer, tmp_path: Path) -> None:
    """The second one ends with the reason; the first one does not notice."""
    with pytest.raises(MetadataConnectionError, match="another server uses it"):
        EmbeddedMetadataServer(tmp_path / "server").start()
    assert process.is_running


@pytest.mark.integration
def test_its_operators_see_it(tmp_path: Path) -> None:
    """Metrics, and three kinds of health; SIGTERM ends it in order."""
    command = ["-m", "dlcore.ops.cli", "metadata", "serve", "--data-dir", str(tmp_path)]
    command += ["--port", "0", "--http-address", "127.0.0.1:0"]
    ready = tmp_path / "ready"
    with (
        ready.open("w") as log,
        subprocess.Popen([sys.executable, *command], stdout=log, stderr=log) as process,
    ):
        try:
            url = url_of(ready)
            for path in ("live", "ready", "works"):
                assert asked_json(f"{url}/health/{path}")[0] == 200
            found = scraped(url)
            assert found["dlog_ready"][()] == found["dlog_metadata_server_nodes"][()] == 1
            assert "dlog_metadata_connected" not in found
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0, ready.read_text()
        finally:
            process.kill()
