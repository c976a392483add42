"""Byte streams through a proxy: the core's own, over readers and writers of the endpoint."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    LogNotReadyError,
    ProducerFencedError,
    ProxyUnavailableError,
    WriteError,
)
from dlcore.log.writing.writer import DirectWriter
from dlcore.sync import open_namespace as open_blocking
from tests.dlcore.backends.test_writing import remote
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.base.ids import DLSN


def test_one_writer_at_a_time() -> None:
    """A new writer begins behind all that the one before it wrote, which writes no more."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        first = await log.open_stream_writer()
        waiting = first.write(b"abc")
        await asyncio.sleep(0)
        second = await log.open_stream_writer()
        written = 3 if second.tell() else 0
        assert await second.write(b"def") == written + 3

        async def write_more() -> None:
            await first.write(b"lost")

        with pytest.raises((ProducerFencedError, WriteError), match=r"incarnation|ProducerFenced"):
            await write_more()
        assert (waiting.exception() is None) == (written == 3)
        await first.abort()
        await second.aclose()
        async with await log.open_stream_reader() as reader:
            assert await reader.read() == b"abc"[:written] + b"def"

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize("heals", [True, False])
def test_a_writer_that_cannot_be_opened_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, *, heals: bool
) -> None:
    """As when the owner loses the log; when it releases the log, it is asked again."""
    commit, failures = DirectWriter.commit, 3 if heals else 1000

    async def failing(writer: DirectWriter) -> DLSN | None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise WriteError("the writer failed")
        return await commit(writer)

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served, patience_s=60.0 if heals else 0.3)
        monkeypatch.setattr(DirectWriter, "commit", failing)
        if heals:
            async with await log.open_stream_writer() as writer:
                assert await writer.write(b"abc") == 3
        else:
            with pytest.raises(LogNotReadyError):
                await log.open_stream_writer()

    with_proxies("clicks")(scenario)


def test_a_file_that_cannot_be_sealed_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, for what was written is there: to close it then is no error."""

    async def refuse(_: Endpoint, log: str, **__: bool) -> None:
        raise ProxyUnavailableError(f"log {log!r}: no proxy answers")

    async def scenario(served: Proxies) -> None:
        await served.start()
        await asyncio.to_thread(write, served.servers[0].location)
        async with await (await remote(served)).open_stream_reader() as reader:
            assert await reader.read() == b"abc"

    def write(endpoint: str) -> None:
        monkeypatch.setattr("dlcore.backends.flight.writing.seal", refuse)
        with open_blocking(endpoint) as namespace:
            stream = namespace.open_log("clicks").open_stream_writer()
            stream.write(b"abc")
            with pytest.raises(ProxyUnavailableError):
                stream.mark_end_of_stream()
            stream.close()

    with_proxies("clicks")(scenario)
