"""The bookie's service against clients that break its rules, press it, or meet it stopping."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest

from dlcore.config import ENTRY_SIZE_BYTES_MAX
from dlcore.errors import (
    BadRequestError,
    BookieOverloadedError,
    BookieUnavailableError,
    DigestMismatchError,
    EntryTooLargeError,
    WrongIncarnationError,
)
from dlcore.proto import bookie_pb2 as pb
from dlcore.proto.bookie_pb2_grpc import BookieStub
from dlcore.transport import wire
from dlcore.transport.grpc import GrpcBookieClient
from tests.fixtures.served_bookie import (
    BOOKIE,
    CLIENT,
    CLUSTER_ID,
    STORAGE,
    frame_of,
    run,
    serve,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.fixtures.served_bookie import ServedBookie

    WriteCall = grpc.aio.StreamStreamCall[bytes, bytes]

HANDSHAKE = wire.encode_handshake(
    wire.Handshake(
        protocol_version=wire.PROTOCOL_VERSION,
        cluster_id=CLUSTER_ID,
        bookie_name=BOOKIE.name,
        incarnation=BOOKIE.incarnation,
    )
)


def adds(*frames: bytes, first: int = 1) -> bytes:
    """Return a message of ordinary adds."""
    return wire.encode_write_batch(
        first_request_id=first, is_recovery=False, frames=frames, lacs=[]
    )


@asynccontextmanager
async def raw_stream(served: ServedBookie) -> AsyncIterator[WriteCall]:
    """Open a write stream to fill by hand."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(served.address, options=options) as channel:
        streaming: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        streaming = channel.stream_stream(f"/{wire.SERVICE}/Write", None, None)
        yield streaming()


async def receive(call: WriteCall) -> tuple[list[int], list[tuple[int, type]]]:
    """Return the next results."""
    data = await call.read()
    assert isinstance(data, bytes)
    ok_request_ids, failures = wire.decode_write_response(data)
    return ok_request_ids, [(request_id, type(error)) for request_id, error in failures]


def handshake_of(**changes: str | int) -> bytes:
    """Return the right handshake with something wrong in it."""
    values = {
        "protocol_version": wire.PROTOCOL_VERSION,
        "cluster_id": CLUSTER_ID,
        "bookie_name": BOOKIE.name,
        "incarnation": BOOKIE.incarnation,
        **changes,
    }
    message = pb.WriteRequest()
    for key, value in values.items():
        setattr(message.handshake, key, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("first_message", "error"),
    [
        (handshake_of(incarnation="0" * 32), WrongIncarnationError),
        (handshake_of(bookie_name="bookie-2"), WrongIncarnationError),
        (handshake_of(cluster_id="elsewhere"), BadRequestError),
        (handshake_of(protocol_version=99), BadRequestError),
        (HANDSHAKE + adds(frame_of(1, 0)), BadRequestError),
        (adds(frame_of(1, 0)), BadRequestError),
        (b"", BadRequestError),
        (b"\xff\xff\xff", BadRequestError),
    ],
)
def test_a_stream_without_the_right_handshake_ends(
    tmp_path: Path, first_message: bytes, error: type
) -> None:
    """Send a wrong first message and an add behind it: one answer, the end, nothing stored."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            async with raw_stream(served) as call:
                await call.write(first_message)
                assert await receive(call) == ([], [(0, error)])
                assert await call.read() is grpc.aio.EOF
                assert await call.code() is grpc.StatusCode.OK
            assert served.storage.ledgers() == []

    run(scenario)


@pytest.mark.parametrize(
    "message",
    [
        HANDSHAKE,
        b"\x2a\x7fcut",
        b"\xff\xff",
        adds(frame_of(1, 1), first=0),
    ],
)
def test_a_message_without_sense_ends_the_stream_and_not_the_bookie(
    tmp_path: Path, message: bytes
) -> None:
    """Behind a good add: the add is answered, then the stream ends; another stream works."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            async with raw_stream(served) as call:
                await call.write(HANDSHAKE)
                assert await receive(call) == ([0], [])
                await call.write(adds(frame_of(1, 0)))
                await call.write(message)
                results: list[tuple[int, type | None]] = []
                while isinstance(data := await call.read(), bytes):
                    ok_request_ids, failures = wire.decode_write_response(data)
                    results += [(id_, None) for id_ in ok_request_ids]
                    results += [(id_, type(error)) for id_, error in failures]
                assert sorted(results, key=lambda each: each[0]) == [
                    (0, BadRequestError),
                    (1, None),
                ]
            async with raw_stream(served) as call:
                await call.write(HANDSHAKE)
                await call.write(adds(frame_of(1, 1)))
                assert (await receive(call))[1] == []
            assert served.storage.ledgers() == [1]

    run(scenario)


