"""Clients of the port for Kafka's clients that are gone before they are served."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any, cast

from dlcore.base import event_loop
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.kafka.server import KafkaServer
from tests.fixtures.aio import until

if TYPE_CHECKING:
    import pytest


def test_a_client_may_leave_before_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As probes of a port do, which reset the connection: that is no defect of the proxy."""
    met: list[Any] = []
    errors: list[Exception] = []
    connected = KafkaServer._connected

    def noted(self: KafkaServer, *streams: Any) -> None:
        met.append(streams)
        try:
            connected(self, *streams)
        except TypeError as error:
            errors.append(error)

    async def scenario() -> None:
        kafka = KafkaServer(ProxyConfig(kafka_address="127.0.0.1:0"), None)
        await kafka.open()
        kafka._serving = (cast("Any", None),) * 3  # this client gets to none of them
        # In one turn of the loop, so that it has left before it is accepted.
        with socket.create_connection(kafka._listener.sockets[0].getsockname()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(lambda: bool(met))
        kafka._serving = None
        await kafka.aclose()
        for _, writer in met:
            writer.transport.abort()

    monkeypatch.setattr(KafkaServer, "_connected", noted)
    event_loop.run(scenario())  # uvloop asks the socket for its peer, asyncio knew it before
    assert errors == []
