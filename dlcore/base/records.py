"""Log records as users see them, and conditions that find a record."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from dlcore.base.config import require, require_kind
from dlcore.base.errors import UnsupportedError
from dlcore.base.html_tables import ShownFields
from dlcore.base.ids import DLSN

_SHOWN_PAYLOAD_BYTES = 64


class LogRecord(ShownFields, msgspec.Struct, frozen=True, gc=False):
    """A record to write: its bytes and its transaction id (0 … 2**63-2, never decreasing)."""

    txid: int
    payload: bytes


class EntryPlace(msgspec.Struct, frozen=True, gc=False):
    """The facts that all records of one entry share: its place in the log, and its time.

    `sequence_id` is that of the entry's first record, `segment_sequence_id` that of the segment's;
    proxies do not send the latter, and it is None.
    """

    lssn: int
    entry_id: int
    sequence_id: int
    segment_sequence_id: int | None
    timestamp_ms: int

    @property
    def end(self) -> DLSN:
        """The position after the entry's last record."""
        return DLSN(self.lssn, self.entry_id + 1, 0)


class LogRecordWithDLSN(ShownFields, msgspec.Struct, frozen=True, gc=False):
    """A record as read: its position, its number in the log (from 0, no gaps), and its time.

    `entry` holds the facts that it shares with the other records of its entry.  They are stored
    once, because a reader makes a million records a second.
    """

    txid: int
    payload: bytes
    slot_id: int
    entry: EntryPlace

    @property
    def dlsn(self) -> DLSN:
        """The record's position."""
        return DLSN(self.entry.lssn, self.entry.entry_id, self.slot_id)

    @property
    def sequence_id(self) -> int:
        """The record's number in the log, from 0."""
        return self.entry.sequence_id + self.slot_id

    @property
    def position_in_segment(self) -> int:
        """The record's number in its segment, from 1.  Raises: UnsupportedError over proxies."""
        if self.entry.segment_sequence_id is None:
            raise UnsupportedError(
                f"record {self.dlsn}: proxies do not send `position_in_segment`; open the "
                "namespace directly, as distributedlog://…"
            )
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
    """A record's position, the number of records before it in its log, and its time.

    For the place after the last record of a snapshot, `dlsn` is the snapshot's end, `sequence_id`
    its number of records, and `timestamp_ms` the time of its last record.
    """

    dlsn: DLSN
    sequence_id: int
    timestamp_ms: int


class RecordField(enum.Enum):
    """A field that never decreases along a log, so that a search can find a record by it."""

    SEQUENCE_ID = "sequence_id"
    TXID = "txid"
    TIMESTAMP_MS = "timestamp_ms"


@dataclass(frozen=True, slots=True)
class NotLessThan:
    """The first record whose `field` is at least `value`."""

    field: RecordField
    value: int

    def __post_init__(self) -> None:
        require_kind("field", self.field, RecordField)
        require_kind(self.field.value, self.value, int)


def require_search(wanted: DLSN | NotLessThan) -> None:
    """Raise `ConfigurationError` unless `wanted` names a record."""
    is_search = isinstance(wanted, DLSN | NotLessThan)
    require(condition=is_search, key="wanted", value=wanted, rule="expected a DLSN or NotLessThan")
