"""Decides which extents at the front of a segment go while the rest of it stays.  No I/O.

Theory of operation.  A log may be truncated within a segment, and keep that segment for long.  The
extents that lie wholly before the first kept position go, from the front, a node of the chain after
the other.  No position changes, because what is left says how much was before it: a chunk where it
begins, and the end of a segment the sums of all before its own extents.

Promises:

* An extent stays with all after it if it has a kept record, or is younger than the log keeps
  truncated ones.
* A segment never loses its last stored extent this way, and the tail of the one in progress, which
  its writer holds, nothing.
* The segment with the last stamps of producers loses nothing: a new owner reads them.

`removal.py` removes the pieces that this gives, as it does those of whole segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.log.metadata.changes import Piece
from dlcore.log.metadata.values import Totals, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import Chunk, LogHead, SegmentEnd


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
        self.limit = entries - 1
        """The entry of the segment before which an extent must end to go."""
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
