"""The bookie's service against clients that break its rules, press it, or meet it stopping."""

from __future__ import annotations

import asyncio
import gc
import warnings
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bookie.serving import service as service_module, session
from bookie.serving.connection import UNSENT_BYTES_HIGH
from bookie.serving.reads_in_progress import ReadBudget, ReadsInProgress
from bookie.storage.reads import Reads
from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.config import ENTRY_SIZE_BYTES_MAX
from dlcore.base.errors import (
    BadRequestError,
    BookieOverloadedError,
    BookieUnavailableError,
    DigestMismatchError,
    EntryTooLargeError,
    WrongIncarnationError,
)
from dlcore.wire.client import WireBookieClient
from dlcore.wire.messages import (
    ADD_BYTES_MAX,
    ADD_FRAMES_MAX,
    HEADER,
    WINDOW_BYTES_MAX,
    Add,
    Chunk,
    Credit,
    Durable,
    Failed,
    Follow,
    Hello,
    Lac,
    Message,
    ReadEntries,
    ReadEntry,
    ReadLac,
    WriteLac,
)
from tests.fixtures.aio import until
from tests.fixtures.certificates import make_tls
from tests.fixtures.raw_wire import HELLO, WELCOME, adds, kind_of, raw_connection
from tests.fixtures.served_bookie import BOOKIE, CLIENT, CLUSTER_ID, STORAGE, frame_of, run, serve

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.base.access.tls import TlsFiles
    from tests.fixtures.raw_wire import RawEnd
    from tests.fixtures.served_bookie import ServedBookie


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions trust their clients from the first request on, whatever they send."""
    monkeypatch.setattr(session, "_TRUST_AT_FIRST", session._TRUST_MAX)
    monkeypatch.setattr(session, "_OF_NO_USE", ())


def client_of(served: ServedBookie, tls: TlsFiles | None = None) -> WireBookieClient:
    """Return a well-behaved client."""
    return WireBookieClient(
        served.resolve, cluster_id=CLUSTER_ID, config=CLIENT, tls=TlsInUse.of(tls)
    )


async def results(end: RawEnd, count: int) -> tuple[list[int], dict[int, type]]:
    """Return the ids called durable, and the errors of others, once `count` are answered."""
    ok: list[int] = []
    failed: dict[int, type] = {}
    while len(ok) + len(failed) < count:
        message = await end.receive()
        if isinstance(message, Durable):
            ok += message.request_ids
        else:
            request_id, error = kind_of(message)
            failed[request_id] = error
    return sorted(ok), failed


@pytest.mark.parametrize(
    ("first_message", "error"),
    [
        (HELLO._replace(incarnation="0" * 32), WrongIncarnationError),
        (HELLO._replace(bookie_name="bookie-2"), WrongIncarnationError),
        (HELLO._replace(cluster_id="elsewhere"), BadRequestError),
        (HELLO._replace(version=99), BadRequestError),
        (adds(frame_of(1, 0)), BadRequestError),
        (b"GET / HTTP/1.1\r\nHost: bookie-1\r\n\r\n", BadRequestError),
        (b"\xff" * 100, BadRequestError),
    ],
)
def test_a_connection_without_the_right_handshake_ends(
    tmp_path: Path, first_message: Hello | bytes, error: type
) -> None:
    """Send a wrong first message and an add behind it: one answer, the end, nothing stored."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            async with raw_connection(served.address, hello=False) as end:
                end.send(first_message, adds(frame_of(1, 0)))
                assert kind_of(await end.receive()) == (0, error)
                assert await end.receive() is None
            assert served.storage.core.live_ledgers() == []

    run(scenario)


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        WELCOME,
        Lac(1, 7),
        Failed(0, 9, "no"),
        b"\xd1" * 40,
        adds(frame_of(1, 1), first=0),
        adds(frame_of(1, 1), first=1),
        adds(frame_of(1, 1), first=2**64 - 1),
        adds(b"x" * 47, first=2),
        adds(b"", first=2),
        adds(*[frame_of(1, 1)] * (ADD_FRAMES_MAX + 1), first=2),
        adds(b"x" * (ADD_BYTES_MAX + 1), first=2),
        Follow(2, 1, 0, WINDOW_BYTES_MAX + 1),
        HEADER.pack(0xD10B, 99, 0, 0, 0, 2, 0),
        HEADER.pack(0xD10B, 2, 0xFF, 4, 100, 2, 0),
        HEADER.pack(0xD10B, 2, 0, 4, 2**32 - 1, 2, 0),
        HEADER.pack(0xD10B, 2, 0, 2**32 - 1, 0, 2, 0),
        HEADER.pack(0xD10B, 3, 0, 16, 0, 2, 0) + bytes(16),  # a wrong checksum
    ],
    ids=lambda message: str(message)[:80],
)
def test_a_message_without_sense_ends_the_connection_and_not_the_bookie(
    tmp_path: Path, message: Message | bytes
) -> None:
    """Behind a good add: the add is answered, then the connection ends; another one works."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            async with raw_connection(served.address) as end:
                end.send(adds(frame_of(1, 0)), message)
                assert await results(end, 2) == ([1], {0: BadRequestError})
                assert await end.receive() is None
            async with raw_connection(served.address) as end:
                end.send(adds(frame_of(1, 1)))
                assert await results(end, 1) == ([1], {})
            assert served.storage.core.live_ledgers() == [1]

    run(scenario)


def test_each_bad_frame_of_a_message_has_its_own_answer(tmp_path: Path) -> None:
    """Good and bad frames in one message: the good ones are stored, the bad ones named."""

    async def scenario() -> None:
        flipped = bytearray(frame_of(1, 1))
        flipped[60] ^= 0x40
        too_large = frame_of(1, 3, b"x" * ENTRY_SIZE_BYTES_MAX)
        async with serve(tmp_path) as served:
            async with raw_connection(served.address) as end:
                end.send(adds(frame_of(1, 0), bytes(flipped), b"s" * 60, too_large, frame_of(1, 4)))
                ok, failed = await results(end, 5)
            assert ok == [1, 5]
            assert failed == {2: DigestMismatchError, 3: DigestMismatchError, 4: EntryTooLargeError}
            ranges = served.storage.reads.list_entries(1)
            assert [each.first_entry_id for each in ranges] == [0, 4]

    run(scenario)


def test_a_client_that_never_reads_its_refusals_costs_a_bounded_backlog(
    tmp_path: Path, trusting: None
) -> None:
    """Send bad adds without an end and read nothing: the bookie stops reading; others go on."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            (connection,) = served.service.connections
            bad = b"x" * 48
            first = 1
            while (
                connection.session.intake.is_reading
                or end.writer.transport.get_write_buffer_size() < 2**20
            ):
                end.send(adds(*[bad] * ADD_FRAMES_MAX, first=first))
                first += ADD_FRAMES_MAX
                await asyncio.sleep(0)
            assert len(connection.session.writes._others) <= 2 * ADD_FRAMES_MAX
            assert connection.socket.unsent_bytes < 2**20
            client = client_of(served)
            await client.add_entry(BOOKIE, frame_of(1, 0))
            await client.aclose()
            while await end.receive() is not None and not connection.session.intake.is_reading:
                pass
            # A client that takes the answers is heard again.
            assert connection.session.intake.is_reading

    run(scenario)


