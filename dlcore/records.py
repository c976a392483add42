"""Log records as users see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlcore.ids import DLSN


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record to write: its bytes and its transaction id (0 … 2**63-2, never decreasing)."""

    txid: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecordWithDLSN:
    """A record as read: where it is, its number in the log (from 0, no gaps), and when written.

    `timestamp_ms` is the writer's clock in epoch milliseconds; it never decreases within a segment.
    """

    dlsn: DLSN
    txid: int
    sequence_id: int
    timestamp_ms: int
    payload: bytes
