"""Decides which records are old enough to be removed, and which extents go.  No I/O.

Theory of operation.  `LogSettings.retention_s` and `explicit_truncation` together mean:

    retention_s   explicit_truncation   records are removed
    unset         either                when they are truncated
    set           False                 when they are truncated, or older
    set           True                  when they are truncated and older

With `retention_bytes` the oldest segments are removed, too, while the newer ones have that many.

The age of a segment is that of its last record, so that all its records are at least as old.  A
segment that is not completed stays.  A live writer completes its segment by age.  The segment of a
dead writer, or of staged appends that ended, is completed by the worker that finds it old.

A log may be truncated within a segment, and keep that segment for long.  The extents that lie
wholly before the first kept position go, from the front, a node of the chain after the other.  No
position changes, because what is left says how much was before it: a chunk where it begins, and the
end of a segment the sums of all before its own extents.

Promises:

* An extent stays with all after it if it has a kept record, or is younger than the log keeps
  truncated ones.
* A segment never loses its last stored extent this way, and the tail of the one in progress, which
  its writer holds, nothing.
* The segment with the last stamps of producers loses nothing: a new owner reads them.

`removal.py` removes the pieces that this gives, as it does those of whole segments.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.ids import DLSN
from dlcore.log.metadata.changes import Piece
from dlcore.log.metadata.values import Totals, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.config import LogSettings
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import Chunk, LogHead, SegmentEnd


def kept_from_ms(settings: LogSettings, *, now_ms: int) -> int | None:
    """Return the write time from which records are kept; None: age does not matter."""
    if settings.retention_s is None:
        return None
    return now_ms - int(settings.retention_s * 1000)


def readable_for_s(settings: LogSettings) -> float:
    """Return for how long records stay if they are not truncated."""
    if settings.retention_s is None or settings.explicit_truncation:
        return math.inf
    return settings.retention_s


def truncated_for_s(settings: LogSettings) -> float:
    """Return the least age that truncated records reach before they are removed."""
    if settings.retention_s is None or not settings.explicit_truncation:
        return 0.0
    return settings.retention_s


def last_write_ms(end: SegmentEnd) -> int:
    """Return when the last record of a segment was written, or a time soon after that."""
    return end.tail[-1].last_timestamp_ms if end.packed else end.completed_ms


def must_complete(head: LogHead, *, kept_from_ms: int) -> bool:
    """Return whether the segment in progress is so old that its writer must be dead, or idle.

    A segment with an open extent was begun that long ago; one of staged appends got no record
    since then.
    """
    segment = head.segment
    if segment is None or segment.created_ms >= kept_from_ms:
        return False
    return head.open_extent is not None or head.last_timestamp_ms < kept_from_ms


def first_kept(head: LogHead, ends: Sequence[SegmentEnd], *, kept_from_ms: int) -> DLSN | None:
    """Return the position below which everything is too old; None if nothing is.

    `ends` are completed segments, from the one with the first active position on.
    """
    old = 0
    for end in ends:
        if last_write_ms(end) >= kept_from_ms:
            break
        old += 1
    if not old:
        return None
    lssn = head.first_active[0] + old
    return head.end_dlsn if lssn > head.max_lssn else DLSN(lssn, 0, 0)


def kept_by_size(head: LogHead, newest: Sequence[SegmentEnd], *, bytes_max: int) -> DLSN | None:
    """Return the position below which a log has too much; None if it has not, or may not have.

    `newest` are its last completed segments, the latest one first: some, or all that are active.
    """
    kept = 0 if head.segment is None else head.segment.size_bytes
    lssn = head.max_lssn + (head.segment is None)
    for end in newest:
        if kept >= bytes_max:
            return DLSN(lssn, 0, 0)
        kept += end.chunked.plus(end.tail).size_bytes
        lssn -= 1
    return None


class Front:
    """The choice of extents that go from the log's first segment, which stays.

    Args:
        head: the log's head.
        end: the end of its first segment; None: the segment is in progress.
        kept_from_ms: the write time from which truncated records are kept; None: none is.
    """

    def __init__(self, head: LogHead, end: SegmentEnd | None, *, kept_from_ms: int | None) -> None:
        self._lssn = head.first_lssn
        self._kept_from_ms = kept_from_ms
        if end is not None:
            entries = end.chunked.plus(end.tail).entries
        else:
            entries = 0 if head.segment is None else head.segment.chunked.entries
        # One less, so that the last extent stays: what is left must say how much was before it.
        self.limit = entries - 1
        """The entry of the segment before which an extent must end to go."""
        # The stamps that a new owner needs may be in any of its extents.
        if head.producers_lssn == self._lssn:
            self.limit = 0
        elif head.first_active[0] == self._lssn:
            self.limit = min(self.limit, head.first_active[1])

    def of_chunk(self, number: int, chunk: Chunk) -> Piece | None:
        """Return the piece of a chunk that goes; None: it stays, with all after it."""
        extents = chunk.extents
        gone = extents[: self._count(extents, chunk.first_entry_id)]
        left = extents[len(gone) :]
        if not gone:
            return None
        sums = Totals().plus(gone)
        rest = replace(
            chunk,
            first_entry_id=chunk.first_entry_id + sums.entries,
            first_sequence_id=chunk.first_sequence_id + sums.records,
            packed=pack(left),
        )
        return Piece(
            lssn=self._lssn,
            chunk=number,
            extents=gone,
            covers=chunk.covers,
            left=rest if left else None,
        )

    def of_end(self, end: SegmentEnd) -> Piece | None:
        """Return the piece that goes of a segment's own extents; all of its chunks have gone."""
        gone = end.tail[: self._count(end.tail, end.chunked.entries)]
        if not gone:
            return None
        rest = replace(end, chunked=end.chunked.plus(gone), packed=pack(end.tail[len(gone) :]))
        return Piece(lssn=self._lssn, chunk=None, extents=gone, left=rest)

    def _count(self, extents: Sequence[Extent], entries: int) -> int:
        """Return how many extents go of some that begin at this entry of the segment."""
        count = 0
        for extent in extents:
            entries += extent.entry_count
            kept_from_ms = self._kept_from_ms
            is_young = kept_from_ms is not None and extent.last_timestamp_ms >= kept_from_ms
            if entries > self.limit or is_young:
                break
            count += 1
        return count
