"""The choice of small extents to merge, and the change of metadata for it: no I/O.

Theory of operation.  Each extent has a weight: its bytes, and something for each entry, so that
weights add up when extents are merged.  An extent of `large_weight` or more is left alone.
Adjacent lighter ones are merged if together they weigh at least `fan_in` times the heaviest of
them.  Therefore a copied record is then in an extent at least `fan_in` times as heavy: it is copied
at most log(large_weight / lightest) / log(fan_in) times, rounded up, however long the log lives.

A run is within one segment, so that no position changes.  Its weight and its numbers of extents and
ledgers are bounded, so that the time of one step and the size of its transaction are bounded.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.log.metadata.changes import Change
from dlcore.log.metadata.segment import Extent
from dlcore.log.metadata.values import (
    CHUNK_EXTENTS_MAX,
    Chunk,
    SegmentEnd,
    VersionedHead,
    pack,
)
from dlcore.metadata.port import ANY_VERSION, Create, Delete, Op, Put
from dlcore.metadata.stored import encode
from dlcore.ops.upkeep.config import ENTRY_WEIGHT, MergePolicy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.log.metadata.values import Totals
    from dlcore.metadata.paths import LogPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRun:
    """The extents [first, end) of the given ones: at least two for a merge."""

    first: int
    end: int


def weight_of(extent: Extent) -> int:
    """Return the weight of a final extent; a cold one is never light."""
    if extent.is_cold:
        return sys.maxsize
    return extent.size_bytes + ENTRY_WEIGHT * extent.entry_count


def plan_merge(extents: Sequence[Extent], policy: MergePolicy) -> MergeRun | None:
    """Return the run to merge next; None if nothing has to be merged.

    The lightest come first: their merged extent may be part of a heavier run later.

    Args:
        extents: final and adjacent extents of one segment, in order.
        policy: which extents are small.
    """
    weights = [weight_of(extent) for extent in extents]
    for bound in _bounds(min(weights, default=policy.large_weight), policy):
        for run in _windows(extents, weights, bound, policy):
            part = weights[run.first : run.end]
            if sum(part) >= policy.fan_in * max(part):
                return run
    return None


def _bounds(lightest: int, policy: MergePolicy) -> list[int]:
    """Return weights, ascending by factors of `fan_in`, up to the largest that is not large."""
    bounds = []
    bound = policy.large_weight - 1
    while bound >= lightest:
        bounds.append(bound)
        bound //= policy.fan_in
    return bounds[::-1]


def _windows(
    extents: Sequence[Extent], weights: Sequence[int], bound: int, policy: MergePolicy
) -> Iterator[MergeRun]:
    """Yield the runs of extents not heavier than `bound`, cut to the limits of one step."""
    first = weight = 0
    ledgers: set[int] = set()
    for index, (extent, each) in enumerate(zip(extents, weights, strict=True)):
        is_end = (
            each > bound
            or weight + each > policy.run_weight_max
            or index - first == policy.run_extents_max
            or len(ledgers | {extent.ledger_id}) > policy.run_ledgers_max
        )
        if is_end:
            if index > first:
                yield MergeRun(first=first, end=index)
            first, weight, ledgers = index, 0, set()
        if each > bound:
            first = index + 1
            continue
        weight += each
        ledgers.add(extent.ledger_id)
    if len(extents) > first:
        yield MergeRun(first=first, end=len(extents))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSegment:
    """A segment's extents as they are stored: chunks by number, and the end of a completed one.

    In the segment in progress only chunks are merged: its tail is in the head.  The chunks below
    `first_chunk` were removed.
    """

    lssn: int
    chunks: tuple[tuple[int, Chunk], ...]
    end: SegmentEnd | None
    first_chunk: int = 0

    @property
    def extents(self) -> tuple[Extent, ...]:
        """All extents that may be merged, in order."""
        chunked = tuple(extent for _, chunk in self.chunks for extent in chunk.extents)
        return chunked if self.end is None else (*chunked, *self.end.tail)

    @property
    def first_entry_id(self) -> int:
        """The entry of the segment with which the extents begin."""
        if self.chunks:
            return self.chunks[0][1].first_entry_id
        return 0 if self.end is None else self.end.chunked.entries

    @property
    def removed(self) -> Totals:
        """The sums of the extents at the front of a completed segment that were removed."""
        assert self.end is not None
        return self.end.chunked.minus([each for _, chunk in self.chunks for each in chunk.extents])


def merged_extent(parts: Sequence[Extent], *, ledger_id: int) -> Extent:
    """Return the extent that replaces `parts` after their entries are copied to a ledger."""
    return Extent(
        ledger_id=ledger_id,
        first_entry_id=0,
        last_entry_id=sum(part.entry_count for part in parts) - 1,
        record_count=sum(part.record_count for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
        first_txid=parts[0].first_txid,
        last_txid=parts[-1].last_txid,
        timestamp_floor_ms=parts[0].timestamp_floor_ms,
        last_timestamp_ms=parts[-1].last_timestamp_ms,
    )


def plan_swap(
    paths: LogPaths, at: VersionedHead, stored: StoredSegment, run: MergeRun, merged: Extent
) -> Change:
    """Return the change that replaces a run by `merged`; the caller adds operations on ledgers.

    The chunks of the run become one, which covers all their numbers.  If the run reaches into the
    end of a completed segment, `merged` is stored there, and there are fewer chunks before it.  A
    completed segment with few extents has no chunks.
    """
    extents = (*stored.extents[: run.first], merged, *stored.extents[run.end :])
    bounds = list(accumulate((len(chunk.extents) for _, chunk in stored.chunks), initial=0))
    if stored.end is not None and len(extents) <= CHUNK_EXTENTS_MAX:
        ops = _fold(paths, stored, extents)
    elif run.end > bounds[-1]:
        ops = _swap_end(paths, stored, run, merged, bounds)
    else:
        ops = _swap_chunks(paths, stored, run, merged, bounds)
    return _changed(paths, at, stored.lssn, ops)


def plan_fold(paths: LogPaths, at: VersionedHead, stored: StoredSegment) -> Change | None:
    """Return the change that moves the few extents of a completed segment into its end.

    None: it has too many, or no chunk.  Readers then get the whole segment from one node.
    """
    if stored.end is None or not stored.chunks or len(stored.extents) > CHUNK_EXTENTS_MAX:
        return None
    return _changed(paths, at, stored.lssn, _fold(paths, stored, stored.extents))


def _changed(paths: LogPaths, at: VersionedHead, lssn: int, ops: Sequence[Op]) -> Change:
    head = at.head.with_rewritten(lssn)
    # The version of the head guards the whole transaction: chunks and segments change only with it.
    put = Put(paths.head, encode(head), at.version)
    return Change((*ops, put), at.with_head(head))


def _fold(paths: LogPaths, stored: StoredSegment, extents: Sequence[Extent]) -> list[Op]:
    assert stored.end is not None
    end = replace(
        stored.end, chunk_count=stored.first_chunk, chunked=stored.removed, packed=pack(extents)
    )
    return [
        *(Delete(paths.chunk(stored.lssn, number)) for number, _ in stored.chunks),
        Put(paths.segment(stored.lssn), encode(end), ANY_VERSION),
    ]


def _swap_chunks(
    paths: LogPaths, stored: StoredSegment, run: MergeRun, merged: Extent, bounds: list[int]
) -> list[Op]:
    low, high = bisect_right(bounds, run.first) - 1, bisect_left(bounds, run.end)
    touched = stored.chunks[low:high]
    extents = stored.extents[bounds[low] : bounds[high]]
    run = MergeRun(first=run.first - bounds[low], end=run.end - bounds[low])
    left = [*extents[: run.first], merged, *extents[run.end :]]
    number, first = touched[0]
    end = touched[-1][0] + touched[-1][1].covers
    entries, records = first.first_entry_id, first.first_sequence_id
    ops: list[Op] = []
    while left:
        part, left = left[:CHUNK_EXTENTS_MAX], left[CHUNK_EXTENTS_MAX:]
        chunk = Chunk(
            covers=1 if left else end - number,
            first_entry_id=entries,
            first_sequence_id=records,
            packed=pack(part),
        )
        path = paths.chunk(stored.lssn, number)
        value = encode(chunk)
        is_there = any(known == number for known, _ in touched)
        ops.append(Put(path, value, ANY_VERSION) if is_there else Create(path, value))
        entries += sum(extent.entry_count for extent in part)
        records += sum(extent.record_count for extent in part)
        number += 1
    ops += [Delete(paths.chunk(stored.lssn, known)) for known, _ in touched if known >= number]
    return ops


def _swap_end(
    paths: LogPaths, stored: StoredSegment, run: MergeRun, merged: Extent, bounds: list[int]
) -> list[Op]:
    end = stored.end
    assert end is not None
    rest = stored.extents[run.end :]
    if run.first >= bounds[-1]:
        packed = pack((*stored.extents[bounds[-1] : run.first], merged, *rest))
        value = encode(replace(end, packed=packed))
        return [Put(paths.segment(stored.lssn), value, ANY_VERSION)]
    low = bisect_right(bounds, run.first) - 1
    number, first = stored.chunks[low]
    kept = stored.extents[bounds[low] : run.first]
    ops: list[Op] = []
    if kept:
        chunk = replace(first, covers=1, packed=pack(kept))
        path = paths.chunk(stored.lssn, number)
        ops.append(Put(path, encode(chunk), ANY_VERSION))
    gone = stored.chunks[low + 1 :] if kept else stored.chunks[low:]
    ops += [Delete(paths.chunk(stored.lssn, known)) for known, _ in gone]
    value = encode(
        replace(
            end,
            chunk_count=number + (1 if kept else 0),
            chunked=end.chunked.minus(stored.extents[run.first : bounds[-1]]),
            packed=pack((merged, *rest)),
        )
    )
    return [*ops, Put(paths.segment(stored.lssn), value, ANY_VERSION)]
