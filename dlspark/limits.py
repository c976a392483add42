"""The number of records that a micro-batch takes from each log: limited, and divided fairly.

A limit of records or bytes is divided so that no log gives more than another as long as both have
unread records.  Therefore a log with few unread records is read to its end at once, however far
behind another log is.  Each log with unread records gives at least one, so that a stream always
advances.  If there are more logs than the limit has records, a batch has one record of each.

Records are counted exactly.  Bytes are known per extent, and divided evenly among its records.  A
record that is larger than the limit is a batch of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.sync import LogSnapshot

DELAY_S_MAX = 15 * 60.0
"""How long `min_records` may hold a batch back by default, as with Kafka."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a micro-batch; None for no bound."""

    max_records: int | None = None
    max_bytes: int | None = None
    min_records: int | None = None
    max_delay_s: float = DELAY_S_MAX

    @property
    def bounds_batches(self) -> bool:
        """Whether a batch may end before the end of the readable records."""
        return self.max_records is not None or self.max_bytes is not None

    def is_enough(self, records: int, *, waited_s: float | None) -> bool:
        """Return whether `records` are enough for a batch, after `waited_s` since the last one.

        `waited_s` is None before the first batch of a run, which is not held back.
        """
        if self.min_records is None or waited_s is None:
            return True
        return records >= self.min_records or waited_s >= self.max_delay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The records of one log from a position on, as runs of (records, bytes) in order."""

    start: int
    """The sequence id of its first record."""
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, snapshot: LogSnapshot, start: int, end: int | None = None) -> Backlog:
        """Return the records of a snapshot with sequence ids in [start, end)."""
        runs = []
        # From the end, because most queries are near it, and a log may have thousands of segments.
        for segment in reversed(snapshot.segments):
            extents = segment.extents
            if not extents:
                continue
            if extents[-1].start_sequence_id + extents[-1].record_count <= start:
                break
            first = bisect_right(extents, start, key=lambda extent: extent.start_sequence_id)
            for extent in reversed(extents[max(0, first - 1) :]):
                stop = extent.start_sequence_id + extent.record_count
                stop = stop if end is None else min(stop, end)
                left = stop - max(start, extent.start_sequence_id)
                # Rounded up, so that a small part of an extent does not count as no bytes.
                if left > 0:
                    runs.append((left, -(-extent.size_bytes * left // extent.record_count)))
        return cls(start=start, runs=tuple(reversed(runs)))

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(records for records, _ in self.runs)

    @property
    def size_bytes(self) -> int:
        """About the size of the records."""
        return sum(size for _, size in self.runs)

    def records_within(self, size_bytes: int) -> int:
        """Return how many records, from the first on, have at most `size_bytes`; at least one."""
        count = 0
        for records, size in self.runs:
            if size > size_bytes:
                count += records * size_bytes // size
                break
            count += records
            size_bytes -= size
        # A stream must always advance, also past a record that is larger than the limit.
        return max(1, count)


def share(backlogs: Mapping[str, Backlog], limits: Limits) -> dict[str, int]:
    """Return how many records of each log a batch takes: at least one of each that has any."""
    filled = {log: backlog for log, backlog in backlogs.items() if backlog.runs}
    shares = {log: backlog.records for log, backlog in filled.items()}
    if limits.max_bytes is not None:
        # Bytes first, because the limit of records is divided among the records that these leave.
        sizes = {log: backlog.size_bytes for log, backlog in filled.items()}
        for log, size_bytes in _divide(sizes, limits.max_bytes).items():
            if size_bytes < sizes[log]:
                shares[log] = filled[log].records_within(size_bytes)
    if limits.max_records is not None:
        shares = {log: max(1, count) for log, count in _divide(shares, limits.max_records).items()}
    return shares


def _divide(amounts: Mapping[str, int], limit: int) -> dict[str, int]:
    """Give the smallest requests in full, and the others equal parts of the rest."""
    parts = {}
    left = limit
    order = sorted(amounts, key=lambda name: (amounts[name], name))
    for position, name in enumerate(order):
        parts[name] = min(amounts[name], left // (len(order) - position))
        left -= parts[name]
    return parts