def test_a_reader_gets_what_its_window_lets_through(tmp_path: Path) -> None:
    """Read with a small window: nothing more comes until credit is given; then the rest does."""

    async def scenario() -> None:
        frames = [frame_of(1, i, b"x" * 1000) for i in range(9)]
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            end.send(adds(*frames))
            await results(end, 9)
            end.send(ReadEntries(10, 1, 0, 8, 1, 2000, 1500))
            got = []
            for _ in range(2):  # the window was open when the second one was sent
                chunk = await end.receive()
                assert isinstance(chunk, Chunk)
                assert not chunk.is_last
                got += [bytes(each) for each in chunk.frames]
            assert got == frames[:2]
            end.send(ReadLac(11, 1, fence=False))
            assert await end.receive() == Lac(11, -1)  # and no chunk before it
            end.send(Credit(10, 100_000))
            is_last = False
            while not is_last:
                chunk = await end.receive()
                assert isinstance(chunk, Chunk)
                is_last = chunk.is_last
                got += [bytes(each) for each in chunk.frames]
            assert got == frames

    run(scenario)


def test_one_budget_bounds_what_is_on_its_way_to_all_readers(tmp_path: Path) -> None:
    """Many readers take nothing: what the bookie holds for them stays below the budget.

    Then one that reads comes, and is served.
    """
    budget, count, size = 2_000_000, 40, 200_000

    async def scenario() -> None:
        frames = [frame_of(1, i, b"x" * size) for i in range(60)]
        async with serve(tmp_path, read_bytes_max=budget) as served:
            client = client_of(served)
            for frame in frames:
                await client.add_entry(BOOKIE, frame)
            ends = []
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    connection = raw_connection(served.address)
                    end = await connection.__aenter__()
                    end.writer.transport.pause_reading()  # type: ignore[attr-defined]
                    end.send(ReadEntries(1, 1, 0, 59, 1, 2**20, WINDOW_BYTES_MAX))
                    ends.append((connection, end))
                held = sum(map(len, frames))
                chunks = client.read_entries(BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=9)
                read = group.create_task(anext(chunks))
                while not read.done():
                    assert served.service.read_budget.free >= 0
                    await asyncio.sleep(0)
            assert held > budget
            await chunks.aclose()
            for connection, _ in ends:
                await connection.__aexit__(None, None, None)
            await client.aclose()

    run(scenario)


