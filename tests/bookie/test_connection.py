"""One connection at odd moments: defects of the bookie, its end, and what clients send by the way.

Goal: each request has one answer, whatever becomes of it, and the connection goes on or ends clean.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from bookie.serving import session as module
from dlcore.base.access.tls import name_in_certificate
from dlcore.base.errors import (
    BadRequestError,
    BookieOverloadedError,
    BookieStorageError,
    BookieUnavailableError,
)
from dlcore.wire.messages import (
    Cancel,
    Durable,
    Failed,
    Follow,
    Lac,
    Ping,
    Pong,
    ReadEntries,
    ReadEntry,
    ReadLac,
    Update,
    WriteLac,
    encode,
)
from tests.fixtures.raw_wire import HELLO, adds, kind_of, raw_connection
from tests.fixtures.served_bookie import frame_of, run, serve

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.wire.messages import Message
    from tests.fixtures.raw_wire import RawEnd

WINDOW = 1_000_000


async def still_works(end: RawEnd) -> None:
    """Ask for something else."""
    end.send(ReadLac(900, 1, fence=False))
    assert await end.receive() == Lac(900, -1)


def test_a_defect_has_an_answer_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception fails its request as unknown, not the connection."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            end.send(adds(frame_of(1, 0)))
            assert await end.receive() == Durable((1,))

            def broken(*_asked: object, **_options: object) -> asyncio.Future[None]:
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                future.set_exception(KeyError("planted"))
                return future

            async def breaks(*_asked: object, **_options: object) -> object:
                raise KeyError("planted")

            with monkeypatch.context() as patch:
                patch.setattr(served.storage.writes, "add_run", lambda _run: None)
                patch.setattr(served.storage.writes, "add_entry", broken)
                patch.setattr(served.storage.reads, "read_entry", breaks)
                patch.setattr(served.storage.reads, "read_chunk", breaks)
                requests: list[Message] = [
                    adds(frame_of(1, 1), first=2),
                    ReadEntry(3, 1, 0, fence=False),
                    ReadEntries(4, 1, 0, 0, 1, 1000, WINDOW),
                ]
                for number, request in enumerate(requests, 2):
                    end.send(request)
                    failed = await end.receive()
                    assert kind_of(failed) == (number, BookieStorageError)
                    assert isinstance(failed, Failed)
                    assert "KeyError" in failed.detail
            await still_works(end)

    with caplog.at_level(logging.ERROR, "bookie.serving.reads_in_progress"):
        run(scenario)
    assert caplog.text.count("\nKeyError: 'planted'") >= 3  # each with its traceback


def test_adds_that_end_together_have_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the session gets them in one event, and one that ends later in another."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            given: list[asyncio.Future[None]] = []
            batches: list[int] = []

            def give(*_asked: object, **_options: object) -> asyncio.Future[None]:
                given.append(asyncio.get_running_loop().create_future())
                return given[-1]

            stored = module.Session._stored

            def count(session: module.Session, event: module.Stored) -> list[module.Effect]:
                batches.append(len(event.outcomes))
                return stored(session, event)

            monkeypatch.setattr(served.storage.writes, "add_entry", give)
            monkeypatch.setattr(module.Session, "_stored", count)
            frames = [frame_of(1, number) for number in range(4)]
            end.send(adds(*frames), ReadLac(9, 1, fence=True))
            assert await end.receive() == Lac(9, -1)
            for first, second in ((0, 2), (1, 3)):
                given[first].set_result(None)
                given[second].set_result(None)
                assert await end.receive() == Durable((first + 1, second + 1))
            assert batches == [2, 2]
            await still_works(end)

    run(scenario)


def test_an_add_that_the_storage_gave_up_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its future was cancelled."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            given: list[asyncio.Future[None]] = []

            def give(*_asked: object, **_options: object) -> asyncio.Future[None]:
                given.append(asyncio.get_running_loop().create_future())
                return given[-1]

            monkeypatch.setattr(served.storage.writes, "add_run", lambda _run: None)
            monkeypatch.setattr(served.storage.writes, "add_entry", give)
            end.send(adds(frame_of(1, 0), frame_of(1, 1)), ReadLac(9, 1, fence=True))
            assert await end.receive() == Lac(9, -1)
            for request_id, future in enumerate(given, 1):
                future.cancel()
                assert kind_of(await end.receive()) == (request_id, BookieUnavailableError)
            monkeypatch.undo()

    run(scenario)


def test_signs_of_life_and_cancels_of_what_is_over(tmp_path: Path) -> None:
    """A PING has its PONG; an unrequested PONG and a CANCEL that comes too late are allowed."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            end.send(Ping(7), Pong(8), ReadLac(1, 1, fence=True))
            assert await end.receive() == Pong(7)
            assert await end.receive() == Lac(1, -1)
            end.send(Cancel(1))
            await still_works(end)

    run(scenario)


