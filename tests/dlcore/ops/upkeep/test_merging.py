"""The choice of extents to merge: never more than pays, until little is left to merge."""

from __future__ import annotations

import math
import random

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.log.metadata.changes import lssn_to_merge
from dlcore.log.metadata.segment import Extent
from dlcore.log.metadata.values import (
    CHUNK_EXTENTS_MAX,
    Chunk,
    LogHead,
    LogKey,
    OpenSegment,
    SegmentEnd,
    Totals,
    VersionedHead,
    pack,
)
from dlcore.metadata.paths import LogPaths
from dlcore.metadata.port import Create, Delete, Put
from dlcore.metadata.stored import decode, encode
from dlcore.ops.upkeep.config import ENTRY_WEIGHT, MergePolicy
from dlcore.ops.upkeep.merging import (
    MergeRun,
    StoredSegment,
    merged_extent,
    plan_fold,
    plan_merge,
    plan_swap,
    weight_of,
)
from tests.fixtures.lengths import for_each

POLICY = MergePolicy(
    large_weight=1_000_000,
    fan_in=4,
    run_weight_max=4_000_000,
    run_extents_max=100,
    run_ledgers_max=50,
)


def extent(weight: int, *, ledger_id: int = 1) -> Extent:
    """Return an extent of one entry."""
    return Extent(
        ledger_id=ledger_id,
        first_entry_id=0,
        last_entry_id=0,
        record_count=1,
        size_bytes=weight - ENTRY_WEIGHT,
    )


def plan(*weights: int, policy: MergePolicy = POLICY) -> tuple[int, int] | None:
    """Return the run over extents of such weights."""
    run = plan_merge([extent(weight) for weight in weights], policy)
    return None if run is None else (run.first, run.end)


@pytest.mark.parametrize(
    ("weights", "run"),
    [
        ((), None),
        ((2_000,), None),
        ((2_000, 2_000, 2_000), None),  # together three times the heaviest, not four
        ((2_000,) * 4, (0, 4)),
        ((2_000,) * 9, (0, 9)),
        ((1_000_000,) * 9, None),  # large already
        ((9_000, 2_000, 2_000, 2_000, 2_000, 9_000), (1, 5)),
        ((1_000_000, 9_000, 2_000, 8_000, 9_000, 9_000, 1_000_000), (1, 6)),
        ((900_000,) * 9, (0, 4)),  # as much as one step may copy
        ((2_000, 1_000_000, 2_000, 1_000_000, 2_000, 2_000), None),
    ],
)
def test_extents_that_are_merged(weights: tuple[int, ...], run: tuple[int, int] | None) -> None:
    """Adjacent ones that together weigh four times the heaviest of them; the lightest first."""
    assert plan(*weights) == run


def test_a_step_is_bounded() -> None:
    """By extents and by ledgers."""
    assert plan(*[2_000] * 150) == (0, 100)
    run = plan_merge([extent(2_000, ledger_id=i) for i in range(80)], POLICY)
    assert run == MergeRun(first=0, end=50)


@for_each(range(6))
def test_a_record_is_copied_few_times_and_few_extents_are_left(seed: int) -> None:
    """Merge as soon as it pays, after each append of any weight: the worst that can be asked for.

    Copies are counted per record by a list beside each extent.
    """
    rng = random.Random(seed)
    extents: list[Extent] = []
    copies: list[list[int]] = []
    lightest, heaviest = 2_000, rng.choice([4_000, 60_000, 1_500_000])
    appended = 0
    for _ in range(800):
        weight = rng.choice([lightest, rng.randint(lightest, heaviest)])
        appended += weight
        extents.append(extent(weight, ledger_id=rng.randint(1, 9)))
        copies.append([0])
        while (run := plan_merge(extents, POLICY)) is not None:
            part = extents[run.first : run.end]
            assert len(part) >= 2
            merged = Extent(
                ledger_id=100,
                first_entry_id=0,
                last_entry_id=sum(each.entry_count for each in part) - 1,
                size_bytes=sum(each.size_bytes for each in part),
            )
            assert weight_of(merged) == sum(map(weight_of, part)) <= POLICY.run_weight_max
            extents[run.first : run.end] = [merged]
            copies[run.first : run.end] = [
                [count + 1 for each in copies[run.first : run.end] for count in each]
            ]
    assert sum(map(weight_of, extents)) == appended
    orders = math.ceil(math.log(POLICY.large_weight / lightest, POLICY.fan_in))
    assert max(count for each in copies for count in each) <= orders
    large = sum(weight_of(each) >= POLICY.large_weight for each in extents)
    assert len(extents) - large <= (large + 1) * POLICY.fan_in * orders


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("large_weight", ENTRY_WEIGHT),
        ("fan_in", 1),
        ("run_weight_max", 1),
        ("run_extents_max", 15),
        ("run_ledgers_max", 15),
    ],
)
def test_a_policy_that_never_merges_is_refused(key: str, value: int) -> None:
    """With the name of what is wrong."""
    with pytest.raises(ConfigurationError, match=f"{key}={value}"):
        MergePolicy(**{key: value})


