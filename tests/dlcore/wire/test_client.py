"""The bookie client beyond the contract: lost, silent, lying bookies, batching, bounds."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import (
    BookieError,
    BookieOverloadedError,
    BookieUnavailableError,
    MetadataConnectionError,
    WrongIncarnationError,
)
from dlcore.base.ids import BookieId
from dlcore.wire.client import WireBookieClient
from dlcore.wire.messages import (
    HEADER,
    Add,
    Cancel,
    Chunk,
    Credit,
    Durable,
    Failed,
    Follow,
    Hello,
    Lac,
    Message,
    ReadEntries,
    ReadLac,
    Update,
    WriteLac,
)
from tests.fixtures.freezer import Freezer
from tests.fixtures.raw_wire import WELCOME, RawEnd, Script, raw_bookie
from tests.fixtures.served_bookie import BOOKIE, CLIENT, client_of, frame_of, run, serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


IMPATIENT = LedgerClientConfig(add_timeout_s=2.0, read_timeout_s=2.0)
"""For bookies that never answer."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; the run's time-out ends it if it never does."""
    while not condition():  # noqa: ASYNC110 - nothing reports it
        await asyncio.sleep(0.001)


def test_a_bookie_that_comes_back_elsewhere_is_found_again(tmp_path: Path) -> None:
    """Stop the server under open connections; start it on another port; the client goes on."""

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