def stand_still(served: ServedBookie) -> list[asyncio.Future[None]]:
    """Let adds be taken and not be durable; return what they wait for."""
    taken: list[asyncio.Future[None]] = []

    def stands(_frame: bytes, *, is_recovery: bool = False) -> asyncio.Future[None]:
        taken.append(asyncio.get_running_loop().create_future())
        return taken[-1]

    served.storage.writes.add_entry = stands  # type: ignore[assignment,method-assign]  # a probe
    return taken


def test_many_connections_share_what_is_in_flight(tmp_path: Path, trusting: None) -> None:
    """One alone has its whole bound; of many each has a share, and the last one has some.

    Bytes in flight are free again when they are settled, also of connections that are gone.
    """

    async def scenario() -> None:
        bound, clients = 512 * 1024, 40
        async with AsyncExitStack() as stack:
            served = await stack.enter_async_context(serve(tmp_path, connection_bytes_max=bound))
            service = served.service
            taken = stand_still(served)
            assert service.bounds.in_flight_share() == bound
            held: list[int] = []
            for _ in range(clients):
                end = await stack.enter_async_context(raw_connection(served.address))
                connection = list(service.connections)[-1]
                end.send(*(adds(frame_of(1, number), first=number) for number in range(1, 1000)))
                while connection.session.intake.is_reading or connection.waits_for_turn:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.001)
                held.append(connection.session.writes.in_flight_bytes)
            assert service.bounds.in_flight_bytes == sum(held)
            assert held[0] >= bound
            assert sum(held[:5]) <= 5 * bound
            assert all(64 * 1024 <= each < bound // 4 for each in held[-30:])
            for connection in list(service.connections):
                connection.abort()
            for future in taken:
                future.set_result(None)
            await until(lambda: service.bounds.in_flight_bytes == 0)

    run(scenario)


def test_the_same_budget_bounds_single_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many clients ask for large entries one by one, at the same time, and take none.

    Entries read for them and not taken are within the budget, except the few that a connection
    holds before it tells that its client is behind.
    """
    monkeypatch.setattr(service_module, "_STALL_S_MAX", 100.0)
    entry_bytes, clients = 1_000_000, 20
    give, free = ReadBudget.give, []

    def watched_give(self: ReadBudget, size: int) -> None:
        give(self, size)
        free.append(self.free)

    monkeypatch.setattr(ReadBudget, "give", watched_give)
    read_entry = Reads.read_entry

    async def slow_read(self: Reads, *place: int, **more: Any) -> memoryview:
        await asyncio.sleep(0.001)  # as from a disk: many are read at the same time
        return await read_entry(self, *place, **more)

    monkeypatch.setattr(Reads, "read_entry", slow_read)

    async def scenario() -> None:
        budget_bytes = 4 * entry_bytes + 1_000
        async with AsyncExitStack() as stack:
            served = await stack.enter_async_context(serve(tmp_path, read_bytes_max=budget_bytes))
            await served.storage.writes.add_entry(frame_of(1, 0, b"x" * entry_bytes))
            ends = [
                await stack.enter_async_context(raw_connection(served.address))
                for _ in range(clients)
            ]
            for end in ends:
                end.writer.transport.pause_reading()  # type: ignore[attr-defined]
                end.send(*(ReadEntry(number, 1, 0, fence=False) for number in range(1, 30)))
            budget = served.service.read_budget
            connections = list(served.service.connections)

            def unsent_bytes() -> int:
                return sum(each.socket.unsent_bytes for each in connections)

            # First the network's own buffers take a few entries of each.
            state, turns = (0, 0), 0
            while turns < 100:
                before, state = state, (budget.free, unsent_bytes())
                stands = state == before and budget.is_exhausted and unsent_bytes() > 0
                turns = turns + 1 if stands else 0
                await asyncio.sleep(0.005)
            unseen_bytes = clients * UNSENT_BYTES_HIGH
            assert unsent_bytes() <= budget_bytes + unseen_bytes
            for each in connections:
                each.abort()
            await until(lambda: budget.free == budget_bytes)

    run(scenario)
    assert min(free) >= 0


def test_single_entries_wait_for_a_client_that_takes_nothing(tmp_path: Path) -> None:
    """Ask for many large entries one by one and read nothing: few of them are in memory."""

    async def scenario() -> None:
        size, count = 2_000_000, 60
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            frame = frame_of(1, 0, b"x" * size)
            client = client_of(served)
            await client.add_entry(BOOKIE, frame)
            await client.aclose()
            (connection,) = (each for each in served.service.connections if each._end._last_id == 0)
            end.writer.transport.pause_reading()  # type: ignore[attr-defined]
            end.send(*(ReadEntry(number, 1, 0, fence=False) for number in range(1, count + 1)))
            while not connection.session.patience.is_stalled:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
            for _ in range(100):
                assert connection.socket.unsent_bytes < 5 * size
                await asyncio.sleep(0)
            end.writer.transport.resume_reading()  # type: ignore[attr-defined]
            for _ in range(count):
                chunk = await end.receive()
                assert isinstance(chunk, Chunk)
                assert bytes(chunk.frames[0]) == frame

    run(scenario)


def test_a_pressed_connection_is_held_back_and_not_refused(tmp_path: Path) -> None:
    """Pipeline far more than the connection's bound: every add succeeds, memory stays bounded."""

    async def scenario() -> None:
        bound, size, count = 200_000, 50_000, 200
        async with serve(tmp_path, connection_bytes_max=bound) as served:
            highest = 0
            add_entry = served.storage.writes.add_entry
            pending: set[asyncio.Future[None]] = set()

            def watched(frame: bytes, *, is_recovery: bool = False) -> asyncio.Future[None]:
                nonlocal highest
                future = add_entry(frame, is_recovery=is_recovery)
                pending.add(future)
                future.add_done_callback(pending.discard)
                highest = max(highest, len(pending) * size)
                return future

            served.storage.writes.add_entry = watched  # type: ignore[assignment,method-assign]  # a probe
            client = client_of(served)
            frames = [frame_of(1, i, b"x" * size) for i in range(count)]
            await asyncio.gather(*(client.add_entry(BOOKIE, frame) for frame in frames))
            await client.aclose()
            # One message more than the bound may have been on its way in.
            assert bound <= highest <= bound + ADD_BYTES_MAX
            assert highest < count * size / 2

    run(scenario)


def test_small_adds_count_for_the_memory_that_they_take(tmp_path: Path, trusting: None) -> None:
    """While the disk stands still, entries of a few bytes are held back too: each is 2 KiB."""

    async def scenario() -> None:
        async with serve(tmp_path, connection_bytes_max=64 * 1024) as served:
            taken = stand_still(served)
            async with raw_connection(served.address) as end:
                (connection,) = served.service.connections
                end.send(*(adds(frame_of(1, number), first=number) for number in range(1, 1000)))
                while connection.session.intake.is_reading:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.001)
                assert 25 < len(taken) <= 32
                assert not connection.session._has_room()
                for future in taken:
                    future.set_result(None)

    run(scenario)