def test_each_bad_frame_of_a_message_has_its_own_answer(tmp_path: Path) -> None:
    """Good and bad frames in one message: the good ones are stored, the bad ones named."""

    async def scenario() -> None:
        flipped = bytearray(frame_of(1, 1))
        flipped[60] ^= 0x40
        too_large = frame_of(1, 3, b"x" * ENTRY_SIZE_BYTES_MAX)
        message = adds(frame_of(1, 0), bytes(flipped), b"short", too_large, frame_of(1, 4))
        async with serve(tmp_path) as served:
            async with raw_stream(served) as call:
                await call.write(HANDSHAKE)
                await call.write(message)
                ok: list[int] = []
                failed: dict[int, type] = {}
                while len(ok) + len(failed) < 6:
                    ok_request_ids, failures = await receive(call)
                    ok += ok_request_ids
                    failed.update(failures)
            assert sorted(ok) == [0, 1, 5]
            assert failed == {2: DigestMismatchError, 3: DigestMismatchError, 4: EntryTooLargeError}
            ranges = served.storage.list_entries(1)
            assert [each.first_entry_id for each in ranges] == [0, 4]

    run(scenario)


def test_a_message_beyond_all_limits_is_refused_by_name(tmp_path: Path) -> None:
    """gRPC itself refuses it and says which limit; other clients notice nothing."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            async with raw_stream(served) as call:
                await call.write(HANDSHAKE)
                assert await receive(call) == ([0], [])
                await call.write(b"\x2a" + b"x" * (wire.REQUEST_BYTES_MAX + 1))
                with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
                    await call.read()
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            client = GrpcBookieClient(served.resolve, cluster_id=CLUSTER_ID, config=CLIENT)
            await client.add_entry(BOOKIE, frame_of(1, 0))
            await client.aclose()

    run(scenario)


def test_generated_stubs_speak_the_same_protocol(tmp_path: Path) -> None:
    """Use protobuf's own stubs, as a client in another language would."""

    async def scenario() -> None:
        async with (
            serve(tmp_path) as served,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            stub = BookieStub(channel)
            call = stub.Write()
            await call.write(pb.WriteRequest.FromString(HANDSHAKE))
            await call.write(
                pb.WriteRequest(first_request_id=1, frames=[frame_of(1, 0), frame_of(1, 1, lac=0)])
            )
            ok: list[int] = []
            while len(ok) < 3:
                response = await call.read()
                assert isinstance(response, pb.WriteResponse)
                ok += response.ok_request_ids
            call.cancel()
            request = pb.ReadEntriesRequest(
                incarnation=BOOKIE.incarnation,
                ledger_id=1,
                last_entry_id=1,
                stride=1,
                chunk_bytes=1,
            )
            frames = [frame async for chunk in stub.ReadEntries(request) for frame in chunk.frames]
            assert frames == [frame_of(1, 0), frame_of(1, 1, lac=0)]
            info = await stub.GetInfo(pb.InfoRequest())
            assert (info.bookie_name, info.ledger_count, info.read_only) == (BOOKIE.name, 1, False)
            assert info.stored_bytes >= len(frames[0]) + len(frames[1])
            assert 0 < info.disk_free_bytes <= info.disk_total_bytes

    run(scenario)


@pytest.mark.parametrize("method", ["ReadLac", "ReadEntry", "ReadEntries", "Follow", "ListEntries"])
def test_undecodable_requests_are_bad_requests(tmp_path: Path, method: str) -> None:
    """Send garbage to each method: a status of its own, not a failure of the call."""

    async def scenario() -> None:
        async with (
            serve(tmp_path) as served,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            path = f"/{wire.SERVICE}/{method}"
            if method in ("ReadEntries", "Follow", "ListEntries"):
                streaming: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
                streaming = channel.unary_stream(path, None, None)
                (data,) = [each async for each in streaming(b"\xff\xff\xff")]
            else:
                unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
                unary = channel.unary_unary(path, None, None)
                data = await unary(b"\xff\xff\xff")
            response = pb.ReadLacResponse.FromString(data)  # status and detail are alike in all
            assert response.status == pb.BAD_REQUEST
            assert response.detail

    run(scenario)


def test_a_pressed_connection_is_held_back_and_not_refused(tmp_path: Path) -> None:
    """Pipeline far more than the connection's bound: every add succeeds, memory stays bounded."""

    async def scenario() -> None:
        bound, size, count = 200_000, 50_000, 200
        async with serve(tmp_path, connection_bytes_max=bound) as served:
            highest = 0
            add_entry = served.storage.add_entry
            pending: set[asyncio.Future[None]] = set()

            def watched(frame: bytes, *, is_recovery: bool = False) -> asyncio.Future[None]:
                nonlocal highest
                future = add_entry(frame, is_recovery=is_recovery)
                pending.add(future)
                future.add_done_callback(pending.discard)
                highest = max(highest, len(pending) * size)
                return future

            served.storage.add_entry = watched  # type: ignore[assignment,method-assign]  # a probe
            client = GrpcBookieClient(served.resolve, cluster_id=CLUSTER_ID, config=CLIENT)
            frames = [frame_of(1, i, b"x" * size) for i in range(count)]
            await asyncio.gather(*(client.add_entry(BOOKIE, frame) for frame in frames))
            await client.aclose()
            # One message more than the bound may have been on its way in.
            assert bound <= highest <= bound + wire.REQUEST_BYTES_MAX
            assert highest < count * size / 2

    run(scenario)


def test_a_full_bookie_says_so_early(tmp_path: Path) -> None:
    """Let the storage take next to nothing at once: what is beyond is OVERLOADED, at once."""

    async def scenario() -> None:
        config = replace(STORAGE, in_flight_bytes_max=100_000)
        async with serve(tmp_path, config=config) as served:
            client = GrpcBookieClient(served.resolve, cluster_id=CLUSTER_ID, config=CLIENT)
            frames = [frame_of(1, i, b"x" * 50_000) for i in range(50)]
            outcomes = await asyncio.gather(
                *(client.add_entry(BOOKIE, frame) for frame in frames), return_exceptions=True
            )
            refused = [each for each in outcomes if isinstance(each, BookieOverloadedError)]
            assert 0 < len(refused) < len(outcomes)
            assert outcomes.count(None) + len(refused) == len(outcomes)
            held = sum(
                each.last_entry_id - each.first_entry_id + 1
                for each in served.storage.list_entries(1)
            )
            assert held == outcomes.count(None)
            await client.aclose()

    run(scenario)


def test_draining_answers_what_was_taken_and_refuses_the_rest(tmp_path: Path) -> None:
    """Drain under load: every acknowledged entry is held, every other add is unavailable."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            client = GrpcBookieClient(served.resolve, cluster_id=CLUSTER_ID, config=CLIENT)
            await client.add_entry(BOOKIE, frame_of(1, 0))
            updates = client.follow(BOOKIE, ledger_id=1, first_entry_id=0)
            await anext(updates)
            waiting = asyncio.ensure_future(anext(updates))
            pending = [client.add_entry(BOOKIE, frame_of(1, i, b"x" * 9000)) for i in range(1, 99)]
            while not any(add.done() for add in pending):
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            await served.service.drain()
            with pytest.raises(BookieUnavailableError):
                await waiting
            outcomes = await asyncio.gather(*pending, return_exceptions=True)
            for entry_id, outcome in enumerate(outcomes, 1):
                assert outcome is None or isinstance(outcome, BookieUnavailableError)
                if outcome is None:
                    await client.read_entry(BOOKIE, ledger_id=1, entry_id=entry_id, fence=False)
            with pytest.raises(BookieUnavailableError):
                await client.add_entry(BOOKIE, frame_of(1, 99))
            with pytest.raises(BookieUnavailableError):
                await client.read_lac(BOOKIE, ledger_id=1, fence=True)
            assert await client.read_lac(BOOKIE, ledger_id=1, fence=False) == -1  # reads go on
            await client.aclose()

    run(scenario)


def test_a_client_that_never_shakes_hands_does_not_hold_up_a_drain(tmp_path: Path) -> None:
    """Open a stream and say nothing."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_stream(served) as call:
            await call.wait_for_connection()
            await served.service.drain()

    run(scenario)


def test_a_client_that_vanishes_leaves_no_trace_in_the_service(tmp_path: Path) -> None:
    """Cut the channel with adds under way: the next client works, and the first one's adds hold."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            async with raw_stream(served) as call:
                await call.write(HANDSHAKE)
                assert await receive(call) == ([0], [])
                await call.write(adds(*(frame_of(1, i) for i in range(100))))
                await receive(call)
            client = GrpcBookieClient(served.resolve, cluster_id=CLUSTER_ID, config=CLIENT)
            await client.add_entry(BOOKIE, frame_of(1, 0))
            await served.service.drain()
            await client.aclose()

    run(scenario)