def test_losing_the_connection_fails_every_pending_request() -> None:
    """Much waits on a bookie that answers nothing; it goes away: all fails, nothing hangs."""

    async def scenario() -> None:
        script = Script(answer=lambda _id: False)
        server = raw_bookie(script.serve)
        async with client_of(await server.__aenter__()) as client:
            adds = [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(50)]
            await script.has_received.wait()
            adds += [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(50, 60)]
            read = asyncio.ensure_future(client.read_lac(BOOKIE, ledger_id=1, fence=False))
            updates = client.follow(BOOKIE, ledger_id=1, first_entry_id=0)
            update = asyncio.ensure_future(anext(updates))
            await until(lambda: len(script.received) >= 4)
            await server.__aexit__(None, None, None)
            outcomes = await asyncio.gather(*adds, read, update, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {BookieUnavailableError}
            assert len({id(outcome) for outcome in outcomes}) == len(outcomes)

    run(scenario)


@pytest.mark.parametrize("shakes_hands", [True, False])
def test_a_silent_bookie_costs_one_add_time_out(shakes_hands: bool) -> None:
    """Nothing is answered: the adds fail in time, and the next one gets a new connection."""

    async def scenario() -> None:
        script = Script(answer=lambda _id: False, shakes_hands=shakes_hands, answers_pings=False)
        async with raw_bookie(script.serve) as address, client_of(address, IMPATIENT) as client:
            adds = [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(3)]
            for add in adds:
                with pytest.raises(BookieUnavailableError, match=r"no answer|silent"):
                    await add
            await until(lambda: not client._peers[BOOKIE]._connections)
            script.answer, script.shakes_hands = lambda _id: True, True
            script.answers_pings = True
            await client.add_entry(BOOKIE, frame_of(1, 3))
            assert script.connections == 2

    run(scenario)


def test_an_add_that_alone_stays_unanswered_fails_alone() -> None:
    """The bookie answers all but one: only that one fails, and the connection lives on."""

    async def scenario() -> None:
        script = Script(answer=lambda id_: id_ != 1)
        async with raw_bookie(script.serve) as address, client_of(address, IMPATIENT) as client:
            lost = client.add_entry(BOOKIE, frame_of(1, 0))
            while not lost.done():
                await client.add_entry(BOOKIE, frame_of(1, 1))
                await asyncio.sleep(0.01)
            with pytest.raises(BookieUnavailableError, match="no answer"):
                await lost
            await client.add_entry(BOOKIE, frame_of(1, 2))
            assert script.connections == 1

    run(scenario)


def test_an_answer_that_comes_too_late_is_dropped() -> None:
    """The add has failed when its answer comes: nothing happens, the connection lives on."""

    async def scenario() -> None:
        script = Script(answer=lambda id_: id_ != 1)
        script.replies = lambda message: [Durable([1])] if isinstance(message, WriteLac) else []
        async with raw_bookie(script.serve) as address, client_of(address, IMPATIENT) as client:
            lost = client.add_entry(BOOKIE, frame_of(1, 0))
            while not lost.done():
                await client.add_entry(BOOKIE, frame_of(1, 1))
                await asyncio.sleep(0.01)
            assert isinstance(lost.exception(), BookieUnavailableError)
            await client.write_lac(BOOKIE, ledger_id=1, last_add_confirmed=0)
            await client.add_entry(BOOKIE, frame_of(1, 2))
            assert script.connections == 1

    run(scenario)


LIES: list[list[Message | bytes]] = [
    [Durable([1])],  # the read itself
    [Durable([2])],  # what was never sent
    [Lac(2, 5)],
    [Chunk(2, [], is_last=True)],
    [Failed(2, 3, "no")],
    [Chunk(1, [b"x" * 100], is_last=True)],  # not what was asked
    [Update(1, [], 5, False)],
    [WELCOME],
    [ReadLac(1, 5, fence=True)],
    [Add(1, False, [b"x" * 100])],
    [b"\x00" * 100],
    [HEADER.pack(0xD10B, 36, 0, 0, 2**32 - 1, 1, 0)],
    [HEADER.pack(0xD10B, 35, 0, 8, 0, 1, 0) + bytes(8)],
    [Failed(0, 3, "the connection")],
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_server_that_breaks_the_protocol_is_no_bookie(lie: list[Message | bytes]) -> None:
    """Answer a LAC read with what it cannot be answered with: unknown, and the connection ends."""

    async def scenario() -> None:
        script = Script(replies=lambda _: lie)
        async with raw_bookie(script.serve) as address, client_of(address) as client:
            with pytest.raises(BookieUnavailableError):
                await client.read_lac(BOOKIE, ledger_id=1, fence=False)
            script.replies = lambda message: [Lac(message.request_id, 7)]  # type: ignore[union-attr]
            assert await client.read_lac(BOOKIE, ledger_id=1, fence=False) == 7
            assert script.connections == 2

    run(scenario)


@pytest.mark.parametrize(
    ("welcome", "error"),
    [
        (WELCOME._replace(incarnation="f" * 32), WrongIncarnationError),
        (WELCOME._replace(bookie_name="bookie-2"), WrongIncarnationError),
        (WELCOME._replace(version=2), BookieUnavailableError),
        (WELCOME._replace(features=4), BookieUnavailableError),
        (Lac(1, 5), BookieUnavailableError),
        (Durable([1]), BookieUnavailableError),
        (Failed(0, 2, "no such ledger"), BookieUnavailableError),
        (Failed(0, 8, "another one"), WrongIncarnationError),
        (Failed(0, 77, "what?"), BookieUnavailableError),
    ],
    ids=str,
)
def test_only_the_meant_bookie_may_answer(welcome: Message, error: type) -> None:
    """Whatever else comes first fails what waits, and no request is ever sent."""

    async def scenario() -> None:
        received: list[Message | None] = []

        async def serve_wrong(end: RawEnd) -> None:
            received.append(await end.receive())
            end.send(welcome)
            received.append(await end.receive())

        async with raw_bookie(serve_wrong) as address, client_of(address) as client:
            with pytest.raises(error):
                await client.add_entry(BOOKIE, frame_of(1, 0))
            with pytest.raises(error):
                await client.read_lac(BOOKIE, ledger_id=1, fence=False)
        assert {type(each) for each in received} <= {Hello, type(None)}

    run(scenario)


def test_a_bookie_that_sends_more_than_the_window_is_cut_off() -> None:
    """A stalled reader gets bounded data, whatever the bookie does."""

    async def scenario() -> None:
        def flood(message: Message) -> list[Message | bytes]:
            if not isinstance(message, ReadEntries):
                return []
            chunk = Chunk(1, [bytes(message.window_bytes // 10)], is_last=False)
            return [chunk] * 20

        script = Script(replies=flood)
        async with raw_bookie(script.serve) as address, client_of(address) as client:
            chunks = client.read_entries(BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=99)
            await anext(chunks)
            await until(lambda: not client._peers[BOOKIE]._connections)
            for _ in range(9):  # what was within the window is good
                await anext(chunks)
            with pytest.raises(BookieUnavailableError, match="window"):
                await anext(chunks)

    run(scenario)


def test_a_port_that_accepts_and_says_nothing_is_unavailable_in_time() -> None:
    """Every request ends by its own time-out."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            async with client_of(f"127.0.0.1:{port}", IMPATIENT) as client:
                with pytest.raises(BookieUnavailableError):
                    await client.add_entry(BOOKIE, frame_of(1, 0))
                with pytest.raises(BookieUnavailableError):
                    await client.read_lac(BOOKIE, ledger_id=1, fence=False)

    run(scenario)


def test_a_read_that_is_not_answered_ends_by_the_read_time_out() -> None:
    """The bookie lives, as its pongs show: no caller has a timer for its answer."""

    async def scenario() -> None:
        async with (
            raw_bookie(Script().serve) as address,
            client_of(address, IMPATIENT) as client,
            asyncio.timeout(20 * IMPATIENT.read_timeout_s),
        ):
            with pytest.raises(BookieUnavailableError, match="no answer"):
                await client.read_lac(BOOKIE, ledger_id=1, fence=True)
            with pytest.raises(BookieUnavailableError, match="no answer"):
                await client.read_entry(BOOKIE, ledger_id=1, entry_id=0, fence=True)

    run(scenario)


def test_a_range_read_that_stalls_ends_by_the_read_time_out() -> None:
    """One chunk comes and then nothing, though the bookie lives."""

    async def scenario() -> None:
        script = Script(replies=lambda _: [Chunk(1, [b"first"], is_last=False)])
        async with raw_bookie(script.serve) as address, client_of(address, IMPATIENT) as client:
            chunks = client.read_entries(BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=9)
            assert [bytes(each) for each in await anext(chunks)] == [b"first"]
            with pytest.raises(BookieUnavailableError, match="no answer"):
                await anext(chunks)

    run(scenario)


def test_a_reader_that_stops_early_ends_the_read_at_the_bookie(tmp_path: Path) -> None:
    """Take one chunk, close the iterator; also a follower, and a cancelled task."""

    async def scenario() -> None:
        async with serve(tmp_path) as served, client_of(served.address) as client:
            for entry_id in range(100):
                client.add_entry(BOOKIE, frame_of(1, entry_id, b"x" * 100_000))
            await client.write_lac(BOOKIE, ledger_id=1, last_add_confirmed=9)

            async def start(stream: object) -> None:
                await anext(stream)  # type: ignore[call-overload]
                await asyncio.Event().wait()

            for _ in range(20):
                chunks = client.read_entries(
                    BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=99
                )
                updates = client.follow(BOOKIE, ledger_id=1, first_entry_id=0)
                async with aclosing(chunks), aclosing(updates):
                    tasks = [asyncio.ensure_future(start(each)) for each in (chunks, updates)]
                    await asyncio.sleep(0)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: not any(each.reads.streams for each in served.service.connections))
            assert not served.storage.followers.ledgers()

    run(scenario)


def test_credit_is_given_as_chunks_are_taken() -> None:
    """A reader that takes what comes is never held up; leaving early is reported as well."""

    async def scenario() -> None:
        script = Script()

        def reply(message: Message) -> list[Message | bytes]:
            if isinstance(message, ReadEntries | Credit):
                chunk = Chunk(message.request_id, [b"x" * message[-1]], is_last=False)
                return [chunk]
            return []

        script.replies = reply
        async with raw_bookie(script.serve) as address, client_of(address) as client:
            chunks = client.read_entries(BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=9)
            for _ in range(5):
                await anext(chunks)
            await chunks.aclose()
            await until(lambda: isinstance(script.received[-1], Cancel))
            kinds = [type(each) for each in script.received]
            assert kinds == [ReadEntries, Credit, Credit, Credit, Credit, Cancel]

    run(scenario)


def test_a_follow_stream_that_the_bookie_ends_is_unavailable() -> None:
    """An unasked end must not look like the end of the ledger."""

    async def scenario() -> None:
        script = Script(replies=lambda _: [Update(1, [], 3, False), Failed(1, 12, "draining")])
        async with raw_bookie(script.serve) as address, client_of(address) as client:
            updates = client.follow(BOOKIE, ledger_id=1, first_entry_id=0)
            assert (await anext(updates)).last_add_confirmed == 3
            with pytest.raises(BookieUnavailableError, match="draining"):
                await anext(updates)
            assert isinstance(script.received[0], Follow)

    run(scenario)


def test_a_frozen_bookie_is_noticed_by_its_follower(tmp_path: Path) -> None:
    """Freeze the network under a follower that waits: PINGs end it within the add time-out."""

    async def scenario() -> None:
        config = replace(CLIENT, add_timeout_s=1.0)
        async with serve(tmp_path) as served:
            freezer = Freezer(served.address)
            async with freezer.listen() as address, client_of(address, config) as client:
                updates = client.follow(BOOKIE, ledger_id=1, first_entry_id=0)
                await anext(updates)
                freezer.freeze()
                clock = asyncio.get_running_loop().time
                frozen_s = clock()
                with pytest.raises(BookieUnavailableError, match="silent"):
                    await anext(updates)
                assert clock() - frozen_s < 1.5 * config.add_timeout_s

    run(scenario)


def test_waiting_requests_share_messages_and_keep_their_order() -> None:
    """Queue small and big adds, recovery adds and LACs: few messages, everything in call order."""

    async def scenario() -> None:
        script = Script()
        async with raw_bookie(script.serve) as address, client_of(address) as client:
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
            for message in script.received:
                if isinstance(message, Add):
                    received += [("add", message.is_recovery, bytes(f)) for f in message.frames]
                else:
                    assert isinstance(message, WriteLac)
                    received.append(("lac", *message[1:]))
            assert received == sent
            assert len(script.received) <= 2 + 2 + 10 + 1
            assert script.connections == 1

    run(scenario)


def test_the_backlog_of_a_connection_is_bounded() -> None:
    """A bookie answers nothing: adds beyond the bound are refused at once, the rest still wait."""

    async def scenario() -> None:
        config = replace(CLIENT, pending_entries_max=5)
        async with raw_bookie(Script(answer=lambda _id: False).serve) as address:
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


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "127.0.0.1:1", "[::1]:1"])
def test_an_address_that_leads_nowhere_is_unavailable(address: str) -> None:
    """A registration may hold anything."""

    async def scenario() -> None:
        async with client_of(address) as client:
            with pytest.raises(BookieUnavailableError):
                await client.add_entry(BOOKIE, frame_of(1, 0))

    run(scenario)


def test_bookies_that_are_gone_are_forgotten() -> None:
    """Else a process of years keeps something of each that it ever talked to."""

    async def scenario() -> None:
        asked = 0

        async def resolve(bookie: BookieId) -> str:
            raise BookieUnavailableError(f"{bookie} is not registered")

        async def ask_another() -> int:
            nonlocal asked
            asked += 1
            with pytest.raises(BookieUnavailableError, match="not registered"):
                await client.read_lac(BookieId(f"b{asked}", "life"), ledger_id=1, fence=False)
            return len(client._peers)

        async with client_of(resolve) as client:
            # Those are kept whose pause is not over, so that they are not asked all the time.
            while await ask_another() >= asked:  # noqa: ASYNC110  # nothing reports it
                await asyncio.sleep(0.01)

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
            client = WireBookieClient(served.resolve, cluster_id="other", config=CLIENT)
            with pytest.raises(BookieError, match="cluster"):
                await client.add_entry(BOOKIE, frame_of(1, 0))
            await client.aclose()
            assert served.storage.core.live_ledgers() == []

    run(scenario)
