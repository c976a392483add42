"""Staging over an endpoint that is given up halfway: what was written is staged whole, or not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.backends.flight import staging, streams
from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import LogRecordTooLongError, WriteError
from dlcore.log.staging.writer import DirectStagingWriter
from tests.dlcore.backends.test_writing import payloads
from tests.fixtures.served_proxies import Proxies, with_proxies
from tests.fixtures.staged_records import batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from dlcore.backends.flight.namespace import FlightNamespace
    from dlcore.backends.flight.staging import FlightStagingWriter
    from dlcore.log.metadata.segment import StagedExtent

LIMIT = 100_000


class Held:
    """Lets the n-th call of a coroutine function wait until it is released."""

    def __init__(self, call: Callable[..., Awaitable[Any]], number: int) -> None:
        self._call = call
        self._left = number
        self.is_reached, self.may_go = asyncio.Event(), asyncio.Event()

    async def __call__(self, *args: Any) -> Any:
        """Be that function."""
        self._left -= 1
        if not self._left:
            self.is_reached.set()
            await self.may_go.wait()
        return await self._call(*args)

    async def cancel_there(self, call: Coroutine[Any, Any, Any]) -> None:
        """Give a call up that has come so far."""
        task = asyncio.create_task(call)
        await self.is_reached.wait()
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException)
        assert task.cancelled()
        self.may_go.set()


def staged_by(scenario: Callable[[Proxies, FlightNamespace], Awaitable[None]]) -> None:
    """Run a scenario with a proxy."""

    async def served_to(served: Proxies) -> None:
        await served.start(message_bytes_max=LIMIT)
        async with await open_namespace(served.servers[0].location) as namespace:
            await scenario(served, namespace)

    with_proxies("clicks")(served_to)


async def committed(namespace: FlightNamespace, extents: list[StagedExtent]) -> None:
    """Commit what was staged."""
    assert (await (await namespace.begin_append("job", 1)).commit(extents)).committed


async def written(namespace: FlightNamespace, *texts: str) -> FlightStagingWriter:
    """Return a writer with a message for each text."""
    writer = await namespace.open_staging_writer(identity="job")
    for text in texts:
        await writer.write_batch("clicks", batch(text))
    return writer


@pytest.mark.parametrize("is_sent", [False, True], ids=["while it is sent", "while it is staged"])
def test_a_writer_that_gives_up_and_stages_again_stages_all(
    is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-C, or a time limit of one's own."""

    async def scenario(served: Proxies, namespace: FlightNamespace) -> None:
        writer = await written(namespace, "a", "b", "c")
        if is_sent:
            held = Held(DirectStagingWriter.stage, 1)
            monkeypatch.setattr(DirectStagingWriter, "stage", lambda self: held(self))
        else:
            held = Held(streams.write, 3)  # the first message says what is to be staged
            monkeypatch.setattr(staging, "write", held)
        await held.cancel_there(writer.stage())
        await committed(namespace, await writer.stage())
        assert await payloads(served) == [b"a", b"b", b"c"]

    staged_by(scenario)


@pytest.mark.parametrize("kept", [0, LIMIT])
def test_calls_at_once_follow_each_other(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come while a stream is being opened, too."""
    monkeypatch.setattr(staging, "KEPT_BYTES_MAX", kept)
    texts = [f"{number}" * (LIMIT // 3) for number in range(6)]

    async def scenario(served: Proxies, namespace: FlightNamespace) -> None:
        writer = await written(namespace)
        async with asyncio.TaskGroup() as calls:
            for text in texts:
                calls.create_task(writer.write_batch("clicks", batch(text)))
            staged = calls.create_task(writer.stage())
        await committed(namespace, staged.result())
        assert await payloads(served) == [text.encode() for text in texts]

    staged_by(scenario)


def test_a_record_that_is_too_large_is_an_error_until_it_is_discarded() -> None:
    """Earlier records are not staged without it."""

    async def scenario(served: Proxies, namespace: FlightNamespace) -> None:
        writer = await written(namespace, "a")
        await writer.write_batch("clicks", pa.record_batch({"value": [bytes(LIMIT)]}))
        for _ in range(2):
            with pytest.raises(LogRecordTooLongError, match="accepts 100000 bytes at most"):
                await writer.stage()
        await writer.discard()
        await writer.write_batch("clicks", batch("b"))
        await committed(namespace, await writer.stage())
        assert await payloads(served) == [b"b"]

    staged_by(scenario)


def test_unkept_parts_are_lost_with_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large write that was given up halfway is reported, too."""
    monkeypatch.setattr(staging, "KEPT_BYTES_MAX", 0)

    async def scenario(served: Proxies, namespace: FlightNamespace) -> None:
        writer = await written(namespace, "a", "b")
        held = Held(streams.write, 1)
        monkeypatch.setattr(staging, "write", held)
        await held.cancel_there(writer.write_batch("clicks", batch("c")))
        for call in (writer.write_batch("clicks", batch("d")), writer.stage()):
            with pytest.raises(WriteError, match="call discard, and write all of them again"):
                await call
        await writer.discard()
        await writer.write_batch("clicks", batch("e"))
        await committed(namespace, await writer.stage())
        assert await payloads(served) == [b"e"]

    staged_by(scenario)
