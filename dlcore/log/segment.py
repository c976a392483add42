"""Log segments and their extents: immutable values, and what follows from them without I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from dlcore.errors import CorruptMetadataError
from dlcore.ids import DLSN

EXTENTS_PER_SEGMENT_MAX = 1000
"""A segment's metadata stays far below ZooKeeper's 1 MB; more extents start another segment."""


class SegmentState(enum.Enum):
    """IN_PROGRESS segments may grow; COMPLETED ones are final but for truncation."""

    IN_PROGRESS = 1
    COMPLETED = 2


class Truncation(enum.Enum):
    """ACTIVE, PARTIALLY_TRUNCATED (readable from the minimum active position), or TRUNCATED."""

    ACTIVE = 0
    PARTIALLY_TRUNCATED = 1
    TRUNCATED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of entries of one ledger that belong to a segment.

    An open extent (`last_entry_id` is None) is being written by the log's writer: its end is the
    ledger's LAC, and its counts are not known yet.  `txid_assigned` says that all its records carry
    `first_txid`, whatever their entries say; a record's timestamp is at least `timestamp_floor_ms`.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int | None
    record_count: int = 0
    size_bytes: int = 0
    first_txid: int = -1
    last_txid: int = -1
    txid_assigned: bool = False
    timestamp_floor_ms: int = 0
    last_timestamp_ms: int = 0

    @property
    def is_open(self) -> bool:
        """Whether a writer is still appending to it."""
        return self.last_entry_id is None

    @property
    def entry_count(self) -> int:
        """Number of entries; only of an extent that is not open."""
        assert self.last_entry_id is not None
        return self.last_entry_id - self.first_entry_id + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSegment:
    """One segment of a log.  At most its last extent is open.

    `start_sequence_id` is the sequence id of its first record.  `min_active` is (entry, slot):
    records below it are truncated.
    """

    lssn: int
    state: SegmentState
    created_ms: int
    start_sequence_id: int
    extents: tuple[Extent, ...]
    completed_ms: int = 0
    truncation: Truncation = Truncation.ACTIVE
    min_active_entry_id: int = 0
    min_active_slot_id: int = 0

    def __post_init__(self) -> None:
        if any(extent.is_open for extent in self.extents[:-1]):
            raise CorruptMetadataError(f"segment {self.lssn}: an open extent before the last one")
        if self.state is SegmentState.COMPLETED and self.has_open_extent:
            raise CorruptMetadataError(
                f"segment {self.lssn}: completed, but its last extent is open"
            )

    @property
    def has_open_extent(self) -> bool:
        """Whether a writer is (or was, when it died) appending to it."""
        return bool(self.extents) and self.extents[-1].is_open

    @property
    def closed_extents(self) -> tuple[Extent, ...]:
        """The extents that are final."""
        return self.extents[:-1] if self.has_open_extent else self.extents

    @property
    def closed_entry_count(self) -> int:
        """Entries in the final extents; an open extent starts at this entry id of the segment."""
        return sum(extent.entry_count for extent in self.closed_extents)

    @property
    def closed_record_count(self) -> int:
        """Records in the final extents."""
        return sum(extent.record_count for extent in self.closed_extents)

    @property
    def closed_size_bytes(self) -> int:
        """Bytes in the final extents."""
        return sum(extent.size_bytes for extent in self.closed_extents)

    @property
    def min_active(self) -> DLSN:
        """The first position of the segment that is not truncated."""
        return DLSN(self.lssn, self.min_active_entry_id, self.min_active_slot_id)

    def completed(self, *, now_ms: int) -> LogSegment:
        """Return a final copy; there must be no open extent left."""
        assert not self.has_open_extent
        return replace(self, state=SegmentState.COMPLETED, completed_ms=now_ms)
