"""Each request names its ledger, its entries, and the rights that it needs."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dlcore.base.access import capability
from dlcore.base.access.capability import (
    EVERYTHING,
    ID_MAX,
    CarriedPurse,
    Grant,
    LedgerRight,
    OwnPurse,
    Reach,
    Signer,
    new_private_key,
)
from dlcore.base.config import LedgerClientConfig
from dlcore.wire.capabilities import reach_of, reach_of_add, reach_of_adds
from dlcore.wire.client import WireBookieClient
from dlcore.wire.frames import FrameRun, frame_parts
from dlcore.wire.messages import (
    Add,
    Authorize,
    Follow,
    Hello,
    Lac,
    Message,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Request,
    WriteLac,
)
from tests.dlcore.wire.test_client import until
from tests.fixtures.raw_wire import WELCOME, RawEnd, Script, raw_bookie
from tests.fixtures.served_bookie import BOOKIE, CLIENT, CLUSTER_ID, frame_of, run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dlcore.base.access.capability import Purse


READ, ADD = LedgerRight.READ, LedgerRight.ADD
FENCE, RECOVER = LedgerRight.READ | LedgerRight.FENCE, LedgerRight.ADD | LedgerRight.RECOVER


@pytest.mark.parametrize(
    ("request_", "first", "last", "rights"),
    [
        (ReadEntries(1, 7, 3, 9, 2, 1, 1), 3, 9, READ),
        (ReadEntry(1, 7, 3, fence=False), 3, 3, READ),
        (ReadEntry(1, 7, 3, fence=True), 3, 3, FENCE),
        (Follow(1, 7, 3, 1), 3, ID_MAX, READ),
        (ReadLac(1, 7, fence=False), ID_MAX, -1, READ),
        (ReadLac(1, 7, fence=True), ID_MAX, -1, FENCE),
        (ReadHeld(1, 7), ID_MAX, -1, READ),
        (WriteLac(1, 7, 4), ID_MAX, -1, ADD),
    ],
)
def test_requests(request_: Request, first: int, last: int, rights: LedgerRight) -> None:
    """All of the entries that an answer may bring, and none where it brings none."""
    assert reach_of(request_) == Reach(7, first, last, int(rights))


def test_adds() -> None:
    """By the ids in the frame, whole or in parts; of recovery they need another right."""
    frame = frame_of(7, 3)
    parts = frame_parts(ledger_id=7, entry_id=3, last_add_confirmed=-1, ledger_bytes=1, body=[b"x"])
    for each in (frame, memoryview(frame), parts):
        assert reach_of_add(each, is_recovery=False) == Reach(7, 3, 3, int(ADD))
    assert reach_of_add(frame, is_recovery=True) == Reach(7, 3, 3, int(RECOVER))


@pytest.mark.parametrize("is_run", [False, True])
def test_adds_of_one_message(is_run: bool) -> None:
    """For one ledger they reach from the first to the last, in any order; for several, not."""

    def reach(*ids: tuple[int, int]) -> Reach | None:
        frames = [frame_of(ledger_id, entry_id, b"x" * entry_id) for ledger_id, entry_id in ids]
        sizes = np.array([len(each) for each in frames])
        run = FrameRun.of_sizes(memoryview(b"".join(frames)), sizes)
        return reach_of_adds(run if is_run else frames, is_recovery=False)

    assert reach((7, 3)) == Reach(7, 3, 3, int(ADD))
    assert reach((7, 4), (7, 9), (7, 2)) == Reach(7, 2, 9, int(ADD))
    assert reach((7, 4), (8, 5)) is None
    assert reach((2**63 - 1, 4)) == Reach(2**63 - 1, 4, 4, int(ADD))
    whole = reach_of_adds([frame_of(7, 3)], is_recovery=True)
    assert whole == Reach(7, 3, 3, int(RECOVER))


SIGNER = Signer(new_private_key())


def token_of(ledger_id: int, **entries: int) -> bytes:
    """Return a capability for reading and adding."""
    grant = Grant.of(ledger_id, LedgerRight.READ | LedgerRight.ADD, **entries)
    return SIGNER.sign([grant], expires_s=9)


def lac_message(message: Message) -> list[Message | bytes]:
    """Answer a read of a LAC."""
    return [Lac(message.request_id, 1)] if isinstance(message, ReadLac) else []


@asynccontextmanager
async def client_with(
    address: str, *given: bytes | Purse, config: LedgerClientConfig = CLIENT
) -> AsyncIterator[WireBookieClient]:
    """Open a client that carries capabilities, or has a purse."""
    purse: Purse = CarriedPurse()
    for each in given:
        if isinstance(each, bytes):
            assert isinstance(purse, CarriedPurse)
            purse.learn([each])
        else:
            purse = each

    async def resolve(_: object) -> str:
        return address

    client = WireBookieClient(resolve, cluster_id=CLUSTER_ID, config=config, purse=purse)
    try:
        yield client
    finally:
        await client.aclose()


async def read(client: WireBookieClient, *ledgers: int) -> None:
    """Ask for LACs, one after the other."""
    for ledger_id in ledgers:
        assert await client.read_lac(BOOKIE, ledger_id=ledger_id, fence=False) == 1


def test_each_is_presented_once_on_a_connection() -> None:
    """Before the first read that needs it; a read of another ledger goes without."""
    script, tokens = Script(replies=lac_message), [token_of(1), token_of(2)]

    async def scenario() -> None:
        async with raw_bookie(script.serve) as address, client_with(address, *tokens) as client:
            await read(client, 1, 1, 2, 3, 1)

    run(scenario)
    asked = [ReadLac(number, each, fence=False) for number, each in enumerate((1, 1, 2, 3, 1), 1)]
    presented = [Authorize(each) for each in tokens]
    assert script.received == [presented[0], *asked[:2], presented[1], *asked[2:]]


def test_a_capability_that_a_bookie_forgot_is_presented_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends drop the oldest."""
    monkeypatch.setattr(capability, "KEPT_MAX", 2)
    script, tokens = Script(replies=lac_message), [token_of(1), token_of(2)]
    later = token_of(3)

    async def scenario() -> None:
        async with raw_bookie(script.serve) as address, client_with(address, *tokens) as client:
            await read(client, 1, 2)
            purse = client._dialer.purse
            assert isinstance(purse, CarriedPurse)
            purse.learn([later])
            await read(client, 3, 2)
            purse.learn([tokens[0]])
            await read(client, 1)

    run(scenario)
    presented = [each.token for each in script.received if isinstance(each, Authorize)]
    assert presented == [*tokens, later, tokens[0]]


