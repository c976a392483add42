"""Streams of a range read are read on, and closed, and every error reaches the caller.

Goal: `RangeRead` performs what its machine decides, and leaves nothing.  Method: streams of frames
that are written down, which note when they are read and closed.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import LedgerReadError, NoSuchEntryError
from dlcore.ledger.reading.range_read import RangeReader
from dlcore.ledger.reading.range_read_driver import RangeRead
from tests.fixtures.aio import cancel_after
from tests.fixtures.ledgers import (
    LEDGER_ID,
    bookie,
    frame_of,
    health_of,
    metadata_of,
    quorum_of,
)
from tests.simulation.loop import run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.wire.frames import EntryFrame

CONFIG = LedgerClientConfig(speculative_read_delay_s=1.0, read_timeout_s=10.0)
SILENCE = "nothing comes any more"


class WrittenStreams:
    """A client whose bookies send what is written down; B is asked first, then C, then A."""

    def __init__(self, **written: Sequence[Any]) -> None:
        self._written = {bookie(name): [*items] for name, items in written.items()}
        self.given: list[str] = []
        self.opened: list[str] = []
        self.closed: list[str] = []

    async def read_entries(
        self, of: BookieId, **_: int
    ) -> AsyncGenerator[Sequence[bytes | memoryview], None]:
        """Give each item: the ids of entries, frames, an error, or silence for ever."""
        self.opened.append(of.name)
        try:
            items = self._written.get(of, [SILENCE])
            while items:
                item = items.pop(0)
                if item is SILENCE:
                    await asyncio.Event().wait()
                if isinstance(item, Exception):
                    raise item
                self.given.append(of.name)
                yield [frame_of(each) if isinstance(each, int) else each for each in item]
        finally:
            self.closed.append(of.name)

    def read(self, last: int) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Read entries 0 to `last`."""
        return self.reader(last).chunks()

    def reader(self, last: int) -> RangeRead:
        """Return what reads entries 0 to `last`."""
        metadata = metadata_of((0, "ABC"), quorum=quorum_of(3, 3, 2))
        client: Any = self
        return RangeRead(
            client,
            CONFIG,
            health_of(),
            ledger_id=LEDGER_ID,
            ensemble=metadata.last_ensemble,
            quorum=metadata.quorum,
            first_entry_id=0,
            last_entry_id=last,
        )


def ids_of(entries: Sequence[EntryFrame]) -> list[int]:
    """Return the ids of entries."""
    return [entry.entry_id for entry in entries]


async def turns() -> None:
    """Let everything happen that can happen now."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_chunk_is_fetched_while_the_caller_works_and_the_stream_is_closed_when_it_leaves() -> (
    None
):
    """A reader that is left in the middle leaves nothing."""

    async def scenario() -> None:
        streams = WrittenStreams(B=[[0], [1], [2], [3]])
        async with aclosing(streams.read(3)) as chunks:
            for count in (1, 2):
                assert ids_of(await anext(chunks)) == [count - 1]
                await turns()
                assert streams.given == ["B"] * (count + 1)
            assert streams.closed == []
        assert streams.closed == ["B"]

    run(scenario())


def test_the_entries_of_a_caller_are_freed_while_it_waits_for_the_next() -> None:
    """Else a reader would take the memory of one more chunk."""

    class Buffer(bytearray):
        """A buffer that may be referred to weakly."""

    async def scenario() -> None:
        buffer = Buffer(frame_of(0))
        kept = weakref.ref(buffer)
        streams = WrittenStreams(B=[[memoryview(buffer)], SILENCE])
        del buffer
        async with aclosing(streams.read(1)) as chunks:
            await anext(chunks)
            waiting = asyncio.create_task(anext(chunks))
            await turns()
            assert kept() is None
            await cancel_after(waiting, 0)

    run(scenario())


@pytest.mark.parametrize("then", [SILENCE, NoSuchEntryError("not here")])
def test_a_reader_that_was_left_is_freed_at_once(then: Any) -> None:
    """No timer or task refers to it, and it does not refer to itself, by an error for example."""

    async def scenario() -> None:
        reader = WrittenStreams(B=[[0], then]).reader(9)
        kept = weakref.ref(reader)
        async with aclosing(reader.chunks()) as chunks:
            await anext(chunks)
            await turns()
        del reader, chunks
        await turns()
        assert kept() is None

    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()


def test_each_stream_is_closed_when_a_caller_that_waits_is_cancelled() -> None:
    """The read ends as if it had been left; a second cancellation changes nothing."""

    async def scenario() -> None:
        streams = WrittenStreams()

        async def read() -> None:
            async with aclosing(streams.read(3)) as chunks:
                await anext(chunks)

        reading = asyncio.create_task(read())
        await asyncio.sleep(1.5)
        await cancel_after(reading, 0, 0)
        assert reading.cancelled()
        assert sorted(streams.closed) == ["B", "C"]

    run(scenario())


def test_a_silent_stream_is_closed_when_another_one_delivers() -> None:
    """Its bookie is to stop."""

    async def scenario() -> None:
        streams = WrittenStreams(C=[[0], SILENCE])
        async with aclosing(streams.read(1)) as chunks:
            assert ids_of(await anext(chunks)) == [0]
            await turns()
            assert streams.closed == ["B"]

    run(scenario())


def test_a_stream_of_damage_is_closed_and_another_one_opened() -> None:
    """While the read goes on, and not at its end."""

    async def scenario() -> None:
        streams = WrittenStreams(B=[[0, b"damaged"], SILENCE])
        async with aclosing(streams.read(9)) as chunks:
            assert ids_of(await anext(chunks)) == [0]
            await turns()
            assert streams.opened == ["B", "C"]
            assert streams.closed == ["B"]

    run(scenario())


def test_the_error_of_all_replicas_is_raised_after_the_entries_before_it() -> None:
    """It names the answer of each."""

    async def scenario() -> None:
        missing = [NoSuchEntryError("not here")]
        streams = WrittenStreams(A=missing, B=[[0], *missing], C=missing)
        async with aclosing(streams.read(1)) as chunks:
            assert ids_of(await anext(chunks)) == [0]
            with pytest.raises(LedgerReadError, match=r"no replica returned entry 1: .*not here"):
                await anext(chunks)

    run(scenario())


@pytest.mark.parametrize("works", [True, False])
def test_a_defect_of_a_stream_is_raised_in_the_caller(*, works: bool) -> None:
    """Also if it works then; it would wait for ever."""

    async def scenario() -> None:
        streams = WrittenStreams(B=[*([[0]] if works else []), ZeroDivisionError()])
        async with aclosing(streams.read(1)) as chunks:
            if works:
                await anext(chunks)
                await turns()
            with pytest.raises(ZeroDivisionError):
                await anext(chunks)

    run(scenario())


def test_a_defect_of_the_machine_is_raised_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here at a tick, which belongs to no task."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(RangeReader, "_on_time", broken)

    async def scenario() -> None:
        async with aclosing(WrittenStreams().read(1)) as chunks:
            with pytest.raises(ZeroDivisionError):
                await anext(chunks)

    run(scenario())
