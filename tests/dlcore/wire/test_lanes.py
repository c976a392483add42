"""A read that stands delays no add and no other reader: by lanes at the client, windows at both."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

from dlcore.wire.messages import Chunk, Follow, Lac, ReadEntries, ReadEntry, ReadLac, Update, encode
from tests.fixtures.raw_wire import RawEnd, Script, raw_bookie
from tests.fixtures.served_bookie import BOOKIE, client_of, frame_of, run, serve

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.wire.messages import Message
    from tests.fixtures.served_bookie import ServedBookie

_STANDING = 8
_ENTRY_BYTES = 256 * 1024
_ENTRIES = 64
"""More bytes than a range read's window."""


class HalfChunk:
    """A bookie that sends half of a range's chunk, and nothing more there until a command."""

    def __init__(self) -> None:
        self.is_standing = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self._rest: bytes = b""

    def _replies(self, message: Message) -> list[Message | bytes]:
        match message:
            case ReadEntries(request_id):
                chunk = Chunk(request_id, [b"c" * 100_000], is_last=True)
                data = b"".join(encode(chunk))
                self._rest = data[len(data) // 2 :]
                self.is_standing.set()
                return [data[: len(data) // 2]]
            case ReadLac(request_id):
                return [Lac(request_id, 4)]
            case ReadEntry(request_id):
                return [Chunk(request_id, [b"e" * 100], is_last=True)]
            case Follow(request_id):
                return [Update(request_id, [b"f" * 100], 0, fenced=False)]
        return []

    async def serve(self, end: RawEnd) -> None:
        """Handle one connection."""
        receive = end.receive

        async def receive_unless_standing() -> Message | None:
            if self._rest:
                rest, self._rest = self._rest, b""
                await self.may_go_on.wait()
                end.send(rest)
            return await receive()

        end.receive = receive_unless_standing  # type: ignore[method-assign]
        await Script(replies=self._replies).serve(end)


def test_while_half_a_chunk_has_come_everything_else_is_answered() -> None:
    """Behind it nothing could come on its connection, so they have their own."""

    async def scenario() -> None:
        bookie = HalfChunk()
        async with raw_bookie(bookie.serve) as address, client_of(address) as client:
            chunks = client.read_entries(BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=0)
            standing = asyncio.ensure_future(anext(chunks))
            await bookie.is_standing.wait()
            await client.add_entry(BOOKIE, frame_of(1, 0))
            await client.write_lac(BOOKIE, ledger_id=1, last_add_confirmed=0)
            assert await client.read_lac(BOOKIE, ledger_id=1, fence=False) == 4
            read = await client.read_entry(BOOKIE, ledger_id=1, entry_id=0, fence=False)
            assert bytes(read) == b"e" * 100
            async with aclosing(client.follow(BOOKIE, ledger_id=1, first_entry_id=0)) as updates:
                assert bytes((await anext(updates)).frames[0]) == b"f" * 100
            assert not standing.done()
            bookie.may_go_on.set()
            assert [len(frame) for frame in await standing] == [100_000]
            await chunks.aclose()

    run(scenario)


def test_reads_without_a_taker_delay_no_add_and_no_reader(tmp_path: Path) -> None:
    """Their windows are full and stay so; an add and other readers have their answers meanwhile."""

    async def scenario() -> None:
        async with (
            serve(tmp_path) as served,
            client_of(served.address) as client,
            AsyncExitStack() as stack,
        ):
            body = b"x" * _ENTRY_BYTES
            for entry_id in range(_ENTRIES):
                await client.add_entry(BOOKIE, frame_of(1, entry_id, body, lac=entry_id - 1))
            for _ in range(_STANDING):
                chunks = client.read_entries(
                    BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=_ENTRIES - 1
                )
                await anext(await stack.enter_async_context(aclosing(chunks)))
                updates = client.follow(BOOKIE, ledger_id=1, first_entry_id=0)
                await anext(await stack.enter_async_context(aclosing(updates)))
            while len(standing := _with_full_windows(served)) < 2 * _STANDING:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            last = frame_of(1, _ENTRIES, lac=_ENTRIES - 1)
            await client.add_entry(BOOKIE, last)
            read = await client.read_entry(BOOKIE, ledger_id=1, entry_id=_ENTRIES, fence=False)
            assert bytes(read) == last
            found = 0
            async for frames in client.read_entries(
                BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=_ENTRIES
            ):
                found += len(frames)
            assert found == _ENTRIES + 1
            assert _with_full_windows(served) == standing

    run(scenario)


def _with_full_windows(served: ServedBookie) -> set[int]:
    """Return the reads that the bookie may send nothing more for now."""
    return {
        id(stream)
        for connection in served.service.connections
        for stream in connection.reads.streams.values()
        if connection._end.window_of(stream.request_id) <= 0
    }
