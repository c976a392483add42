"""Scanned records of many entries at a time, and where in its log each of them is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dlcore.base.html_tables import ShownFields
from dlcore.base.ids import DLSN
from dlcore.log.reading.scan import ScanBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from dlcore.log.entries.runs import EntryRun
    from dlcore.log.reading.scan import ExtentView, ScanRange
    from dlcore.wire.frames import EntryFrame

FIRST_BYTES = 128 * 1024
"""About how much the first request of a scan is for."""
GROWTH = 2
"""How many times larger each next request is."""
_GROWN_BYTES = 8 * 1024 * 1024
"""A request for more than this is for all that is left."""
_JOINED_BYTES_MAX = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRun(ShownFields):
    """Records of consecutive entries of a segment, in order.

    `batch` has the columns of `ScanBatch.batch`.  The arrays have an item for each entry: its id,
    how many rows of the batch are its own, and the values of `ScanBatch` of the first of these.
    """

    batch: pa.RecordBatch
    lssn: int
    entry_ids: NDArray[np.int64]
    records: NDArray[np.int64]
    first_slots: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    timestamps_ms: NDArray[np.int64]

    @classmethod
    def of(cls, entry: ScanBatch) -> ScanRun:
        """Return the records of one entry."""
        return cls(
            batch=entry.batch,
            lssn=entry.lssn,
            entry_ids=np.array([entry.entry_id]),
            records=np.array([entry.batch.num_rows]),
            first_slots=np.array([entry.first_slot]),
            sequence_ids=np.array([entry.sequence_id]),
            timestamps_ms=np.array([entry.timestamp_ms]),
        )

    @property
    def end(self) -> DLSN:
        """The position after the last record, in its entry."""
        slot = int(self.first_slots[-1] + self.records[-1])
        return DLSN(self.lssn, int(self.entry_ids[-1]), slot)

    @property
    def end_sequence_id(self) -> int:
        """The sequence id after the last record."""
        return int(self.sequence_ids[-1] + self.records[-1])

    def entries(self) -> Iterator[ScanBatch]:
        """Yield the records entry by entry; the batches are slices."""
        row = 0
        for entry_id, count, first_slot, sequence_id, timestamp_ms in zip(
            self.entry_ids.tolist(),
            self.records.tolist(),
            self.first_slots.tolist(),
            self.sequence_ids.tolist(),
            self.timestamps_ms.tolist(),
            strict=True,
        ):
            yield ScanBatch(
                batch=self.batch.slice(row, count),
                lssn=self.lssn,
                entry_id=entry_id,
                first_slot=first_slot,
                sequence_id=sequence_id,
                timestamp_ms=timestamp_ms,
            )
            row += count


class ScanGrowth:
    """Divides the entries of a scan into requests, each larger than the last."""

    def __init__(self) -> None:
        self._wanted_bytes = FIRST_BYTES

    def sections(self, extents: Sequence[ExtentView]) -> Iterator[tuple[int, int]]:
        """Yield the first and last entry of each request for the next adjacent extents."""
        first, last = extents[0].first_entry_id, extents[-1].last_entry_id
        entry_bytes = max(1, sum(each.size_bytes for each in extents) // (last - first + 1))
        while first <= last:
            count = max(1, self._wanted_bytes // entry_bytes)
            end = last if self._wanted_bytes > _GROWN_BYTES else min(last, first + count - 1)
            yield first, end
            self._wanted_bytes = self._wanted_bytes * GROWTH
            first = end + 1


def joinable(frames: Sequence[EntryFrame]) -> Iterator[Sequence[EntryFrame]]:
    """Cut entries into pieces of so few bytes that copying them costs little; or of one entry."""
    start = size_bytes = 0
    for at, frame in enumerate(frames):
        size_bytes += len(frame.data)
        if size_bytes > _JOINED_BYTES_MAX and at > start:
            yield frames[start:at]
            start, size_bytes = at, len(frame.data)
    yield frames[start:]


class ExtentPlaces:
    """Where the entries of adjacent extents are in their log."""

    def __init__(self, part: ScanRange, extents: Sequence[ExtentView]) -> None:
        self._part = part
        self._lasts = np.array([each.last_entry_id for each in extents])
        self._shifts = np.array([each.in_segment(0) for each in extents])
        self._sequence_ids = np.array([each.start_sequence_id for each in extents])
        self._floors_ms = np.array([each.timestamp_floor_ms for each in extents])
        self._txids = np.array([each.first_txid for each in extents])
        self._is_assigned = np.array([each.txid_assigned for each in extents])

    def place(self, first_entry_id: int, run: EntryRun) -> ScanRun:
        """Return the records of at least three entries of the ledger that are in the range."""
        count = len(run.records)
        ledger_entry_ids = np.arange(first_entry_id, first_entry_id + count)
        extent = np.searchsorted(self._lasts, ledger_entry_ids)
        batch = run.batch
        is_assigned = self._is_assigned[extent]
        if is_assigned.any():
            from dlcore.log.entries.runs import with_txids  # loads pyarrow

            batch = with_txids(batch, run.records, is_assigned, self._txids[extent])
        start, end = self._part.start, self._part.end
        entry_ids = ledger_entry_ids + self._shifts[extent]
        firsts = np.zeros(count, np.int64)
        firsts[entry_ids == start.entry_id] = start.slot_id
        ends = run.records.copy()
        is_last = entry_ids == end.entry_id
        ends[is_last] = np.minimum(ends[is_last], end.slot_id)
        records = np.maximum(ends - firsts, 0)
        is_read = records > 0
        # Only the range's first and last entry are read in part, and they are the run's.
        assert is_read[1:-1].all()
        skipped = int(min(firsts[0], run.records[0]))
        sequence_ids = self._sequence_ids[extent] + run.records_before + firsts
        times_ms = np.maximum(run.write_times_ms, self._floors_ms[extent])
        return ScanRun(
            batch=batch.slice(skipped, int(records.sum())),
            lssn=self._part.lssn,
            entry_ids=entry_ids[is_read],
            records=records[is_read],
            first_slots=firsts[is_read],
            sequence_ids=sequence_ids[is_read],
            timestamps_ms=times_ms[is_read],
        )
