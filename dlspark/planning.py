"""From ranges to read to input partitions: one per segment, unless options or numbers say else."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlcore.sync import ScanRange

PARTITIONS_BEFORE_GROUPING = 64
"""More partitions than this (or than `minPartitions`) are made fewer where they are small."""

GROUP_BYTES_MAX = 32 * 1024 * 1024
"""Grouping makes no partition larger than this: about a second of reading."""


class DlogPartition(InputPartition):
    """Consecutive ranges of one log, read in order by one task.

    It carries ledgers, ensembles and addresses: the task reads without the metadata store.
    """

    def __init__(self, scans: Sequence[ScanRange]) -> None:
        super().__init__(None)
        self.scans = tuple(scans)

    def __repr__(self) -> str:
        parts = ", ".join(f"{scan.log} {scan.start} … {scan.end}" for scan in self.scans)
        return f"DlogPartition({parts})"


def plan_partitions(
    scans: Iterable[ScanRange],
    *,
    min_partitions: int | None,
    max_records_per_partition: int | None,
) -> list[DlogPartition]:
    """Return partitions that hold exactly `scans`, in their order.

    A range is split at entries only, so a partition can have more than `max_records_per_partition`
    records where a single entry has, and fewer partitions than asked for come out of few entries.
    """
    ranges = [scan for scan in scans if scan.entry_count > 0]
    if max_records_per_partition is not None:
        ranges = [part for scan in ranges for part in _cut(scan, max_records_per_partition)]
    target = max(min_partitions or 0, PARTITIONS_BEFORE_GROUPING)
    groups = [[scan] for scan in ranges]
    if len(groups) > target:
        groups = _group(ranges, target, max_records_per_partition)
    if min_partitions is not None and len(groups) < min_partitions:
        groups = _split([scan for group in groups for scan in group], min_partitions)
    return [DlogPartition(group) for group in groups]


def _cut(scan: ScanRange, records_max: int) -> list[ScanRange]:
    records = max(scan.record_count_estimate, scan.entry_count)
    if records <= records_max:
        return [scan]
    return scan.split(max(1, records_max * scan.entry_count // records))


def _group(ranges: list[ScanRange], target: int, records_max: int | None) -> list[list[ScanRange]]:
    """Join neighbours of one log up to an equal share of all bytes, which bounds the number."""
    total_bytes = sum(scan.size_bytes_estimate for scan in ranges)
    share_bytes = min(GROUP_BYTES_MAX, max(1, -(-total_bytes // target)))
    groups: list[list[ScanRange]] = []
    group_bytes = group_records = 0
    for scan in ranges:
        group_bytes += scan.size_bytes_estimate
        group_records += scan.record_count_estimate
        fits = group_bytes <= share_bytes and (records_max is None or group_records <= records_max)
        if groups and fits and groups[-1][0].log == scan.log:
            groups[-1].append(scan)
        else:
            groups.append([scan])
            group_bytes, group_records = scan.size_bytes_estimate, scan.record_count_estimate
    return groups


def _split(ranges: list[ScanRange], parts_min: int) -> list[list[ScanRange]]:
    """Split in proportion to bytes until there are `parts_min`, as far as there are entries."""
    pieces = [1] * len(ranges)
    heaviest = [(float(-scan.size_bytes_estimate), index) for index, scan in enumerate(ranges)]
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