def test_a_read_that_waits_is_cancelled(tmp_path: Path) -> None:
    """It is not answered, and takes nothing of the budget along; so is a stream."""

    async def scenario() -> None:
        async with serve(tmp_path, read_bytes_max=200_000) as served:
            budget = served.service.read_budget
            async with raw_connection(served.address) as end:
                end.send(adds(frame_of(1, 0)))
                assert await end.receive() == Durable((1,))
                await budget.take(budget.free)
                end.send(ReadEntry(2, 1, 0, fence=False), ReadEntries(3, 1, 0, 0, 1, 100, WINDOW))
                end.send(Follow(4, 1, 0, WINDOW))
                while not budget.is_exhausted:  # noqa: ASYNC110  # the requests are on their way
                    await asyncio.sleep(0.005)
                end.send(Cancel(2), Cancel(3), Cancel(4))
                await still_works(end)
                budget.give(200_000)
                (connection,) = served.service.connections
                while connection.reads.single or connection.reads.steps:  # noqa: ASYNC110  # as above
                    await asyncio.sleep(0.005)
                assert (budget.free, connection.reads.streams) == (200_000, {})

    run(scenario)


def test_a_connection_that_is_lost_as_a_message_begins_takes_nothing_along(
    tmp_path: Path,
) -> None:
    """The message waits for room or the disk, and gets it when its client is gone."""

    async def scenario() -> None:
        async with serve(tmp_path, read_bytes_max=200_000) as served:
            budget = served.service.read_budget
            await served.storage.writes.add_entry(frame_of(1, 0))
            await budget.take(budget.free)
            async with raw_connection(served.address):
                (connection,) = served.service.connections
                request = b"".join(encode(ReadEntries(1, 1, 0, 0, 1, 100, WINDOW)))
                connection._end.get_buffer()[: len(request)] = request
                connection.buffer_updated(len(request))
                connection.connection_lost(None)  # in the same turn of the loop
                assert budget.is_exhausted
                budget.give(200_000)
                while connection.reads.steps:  # noqa: ASYNC110  # it has its turn
                    await asyncio.sleep(0)
            assert (budget.free, budget.is_exhausted) == (200_000, False)

    run(scenario)


