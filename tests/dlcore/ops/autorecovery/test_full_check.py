"""The full replica check: no ledger is checked twice in a round, under any auditor."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import MetadataVersionError, NoNodeError
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.metadata.stored import decode, encode
from dlcore.ops.autorecovery.listing import CheckProgress, RepairList
from dlcore.ops.autorecovery.values import ReplicaCheckRun
from tests.fixtures.ledger_cluster import PATHS, Cluster, TokenClock, run, write
from tests.fixtures.recovery import QUICK, recovering, until

LEDGERS = 30
SLOW = replace(QUICK, check_ledgers_per_s=1.0, check_interval_s=1000.0)


async def fill(cluster: Cluster) -> None:
    """Make ledgers, one a second of a check."""
    for _ in range(LEDGERS):
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        await writer.close()


async def progress_of(cluster: Cluster) -> ReplicaCheckRun | None:
    """Return how far the check is that is under way."""
    node = await cluster.store.get(PATHS.check_progress)
    return None if node is None else decode(ReplicaCheckRun, node.value, source="progress")


def repairs_of(cluster: Cluster) -> RepairList:
    """Return the list, as a test's own process sees it."""
    return RepairList(cluster.store, PATHS, TokenClock())


def test_a_check_that_was_interrupted_goes_on_where_it_was() -> None:
    """The next auditor asks about the rest only; the round is the same, and its end clears it."""

    async def scenario(cluster: Cluster) -> None:
        await fill(cluster)
        async with recovering(cluster, SLOW):
            await asyncio.sleep(LEDGERS / 2 + 1)
        interrupted = await progress_of(cluster)
        assert interrupted is not None
        assert LEDGERS / 4 < interrupted.ledgers == interrupted.next_ledger_id < LEDGERS
        began_s = asyncio.get_running_loop().time()
        async with recovering(cluster, SLOW):
            await until(repairs_of(cluster).read_last_check)
        assert asyncio.get_running_loop().time() - began_s < LEDGERS - interrupted.ledgers + 3
        last = await repairs_of(cluster).read_last_check()
        assert last is not None
        assert (last.ledgers, last.started_ms) == (LEDGERS, interrupted.started_ms)
        assert await progress_of(cluster) is None

    run(scenario)


@pytest.mark.parametrize("why", ["damaged", "old", "from the future"])
def test_work_that_cannot_go_on_begins_anew(why: str, caplog: pytest.LogCaptureFixture) -> None:
    """A value that does not parse is named; one of long ago, or of no time, says nothing."""

    async def scenario(cluster: Cluster) -> None:
        await fill(cluster)
        now_ms = TokenClock().now_ms()
        begun_ms = now_ms - 2_000_000 if why == "old" else now_ms + 10**9
        stale = ReplicaCheckRun(
            started_ms=begun_ms,
            finished_ms=begun_ms,
            ledgers=7,
            under_replicated=0,
            unknown=0,
            next_ledger_id=LEDGERS,
        )
        value = b"\xff\xff" if why == "damaged" else encode(stale)
        await cluster.store.create(PATHS.check_progress, value, make_parents=True)
        async with recovering(cluster, SLOW):
            await until(repairs_of(cluster).read_last_check)
        last = await repairs_of(cluster).read_last_check()
        assert last is not None
        assert last.ledgers == LEDGERS
        assert (PATHS.check_progress in caplog.text) == (why == "damaged")

    run(scenario)


def test_an_auditor_that_was_replaced_notes_nothing() -> None:
    """Goal: a zombie neither moves a check of another nor ends it, nor makes up one that ended."""

    async def scenario(cluster: Cluster) -> None:
        repairs = repairs_of(cluster)
        zombie = await repairs.begin_check(age_ms_max=1000)
        moved = CheckProgress(structs.replace(zombie.run, next_ledger_id=5), zombie.version)
        other = await repairs.note_check(moved)
        with pytest.raises(MetadataVersionError):
            await repairs.note_check(zombie)
        with pytest.raises(MetadataVersionError):
            await repairs.end_check(zombie)
        assert await progress_of(cluster) == moved.run
        await repairs.end_check(other)
        for late in (repairs.note_check(other), repairs.end_check(other)):
            with pytest.raises(NoNodeError):
                await late
        assert await progress_of(cluster) is None

    run(scenario)


def test_ledgers_are_listed_from_any_id_on() -> None:
    """Whole branches of the tree that lie before it are not read."""

    async def scenario(cluster: Cluster) -> None:
        ids = [0, 1, 9_999, 10_000, 10_001, 99_999_999, 100_000_000, 100_010_000]
        for ledger_id in ids:
            await cluster.store.create(PATHS.ledger(ledger_id), make_parents=True)
        ledgers = LedgerStore(cluster.store, PATHS)
        for first in (0, 1, 2, 10_000, 10_001, 10_002, 99_999_999, 100_000_001, 10**12):
            listed = [each async for each in ledgers.list_ledgers(first=first)]
            assert listed == [each for each in ids if each >= first]

    run(scenario)
