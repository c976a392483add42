"""Log records as users see them."""

from __future__ import annotations

from dataclasses import dataclass

from dlcore.ids import DLSN


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record to write: its transaction id (0 … 2**63-2, never decreasing in a log) and its bytes."""

    txid: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecordWithDLSN:
    """A record as read: where it is, its number in the log (from 0, without gaps), and when written.

    `timestamp_ms` is the writer's clock in epoch milliseconds; it never decreases within a segment.
    """

    dlsn: DLSN
    txid: int
    sequence_id: int
    timestamp_ms: int
    payload: bytes
