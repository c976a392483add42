"""Whether a proxy is gone: a refused connection alone proves it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dlcore.proxy import probing
from dlcore.proxy.probing import refuses_connections
from tests.fixtures.ports import free_ports


def test_no_proxy_listens_where_connections_are_refused() -> None:
    """By address, and by a name that leads to several of them."""
    port = free_ports(1)
    for host in ("127.0.0.1", "localhost"):
        assert asyncio.run(refuses_connections(f"grpc://{host}:{port}"))


def test_a_listening_proxy_is_there_also_with_tls() -> None:
    """Nothing is said on the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for scheme in ("grpc", "grpc+tls"):
            assert not asyncio.run(refuses_connections(f"{scheme}://127.0.0.1:{port}"))


@pytest.mark.parametrize("location", ["grpc://no.such.host.invalid:1", "elsewhere", "grpc://h:x"])
def test_an_address_that_leads_nowhere_proves_nothing(location: str) -> None:
    """The host may be cut off, or its name unknown, from here alone."""
    assert not asyncio.run(refuses_connections(location))


def test_a_host_that_does_not_answer_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for."""
    monkeypatch.setattr(probing, "_PROBE_S", 0.05)

    async def never(host: str, port: int) -> bool:
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(probing, "_refuses", never)
    assert not asyncio.run(refuses_connections("grpc://127.0.0.1:1"))