def test_a_full_bookie_says_so_early(tmp_path: Path) -> None:
    """Let the storage take next to nothing at once: what is beyond is OVERLOADED, at once."""

    async def scenario() -> None:
        config = replace(STORAGE, in_flight_bytes_max=100_000)
        async with serve(tmp_path, config=config) as served:
            client = client_of(served)
            frames = [frame_of(1, i, b"x" * 50_000) for i in range(50)]
            outcomes = await asyncio.gather(
                *(client.add_entry(BOOKIE, frame) for frame in frames), return_exceptions=True
            )
            refused = [each for each in outcomes if isinstance(each, BookieOverloadedError)]
            assert 0 < len(refused) < len(outcomes)
            assert outcomes.count(None) + len(refused) == len(outcomes)
            held = sum(
                each.last_entry_id - each.first_entry_id + 1
                for each in served.storage.reads.list_entries(1)
            )
            assert held == outcomes.count(None)
            await client.aclose()

    run(scenario)


@pytest.mark.parametrize("is_tls", [False, True])
def test_draining_answers_what_was_taken_and_refuses_the_rest(tmp_path: Path, is_tls: bool) -> None:
    """Drain under load: every acknowledged entry is held, every other add is unavailable."""
    tls = make_tls(tmp_path / "tls") if is_tls else None

    async def scenario() -> None:
        async with serve(tmp_path / "data", tls=tls.bookie if tls else None) as served:
            client = client_of(served, tls.client if tls else None)
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
    """Connect and say nothing."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_connection(served.address, hello=False):
            await served.service.drain()

    run(scenario)


def test_a_client_that_vanishes_leaves_no_trace_in_the_service(tmp_path: Path) -> None:
    """Cut the connection with everything under way: the next client works, what was added holds."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            async with raw_connection(served.address) as end:
                end.send(
                    Add(1, False, [frame_of(1, i) for i in range(100)]),
                    WriteLac(101, 1, 5),
                    Follow(102, 1, 0, 1000),
                    ReadEntries(103, 1, 0, 99, 1, 1000, 1000),
                )
                await end.receive()
                (connection,) = served.service.connections
            await connection.closed.wait()
            client = client_of(served)
            await client.add_entry(BOOKIE, frame_of(1, 0))
            assert list(served.storage.followers.ledgers()) == []
            assert len(served.service.connections) == 1
            await served.service.drain()
            await client.aclose()

    run(scenario)


