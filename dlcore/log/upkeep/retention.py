"""Decides which records are old enough to be removed, by the log's metadata.  No I/O.

Theory of operation.  `LogSettings.retention_s` and `explicit_truncation` together mean:

    retention_s   explicit_truncation   records are removed
    unset         either                when they are truncated
    set           False                 when they are truncated, or older
    set           True                  when they are truncated and older

With `retention_bytes` the oldest segments are removed, too, while the newer ones have that many.

The age of a segment is that of its last record, so that all its records are at least as old.  A
segment that is not completed stays.  A live writer completes its segment by age.  The segment of a
dead writer, or of staged appends that ended, is completed by the worker that finds it old.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.config import LogSettings
    from dlcore.log.metadata.values import LogHead, SegmentEnd


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
