"""A port that is not ZooKeeper's, given as one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import MetadataConnectionError
from dlcore.metadata.zookeeper import ZooKeeperStore

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter


def test_the_port_of_another_service_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    """It names the server and says what is wrong, and kazoo's tracebacks are not shown."""

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\xff\xff\xff\xff, which is no length of an answer")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        reason = f"no ZooKeeper answers at {host}:{port} .* is not ZooKeeper: is it the port of"
        async with server:
            with pytest.raises(MetadataConnectionError, match=reason):
                await ZooKeeperStore.connect(f"{host}:{port}", connect_timeout_s=3)

    asyncio.run(scenario())
    assert caplog.text == ""