def test_only_so_many_streams_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused, and may be opened when another has ended."""
    monkeypatch.setattr(module, "_STREAMS_MAX", 2)

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            end.send(adds(frame_of(1, 0)))
            assert await end.receive() == Durable((1,))
            end.send(*(Follow(number, 1, 5, WINDOW) for number in (2, 3, 4)))
            answers = [await end.receive() for _ in range(3)]
            assert sorted(type(answer).__name__ for answer in answers) == [
                "Failed",
                "Update",
                "Update",
            ]
            refused = next(answer for answer in answers if isinstance(answer, Failed))
            assert kind_of(refused) == (4, BookieOverloadedError)
            end.send(Cancel(2), Follow(5, 1, 5, WINDOW))
            update = await end.receive()
            assert isinstance(update, Update)
            assert update.request_id == 5

    run(scenario)


def test_a_bookie_that_shuts_down_refuses_what_writes_and_who_follows(tmp_path: Path) -> None:
    """Reads that have an end go on."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            end.send(adds(*(frame_of(1, entry_id) for entry_id in range(3))))
            assert await end.receive() == Durable(
                (
                    1,
                    2,
                    3,
                )
            )
            # A window of nothing: it is open, and waits for credit.
            end.send(ReadEntries(4, 1, 0, 2, 1, 1000, 1), Follow(5, 1, 9, WINDOW))
            first = [await end.receive(), await end.receive()]
            assert len(first) == 2
            await served.service.drain()
            assert kind_of(await end.receive()) == (5, BookieUnavailableError)
            end.send(WriteLac(6, 1, 1), Follow(7, 1, 0, WINDOW), ReadEntry(8, 1, 0, fence=True))
            refused = [kind_of(await end.receive()) for _ in range(3)]
            assert sorted(refused, key=lambda each: each[0]) == [
                (number, BookieUnavailableError) for number in (6, 7, 8)
            ]
            (connection,) = served.service.connections
            assert list(connection.reads.streams) in ([4], [])
            await still_works(end)

    run(scenario)


def test_a_client_without_a_timely_handshake_gets_an_error(tmp_path: Path) -> None:
    """The bookie sends an error and disconnects the client, though the client is not silent."""

    async def scenario() -> None:
        async with (
            serve(tmp_path, silence_s=0.4, handshake_s=0.1) as served,
            raw_connection(served.address, hello=False) as end,
        ):
            assert kind_of(await end.receive()) == (0, BadRequestError)
            end.send(HELLO)  # too late
            assert await end.receive() is None
            (connection,) = served.service.connections or [None]
            if connection is not None:
                await connection.closed.wait()
            assert not served.service.connections

    run(scenario)


def test_a_refused_client_gets_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A follower that broke the protocol, and does not hang up: news are no defect to be logged."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, raw_connection(served.address) as end:
            add = served.storage.writes.add_entry
            await add(frame_of(1, 0))
            end.send(Follow(1, 1, 5, WINDOW))
            assert isinstance(await end.receive(), Update)
            end.send(Durable((1,)))
            assert kind_of(await end.receive()) == (0, BadRequestError)
            (connection,) = served.service.connections
            for entry_id in range(1, 9):
                await add(frame_of(1, entry_id, lac=entry_id - 1))
            assert not connection.reads.steps
            assert await end.receive() is None

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert not caplog.records


def test_a_client_that_takes_nothing_for_long_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And its share of the budget is there again."""

    async def scenario() -> None:
        async with serve(tmp_path, silence_s=1.0) as served:
            for entry_id in range(15):
                await served.storage.writes.add_entry(frame_of(1, entry_id, b"x" * 1_000_000))
            budget = served.service.read_budget
            whole = budget.free
            async with raw_connection(served.address) as end:
                (connection,) = served.service.connections
                for number in range(1, 5):
                    end.send(ReadEntries(number, 1, 0, 14, 1, 1_000_000, 16_000_000))
                await connection.closed.wait()
            assert budget.free == whole
            connection.socket.close()  # ending it again does no harm
            connection.abort()
            connection._tick()

    with caplog.at_level(logging.INFO, "bookie.serving.connection"):
        run(scenario)
    assert "it receives no answers" in caplog.text


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        (None, None),
        ({}, None),
        ({"subject": ()}, None),
        ({"subject": ((("organizationName", "o"),), (("commonName", "client"),))}, "client"),
        ({"subject": ((("organizationName", "o"), ("commonName", "both")),)}, "both"),
    ],
)
def test_the_user_that_a_certificate_names(certificate: object, name: str | None) -> None:
    """The common name, wherever in its subject it is."""
    assert name_in_certificate(certificate) == name
