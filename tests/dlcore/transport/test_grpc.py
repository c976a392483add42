"""The gRPC client beyond the contract: lost, silent and frozen bookies, batching, bounds."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from dlcore.config import LedgerClientConfig
from dlcore.errors import (
    BookieOverloadedError,
    BookieUnavailableError,
    MetadataConnectionError,
    WrongIncarnationError,
)
from dlcore.proto import bookie_pb2 as pb
from dlcore.transport import wire
from dlcore.transport.grpc import GrpcBookieClient
from tests.fixtures.served_bookie import BOOKIE, CLIENT, CLUSTER_ID, frame_of, run, serve

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from dlcore.ids import BookieId

    Context = grpc.aio.ServicerContext[bytes, bytes]

IMPATIENT = LedgerClientConfig(add_timeout_s=0.5, read_timeout_s=0.5)
"""For bookies that never answer."""


@asynccontextmanager
async def client_of(
    address: str | Callable[[BookieId], Awaitable[str]], config: LedgerClientConfig = CLIENT
) -> AsyncIterator[GrpcBookieClient]:
    """Open a client whose bookies are all at `address`."""

    async def resolve(_bookie: BookieId) -> str:
        assert isinstance(address, str)
        return address

    client = GrpcBookieClient(
        resolve if isinstance(address, str) else address, cluster_id=CLUSTER_ID, config=config
    )
    try:
        yield client
    finally:
        await client.aclose()


@dataclass
class Script:
    """A bookie that records the messages of its write streams and answers as told."""

    answer: Callable[[int], bool] = lambda _request_id: True
    shakes_hands: bool = True
    streams: int = 0
    batches: list[wire.WriteBatch] = field(default_factory=list)
    has_batch: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, _requests: object, context: Context) -> None:
        """Handle one stream."""
        self.streams += 1
        await context.read()
        if self.shakes_hands:
            await context.write(wire.encode_write_response([0], ()))
        while isinstance(data := cast("object", await context.read()), bytes):
            batch = wire.decode_write_request(data)
            self.batches.append(batch)
            self.has_batch.set()
            count = len(batch.frames) + len(batch.lacs)
            ids = range(batch.first_request_id, batch.first_request_id + count)
            if answered := [id_ for id_ in ids if self.answer(id_)]:
                await context.write(wire.encode_write_response(answered, ()))


@asynccontextmanager
async def scripted(
    script: Script, **streams: Callable[[bytes, Context], Awaitable[None]]
) -> AsyncIterator[str]:
    """Serve `script`, and other methods' handlers by name; yield the address."""
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Write": grpc.stream_stream_rpc_method_handler(script.write, None, None)
    }
    for name, handler in streams.items():
        handlers[name] = grpc.unary_stream_rpc_method_handler(handler, None, None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def test_a_bookie_that_comes_back_elsewhere_is_found_again(tmp_path: Path) -> None:
    """Stop the server under an open stream; start it on another port; the same client goes on."""

    async def scenario() -> None:
        address = ""

        async def resolve(_bookie: BookieId) -> str:
            return address

        async with client_of(resolve) as client:
            async with serve(tmp_path) as served:
                address = served.address
                await client.add_entry(BOOKIE, frame_of(1, 0))
                assert await client.read_lac(BOOKIE, ledger_id=1, fence=False) == -1
            with pytest.raises(BookieUnavailableError):
                await client.add_entry(BOOKIE, frame_of(1, 1))
            with pytest.raises(BookieUnavailableError):
                await client.read_lac(BOOKIE, ledger_id=1, fence=False)
            async with serve(tmp_path) as served:
                assert served.address != address
                address = served.address
                await client.add_entry(BOOKIE, frame_of(1, 1))
                read = await client.read_entry(BOOKIE, ledger_id=1, entry_id=0, fence=False)
                assert bytes(read) == frame_of(1, 0)

    run(scenario)


def test_losing_the_connection_fails_every_pending_add() -> None:
    """Many adds wait on a bookie that answers none; it goes away: all fail, none hangs."""

    async def scenario() -> None:
        script = Script(answer=lambda _id: False)
        server = scripted(script)
        async with client_of(await server.__aenter__()) as client:
            adds = [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(50)]
            await script.has_batch.wait()
            adds += [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(50, 60)]
            await server.__aexit__(None, None, None)
            outcomes = await asyncio.gather(*adds, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {BookieUnavailableError}
            assert len({id(outcome) for outcome in outcomes}) == len(outcomes)

    run(scenario)


def test_closing_fails_every_pending_add() -> None:
    """Close a client whose adds nobody answers, some of them not yet sent."""

    async def scenario() -> None:
        script = Script(answer=lambda _id: False)
        async with scripted(script) as address, client_of(address) as client:
            adds = [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(5)]
            await script.has_batch.wait()
            adds += [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(5, 9)]
            await client.aclose()
            outcomes = await asyncio.gather(*adds, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {BookieUnavailableError}

    run(scenario)


@pytest.mark.parametrize("shakes_hands", [True, False])
def test_a_silent_bookie_costs_one_add_time_out(shakes_hands: bool) -> None:
    """Nothing is answered: the adds fail in time, and the next one gets a new stream."""

    async def scenario() -> None:
        script = Script(answer=lambda _id: False, shakes_hands=shakes_hands)
        async with scripted(script) as address, client_of(address, IMPATIENT) as client:
            adds = [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(3)]
            for add in adds:
                with pytest.raises(BookieUnavailableError, match="no answer"):
                    await add
            script.answer, script.shakes_hands = lambda _id: True, True
            await client.add_entry(BOOKIE, frame_of(1, 3))
            assert script.streams == 2

    run(scenario)


def test_an_add_that_alone_stays_unanswered_fails_alone() -> None:
    """The bookie answers all but one: only that one fails, and the stream lives on."""

    async def scenario() -> None:
        script = Script(answer=lambda id_: id_ != 1)
        async with scripted(script) as address, client_of(address, IMPATIENT) as client:
            lost = client.add_entry(BOOKIE, frame_of(1, 0))
            while not lost.done():
                await client.add_entry(BOOKIE, frame_of(1, 1))
                await asyncio.sleep(0.01)
            with pytest.raises(BookieUnavailableError, match="no answer"):
                await lost
            await client.add_entry(BOOKIE, frame_of(1, 2))
            assert script.streams == 1

    run(scenario)


def test_a_peer_that_speaks_no_grpc_is_unavailable_in_time() -> None:
    """A port that accepts and says nothing: every request ends by its own time-out."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            async with client_of(f"127.0.0.1:{port}", IMPATIENT) as client:
                with pytest.raises(BookieUnavailableError):
                    await client.add_entry(BOOKIE, frame_of(1, 0))
                with pytest.raises(BookieUnavailableError):
                    await client.read_lac(BOOKIE, ledger_id=1, fence=False)

    run(scenario)


def test_a_range_read_that_stalls_ends_by_the_read_time_out() -> None:
    """One chunk comes and then nothing."""

    async def stall(_data: bytes, context: Context) -> None:
        await context.write(wire.encode_read_entries_response([b"first"]))
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with (
            scripted(Script(), ReadEntries=stall) as address,
            client_of(address, IMPATIENT) as client,
        ):
            chunks = client.read_entries(BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=9)
            assert await anext(chunks) == [b"first"]
            with pytest.raises(BookieUnavailableError, match="no answer"):
                await anext(chunks)

    run(scenario)


def test_a_reader_that_stops_early_ends_the_read_at_the_bookie() -> None:
    """Take one chunk, close the iterator: the bookie's handler is cancelled."""
    ended = asyncio.Event()

    async def forever(_data: bytes, context: Context) -> None:
        try:
            while True:
                await context.write(wire.encode_read_entries_response([b"x" * 100_000]))
        finally:
            ended.set()

    async def scenario() -> None:
        async with (
            scripted(Script(), ReadEntries=forever) as address,
            client_of(address) as client,
        ):
            chunks = client.read_entries(BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=9)
            async with aclosing(cast("AsyncGenerator[object, None]", chunks)):
                await anext(chunks)
            await ended.wait()

    run(scenario)


def test_a_follow_stream_that_the_bookie_ends_is_unavailable() -> None:
    """An end that nobody asked for must not look like the end of the ledger."""

    async def end(_data: bytes, context: Context) -> None:
        update = pb.FollowResponse(status=pb.OK, last_add_confirmed=3)
        await context.write(update.SerializeToString())

    async def scenario() -> None:
        async with scripted(Script(), Follow=end) as address, client_of(address) as client:
            updates = client.follow(BOOKIE, ledger_id=1, first_entry_id=0)
            assert (await anext(updates)).last_add_confirmed == 3
            with pytest.raises(BookieUnavailableError, match="ended"):
                await anext(updates)

    run(scenario)


class Freezer:
    """Forwards bytes between a client and `target` until told to stop: a partition."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def freeze(self) -> None:
        """Let nothing pass any more; connections stay open."""
        self._flows.clear()

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        """Accept connections at the address yielded."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._forward(source, sink)))

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(2**16):
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
        finally:
            sink.transport.abort()
            with suppress(OSError):
                await sink.wait_closed()


def test_a_frozen_bookie_is_noticed_by_its_follower(tmp_path: Path) -> None:
    """Freeze the network under a follower that waits: keepalive ends it within a few seconds."""

    async def scenario() -> None:
        config = replace(CLIENT, add_timeout_s=1.0)
        async with serve(tmp_path) as served:
            freezer = Freezer(served.address)
            async with freezer.listen() as address, client_of(address, config) as client:
                updates = client.follow(BOOKIE, ledger_id=1, first_entry_id=0)
                await anext(updates)
                freezer.freeze()
                with pytest.raises(BookieUnavailableError):
                    await anext(updates)

    run(scenario)


def test_waiting_requests_share_messages_and_keep_their_order() -> None:
    """Queue small and big adds, recovery adds and LACs: few messages, everything in call order."""

    async def scenario() -> None:
        script = Script()
        async with scripted(script) as address, client_of(address) as client:
            sent: list[tuple[object, ...]] = []
            pending: list[Awaitable[None]] = []

            def add(entry_id: int, size: int, *, is_recovery: bool = False) -> None:
                frame = frame_of(1, entry_id, b"x" * size)
                sent.append(("add", is_recovery, frame))
                pending.append(client.add_entry(BOOKIE, frame, is_recovery=is_recovery))

            def tell(lac: int) -> None:
                sent.append(("lac", 1, lac))
                pending.append(client.write_lac(BOOKIE, ledger_id=1, last_add_confirmed=lac))

            for i in range(500):
                add(i, 100)
            tell(400)
            tell(499)
            for i in range(500, 510):
                add(i, 600_000)
            for i in range(510, 520):
                add(i, 100, is_recovery=True)
            await asyncio.gather(*pending)
            received: list[tuple[object, ...]] = []
            for batch in script.batches:
                received += [("add", batch.is_recovery, bytes(frame)) for frame in batch.frames]
                received += [("lac", *lac) for lac in batch.lacs]
            assert received == sent
            assert len(script.batches) <= 1 + 10 + 1
            assert script.streams == 1

    run(scenario)


def test_the_backlog_of_a_stream_is_bounded() -> None:
    """A bookie answers nothing: adds beyond the bound are refused at once, the rest still wait."""

    async def scenario() -> None:
        config = replace(CLIENT, pending_entries_max=5)
        async with scripted(Script(answer=lambda _id: False)) as address:
            async with client_of(address, config) as client:
                adds = [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(21)]
                with pytest.raises(BookieOverloadedError):
                    await adds.pop()
                assert not any(add.done() for add in adds)
            for add in adds:
                with pytest.raises(BookieUnavailableError):
                    await add

    run(scenario)


def test_an_address_that_cannot_be_found_out_is_unknown() -> None:
    """The metadata store is away, or knows another incarnation: two different answers."""

    async def scenario() -> None:
        for raised, seen in (
            (MetadataConnectionError("away"), BookieUnavailableError),
            (WrongIncarnationError("wiped"), WrongIncarnationError),
        ):

            async def resolve(_bookie: BookieId, error: Exception = raised) -> str:
                raise error

            async with client_of(resolve) as client:
                with pytest.raises(seen):
                    await client.add_entry(BOOKIE, frame_of(1, 0))
                with pytest.raises(seen):
                    await client.read_lac(BOOKIE, ledger_id=1, fence=True)

    run(scenario)


def test_cancelling_one_add_harms_no_other(tmp_path: Path) -> None:
    """Cancel a future under way; its neighbours are answered."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, client_of(served.address) as client:
            adds = [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(3)]
            adds[1].cancel()
            await adds[0]
            await adds[2]

    run(scenario)


def test_a_bookie_of_another_cluster_is_refused(tmp_path: Path) -> None:
    """The handshake names the cluster; nothing is stored."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            client = GrpcBookieClient(served.resolve, cluster_id="other", config=CLIENT)
            with pytest.raises(Exception, match="cluster"):
                await client.add_entry(BOOKIE, frame_of(1, 0))
            await client.aclose()
            assert served.storage.ledgers() == []

    run(scenario)
