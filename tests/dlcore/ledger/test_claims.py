"""A LAC that one bookie tells: the entries that a quorum holds decide, of any writer.

Goal: one forged message makes no ledger unreadable or unrecoverable, and no LAC that is true is
taken back.  Method: the rule by itself against every small case, then memory bookies.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.ledger.metadata.values import LedgerState, write_set
from dlcore.ledger.reading.confirmed import confirmed_of, vouched_and_claimed
from dlcore.wire.frames import encode_frame
from dlcore.wire.port import EntryRange
from tests.fixtures.ledger_cluster import Cluster, bodies, read_all, run, write
from tests.fixtures.ledgers import quorum_of

if TYPE_CHECKING:
    from dlcore.ledger.writing.writer import LedgerWriter

CLAIMS = [10, 11, 500, 2**62]


@pytest.mark.parametrize("sizes", [(3, 3, 2), (4, 2, 2), (3, 2, 1), (2, 2, 2), (4, 3, 2)])
def test_a_claim_stands_unless_too_many_prove_that_it_cannot(sizes: tuple[int, int, int]) -> None:
    """Every entry on any of its bookies, some of them silent: what Qa may hold is confirmed."""
    quorum = quorum_of(*sizes)
    size = quorum.ensemble_size
    claimed = 2 if size < 4 else 1
    subsets = list(itertools.product((False, True), repeat=size))
    for silent in subsets:
        for holders in itertools.product(subsets, repeat=claimed + 1):
            held = {
                position: [
                    EntryRange(first_entry_id=entry_id, last_entry_id=entry_id)
                    for entry_id in range(claimed + 1)
                    if holders[entry_id][position] and position in write_set(quorum, entry_id)
                ]
                for position in range(size)
                if not silent[position]
            }
            may_be = [
                sum(silent[p] or holders[entry_id][p] for p in write_set(quorum, entry_id))
                >= quorum.ack_quorum_size
                for entry_id in range(claimed + 1)
            ]
            expected = [*may_be, False].index(False) - 1
            assert confirmed_of(quorum, held, vouched=-1, claimed=claimed) == expected


def test_a_claim_is_judged_by_the_ends_of_what_is_held() -> None:
    """As by a look at every entry up to it."""
    rng = random.Random(5)
    for _ in range(2000):
        quorum = quorum_of(*rng.choice([(3, 3, 2), (4, 2, 2), (5, 3, 2), (4, 3, 3)]))
        claimed, vouched = rng.randint(0, 40), rng.randint(-1, 10)
        held: dict[int, list[EntryRange]] = {}
        for position in range(quorum.ensemble_size):
            edges = sorted(rng.sample(range(60), 2 * rng.randint(0, 4)))
            ranges = zip(edges[::2], edges[1::2], strict=True)
            if rng.random() < 0.8:
                held[position] = [
                    EntryRange(first_entry_id=first, last_entry_id=last) for first, last in ranges
                ]
        expected = claimed
        for entry_id in range(vouched + 1, claimed + 1):
            noes = sum(
                p in held
                and not any(r.first_entry_id <= entry_id <= r.last_entry_id for r in held[p])
                for p in write_set(quorum, entry_id)
            )
            if noes >= quorum.write_quorum_size - quorum.ack_quorum_size + 1:
                expected = entry_id - 1
                break
        assert confirmed_of(quorum, held, vouched=vouched, claimed=claimed) == expected


def test_an_entry_forged_billions_ahead_costs_no_look_at_all_before_it() -> None:
    """The bookie that was lied to answers alone, so that nothing is refuted."""
    ahead = 2**60
    held = {
        0: [
            EntryRange(first_entry_id=0, last_entry_id=9),
            EntryRange(first_entry_id=ahead, last_entry_id=ahead),
        ]
    }
    assert confirmed_of(quorum_of(3, 3, 2), held, vouched=9, claimed=ahead - 1) == ahead - 1


def test_a_lac_of_two_bookies_is_no_claim() -> None:
    """Nor what is below the ensemble's first entry."""
    assert vouched_and_claimed([7, 3, 7], floor=-1) == (7, 7)
    assert vouched_and_claimed([7, 3, 5], floor=-1) == (5, 7)
    assert vouched_and_claimed([7, 3, 5], floor=6) == (6, 7)
    assert vouched_and_claimed([7], floor=2) == (2, 7)
    assert vouched_and_claimed([], floor=2) == (2, 2)