PATHS = LogPaths("/head")
LSSN = 7
START_SEQUENCE_ID = 1_000


def small(number: int, rng: random.Random) -> Extent:
    """Return one of many extents that all differ."""
    entries = rng.randint(1, 3)
    return Extent(
        ledger_id=number,
        first_entry_id=number,
        last_entry_id=number + entries - 1,
        record_count=entries * 2,
        size_bytes=100 + number,
        first_txid=number,
        last_txid=number,
        txid_assigned=bool(number % 2),
        timestamp_floor_ms=number,
        last_timestamp_ms=number + 1,
    )


def stored_segment(
    counts: list[int], tail: int | None, rng: random.Random
) -> tuple[StoredSegment, dict[str, bytes]]:
    """Return a segment of chunks with so many extents, and its nodes; numbers may be covered."""
    number = position = 0
    totals = Totals()
    chunks: list[tuple[int, Chunk]] = []
    nodes: dict[str, bytes] = {}
    for count in counts:
        extents = [small(position + i, rng) for i in range(count)]
        chunk = Chunk(
            covers=rng.randint(1, 3),
            first_entry_id=totals.entries,
            first_sequence_id=START_SEQUENCE_ID + totals.records,
            packed=pack(extents),
        )
        chunks.append((number, chunk))
        nodes[PATHS.chunk(LSSN, number)] = encode(chunk)
        totals = totals.plus(extents)
        number += chunk.covers
        position += count
    end = None
    if tail is not None:
        end = SegmentEnd(
            created_ms=1,
            completed_ms=2,
            start_sequence_id=START_SEQUENCE_ID,
            chunk_count=number,
            chunked=totals,
            packed=pack([small(position + i, rng) for i in range(tail)]),
        )
        nodes[PATHS.segment(LSSN)] = encode(end)
    return StoredSegment(lssn=LSSN, chunks=tuple(chunks), end=end), nodes


def read_nodes(nodes: dict[str, bytes], count: int) -> tuple[list[Extent], int]:
    """Return the extents of the nodes by the rule of readers, and how many nodes were chunks."""
    totals, number, read = Totals(), 0, 0
    extents: list[Extent] = []
    path = PATHS.segment(LSSN)
    end = decode(SegmentEnd, nodes[path], source=path) if path in nodes else None
    if end is not None:
        count = end.chunk_count
    while number < count:
        path = PATHS.chunk(LSSN, number)
        chunk = decode(Chunk, nodes[path], source=path)
        assert chunk.first_entry_id == totals.entries
        assert chunk.first_sequence_id == START_SEQUENCE_ID + totals.records
        assert len(chunk.extents) <= CHUNK_EXTENTS_MAX
        totals = totals.plus(chunk.extents)
        extents += chunk.extents
        number += chunk.covers
        read += 1
    assert number == count
    if end is not None:
        assert end.chunked == totals
        extents += end.tail
    return extents, read


@for_each(range(300))
def test_a_swap_puts_the_merged_extent_in_the_place_of_the_run(seed: int) -> None:
    """In one chunk, over several, in the end of a completed segment, and over both."""
    rng = random.Random(seed)
    counts = [rng.randint(1, rng.choice([3, CHUNK_EXTENTS_MAX])) for _ in range(rng.randint(0, 4))]
    tail = rng.choice([None, 0, 2, 8]) if sum(counts) > 1 else 8
    stored, nodes = stored_segment(counts, tail, rng)
    extents = list(stored.extents)
    low = rng.choice([0, max(0, len(extents) - 12)])
    first = rng.randint(low, len(extents) - 2)
    run = MergeRun(first=first, end=rng.randint(first + 2, len(extents)))
    merged = merged_extent(extents[run.first : run.end], ledger_id=9_999)
    assert merged.entry_count == sum(each.entry_count for each in extents[run.first : run.end])
    at = VersionedHead(
        log=LogKey(name="clicks", log_id="1"),
        head=LogHead(max_lssn=LSSN, merges=20, merged_lssns=(*range(1, 17),)),
        version=11,
    )
    change = plan_swap(PATHS, at, stored, run, merged)
    for op in change.ops[:-1]:
        if isinstance(op, Put | Create):
            assert (op.path in nodes) is isinstance(op, Put)
            nodes[op.path] = op.value
        else:
            assert isinstance(op, Delete)
            del nodes[op.path]
    count = sum(chunk.covers for _, chunk in stored.chunks)
    found, read = read_nodes(nodes, count)
    assert found == [*extents[: run.first], merged, *extents[run.end :]]
    assert len(nodes) == read + (stored.end is not None)  # nothing unread is left
    head = change.ops[-1]
    assert isinstance(head, Put)
    assert (head.path, head.version) == (PATHS.head, 11)
    assert decode(LogHead, head.value, source="") == change.after.head
    assert (change.after.head.merges, change.after.head.merged_lssns) == (21, (*range(2, 17), LSSN))
    assert change.after.version == 12


