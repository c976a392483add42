"""One connection to a bookie at odd moments: after it broke, or asked by the bookie."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import BookieUnavailableError, NoSuchEntryError
from dlcore.wire.connection import Incoming
from dlcore.wire.fields import Status
from dlcore.wire.messages import Add, Failed, Lac, Ping, Pong, ReadEntry, ReadLac
from tests.fixtures.aio import until
from tests.fixtures.raw_wire import WELCOME, RawEnd, Script, raw_bookie
from tests.fixtures.served_bookie import BOOKIE, client_of, frame_of, run

if TYPE_CHECKING:
    from dlcore.wire.client import WireBookieClient
    from dlcore.wire.connection import Connection
    from dlcore.wire.messages import Message


async def connection_of(client: WireBookieClient) -> Connection:
    """Return the client's only connection, once it is made."""
    await client.read_lac(BOOKIE, ledger_id=1, fence=False)
    (peer,) = client._peers.values()
    (connection,) = peer._connections.values()
    return connection


class LateTransport(asyncio.Transport):
    """One that was made when no caller waited for it any more."""

    is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is written to it."""

    def abort(self) -> None:
        """Note it."""
        self.is_aborted = True


def answer(message: Message) -> list[Message | bytes]:
    """Answer reads of LACs; say of entries that they are not there."""
    if isinstance(message, ReadLac):
        return [Lac(message.request_id, 4)]
    if isinstance(message, ReadEntry):
        return [Failed(message.request_id, Status.NO_SUCH_ENTRY, "not here")]
    return []


def test_a_bookie_that_asks_for_a_sign_of_life_gets_it() -> None:
    """At once, and what is refused says which bookie refused it."""
    heard: list[object] = []

    async def serve(end: RawEnd) -> None:
        heard.append(await end.receive())
        end.send(WELCOME, Ping(9), Pong(8))
        while (message := await end.receive()) is not None:
            heard.append(message)
            end.send(*answer(message))

    async def scenario() -> None:
        async with raw_bookie(serve) as address, client_of(address) as client:
            assert await client.read_lac(BOOKIE, ledger_id=1, fence=False) == 4
            with pytest.raises(NoSuchEntryError, match=str(BOOKIE)):
                await client.read_entry(BOOKIE, ledger_id=1, entry_id=0, fence=False)
            assert Pong(9) in heard

    run(scenario)


def test_a_bookie_that_takes_nothing_is_sent_no_sign_of_life() -> None:
    """Its questions would otherwise fill the memory of the bookie, which answers them."""

    def ask_back(message: Message) -> list[Message | bytes]:
        return [Ping(message.request_id), *answer(message)] if isinstance(message, ReadLac) else []

    async def scenario() -> None:
        script = Script(replies=ask_back)
        async with raw_bookie(script.serve) as address, client_of(address) as client:
            connection = await connection_of(client)
            connection.pause_writing()
            await client.read_lac(BOOKIE, ledger_id=1, fence=False)
            connection.resume_writing()
            for _ in range(2):
                await client.read_lac(BOOKIE, ledger_id=1, fence=False)
            said = [each.token for each in script.received if isinstance(each, Pong)]
            assert said[:2] == [1, 3]

    run(scenario)


def test_a_connection_that_broke_takes_nothing_more_and_says_why() -> None:
    """Whatever comes, and however often it breaks; the first reason stays."""

    async def scenario() -> None:
        script = Script(replies=answer)
        async with raw_bookie(script.serve) as address, client_of(address) as client:
            connection = await connection_of(client)
            connection.fail(BookieUnavailableError("first"))
            connection.fail(BookieUnavailableError("second"))
            connection.buffer_updated(1)
            incoming = connection.read(ReadLac(0, 1, fence=False))
            with pytest.raises(BookieUnavailableError, match="is broken"):
                await incoming.get()
            connection.cancel(incoming)
            await connection.closed.wait()
            connection.connection_lost(None)
            late = LateTransport()
            connection.connection_made(late)
            assert late.is_aborted
            connection._transport = None
            assert await client.read_lac(BOOKIE, ledger_id=1, fence=False) == 4  # by another one
            assert script.connections == 2

    run(scenario)


def test_the_first_error_of_a_read_ends_it_behind_what_came_before() -> None:
    """Later ones say nothing new."""

    async def scenario() -> None:
        incoming = Incoming()
        waiting = asyncio.create_task(incoming.get())
        await asyncio.sleep(0)
        incoming.put(7)
        incoming.put(8)
        incoming.fail(NoSuchEntryError("first"))
        incoming.fail(BookieUnavailableError("second"))
        assert [await waiting, await incoming.get()] == [7, 8]
        for _ in range(2):
            with pytest.raises(NoSuchEntryError, match="first"):
                await incoming.get()

    run(scenario)


def test_an_answer_is_taken_at_once_only_by_who_waits_for_it() -> None:
    """Not before earlier answers, nor one that is refused."""

    async def scenario() -> None:
        incoming, offered = Incoming(), list[object]()

        def take(item: object) -> bool:
            offered.append(item)
            return item != 3

        incoming.taker = take
        incoming.put(0)  # no caller waits
        assert await incoming.get() == 0
        waiting = asyncio.create_task(incoming.get())
        await asyncio.sleep(0)
        for item in (1, 2, 3, 4):
            incoming.put(item)
        assert offered == [1, 2, 3]
        assert [await waiting, await incoming.get()] == [3, 4]
        assert offered == [1, 2, 3]

    run(scenario)


def test_a_defect_of_one_caller_takes_no_answer_from_another() -> None:
    """The loop's exception handler gets it; one message answers both."""

    async def scenario() -> None:
        noted: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: noted.append(context["exception"]))
        async with raw_bookie(Script().serve) as address, client_of(address) as client:
            defect = RuntimeError("a defect")

            def fail(_error: object) -> None:
                raise defect

            await client.write_lac(BOOKIE, ledger_id=1, last_add_confirmed=4)
            client.send_add(BOOKIE, frame_of(1, 5), fail)
            other = client.add_entry(BOOKIE, frame_of(1, 6))
            client.send_add(BOOKIE, frame_of(1, 7), fail)
            last = client.add_entry(BOOKIE, frame_of(1, 8))
            await asyncio.gather(other, last)
            assert noted == [defect, defect]

    run(scenario)


def test_an_add_waits_for_no_company_where_only_a_lac_is_out() -> None:
    """It leaves in the call, as one by itself does; behind another add it waits to share a turn."""

    async def scenario() -> None:
        script = Script(answer=lambda _id: False)
        async with raw_bookie(script.serve) as address, client_of(address) as client:
            lac = client.write_lac(BOOKIE, ledger_id=1, last_add_confirmed=4)
            await until(lambda: len(script.received) == 1)
            adds = [client.add_entry(BOOKIE, frame_of(1, entry_id)) for entry_id in (5, 6, 7)]
            await until(lambda: len(script.received) == 3)
            counts = [len(each.frames) for each in script.received if isinstance(each, Add)]
            assert counts == [1, 2]
            assert not any(each.done() for each in (lac, *adds))
        for each in (lac, *adds):
            with pytest.raises(BookieUnavailableError):
                await each

    run(scenario)
