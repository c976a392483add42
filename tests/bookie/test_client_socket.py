"""A client's socket before its connection, while it is there, and after its loss."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bookie.serving.connection import ClientSocket


class NotedTransport(asyncio.Transport):
    """Notes what it is asked for."""

    def __init__(self, **known: Any) -> None:
        super().__init__(known)
        self.calls: list[Any] = []
        self.has_end = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Note it."""
        self.calls.append((high, low))

    def is_closing(self) -> bool:
        """Return whether it is asked to end."""
        return "close" in self.calls or "abort" in self.calls

    def get_write_buffer_size(self) -> int:
        """Return some number."""
        return 7

    def write(self, data: Any) -> None:
        """Note what is sent."""
        self.calls.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        """Note what is sent."""
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """Return whether it can end one direction."""
        return self.has_end

    def write_eof(self) -> None:
        """Note it."""
        self.calls.append("eof")

    def resume_reading(self) -> None:
        """Note it."""
        self.calls.append("resume")

    def pause_reading(self) -> None:
        """Note it."""
        self.calls.append("pause")

    def close(self) -> None:
        """Note it."""
        self.calls.append("close")

    def abort(self) -> None:
        """Note it."""
        self.calls.append("abort")


def use_all(socket: ClientSocket) -> None:
    """Make each call once."""
    socket.send([b"a", b"b"])
    socket.set_reading(is_reading=False)
    socket.set_reading(is_reading=True)
    socket.end_sending()
    socket.close()
    socket.abort()


def test_calls_reach_the_transport_while_there_is_one() -> None:
    """Before and after they do nothing."""
    socket, transport = ClientSocket(), NotedTransport()
    use_all(socket)
    assert (socket.is_open, socket.unsent_bytes) == (False, 0)
    assert socket.connect(transport) is None
    assert (socket.is_open, socket.unsent_bytes) == (True, 7)
    transport.calls.clear()
    use_all(socket)
    assert transport.calls == [b"ab", "pause", "resume", "eof", "close", "abort"]
    assert (socket.is_open, socket.unsent_bytes) == (False, 7)
    socket.transport = None
    use_all(socket)
    assert transport.calls == [b"ab", "pause", "resume", "eof", "close", "abort"]
    assert (socket.is_open, socket.unsent_bytes) == (False, 0)


def test_nothing_is_sent_to_a_client_that_is_hung_up_on() -> None:
    """And a transport that cannot end one direction, as that of TLS, is left alone."""
    socket, transport = ClientSocket(), NotedTransport()
    socket.connect(transport)
    transport.calls.clear()
    transport.has_end = False
    socket.end_sending()
    socket.close()
    socket.send([b"late"])
    assert transport.calls == ["close"]


@pytest.mark.parametrize(
    ("certificate", "peer"),
    [
        ({"subject": ((("commonName", "writer"),),)}, "writer"),
        ({"subject": ()}, ("10.0.0.1", 9)),
        (None, ("10.0.0.1", 9)),
    ],
)
def test_logs_name_a_client_by_its_certificate_else_by_its_address(
    certificate: Any, peer: object
) -> None:
    """Also after its loss."""
    socket = ClientSocket()
    transport = NotedTransport(peercert=certificate, peername=("10.0.0.1", 9))
    assert socket.connect(transport) == certificate
    socket.transport = None
    assert socket.peer == peer
