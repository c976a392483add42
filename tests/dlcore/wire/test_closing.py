"""A client that closes while writes are on their way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlcore.base.errors import BookieUnavailableError
from dlcore.base.ids import BookieId
from tests.fixtures.aio import cancel_after
from tests.fixtures.raw_wire import Script, raw_bookie
from tests.fixtures.served_bookie import BOOKIE, client_of, frame_of, run, serve

if TYPE_CHECKING:
    from pathlib import Path


def test_closing_fails_every_pending_add() -> None:
    """Close a client whose adds no bookie answers, some of them not yet sent."""

    async def scenario() -> None:
        script = Script(answer=lambda _id: False)
        async with raw_bookie(script.serve) as address, client_of(address) as client:
            adds = [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(5)]
            await script.has_received.wait()
            adds += [client.add_entry(BOOKIE, frame_of(1, i)) for i in range(5, 9)]
            await client.aclose()
            outcomes = await asyncio.gather(*adds, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {BookieUnavailableError}

    run(scenario)


def test_closing_waits_for_adds_on_their_way(tmp_path: Path) -> None:
    """Close a client that has not yet reached the bookie: the add still arrives."""

    async def scenario() -> None:
        is_known = asyncio.Event()

        async def resolve(_bookie: BookieId) -> str:
            await is_known.wait()
            return served.address

        async with serve(tmp_path) as served, client_of(resolve) as client:
            add = client.add_entry(BOOKIE, frame_of(1, 0))
            async with asyncio.TaskGroup() as group:
                group.create_task(client.aclose())
                await asyncio.sleep(0)  # it closes now
                is_known.set()
            await add
            async with client_of(served.address) as other:
                read = await other.read_entry(BOOKIE, ledger_id=1, entry_id=0, fence=False)
                assert bytes(read) == frame_of(1, 0)

    run(scenario)


def test_a_cancelled_close_closes_every_connection() -> None:
    """Also those whose turn had not come."""

    async def scenario() -> None:
        others = [BookieId(f"bookie-{number}", f"{number}" * 32) for number in (2, 3)]

        async def resolve(bookie: BookieId) -> str:
            if bookie != BOOKIE:
                await asyncio.Event().wait()
            return address

        script = Script(answer=lambda _id: False)
        async with raw_bookie(script.serve) as address, client_of(resolve) as client:
            adds = [client.add_entry(each, frame_of(1, 0)) for each in (BOOKIE, *others)]
            await script.has_received.wait()
            await cancel_after(asyncio.create_task(client.aclose()), 1)
            assert all(add.done() for add in adds)
            outcomes = await asyncio.gather(*adds, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {BookieUnavailableError}

    run(scenario)
