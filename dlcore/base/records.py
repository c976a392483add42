"""Log records as users see them, and how one is looked for."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from dlcore.base.html_tables import ShownFields
from dlcore.base.ids import DLSN

_SHOWN_PAYLOAD_BYTES = 64


class LogRecord(ShownFields, msgspec.Struct, frozen=True, gc=False):
    """A record to write: its bytes and its transaction id (0 … 2**63-2, never decreasing)."""

    txid: int
    payload: bytes


class EntryPlace(msgspec.Struct, frozen=True, gc=False):
    """What the records of one entry have in common: where it is, and when it was written.

    `sequence_id` is that of its first record, `segment_sequence_id` that of the segment's.
    """

    lssn: int
    entry_id: int
    sequence_id: int
    segment_sequence_id: int
    timestamp_ms: int

    @property
    def end(self) -> DLSN:
        """The position after its last record."""
        return DLSN(self.lssn, self.entry_id + 1, 0)


class LogRecordWithDLSN(ShownFields, msgspec.Struct, frozen=True, gc=False):
    """A record as read: where it is, its number in the log (from 0, no gaps), and when written.

    What it shares with the other records of its entry is kept once, in `entry`, for a reader makes
    a million records in a second.
    """

    txid: int
    payload: bytes
    slot_id: int
    entry: EntryPlace

    @property
    def dlsn(self) -> DLSN:
        """Its position."""
        return DLSN(self.entry.lssn, self.entry.entry_id, self.slot_id)

    @property
    def sequence_id(self) -> int:
        """Its number in the log."""
        return self.entry.sequence_id + self.slot_id

    @property
    def position_in_segment(self) -> int:
        """Its number in its segment, from 1."""
        return self.sequence_id - self.entry.segment_sequence_id + 1

    @property
    def timestamp_ms(self) -> int:
        """The writer's clock in epoch milliseconds; it never decreases within a segment."""
        return self.entry.timestamp_ms

    def __repr__(self) -> str:
        payload = repr(self.payload[:_SHOWN_PAYLOAD_BYTES])
        if len(self.payload) > _SHOWN_PAYLOAD_BYTES:
            payload = f"{payload}… ({len(self.payload)} bytes)"
        return (
            f"LogRecordWithDLSN(dlsn={self.dlsn}, txid={self.txid}, "
            f"sequence_id={self.sequence_id}, timestamp_ms={self.timestamp_ms}, payload={payload})"
        )


@dataclass(frozen=True, slots=True)
class RecordPlace(ShownFields):
    """Where a record is, how many records of its log precede it, and when it was written.

    After the last record of a snapshot: its end, its number of records, the time of the last one.
    """

    dlsn: DLSN
    sequence_id: int
    timestamp_ms: int


class RecordField(enum.Enum):
    """What never decreases from one record of a log to the next, so that it finds a record."""

    SEQUENCE_ID = "sequence_id"
    TXID = "txid"
    TIMESTAMP_MS = "timestamp_ms"


@dataclass(frozen=True, slots=True)
class NotLessThan:
    """The first record of which `field` is not below `value`."""

    field: RecordField
    value: int
