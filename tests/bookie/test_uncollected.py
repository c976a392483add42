"""A bookie leaves nothing of a connection to Python's collector, whatever its client did.

Goal: clients that come, are refused and go leave nothing behind, also where the collector has
frozen what there was.  Method: with the collector off, each kind of request; then look for errors
and parts of connections.  An error refers to the frames that it passed, so it must not be among
their variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import DLError
from dlcore.wire.messages import (
    Follow,
    Message,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    WriteLac,
)
from tests.fixtures.aio import until
from tests.fixtures.raw_wire import HELLO, adds, raw_connection
from tests.fixtures.served_bookie import frame_of, run, serve
from tests.fixtures.uncollected import uncollected

if TYPE_CHECKING:
    from pathlib import Path

CLOSED, MISSING = 1, 2
"""Ledgers: one that is fenced, one that the bookie does not have."""
FLIPPED = frame_of(3, 0)[:-1] + b"?"

REQUESTS: dict[str, list[Message | bytes]] = {
    "no protocol": [b"GET / HTTP/1.1\r\nHost: bookie-1\r\n\r\n"],
    "another bookie": [HELLO._replace(bookie_name="another")],
    "no handshake": [adds(frame_of(3, 0))],
    "an id again": [HELLO, adds(frame_of(3, 0)), adds(frame_of(3, 1))],
    "a fenced ledger": [HELLO, adds(frame_of(CLOSED, 1))],
    "a fenced ledger, many": [HELLO, adds(*(frame_of(CLOSED, i) for i in range(1, 9)))],
    "a flipped bit": [HELLO, adds(FLIPPED)],
    "flipped bits": [HELLO, adds(FLIPPED, FLIPPED)],
    "a false LAC": [HELLO, WriteLac(1, CLOSED, 10_000)],
    "a LAC of no ledger": [HELLO, WriteLac(1, MISSING, 1)],
    "an entry of no ledger": [HELLO, ReadEntry(1, MISSING, 0, fence=False)],
    "no entry": [HELLO, ReadEntry(1, CLOSED, 7, fence=False)],
    "entries of no ledger": [HELLO, ReadEntries(1, MISSING, 0, 8, 1, 2000, 1500)],
    "a LAC to read of no ledger": [HELLO, ReadLac(1, MISSING, fence=False)],
    "entries held of no ledger": [HELLO, ReadHeld(1, MISSING)],
    "entries that are read": [HELLO, ReadEntry(1, CLOSED, 0, fence=False)],
    "a range that is read": [HELLO, ReadEntries(1, CLOSED, 0, 0, 1, 2000, 1500)],
    "following a ledger": [HELLO, Follow(1, CLOSED, 0, 2000)],
    "following none": [HELLO, Follow(1, MISSING, 0, 2000)],
}


def is_part(each: object) -> bool:
    """Return whether it is an error, or a part of a connection."""
    # The module of a class in C may be no text.
    module = str(type(each).__module__)
    return isinstance(each, DLError) or module.startswith("bookie.serving.")


@pytest.mark.parametrize("messages", REQUESTS.values(), ids=REQUESTS.keys())
def test_nothing_waits_for_the_collector(tmp_path: Path, messages: list[Message | bytes]) -> None:
    """Send it, take the answer, go."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            async with raw_connection(served.address) as end:
                end.send(adds(frame_of(CLOSED, 0)), ReadLac(2, CLOSED, fence=True))
                for _ in range(2):
                    await end.receive()
            await until(lambda: not served.service.connections)
            with uncollected(is_part) as left:
                async with raw_connection(served.address, hello=False) as end:
                    end.send(*messages)
                    for _ in messages[:2]:
                        await end.receive()
                await until(lambda: not served.service.connections)
                assert left() == []

    run(scenario)