def test_writes_are_preceded_by_what_they_need() -> None:
    """Adds that share a message, also of several ledgers or capabilities, and LACs."""
    low, high, other = token_of(1, last_entry_id=4), token_of(1, first_entry_id=5), token_of(2)
    script = Script()

    async def scenario() -> None:
        tokens = (low, high, other)
        async with raw_bookie(script.serve) as address, client_with(address, *tokens) as client:
            await client.write_lac(BOOKIE, ledger_id=2, last_add_confirmed=0)
            adds = [client.add_entry(BOOKIE, frame_of(1, entry_id)) for entry_id in (3, 4, 5, 6)]
            for each in adds:
                await each

    run(scenario)
    before = script.received.index(next(m for m in script.received if isinstance(m, Add)))
    assert script.received[:2] == [Authorize(other), WriteLac(1, 2, 0)]
    kinds = [type(each) for each in script.received]
    assert kinds.count(Authorize) == 3
    assert Authorize(low) in script.received[:before]
    last = next(m for m in script.received if isinstance(m, Add) and frame_of(1, 6) in m.frames)
    assert script.received.index(Authorize(high)) < script.received.index(last)


def test_the_own_one_is_presented_before_all_else_and_when_it_is_renewed() -> None:
    """Once for reads, adds and LACs; the next request brings a new one."""
    script, now_s = Script(replies=lac_message), 1000.0

    def make(expires_s: int) -> bytes:
        return SIGNER.sign([EVERYTHING], expires_s=expires_s)

    async def scenario() -> None:
        nonlocal now_s
        purse = OwnPurse(make, lambda: now_s, lifetime_s=100)
        async with raw_bookie(script.serve) as address, client_with(address, purse) as client:
            await client.write_lac(BOOKIE, ledger_id=2, last_add_confirmed=0)
            await client.add_entry(BOOKIE, frame_of(1, 0))
            await client.write_lac(BOOKIE, ledger_id=1, last_add_confirmed=0)
            now_s = 1050.0
            await client.add_entry(BOOKIE, frame_of(3, 0))
            await read(client, 5)
            await read(client, 5)

    run(scenario)
    old, new = Authorize(make(1100)), Authorize(make(1150))
    kinds = [each if isinstance(each, Authorize) else type(each) for each in script.received]
    reads = [new, ReadLac, ReadLac]  # on a connection of their own
    assert kinds == [old, WriteLac, Add, WriteLac, new, Add, *reads]


def test_it_is_renewed_for_a_client_that_only_follows() -> None:
    """Without any request, or its follower would end with the capability."""
    script, now_s = Script(replies=lac_message), 1000.0

    def make(expires_s: int) -> bytes:
        return SIGNER.sign([EVERYTHING], expires_s=expires_s)

    async def scenario() -> None:
        nonlocal now_s
        purse = OwnPurse(make, lambda: now_s, lifetime_s=100)
        config = LedgerClientConfig(add_timeout_s=0.2, read_timeout_s=20.0)
        async with (
            raw_bookie(script.serve) as address,
            client_with(address, purse, config=config) as client,
        ):
            await read(client, 5)
            now_s = 1050.0
            await until(lambda: Authorize(make(1150)) in script.received)

    run(scenario)
    assert script.received == [Authorize(make(1100)), ReadLac(1, 5, False), Authorize(make(1150))]


def test_a_bookie_of_an_earlier_release_is_sent_none() -> None:
    """It would take the unknown kind for a broken protocol."""
    received: list[Message | None] = []

    async def serve_old(end: RawEnd) -> None:
        received.append(await end.receive())
        end.send(WELCOME._replace(features=1))
        while (message := await end.receive()) is not None:
            received.append(message)
            end.send(*lac_message(message))

    async def scenario() -> None:
        async with raw_bookie(serve_old) as address, client_with(address, token_of(1)) as client:
            await read(client, 1)

    run(scenario)
    assert [type(each) for each in received] == [Hello, ReadLac]