async def ledger_of_ten(cluster: Cluster, quorum: QuorumConfig) -> LedgerWriter:
    """Return a ledger of ten entries whose writer lives, and has published its LAC."""
    writer = await cluster.client.create_ledger(quorum)
    await write(writer, 10)
    await writer.publish_lac()
    return writer


def forge(cluster: Cluster, writer: LedgerWriter, lac: int, *, is_add: bool) -> None:
    """Tell one bookie that entries up to `lac` are confirmed, as a stranger can."""
    bookie = cluster.member(writer, 1)
    if not is_add:
        bookie.write_lac(writer.ledger_id, lac)
        return
    frame = encode_frame(
        ledger_id=writer.ledger_id,
        entry_id=lac + 1,
        last_add_confirmed=lac,
        ledger_bytes=1,
        body=[b"x"],
    )
    bookie.add_entry(frame, is_recovery=False)


@pytest.mark.parametrize("is_add", [False, True], ids=["lac", "add"])
@pytest.mark.parametrize("lac", CLAIMS)
@pytest.mark.parametrize("sizes", [(3, 3, 2), (4, 2, 2)])
def test_a_forged_lac_stops_no_read_and_no_recovery(
    sizes: tuple[int, int, int], lac: int, *, is_add: bool
) -> None:
    """The ledger ends with the last entry that was written, all of it readable."""

    async def scenario(cluster: Cluster) -> None:
        writer = await ledger_of_ten(cluster, quorum_of(*sizes))
        forge(cluster, writer, lac, is_add=is_add)
        other = cluster.new_client()
        reader = await other.open_ledger(writer.ledger_id)
        assert await reader.read_last_add_confirmed() == 9
        assert await read_all(reader, 0, 9) == bodies(0, 9)
        metadata = await other.recover_ledger(writer.ledger_id)
        assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, 9)
        assert metadata.length_bytes == sum(map(len, bodies(0, 9)))
        await other.aclose()

    run(scenario)


@pytest.mark.parametrize("lac", CLAIMS)
def test_a_follower_of_the_bookie_that_lies_goes_on(lac: int) -> None:
    """With what was written since, and what comes."""

    async def scenario(cluster: Cluster) -> None:
        writer = await ledger_of_ten(cluster, QuorumConfig())
        for position in range(3):  # whichever is followed first
            if position == writer.ledger_id % 3:
                cluster.member(writer, position).write_lac(writer.ledger_id, lac)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []

        async def follow() -> None:
            async with aclosing(reader.follow(0)) as steps:
                async for step in steps:
                    got.extend(bytes(frame.body) for frame in step.frames)

        task = asyncio.create_task(follow())
        await asyncio.sleep(5)
        assert got == bodies(0, 9)
        for number in range(10, 20):
            await writer.append([bodies(number, number)[0]])
        await writer.close()
        await asyncio.wait_for(task, 20)
        assert got == bodies(0, 19)

    run(scenario)


def test_a_forged_next_entry_is_not_taken_into_the_ledger() -> None:
    """One bookie holds it, with the right ids and checksum; it does not count on."""

    async def scenario(cluster: Cluster) -> None:
        writer = await ledger_of_ten(cluster, QuorumConfig())
        forge(cluster, writer, 9, is_add=True)
        other = cluster.new_client()
        metadata = await other.recover_ledger(writer.ledger_id)
        assert metadata.last_entry_id == 9
        await other.aclose()

    run(scenario)
