"""The division of a range of a log into parts for separate reads, of any number of segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.ids import DLSN
    from dlcore.log.reading.scan import LogSnapshot

PARTS_MAX = 64
"""Most parts of a range: enough for any client, in an answer of some KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The records in [start, end), with estimates of their number and bytes; a tail may grow."""

    start: DLSN
    end: DLSN
    record_count: int
    size_bytes: int
    is_tail: bool


def parts_of(snapshot: LogSnapshot, start: DLSN, end: DLSN) -> list[Part]:
    """Return the parts of the readable records in [start, end), in order.

    The tail, the last segment of a log that is not sealed, is a part of its own.  Segments before
    it are grouped with their neighbours into parts of about equal bytes.
    """
    segments = [
        Part(
            start=each.start,
            end=each.end,
            record_count=each.record_count_estimate,
            size_bytes=each.size_bytes_estimate,
            is_tail=not snapshot.sealed and each.lssn == snapshot.segments[-1].lssn,
        )
        for each in snapshot.scans(start, end)
    ]
    tail = segments[-1:] if segments and segments[-1].is_tail else []
    return [*_grouped(segments[: len(segments) - len(tail)], PARTS_MAX - 1), *tail]


def _grouped(parts: Sequence[Part], count_max: int) -> list[Part]:
    wanted_bytes = sum(part.size_bytes for part in parts) / count_max
    groups: list[list[Part]] = []
    size_bytes = 0
    for part in parts:
        size_bytes += part.size_bytes
        if not groups or len(parts) <= count_max or size_bytes > wanted_bytes * len(groups):
            groups.append([part])
        else:
            groups[-1].append(part)
    return [
        Part(
            start=group[0].start,
            end=group[-1].end,
            record_count=sum(part.record_count for part in group),
            size_bytes=sum(part.size_bytes for part in group),
            is_tail=False,
        )
        for group in groups
    ]
