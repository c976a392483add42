"""Log segments and their extents: immutable values and pure functions on them."""

from __future__ import annotations

import enum
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dlcore.base.errors import ConfigurationError, CorruptMetadataError
from dlcore.base.html_tables import ShownFields
from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_Extent = TypeVar("_Extent", bound="Extent")


class SegmentState(enum.Enum):
    """IN_PROGRESS segments may grow; COMPLETED ones are final."""

    IN_PROGRESS = 1
    COMPLETED = 2


# gc=False: its fields are numbers, so it is part of no cycle, and a log may have very many.
class Extent(ShownFields, msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A run of entries of one ledger that belongs to a segment.

    The log's writer appends to an open extent (`last_entry_id` is None): its end is the ledger's
    LAC, and its counts are not known yet.  With `txid_assigned` all its records have `first_txid`,
    whatever their entries say.  A record's timestamp is at least `timestamp_floor_ms`.
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
    stamped: bool = False
    """Whether its last entry has a stamp of producers."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the values without field names: a scan sends thousands of extents to its task."""
        return _restored, (type(self), *msgspec.structs.astuple(self))

    @property
    def is_open(self) -> bool:
        """Whether a writer is still appending to it."""
        return self.last_entry_id is None

    @property
    def entry_count(self) -> int:
        """Number of entries; not for an open extent."""
        assert self.last_entry_id is not None
        return self.last_entry_id - self.first_entry_id + 1

    @property
    def assigned_txid(self) -> int | None:
        """The transaction id of all its records; None if their entries have it."""
        return self.first_txid if self.txid_assigned else None

    @property
    def is_cold(self) -> bool:
        """Whether an object has its entries, and no bookie."""
        return isinstance(self, ColdExtent)

    def timestamp_ms(self, write_time_ms: int) -> int:
        """Return the timestamp of the records of an entry with this write time."""
        return max(write_time_ms, self.timestamp_floor_ms)


class StagedExtent(Extent, frozen=True, kw_only=True):
    """Entries that a staging writer made durable and that are in no log yet.

    `first_txid` and `last_txid` are -1 if the records came without transaction ids: they get one
    when the append commits.
    """

    log: str
    log_id: str
    identity: str
    last_entry_id: int

    def __post_init__(self) -> None:
        if self.record_count < 1 or not 0 <= self.first_entry_id <= self.last_entry_id:
            raise ConfigurationError(f"not a staged extent: {self!r}")

    @property
    def has_txids(self) -> bool:
        """Whether the records were staged with transaction ids of their own."""
        return self.first_txid >= 0


class ColdExtent(Extent, frozen=True, kw_only=True, gc=False):
    """An extent of a cold ledger, which is the result of tiering."""


def _restored(kind: type[_Extent], *values: Any) -> _Extent:
    return kind(**dict(zip(kind.__struct_fields__, values, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LogSegment(ShownFields):
    """One segment of a log, with all its extents.  At most the last of them is open.

    `start_sequence_id` is the sequence id of its first record.  At its front `removed_entries`
    entries with `removed_records` records were removed; positions and counts include them.
    """

    lssn: int
    state: SegmentState
    created_ms: int
    start_sequence_id: int
    extents: tuple[Extent, ...]
    completed_ms: int = 0
    removed_entries: int = 0
    removed_records: int = 0
    _entry_ends: list[int] = field(init=False, repr=False, compare=False)
    _record_ends: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if any(extent.is_open for extent in self.extents[:-1]):
            raise CorruptMetadataError(f"segment {self.lssn}: an open extent before the last one")
        if self.state is SegmentState.COMPLETED and self.has_open_extent:
            raise CorruptMetadataError(
                f"segment {self.lssn}: completed, but its last extent is open"
            )
        closed = self.closed_extents
        entries = accumulate((e.entry_count for e in closed), initial=self.removed_entries)
        records = accumulate((e.record_count for e in closed), initial=self.removed_records)
        object.__setattr__(self, "_entry_ends", list(entries))
        object.__setattr__(self, "_record_ends", list(records))

    def __repr__(self) -> str:
        return (
            f"<LogSegment {self.lssn} {self.state.name} {self.closed_entry_count:,} entries, "
            f"{self.closed_record_count:,} records, {len(self.extents):,} extents"
            f"{', the last one open' if self.has_open_extent else ''}>"
        )

    @property
    def has_open_extent(self) -> bool:
        """Whether a writer is (or was, when it died) appending to it."""
        return bool(self.extents) and self.extents[-1].is_open

    @property
    def closed_extents(self) -> tuple[Extent, ...]:
        """The final extents."""
        return self.extents[:-1] if self.has_open_extent else self.extents

    @property
    def closed_entry_count(self) -> int:
        """Entries in the final extents; an open extent starts at this entry id of the segment."""
        return self._entry_ends[-1]

    @property
    def closed_record_count(self) -> int:
        """Records in the final extents."""
        return self._record_ends[-1]

    @property
    def closed_size_bytes(self) -> int:
        """Bytes in the final extents."""
        return sum(extent.size_bytes for extent in self.closed_extents)

    @property
    def start(self) -> DLSN:
        """The first position that is not removed."""
        return DLSN(self.lssn, self.removed_entries, 0)

    def find(self, entry_id: int) -> tuple[Extent, int, int] | None:
        """Return the extent that holds an entry of the segment, or the open one that may.

        The two numbers are the first entry id of the extent within the segment, and the sequence id
        of its first record.  None: the entry is after all extents of the segment.
        """
        assert entry_id >= self.removed_entries
        index = bisect_right(self._entry_ends, entry_id) - 1
        if index >= len(self.extents):
            return None
        sequence_id = self.start_sequence_id + self._record_ends[index]
        return self.extents[index], self._entry_ends[index], sequence_id


def adjacent(extents: Iterable[_Extent]) -> Iterator[list[_Extent]]:
    """Yield groups of extents that are also adjacent in their ledger: one read gets a group."""
    group: list[_Extent] = []
    for extent in extents:
        if group:
            last = group[-1].last_entry_id
            assert last is not None
            if (group[-1].ledger_id, last + 1) != (extent.ledger_id, extent.first_entry_id):
                yield group
                group = []
        group.append(extent)
    if group:
        yield group
