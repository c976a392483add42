"""Snapshots of a log, and ranges of them that are read independently: pure values.

A `LogSnapshot` has everything that reading needs (segments, extents, ledger ensembles, bookie
addresses).  Therefore a `ScanRange` of it can be read in another process or on another machine
without the metadata store.  All values are picklable and do no I/O.

Positions are half-open: a range holds the records from `start` up to but not including `end`.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping  # noqa: TC003  # msgspec reads it when it unpacks
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.access.capability import Grant, LedgerRight
from dlcore.base.config import require
from dlcore.base.html_tables import ShownFields, rows_html
from dlcore.base.ids import DLSN, BookieId
from dlcore.ledger.metadata.values import LedgerMetadata  # noqa: TC001  # as above
from dlcore.log.metadata.segment import Extent
from dlcore.log.typed.schema import LogSchema  # noqa: TC001  # as above

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

_SHOWN_SEGMENTS = 100


class ExtentView(Extent, frozen=True, kw_only=True, gc=False):
    """A run of readable entries; for an open extent up to the LAC that was read.

    `base_entry_id` is the entry id, within the segment, of its first entry.  `start_sequence_id` is
    the sequence id of the extent's very first record, also in a clipped view: an entry's header
    counts the records before it from there.  `record_count` and `size_bytes` are exact for whole
    extents and prorated by entries for clipped ones.
    """

    last_entry_id: int
    base_entry_id: int
    start_sequence_id: int

    @property
    def end_entry_id(self) -> int:
        """The entry id, within the segment, after its last entry."""
        return self.base_entry_id + self.entry_count

    def in_segment(self, entry_id: int) -> int:
        """Return the entry id within the segment of an entry of the ledger."""
        return self.base_entry_id + entry_id - self.first_entry_id

    def clipped(self, *, first: int, end: int) -> ExtentView | None:
        """Return the part with entry ids (of the segment) in [first, end), or None if empty."""
        first = max(first, self.base_entry_id)
        end = min(end, self.end_entry_id)
        if first >= end:
            return None
        if end - first == self.entry_count:
            return self
        skipped = first - self.base_entry_id
        return msgspec.structs.replace(
            self,
            first_entry_id=self.first_entry_id + skipped,
            last_entry_id=self.first_entry_id + skipped + (end - first) - 1,
            base_entry_id=first,
            record_count=_prorated(self.record_count, end - first, self.entry_count),
            size_bytes=_prorated(self.size_bytes, end - first, self.entry_count),
        )


def _prorated(amount: int, part: int, whole: int) -> int:
    return -(-amount * part // whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView(ShownFields):
    """The readable part of one segment, with the ledgers that its extents name.

    Entries and records that are truncated at its start are counted too.
    """

    lssn: int
    start_sequence_id: int
    extents: tuple[ExtentView, ...]
    ledgers: Mapping[int, LedgerMetadata]

    @property
    def entry_count(self) -> int:
        """Number of entries, and the entry id after the last one."""
        return self.extents[-1].end_entry_id if self.extents else 0

    @property
    def record_count(self) -> int:
        """Number of records."""
        if not self.extents:
            return 0
        last = self.extents[-1]
        return last.start_sequence_id + last.record_count - self.start_sequence_id

    @property
    def size_bytes(self) -> int:
        """Bytes of the entries' bodies."""
        return sum(extent.size_bytes for extent in self.extents)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRange(ShownFields):
    """The records of one segment in [start, end), with everything needed to read them.

    `columns` are the columns of a typed log's batches, beside the transaction ids; batches of a
    byte log have at least these.  None: all.  `capabilities` are presented to the bookies by a
    process without a certificate; being secrets, they are not shown.
    """

    log: str
    log_id: str
    lssn: int
    start: DLSN
    end: DLSN
    extents: tuple[ExtentView, ...]
    ledgers: Mapping[int, LedgerMetadata]
    cluster_id: str = ""
    addresses: Mapping[BookieId, str] = field(default_factory=dict)
    schema: LogSchema | None = None
    columns: frozenset[str] | None = None
    capabilities: tuple[bytes, ...] = field(default=(), repr=False)

    @staticmethod
    def pack(ranges: Sequence[ScanRange]) -> bytes:
        """Return `ranges` as bytes for another process of this release.

        Pickling extents one by one takes ten times the time and the bytes.
        """
        return zlib.compress(msgspec.msgpack.encode(ranges), level=1)

    @staticmethod
    def unpack(packed: bytes) -> tuple[ScanRange, ...]:
        """Return the ranges that `pack` encoded."""
        return msgspec.msgpack.decode(zlib.decompress(packed), type=tuple[ScanRange, ...])

    @property
    def entry_count(self) -> int:
        """Number of entries that are read; those at the edges count whole."""
        if not self.extents:
            return 0
        return self.extents[-1].end_entry_id - self.extents[0].base_entry_id

    @property
    def record_count_estimate(self) -> int:
        """Estimated number of records; exact for whole extents."""
        return sum(extent.record_count for extent in self.extents)

    @property
    def size_bytes_estimate(self) -> int:
        """Estimated bytes to read."""
        return sum(extent.size_bytes for extent in self.extents)

    def grants(self) -> Iterator[Grant]:
        """Return what a capability to read it gives."""
        for extent in self.extents:
            yield Grant.of(
                extent.ledger_id,
                LedgerRight.READ,
                first_entry_id=extent.first_entry_id,
                last_entry_id=extent.last_entry_id,
            )

    def split(self, entries_per_part: int) -> list[ScanRange]:
        """Return the same records as consecutive ranges of at most `entries_per_part` entries."""
        require(
            condition=entries_per_part > 0,
            key="entries_per_part",
            value=entries_per_part,
            rule="expected a number > 0",
        )
        if self.entry_count <= entries_per_part:
            return [self]
        first, end = self.extents[0].base_entry_id, self.extents[-1].end_entry_id
        cuts = [
            self.start,
            *(
                DLSN(self.lssn, cut, 0)
                for cut in range(first + entries_per_part, end, entries_per_part)
            ),
            self.end,
        ]
        return [self.between(start, stop) for start, stop in pairwise(cuts)]

    def after_entry(self, entry_id: int) -> ScanRange | None:
        """Return the range after one of its entries; None if that is empty."""
        rest = self.between(DLSN(self.lssn, entry_id + 1, 0), self.end)
        return rest if rest.extents and rest.start < rest.end else None

    def between(self, start: DLSN, end: DLSN) -> ScanRange:
        """Return its records in [start, end), which lie within it."""
        extents = _clip(self.extents, start, end)
        ledgers = _named(self.ledgers, extents)
        return replace(self, start=start, end=end, extents=extents, ledgers=ledgers)


