"""The status of a log, as one call returns it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dlcore.base.html_tables import fields_html

if TYPE_CHECKING:
    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import DLSN


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """The contents of a log, their storage, and the writer; as of one moment.

    `first`, `last` and `last_txid` are None for a log without records.  In `size_bytes` entries
    that are truncated in part count by their share.  `writer` is None if no writer owns the log.
    `under_replicated_ledgers` are those on auto-recovery's list: they have lost copies, but no
    data yet.
    """

    name: str
    log_id: str
    first: DLSN | None
    last: DLSN | None
    last_txid: int | None
    record_count: int
    size_bytes: int
    segment_count: int
    ledger_count: int
    under_replicated_ledgers: int
    quorum: QuorumConfig
    sealed: bool
    writer: str | None
    created_ms: int
    last_timestamp_ms: int
    now_ms: int

    @property
    def created(self) -> datetime:
        """When it was created."""
        return datetime.fromtimestamp(self.created_ms / 1000, UTC)

    @property
    def age_s(self) -> float:
        """How long ago it was created."""
        return (self.now_ms - self.created_ms) / 1000

    @property
    def idle_s(self) -> float | None:
        """How long ago its last record was written; None if it never had one."""
        return (self.now_ms - self.last_timestamp_ms) / 1000 if self.last_timestamp_ms else None

    def _repr_html_(self) -> str:
        idle = "never written" if self.idle_s is None else f"{self.idle_s:,.0f} s"
        return fields_html(
            f"log {self.name}",
            {
                "positions": "none" if self.first is None else f"{self.first} … {self.last}",
                "last txid": "none" if self.last_txid is None else self.last_txid,
                "records": self.record_count,
                "bytes": self.size_bytes,
                "segments": self.segment_count,
                "ledgers": self.ledger_count,
                "under-replicated ledgers": self.under_replicated_ledgers,
                "E/Qw/Qa": self.quorum,
                "state": "sealed" if self.sealed else "open",
                "writer": self.writer or "none",
                "created": f"{self.created:%Y-%m-%d %H:%M:%S} UTC",
                "idle for": idle,
            },
        )