@pytest.mark.parametrize(
    ("counts", "tail", "folds"),
    [([8, 8, 1], 3, True), ([60], 4, True), ([60], 5, False), ([], 8, False), ([8], None, False)],
)
def test_few_extents_of_a_completed_segment_lie_in_one_node(
    counts: list[int], tail: int | None, *, folds: bool
) -> None:
    """Its end; too many stay in chunks, and so do those of the segment in progress."""
    stored, nodes = stored_segment(counts, tail, random.Random(1))
    at = VersionedHead(log=LogKey(name="clicks", log_id="1"), head=LogHead(max_lssn=8), version=2)
    change = plan_fold(PATHS, at, stored)
    assert (change is not None) is folds
    if change is not None:
        for op in change.ops[:-1]:
            if isinstance(op, Put):
                nodes[op.path] = op.value
            else:
                del nodes[op.path]
        assert read_nodes(nodes, 0) == (list(stored.extents), 0)
        assert nodes.keys() == {PATHS.segment(LSSN)}
        assert (change.after.head.merges, change.after.head.merged_lssns) == (1, (LSSN,))


def test_a_segment_without_its_first_extents_keeps_their_sums() -> None:
    """Its chunks keep their numbers, and positions go on from what was removed."""
    whole, _ = stored_segment([4, 5, 3], 2, random.Random(1))
    assert (whole.first_entry_id, whole.removed) == (0, Totals())
    (_, gone), (first, chunk), _ = whole.chunks
    left = StoredSegment(lssn=LSSN, chunks=whole.chunks[1:], end=whole.end, first_chunk=first)
    assert left.removed == Totals().plus(gone.extents)
    assert left.first_entry_id == left.removed.entries == chunk.first_entry_id
    at = VersionedHead(log=LogKey(name="clicks", log_id="1"), head=LogHead(max_lssn=8), version=2)
    change = plan_fold(PATHS, at, left)
    assert change is not None
    *_, put, _ = change.ops
    assert isinstance(put, Put)
    end = decode(SegmentEnd, put.value, source=put.path)
    assert (end.chunk_count, end.chunked, end.tail) == (first, left.removed, left.extents)
    folded = StoredSegment(lssn=LSSN, chunks=(), end=end, first_chunk=first)
    assert folded.first_entry_id == left.first_entry_id
    assert folded.removed == left.removed
    assert StoredSegment(lssn=LSSN, chunks=(), end=None).first_entry_id == 0


@pytest.mark.parametrize(
    ("before", "after", "asks_for"),
    [
        ((3, None), (3, 0), None),  # the log's first append
        ((3, 7), (3, 7), None),
        ((3, 6), (3, 7), None),
        ((3, 7), (3, 8), 3),  # once in eight chunks
        ((3, 7), (3, 25), 3),
        ((3, 8), (3, 15), None),
        ((3, 2), (4, 0), 3),  # completed: what it has is all that it will have
        ((3, 2), (6, 0), 3),
        ((3, 2), (3, None), 3),  # another writer completed it and has begun none
    ],
)
def test_a_commit_asks_for_upkeep_when_a_segment_is_completed_or_has_grown(
    before: tuple[int, int | None], after: tuple[int, int | None], asks_for: int | None
) -> None:
    """By what was there before it and after it, not by a look at the log."""

    def head(max_lssn: int, chunks: int | None) -> LogHead:
        segment = OpenSegment(created_ms=1, start_sequence_id=0, chunk_count=chunks or 0)
        return LogHead(max_lssn=max_lssn, segment=None if chunks is None else segment)

    assert lssn_to_merge(head(*before), head(*after)) == asks_for