def _clip(extents: tuple[ExtentView, ...], start: DLSN, end: DLSN) -> tuple[ExtentView, ...]:
    """Return the extents, clipped to the entries that hold records of [start, end).

    Both are positions of one segment.
    """
    # With slot 0 it is before the first record of its entry, which is not needed then.
    end_entry_id = end.entry_id + (1 if end.slot_id > 0 else 0)
    low = bisect_right(extents, start.entry_id, key=lambda extent: extent.end_entry_id)
    high = bisect_left(extents, end_entry_id, key=lambda extent: extent.base_entry_id)
    parts: list[ExtentView | None] = list(extents[low:high])
    # Only these can lie partly outside, and a segment may have very many extents.
    for edge in {0, len(parts) - 1} if parts else ():
        whole = extents[low + edge]
        parts[edge] = whole.clipped(first=start.entry_id, end=end_entry_id)
    return tuple(part for part in parts if part is not None)


def _named(
    ledgers: Mapping[int, LedgerMetadata], extents: Iterable[ExtentView]
) -> dict[int, LedgerMetadata]:
    """Return those of `ledgers` that hold entries of `extents`."""
    return {extent.ledger_id: ledgers[extent.ledger_id] for extent in extents}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanBatch(ShownFields):
    """Records of one entry, in order.

    `batch` has the columns txid (int64) and value (binary); for a typed log `_txid` and the log's
    columns, or those of them that the range selects.  The first row is at DLSN(lssn, entry_id,
    first_slot) and has `sequence_id`; the following rows count up from there.  All rows have
    `timestamp_ms`, epoch milliseconds.
    """

    batch: pa.RecordBatch
    lssn: int
    entry_id: int
    first_slot: int
    sequence_id: int
    timestamp_ms: int

    @property
    def first(self) -> DLSN:
        """Position of the first record."""
        return DLSN(self.lssn, self.entry_id, self.first_slot)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LogSnapshot:
    """A log's readable records at one moment.

    `first` is the position of the first record that is not truncated, or of the next record if
    there is none.  `end` is the position after the last readable record, in canonical form: the
    entry count of the last segment with readable entries, slot 0; or `first` if there is none.
    `schema` is that of a typed log, with every version that its entries have.  `removed_txid` is
    the highest transaction id of removed extents, as far as it is known.  `next_sequence_id` is the
    sequence id of the record after the final extents.  `rewrites` counts how often stored extents
    were replaced by others with the same records, or without those that were redacted.
    """

    log: str
    log_id: str
    first: DLSN
    end: DLSN
    segments: tuple[SegmentView, ...]
    sealed: bool = False
    cluster_id: str = ""
    addresses: Mapping[BookieId, str] = field(default_factory=dict)
    schema: LogSchema | None = None
    removed_txid: int = -1
    next_sequence_id: int = 0
    rewrites: int = 0

    def __repr__(self) -> str:
        return (
            f"<LogSnapshot {self.log!r} from {self.first} to {self.end}, "
            f"{len(self.segments):,} segments{', sealed' if self.sealed else ''}>"
        )

    def _repr_html_(self) -> str:
        return rows_html(
            f"log {self.log} from {self.first} to {self.end}",
            ("segment", "entries", "records", "bytes", "extents"),
            (
                (s.lssn, s.entry_count, s.record_count, s.size_bytes, len(s.extents))
                for s in self.segments[-_SHOWN_SEGMENTS:]
            ),
        )

    @property
    def columns(self) -> pa.Schema | None:
        """The latest columns of a typed log; None for a byte log."""
        from dlcore.log.typed.arrow import schema_of  # loads pyarrow, which plans do without

        return None if self.schema is None else schema_of(self.schema.latest)

    @property
    def is_empty(self) -> bool:
        """Whether no record is readable."""
        return self.first >= self.end

    def contains(self, dlsn: DLSN) -> bool:
        """Return whether `dlsn` is in the readable range: first <= dlsn < end."""
        return self.first <= dlsn < self.end

    def is_truncated_before(self, dlsn: DLSN) -> bool:
        """Return whether records from `dlsn` on were truncated."""
        return dlsn < self.first

    @property
    def truncated_txid(self) -> int:
        """The highest transaction id that is known to be truncated, by whole extents."""
        known = [
            extent.last_txid
            for segment in self.segments
            if segment.lssn <= self.first.lssn
            for extent in segment.extents
            if DLSN(segment.lssn, extent.end_entry_id, 0) <= self.first
        ]
        return max(self.removed_txid, *known, -1)

    def starting_at(self, first: DLSN) -> LogSnapshot:
        """Return a copy whose first record is at `first`."""
        return replace(self, first=first)

    def canonical(self, dlsn: DLSN) -> DLSN:
        """Return the lowest readable position that is not below `dlsn`, or `end`.

        Positions past the last entry of a segment move to the start of the next one, so that two
        positions with the same records before them become equal.
        """
        position = max(dlsn, self.first)
        for segment in self.segments:
            if segment.lssn < position.lssn or segment.entry_count == 0:
                continue
            if segment.lssn > position.lssn:
                return DLSN(segment.lssn, 0, 0)
            if position.entry_id < segment.entry_count:
                return position
        return self.end

    def scans(self, start: DLSN, end: DLSN) -> list[ScanRange]:
        """Return the readable records in [start, end) as one range per segment, in order.

        Truncated records and those that are not readable yet are left out.  Callers that must not
        miss records compare `start` with `first` before.
        """
        return list(self._scans(max(start, self.first), min(end, self.end)))

    def _scans(self, start: DLSN, end: DLSN) -> Iterator[ScanRange]:
        for segment in self.segments:
            low = max(start, DLSN(segment.lssn, 0, 0))
            high = min(end, DLSN(segment.lssn, segment.entry_count, 0))
            extents = _clip(segment.extents, low, high) if low < high else ()
            if not extents:
                continue
            ledgers = _named(segment.ledgers, extents)
            bookies = {
                bookie
                for ledger in ledgers.values()
                for ensemble in ledger.ensembles
                for bookie in ensemble.bookies
            }
            yield ScanRange(
                log=self.log,
                log_id=self.log_id,
                lssn=segment.lssn,
                start=low,
                end=high,
                extents=extents,
                ledgers=ledgers,
                cluster_id=self.cluster_id,
                addresses={b: a for b, a in self.addresses.items() if b in bookies},
                schema=self.schema,
            )

    def count_records(self, start: DLSN, end: DLSN) -> int:
        """Return how many records are in [start, end).

        It is exact if both are at the edges of extents, else an estimate by entries;
        `DistributedLogManager.get_log_record_count` is always exact.
        """
        return sum(part.record_count_estimate for part in self.scans(start, end))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult(ShownFields):
    """The outcome of a commit: done by this call, or done before (then `logs` is empty).

    `logs` maps each log to the position of the first record appended and the position after the
    last.
    """

    committed: bool
    already_committed: bool
    logs: Mapping[str, tuple[DLSN, DLSN]] = field(default_factory=dict)


def pack_snapshots(snapshots: Sequence[LogSnapshot]) -> bytes:
    """Return snapshots as bytes for another process of this release."""
    return zlib.compress(msgspec.msgpack.encode(snapshots), level=1)


def unpack_snapshots(packed: bytes) -> list[LogSnapshot]:
    """Return the snapshots in the result of `pack_snapshots`."""
    return msgspec.msgpack.decode(zlib.decompress(packed), type=list[LogSnapshot])
