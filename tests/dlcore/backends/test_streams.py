"""Byte streams through a proxy: the core's own, over readers and writers of the endpoint."""

from __future__ import annotations

import asyncio
import io
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


def test_streams_are_files() -> None:
    """Python uses them like files; they say where they are."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        await asyncio.to_thread(write_and_read, served.servers[0].location)

    def write_and_read(endpoint: str) -> None:
        with open_blocking(endpoint) as namespace:
            log = namespace.open_log("clicks")
            with io.TextIOWrapper(io.BufferedWriter(log.open_stream_writer())) as text:
                text.writelines(f"line {number}\n" for number in range(100))
            with log.open_stream_reader() as stream:
                lines = io.TextIOWrapper(io.BufferedReader(stream)).readlines()
                assert [int(line.removeprefix("line ")) for line in lines] == list(range(100))
            writer = log.open_stream_writer()
            writer.write(b"end")
            assert repr(writer).startswith(
                f"<AppendOnlyStreamWriter at {writer.tell()} of <LogWriter"
            )
            writer.mark_end_of_stream()
            writer.close()
            with log.open_stream_reader(writer.tell() - 3) as stream:
                assert (stream.readall(), stream.has_ended) == (b"end", True)
                assert repr(stream) == f"<AppendOnlyStreamReader 'clicks' at {writer.tell()}>"
            with namespace.open_staging_writer(identity="me") as staging:
                assert repr(staging) == "<StagingWriter identity='me'>"
            with namespace.begin_append("me", 1) as append:
                assert repr(append) == "<StagedAppend 'me' v1>"
            with namespace.open_merged_reader(["clicks"], txid=writer.tell()) as reader:
                assert [record.payload for _, record in reader] == [b"end"]

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
