"""A run: consecutive entries of one log in a ledger, and the extent that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dlcore.base.ids import DLSN
from dlcore.log.entries.body import encode_entry, encode_entry_header
from dlcore.log.entries.plain_records import plain_format
from dlcore.log.metadata.segment import Extent

if TYPE_CHECKING:
    from dlcore.log.entries.compression import Compressor
    from dlcore.log.entries.encryption import EntryEncryptor
    from dlcore.log.metadata.changes import SegmentLimits
    from dlcore.log.metadata.values import LogHead
    from dlcore.log.writing.transmit import Group
    from dlcore.wire.frames import BytesLike

_NEARLY_FULL = 0.75
"""With this share of its size or age a segment will soon be completed."""


class Run:
    """Keeps the counts for the headers of its entries, and for its extent.

    Write times are never below `timestamp_ms`, the last one of the segment or ledger before.
    """

    def __init__(self, *, first_entry_id: int = 0, timestamp_ms: int = 0) -> None:
        self.first_entry_id = first_entry_id
        self.timestamp_ms = timestamp_ms
        self.entry_count = 0
        self.record_count = 0
        self.size_bytes = 0
        self.first_txid = -1
        self.last_txid = -1
        self.is_stamped = False

    @property
    def last_entry_id(self) -> int:
        """Its last entry; one below the first while there are none."""
        return self.first_entry_id + self.entry_count - 1

    def extent(self, ledger_id: int) -> Extent:
        """Return its entries as a final extent of the ledger."""
        return Extent(
            ledger_id=ledger_id,
            first_entry_id=self.first_entry_id,
            last_entry_id=self.last_entry_id,
            record_count=self.record_count,
            size_bytes=self.size_bytes,
            first_txid=self.first_txid,
            last_txid=self.last_txid,
            last_timestamp_ms=self.timestamp_ms,
            stamped=self.is_stamped,
        )

    def encode(
        self,
        group: Group[Any],
        *,
        now_ms: int,
        compressor: Compressor,
        stamp: bytes = b"",
        encryptor: EntryEncryptor | None = None,
    ) -> list[BytesLike]:
        """Return the parts of the next entry's body, which holds `group`, and count it."""
        # Readers search by time, so it never decreases, even if the clock is set back.
        self.timestamp_ms = max(self.timestamp_ms, now_ms)
        body = self._encode(group, compressor, stamp)
        if encryptor is not None:
            body = encryptor.encrypt(body)
        if not self.entry_count:
            self.first_txid = group.first_txid
        self.last_txid = group.last_txid
        self.is_stamped = bool(stamp)
        self.entry_count += 1
        self.record_count += group.record_count
        self.size_bytes += sum(memoryview(part).nbytes for part in body)
        return body

    def _encode(self, group: Group[Any], compressor: Compressor, stamp: bytes) -> list[BytesLike]:
        # Records written one by one are encoded without a batch, which costs more than they do.
        plain, form = group.plain_records(), plain_format()
        if plain is not None and form is not None and compressor.leaves_bytes:
            header = encode_entry_header(
                record_count=group.record_count,
                first_txid=group.first_txid,
                last_txid=group.last_txid,
                records_before=self.record_count,
                write_time_ms=self.timestamp_ms,
                stamp=stamp,
            )
            return [header, *form.message(*plain)]
        return encode_entry(
            group.batch(),
            first_txid=group.first_txid,
            last_txid=group.last_txid,
            records_before=self.record_count,
            write_time_ms=self.timestamp_ms,
            compressor=compressor,
            schema_id=group.schema_id,
            stamp=stamp,
        )


@dataclass(slots=True)
class OwnExtent:
    """The extent that a writer has open, until its end is in the metadata, and its segment.

    Extents of others may come before it in the segment: `first_entry_id` is its first entry's id
    there.  `acknowledged` is the first entry id of the segment that is not acknowledged, and
    `acknowledged_records` the sequence id of its first record.
    """

    lssn: int
    ledger_id: int
    first_entry_id: int
    started_ms: int
    bytes_before: int
    run: Run
    acknowledged: int
    acknowledged_records: int
    closing: Extent | None = None
    """The final form, once its ledger is closed."""

    @classmethod
    def opened(cls, ledger_id: int, head: LogHead) -> OwnExtent:
        """Return the extent over this ledger that a head opens."""
        segment, lssn = head.segment, head.max_lssn
        assert segment is not None
        first = head.end[1] if head.end[0] == lssn else 0
        run = Run(timestamp_ms=head.last_timestamp_ms)
        before = segment.size_bytes
        return cls(
            lssn,
            ledger_id,
            first,
            segment.created_ms,
            before,
            run,
            acknowledged=first,
            acknowledged_records=head.next_sequence_id,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of its segment."""
        return self.bytes_before + self.run.size_bytes

    @property
    def end(self) -> DLSN | None:
        """The position after its last acknowledged record, if there is one."""
        if self.acknowledged == self.first_entry_id:
            return None
        return DLSN(self.lssn, self.acknowledged, 0)

    def is_full(self, limits: SegmentLimits, *, now_ms: int) -> bool:
        """Return whether the segment must be completed before another entry.

        One without an entry is never completed, however long its start took.
        """
        return self.run.entry_count > 0 and limits.is_reached(
            size_bytes=self.size_bytes, age_ms=now_ms - self.started_ms
        )

    def is_nearly_full(self, limits: SegmentLimits, *, now_ms: int) -> bool:
        """Return whether the segment will soon be completed at the present rate."""
        return limits.is_reached(
            size_bytes=int(self.size_bytes / _NEARLY_FULL),
            age_ms=int((now_ms - self.started_ms) / _NEARLY_FULL),
        )

    def close(self, last_entry_id: int, size_bytes: int) -> None:
        """Note where its ledger ends, once all of it is acknowledged."""
        closing = self.run.extent(self.ledger_id)
        end = self.first_entry_id + last_entry_id + 1
        assert (last_entry_id, end) == (closing.last_entry_id, self.acknowledged)
        self.closing = replace(closing, size_bytes=size_bytes)
