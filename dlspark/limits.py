"""The share of a micro-batch in what its logs hold: limited, and divided fairly.

A limit of records or bytes is divided so that no log takes more than another as long as both have
more to give: a log with little is read up at once, however far behind another one is.  Each log
that has something gives at least one record, so that a stream always advances; with more logs than
the limit has records a batch is as large as their number.

Records are counted exactly.  Bytes are known of extents, and shared out by records within one; a
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
"""How long `min_records` may hold a batch back, unless the user says otherwise; Kafka's too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a micro-batch; None for no bound."""

    max_records: int | None = None
    max_bytes: int | None = None
    min_records: int | None = None
    max_delay_s: float = DELAY_S_MAX

    @property
    def bounds_batches(self) -> bool:
        """Whether a batch may end before the end of what is readable."""
        return self.max_records is not None or self.max_bytes is not None

    def is_enough(self, records: int, *, waited_s: float | None) -> bool:
        """Return whether `records` are worth a batch, so long after the last one.

        `waited_s` is None before the first batch of a run, which is not held back.
        """
        if self.min_records is None or waited_s is None:
            return True
        return records >= self.min_records or waited_s >= self.max_delay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What one log holds from a position on: runs of (records, bytes), in order."""

    start: int
    """The sequence id of its first record."""
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, snapshot: LogSnapshot, start: int, end: int | None = None) -> Backlog:
        """Return what a snapshot holds of the records with sequence ids in [start, end)."""
        runs = []
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
                if left > 0:
                    runs.append((left, -(-extent.size_bytes * left // extent.record_count)))
        return cls(start=start, runs=tuple(reversed(runs)))

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(records for records, _ in self.runs)

    @property
    def size_bytes(self) -> int:
        """About how many bytes they are."""
        return sum(size for _, size in self.runs)

    def records_within(self, size_bytes: int) -> int:
        """Return how many records, from the first on, are at most so many bytes; at least one."""
        count = 0
        for records, size in self.runs:
            if size > size_bytes:
                count += records * size_bytes // size
                break
            count += records
            size_bytes -= size
        return max(1, count)


def share(backlogs: Mapping[str, Backlog], limits: Limits) -> dict[str, int]:
    """Return how many records of each log a batch takes: at least one of each that has any."""
    filled = {log: backlog for log, backlog in backlogs.items() if backlog.runs}
    shares = {log: backlog.records for log, backlog in filled.items()}
    if limits.max_bytes is not None:
        sizes = {log: backlog.size_bytes for log, backlog in filled.items()}
        for log, size_bytes in _divide(sizes, limits.max_bytes).items():
            if size_bytes < sizes[log]:
                shares[log] = filled[log].records_within(size_bytes)
    if limits.max_records is not None:
        shares = {log: max(1, count) for log, count in _divide(shares, limits.max_records).items()}
    return shares


def _divide(amounts: Mapping[str, int], limit: int) -> dict[str, int]:
    """Give the smallest all they ask for, and the others equal parts of what that leaves."""
    parts = {}
    left = limit
    order = sorted(amounts, key=lambda name: (amounts[name], name))
    for position, name in enumerate(order):
        parts[name] = min(amounts[name], left // (len(order) - position))
        left -= parts[name]
    return parts
