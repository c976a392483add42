"""From ranges to input partitions: one per segment, unless options or sizes require others."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.datasource import InputPartition

from dlcore import ScanRange
from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlcore.sync import ExtentView, LogSnapshot
    from dlspark.options import Division

PARTITIONS_BEFORE_GROUPING = 64
"""If there are more partitions than this (or than `minPartitions`), small ones are joined."""

GROUP_BYTES_MAX = 32 * 1024 * 1024
"""Most bytes of a joined partition: about a second of reading."""

COUNTED_ROWS_MAX = 16 * 1024 * 1024
"""Most rows of a partition without reading: about a second of work."""


class DlogPartition(InputPartition):
    """Ranges of logs, read in order by one task; ranges of one log are consecutive.

    It contains ledgers, ensembles and addresses, so that the task reads without the metadata store,
    and capabilities, if they are used.
    """

    def __init__(self, scans: Sequence[ScanRange], capabilities: tuple[bytes, ...] = ()) -> None:
        super().__init__(None)
        self.scans = tuple(scans)
        self.capabilities = capabilities

    def __reduce__(self) -> tuple[object, ...]:
        # Packed, because Spark pickles all partitions of a read in one process, and a range names
        # many extents.
        return _unpacked, (ScanRange.pack(self.scans), self.capabilities)

    def __repr__(self) -> str:
        parts = ", ".join(f"{scan.log} {scan.start} … {scan.end}" for scan in self.scans)
        return f"DlogPartition({parts})"


def _unpacked(packed: bytes, capabilities: tuple[bytes, ...]) -> DlogPartition:
    return DlogPartition(ScanRange.unpack(packed), capabilities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Records of one log's snapshot, from `start` up to but not including `end`."""

    snapshot: LogSnapshot
    start: DLSN
    end: DLSN

    def scans(self) -> list[ScanRange]:
        """Return its readable ranges, segment by segment."""
        return self.snapshot.scans(self.start, self.end)


def first_sequence_id(part: ScanRange) -> int | None:
    """Return the sequence id of a range's first record; None if only reading would give it."""
    first = part.extents[0]
    is_at_edge = part.start == DLSN(part.lssn, first.base_entry_id, 0) and _has_its_first(first)
    return first.start_sequence_id if is_at_edge else None


def end_sequence_id(part: ScanRange) -> int | None:
    """Return the sequence id after a range's last record; None if only reading would give it."""
    last = part.extents[-1]
    # A view that was clipped at its end counts only an estimate of its records.
    is_at_edge = part.end == DLSN(part.lssn, last.end_entry_id, 0) and _has_its_first(last)
    if is_at_edge and last.last_entry_id == part.ledgers[last.ledger_id].last_entry_id:
        return last.start_sequence_id + last.record_count
    return None


def _has_its_first(extent: ExtentView) -> bool:
    """Return whether a view, which may be clipped, certainly has its extent's first entry."""
    return 0 in (extent.base_entry_id, extent.first_entry_id)


class CountedRange(NamedTuple):
    """Records of one log whose rows need only their numbers, so that they are not read."""

    log: str
    first_sequence_id: int
    records: int


class CountedPartition(InputPartition):
    """Ranges whose rows follow from their sequence ids."""

    def __init__(self, ranges: Sequence[CountedRange]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)

    def __repr__(self) -> str:
        parts = ", ".join(f"{log} #{first} + {records}" for log, first, records in self.ranges)
        return f"CountedPartition({parts})"


