"""Waiting for work outside the event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from dlcore.metadata.answers import ConnectionHandler, in_thread
from tests.fixtures.certificates import make_tls

if TYPE_CHECKING:
    from pathlib import Path


def test_zookeeper_is_left_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the exit of Python 3.12: the event loop does it; an error is still raised."""
    done: list[str] = []

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def fail() -> None:
        raise OSError("no answer")

    async def leave() -> None:
        await in_thread(lambda: done.append(threading.current_thread().name))
        with pytest.raises(OSError, match="no answer"):
            await in_thread(fail)

    asyncio.run(leave())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    asyncio.run(leave())
    assert done == ["zookeeper-stop", threading.current_thread().name]


def test_data_that_tls_holds_back_is_seen(tmp_path: Path) -> None:
    """Two answers in one record of TLS: after the first one the socket itself has nothing more."""
    tls = make_tls(tmp_path / "tls")
    handler = ConnectionHandler(None)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        context = tls.bookie.server_context(asks_clients=False)
        with context.wrap_socket(theirs, server_side=True) as server:
            server.sendall(b"answer" * 2)
            server.recv(1)

    serving = threading.Thread(target=serve)
    serving.start()
    with tls.client.client_context().wrap_socket(ours, server_hostname="127.0.0.1") as client:
        assert client.recv(6) == b"answer"
        assert handler.select([client], [], [], 10.0) == ([client], [], [])
        pipe, other = socket.socketpair()
        with pipe, other:
            other.sendall(b"x")
            assert handler.select([pipe, client], [], [], 10.0) == ([client, pipe], [], [])
        assert client.recv(6) == b"answer"
        assert handler.select([client], [], [], 0.0) == ([], [], [])
        client.sendall(b"x")
    serving.join()
