"""Goal: truncation frees the ledgers before the first kept position, within a segment too.

Method: logs in memory whose extents are ledgers of their own.  The rest is read from every side,
and has the positions, numbers and times that it had.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from dlcore.base.errors import AlreadyTruncatedError
from dlcore.base.ids import DLSN
from dlcore.log.metadata.changes import plan_complete
from dlcore.log.metadata.history import LogHistory
from dlcore.log.metadata.segment import SegmentState
from dlcore.log.reading.snapshot import Finder
from dlcore.log.upkeep.staged import drop_merged
from dlcore.metadata.binding import ClusterFeatures
from dlcore.ops.inspection import audit_ledgers, finish_removal, inspect_log
from dlcore.ops.upkeep.config import MergePolicy
from dlcore.ops.upkeep.expiry import expire_log
from dlcore.ops.upkeep.merger import LogMerger
from tests.fixtures.lengths import sample
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all
from tests.fixtures.staged_records import batch

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.metadata.values import VersionedHead

POLICY = MergePolicy(
    large_weight=1_000_000,
    fan_in=4,
    run_weight_max=4_000_000,
    run_extents_max=100,
    run_ledgers_max=50,
)


async def append(log: DirectLog, namespace: DirectNamespace, number: int) -> None:
    """Append an extent of one entry with three records, in a ledger of its own."""
    async with await namespace.begin_append("job", number) as staged:
        await staged.write_batch(log.name, batch(*(f"{number}-{row}" for row in "abc")))
        await staged.commit()


async def appended(cluster: MemoryCluster, log: DirectLog, count: int) -> list[LogRecordWithDLSN]:
    """Append so many extents; return all records."""
    for number in range(1, count + 1):
        await append(log, cluster.namespaces[0], number)
    await cluster.namespaces[0].log_context.tidier.settled()
    return await read_all(log)


async def complete(log: DirectLog) -> None:
    """Complete the segment in progress."""
    context, at = log._context, await head_of(log)
    change = plan_complete(context.logs.paths_of(log._log), at, now_ms=1, closing=None)
    await context.logs.apply(change)


async def ledgers_of(log: DirectLog) -> list[int]:
    """Return the ledgers that the audit finds, all of them named by this log."""
    segments = await LogHistory(log._context.logs, log._log, keeps_truncated=True).read()
    found = [extent.ledger_id for segment in segments.segments for extent in segment.extents]
    audit = await audit_ledgers(log._context, report=lambda *_: None)
    assert (audit.ledgers, audit.orphans, audit.missing) == (len(set(found)), (), {})
    return found


async def head_of(log: DirectLog) -> VersionedHead:
    """Return the log's head."""
    return await log._context.logs.read(log._log)