def plan_counts(ranges: Iterable[CountedRange], division: Division) -> list[CountedPartition]:
    """Return partitions that hold exactly `ranges`, in their order."""
    ranges = [each for each in ranges if each.records > 0]
    total = sum(each.records for each in ranges)
    rows_max = min(COUNTED_ROWS_MAX, division.max_records or COUNTED_ROWS_MAX)
    if division.min_partitions is not None:
        # Rounded down, so that there are not fewer partitions than wanted.
        rows_max = min(rows_max, max(1, total // division.min_partitions))
    partitions: list[list[CountedRange]] = []
    room = 0
    for log, first, records in ranges:
        done = 0
        while done < records:
            if room == 0:
                partitions.append([])
                room = rows_max
            count = min(room, records - done)
            partitions[-1].append(CountedRange(log, first + done, count))
            done += count
            room -= count
    return [CountedPartition(each) for each in partitions]


def plan_partitions(scans: Iterable[ScanRange], division: Division) -> list[DlogPartition]:
    """Return partitions that hold exactly `scans`, in their order.

    A range is split only between entries.  Therefore a partition may have more records or bytes
    than wanted if a single entry has more, and few entries give fewer partitions than wanted.
    """
    ranges = [part for scan in scans if scan.entry_count > 0 for part in _cut(scan, division)]
    target = max(division.min_partitions or 0, PARTITIONS_BEFORE_GROUPING)
    groups = [[scan] for scan in ranges]
    if len(groups) > target:
        groups = _group(ranges, target, division)
    # There are too few ranges, or grouping joined too many: single ranges are divided in any case.
    if division.min_partitions is not None and len(groups) < division.min_partitions:
        groups = _split([scan for group in groups for scan in group], division.min_partitions)
    return [DlogPartition(group) for group in groups]


def _cut(scan: ScanRange, division: Division) -> list[ScanRange]:
    """Split a range into equal parts, each within the limits of `division`."""
    entries, records = scan.entry_count, max(scan.record_count_estimate, scan.entry_count)
    parts = -(-scan.size_bytes_estimate // division.max_bytes)
    if division.max_records is not None:
        # Entries per part are rounded down, so that no part has more records than allowed.
        parts = max(parts, -(-entries // max(1, division.max_records * entries // records)))
    return scan.split(-(-entries // parts)) if parts > 1 else [scan]


def _group(ranges: list[ScanRange], target: int, division: Division) -> list[list[ScanRange]]:
    """Join neighbours up to an equal share of all bytes, which limits the number of partitions."""
    total_bytes = sum(scan.size_bytes_estimate for scan in ranges)
    share_bytes = min(GROUP_BYTES_MAX, division.max_bytes, max(1, -(-total_bytes // target)))
    records_max = division.max_records
    groups: list[list[ScanRange]] = []
    group_bytes = group_records = 0
    for scan in ranges:
        group_bytes += scan.size_bytes_estimate
        group_records += scan.record_count_estimate
        fits = group_bytes <= share_bytes and (records_max is None or group_records <= records_max)
        if groups and fits:
            groups[-1].append(scan)
        else:
            groups.append([scan])
            group_bytes, group_records = scan.size_bytes_estimate, scan.record_count_estimate
    return groups


def _split(ranges: list[ScanRange], parts_min: int) -> list[list[ScanRange]]:
    """Split in proportion to bytes until there are `parts_min`, as far as there are entries."""
    pieces = [1] * len(ranges)
    heaviest = [(float(-scan.size_bytes_estimate), index) for index, scan in enumerate(ranges)]
    # The piece with most bytes is split each time, so that the pieces become even.
    heapq.heapify(heaviest)
    missing = parts_min - len(ranges)
    while missing > 0 and heaviest:
        _, index = heapq.heappop(heaviest)
        if pieces[index] < ranges[index].entry_count:
            pieces[index] += 1
            missing -= 1
            share = -ranges[index].size_bytes_estimate / pieces[index]
            heapq.heappush(heaviest, (share, index))
    return [part for scan, count in zip(ranges, pieces, strict=True) for part in _into(scan, count)]


def _into(scan: ScanRange, count: int) -> list[list[ScanRange]]:
    """Split into exactly `count` partitions; `count` is at most the number of entries."""
    parts = scan.split(scan.entry_count // count)
    cuts = [index * len(parts) // count for index in range(count + 1)]
    return [parts[first:end] for first, end in itertools.pairwise(cuts)]