@pytest.mark.parametrize("hello", [True, False])
def test_a_silent_client_is_given_up(tmp_path: Path, hello: bool) -> None:
    """A client that answers no PING loses its connection, and one that says nothing at all."""

    async def scenario() -> None:
        async with (
            serve(tmp_path, silence_s=0.3) as served,
            raw_connection(served.address, hello=hello) as end,
        ):
            clock = asyncio.get_running_loop().time
            began_s = clock()
            while await end.receive() is not None:
                pass
            assert clock() - began_s < 2 * 0.3
            assert not served.service.connections

    run(scenario)


@pytest.mark.parametrize("read", [ReadLac(1, 1, fence=True), ReadEntry(1, 1, 0, fence=False)])
def test_a_read_whose_client_goes_before_it_began_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: ReadLac | ReadEntry
) -> None:
    """Goal: a connection that ends in the turn in which a read came prints no warning."""

    async def scenario() -> None:
        take = ReadsInProgress.begin
        taken = asyncio.Event()

        def take_and_end(reads: ReadsInProgress, request: ReadLac | ReadEntry) -> None:
            take(reads, request)
            (connection,) = served.service.connections
            connection.connection_lost(None)
            taken.set()

        monkeypatch.setattr(ReadsInProgress, "begin", take_and_end)
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            end.send(read)
            await taken.wait()
        gc.collect()  # what was never awaited says so when it goes

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(scenario)
    assert [str(each.message) for each in caught if "never awaited" in str(each.message)] == []
