"""Bookies of the release before, which do not speak every message of this one."""

from __future__ import annotations

import pytest

from dlcore.wire.messages import Chunk, Failed, Hello, Lac, Message, ReadEntry, ReadLac
from tests.fixtures.raw_wire import WELCOME, RawEnd, raw_bookie
from tests.fixtures.served_bookie import BOOKIE, client_of, frame_of, run


@pytest.mark.parametrize(("held", "known_to"), [(0, 0), (3, 3), (99, 15)])
def test_a_bookie_of_an_earlier_release_is_asked_for_one_entry_after_the_other(
    held: int, known_to: int
) -> None:
    """It does not speak READ_HELD, and is not sent it."""
    received: list[Message | None] = []

    async def serve_old(end: RawEnd) -> None:
        received.append(await end.receive())
        end.send(WELCOME._replace(features=0))
        while (message := await end.receive()) is not None:
            received.append(message)
            match message:
                case ReadLac(request_id):
                    end.send(Lac(request_id, -1))
                case ReadEntry(request_id, ledger_id, entry_id) if entry_id < held:
                    end.send(Chunk(request_id, [frame_of(ledger_id, entry_id)], is_last=True))
                case ReadEntry(request_id):
                    end.send(Failed(request_id, 3, "not held"))

    async def scenario() -> None:
        async with raw_bookie(serve_old) as address, client_of(address) as client:
            answer = await client.read_held(BOOKIE, ledger_id=1)
            assert answer == (-1, known_to, [(0, min(held, 16) - 1)] if held else [])

    run(scenario)
    assert {type(each) for each in received} <= {Hello, ReadLac, ReadEntry}