async def check(cluster: MemoryCluster, log: DirectLog, kept: list[LogRecordWithDLSN]) -> None:
    """The kept records are found from every side, by clients that know the log and by others."""
    other = await cluster.open(f"other-{len(cluster.namespaces)}")
    for each in (log, await other.open_log(log.name)):
        assert await read_all(each) == kept
        assert await each.get_first_dlsn() == kept[0].dlsn
        assert await each.get_log_record_count() == len(kept)
        snapshot = await each.get_snapshot()
        assert snapshot.count_records(DLSN.INITIAL, snapshot.end) >= len(kept)
        for record in kept[:: max(1, len(kept) // 7)]:
            async with await each.open_reader(dlsn=record.dlsn) as reader:
                assert await reader.read_next() == record
            place = await Finder(each._context, snapshot).place(record.dlsn)
            assert (place.dlsn, place.sequence_id) == (record.dlsn, record.sequence_id)
        async with await each.open_reader(ignore_truncation=True, dlsn=DLSN.INITIAL) as reader:
            first = await reader.read_next()
            assert first is not None
            assert first.dlsn <= kept[0].dlsn
    assert await inspect_log(log._context, log.name, reads_entries=True) == []


@pytest.mark.parametrize("is_open", [True, False])
def test_the_ledgers_before_the_first_position_go(*, is_open: bool) -> None:
    """Chunk by chunk, within a chunk, and within the end of a completed segment."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        every = await appended(cluster, log, 30)
        if not is_open:
            await complete(log)
        assert len(await ledgers_of(log)) == 30
        for number in (1, 2, 7, 8, 11, 16, 23, 24, 27, 29):
            for slot in (0, 1):
                first = DLSN(1, number, slot)
                await log.truncate(first)
                # An open segment keeps its last extent in chunks, and those in the head.
                left = max(30 - number, 7) if is_open else 30 - number
                assert len(await ledgers_of(log)) == left
                await check(cluster, log, [each for each in every if each.dlsn >= first])
                with pytest.raises(
                    AlreadyTruncatedError, match=f"the first one left is at {first}"
                ):
                    await log.open_reader(dlsn=DLSN(1, 0, 1))
        await append(log, cluster.namespaces[0], 99)
        *_, last = await read_all(log)
        assert last.sequence_id == every[-1].sequence_id + 3
        if (await head_of(log)).head.segment is not None:
            await complete(log)
        await log.truncate((await log.get_snapshot()).end)
        await cluster.namespaces[0].log_context.tidier.settled()
        assert await ledgers_of(log) == []

    on_log(body)


@pytest.mark.parametrize("seed", sample(range(100), 4))
def test_whatever_else_happens_to_the_log(seed: int) -> None:
    """It is appended to, merged, completed and truncated at any record, by chance."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        rng, namespace = random.Random(seed), cluster.namespaces[0]
        merging = await cluster.open("merging")
        merger = LogMerger(
            merging.log_context, merging.staging_owner, policy=POLICY, bytes_per_s=1e9
        )
        reader = await cluster.open("reader")
        view = await reader.open_log("clicks")
        kept: list[LogRecordWithDLSN] = []
        for step in range(1, 60):
            match rng.choice(("append", "append", "truncate", "truncate", "merge", "complete")):
                case "append":
                    for number in range(rng.choice((1, 3, 12))):
                        await append(log, namespace, 100 * step + number)
                    added = await read_all(log)
                    assert added[: len(kept)] == kept
                    kept = added
                case "truncate" if kept:
                    first = rng.choice(kept[:30]).dlsn
                    await log.truncate(first)
                    kept = [each for each in kept if each.dlsn >= first]
                    await check_front(log)
                case "merge":
                    await merger.merge(log._log)
                case "complete" if (await head_of(log)).head.segment is not None:
                    await complete(log)
                case _:
                    continue
            assert await read_all(view) == kept
        if kept:
            await check(cluster, log, kept)
        if (await head_of(log)).head.segment is not None:
            await complete(log)
        await log.truncate((await log.get_snapshot()).end)
        await cluster.namespaces[0].log_context.tidier.settled()
        cluster.clocks["a"].current_ms += 100_000
        await drop_merged(namespace.log_context, grace_ms=10_000)
        assert await ledgers_of(log) == []

    on_log(body)


async def check_front(log: DirectLog) -> None:
    """Nothing that stays was removed; a completed segment lost all that could go."""
    state = await LogHistory(log._context.logs, log._log).read()
    first, segment = state.first_active, state.segments[0]
    assert segment.start <= max(first, DLSN(segment.lssn, 0, 0))
    if segment.state is SegmentState.COMPLETED and segment.lssn == first.lssn:
        assert segment.start.entry_id + segment.extents[0].entry_count > first.entry_id


def test_without_the_feature_the_segment_stays_whole() -> None:
    """An earlier release would misplace the rest; once it is finalized, all that may go does."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        every = await appended(cluster, log, 30)
        await complete(log)
        asked = []

        async def has(_: ClusterFeatures, name: str) -> bool:
            asked.append(name)
            return False

        with patch.object(ClusterFeatures, "has", has):
            await log.truncate(DLSN(1, 20, 0))
            assert asked == ["partial-removal"]
            assert len(await ledgers_of(log)) == 30
            await check(cluster, log, [each for each in every if each.dlsn >= DLSN(1, 20, 0)])
        (found,) = await inspect_log(log._context, log.name)
        assert found.detail == "extents of segment 1 are truncated, not removed"
        await finish_removal(log._context, log.name)
        assert await inspect_log(log._context, log.name) == []
        assert len(await ledgers_of(log)) == 10

    on_log(body)


def test_truncated_extents_wait_for_their_age() -> None:
    """A log has a retention and explicit truncation; a worker removes them later."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        clock = cluster.clocks["a"]
        await log.update_settings(retention_s=10.0, explicit_truncation=True)
        for number in range(1, 31):
            clock.current_ms += 1_000
            await append(log, cluster.namespaces[0], number)
        await cluster.namespaces[0].log_context.tidier.settled()
        await complete(log)
        await log.truncate(DLSN(1, 25, 0))
        assert len(await ledgers_of(log)) == 11  # the others are more than ten seconds old
        clock.current_ms += 4_000
        assert await expire_log(log._context, log._log)
        assert len(await ledgers_of(log)) == 7
        clock.current_ms += 4_000
        assert await expire_log(log._context, log._log)
        assert len(await ledgers_of(log)) == 5
        assert not await expire_log(log._context, log._log)

    on_log(body)


async def fold(cluster: MemoryCluster, log: DirectLog) -> None:
    """Move all extents of the completed segment into one node; nothing is merged."""
    folding = replace(
        POLICY, large_weight=4_000, fan_in=1_000, run_extents_max=1_000, run_ledgers_max=1_000
    )
    merging = await cluster.open("merging")
    merger = LogMerger(merging.log_context, merging.staging_owner, policy=folding, bytes_per_s=1e9)
    assert await merger.merge(log._log) == 0


@pytest.mark.parametrize(("is_folded", "truncated", "left"), [(True, 0, 30), (False, 26, 4)])
def test_chunks_that_are_known_and_an_end_that_is_newer(
    *, is_folded: bool, truncated: int, left: int
) -> None:
    """A reader that knows the chunks reads the end of the segment after this was changed."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await appended(cluster, log, 30)
        history = LogHistory(log._context.logs, log._log)
        (before,) = (await history.read()).segments
        await complete(log)
        at = await head_of(log)
        if is_folded:
            await fold(cluster, log)
        await log.truncate(DLSN(1, truncated, 0))
        (segment,) = (await history.state_of(at)).segments
        assert segment.extents == before.extents[30 - left :]
        assert segment.closed_entry_count == before.closed_entry_count

    on_log(body)


def test_a_view_from_before_the_removal() -> None:
    """A reader with an older head finds that it does not fit what is stored, and reads it again."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        every = await appended(cluster, log, 30)
        await complete(log)
        await fold(cluster, log)
        at = await head_of(log)
        await log.truncate(DLSN(1, 20, 1))
        assert len(await ledgers_of(log)) == 10
        state = await LogHistory(log._context.logs, log._log).state_of(at)
        assert state.first_active == DLSN(1, 20, 1)
        (segment,) = state.segments
        assert (segment.removed_entries, segment.removed_records) == (20, 60)
        assert segment.find(20) == (segment.extents[0], 20, 60)

        assert await read_all(log) == [each for each in every if each.dlsn >= DLSN(1, 20, 1)]

    on_log(body)
