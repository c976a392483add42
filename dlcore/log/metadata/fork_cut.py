"""Decides what a fork of a log begins with: the cold extents below a position.  No I/O.

A fork ends at the end of an entry: at a position with slot 0, or at a segment's end.  All before
it must be cold.  Records that the source has truncated are not in the fork either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.log.metadata.segment import SegmentState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.metadata.segment import Extent, LogSegment
    from dlcore.log.metadata.values import LogState


@dataclass(frozen=True, slots=True)
class ForkCut:
    """The beginning of a fork.

    The last of the segments has its whole extents before `at`.  If `at` is within an extent, that
    one is `split`, and its first `split_entries` entries belong to the fork too.
    """

    at: DLSN
    segments: tuple[LogSegment, ...]
    split: Extent | None = None
    split_entries: int = 0

    def whole(self, split: Extent | None) -> tuple[LogSegment, ...]:
        """Return the segments, with `split` as the extent that ends at `at`, if there is one."""
        if split is None:
            return self.segments
        *others, last = self.segments
        return (*others, replace(last, extents=(*last.extents, split)))


def removed_txid_of(state: LogState) -> int:
    """Return the highest transaction id in what a fork leaves out at the front, or -1.

    `state` has the segments that are truncated but still stored.
    """
    known = [
        segment.extents[-1].last_txid
        for segment in state.segments
        if segment.lssn < state.first_active.lssn and segment.extents
    ]
    return max(state.head.removed_txid, *known, -1)


def cut_of(state: LogState, at: DLSN | None) -> ForkCut:
    """Return the beginning of a fork that has all before `at`; None: all that is cold.

    Raises:
        ConfigurationError: no fork can end there; the message names positions that work.
    """
    first = state.first_active
    segments = [each for each in state.segments if each.lssn >= first.lssn]
    limit = _cold_end(segments, first)
    named = f"log {state.name!r}"
    if limit <= first:
        raise ConfigurationError(
            f"{named}: no fork can be made, its records from {first} on are not in objects yet: "
            f"{_how_to_tier(state.name)}"
        )
    if at is None:
        at = limit
    if at.slot_id:
        raise ConfigurationError(
            f"{named}: no fork can end at {at}, within an entry: expected "
            f"{DLSN(at.lssn, at.entry_id, 0)} or {DLSN(at.lssn, at.entry_id + 1, 0)}"
        )
    if at <= first:
        raise ConfigurationError(
            f"{named}: no record is before {at}, the first one is at {first}: expected "
            f"{DLSN(first.lssn, first.entry_id + 1, 0)} … {limit}"
        )
    if at > limit:
        raise ConfigurationError(
            f"{named}: no fork can end at {at}, the records from {limit} on are not in objects "
            f"yet: expected {limit} or less, or first: {_how_to_tier(state.name)}"
        )
    return _cut(named, segments, at)


def _how_to_tier(name: str) -> str:
    return (
        f"dlog log settings {name} --set tier=s3://bucket/folder --set tier_after_s=0, unless it "
        "has a tier, and wait for dlog autorecovery run (docs/tier.md); dlog autorecovery status "
        "says what keeps a worker from it"
    )


def _cold_end(segments: Sequence[LogSegment], first: DLSN) -> DLSN:
    """Return the position after all that is cold from the beginning on."""
    limit = first
    for segment in segments:
        entries = segment.removed_entries
        for extent in segment.extents:
            if not extent.is_cold:
                return max(first, DLSN(segment.lssn, entries, 0))
            entries += extent.entry_count
        if segment.state is not SegmentState.COMPLETED:
            return max(first, DLSN(segment.lssn, entries, 0))
        limit = DLSN(segment.lssn + 1, 0, 0)
    return limit


def _cut(named: str, segments: Sequence[LogSegment], at: DLSN) -> ForkCut:
    before = tuple(each for each in segments if each.lssn < at.lssn)
    if at.entry_id == 0:
        return ForkCut(at, before)
    segment = next(each for each in segments if each.lssn == at.lssn)
    if at.entry_id > segment.closed_entry_count:
        raise ConfigurationError(
            f"{named}: no fork can end at {at}, segment {at.lssn} has "
            f"{segment.closed_entry_count} entries: expected "
            f"{DLSN(at.lssn, segment.closed_entry_count, 0)} or {DLSN(at.lssn + 1, 0, 0)}"
        )
    whole: list[Extent] = []
    left = at.entry_id - segment.removed_entries
    for extent in segment.extents:
        if extent.entry_count > left:
            break
        whole.append(extent)
        left -= extent.entry_count
    last = replace(segment, extents=tuple(whole), state=SegmentState.COMPLETED)
    split = segment.extents[len(whole)] if left else None
    return ForkCut(at, (*before, last), split, left)
