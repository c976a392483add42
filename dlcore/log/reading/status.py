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
    `under_replicated_ledgers` are those on auto-recovery's list: they have lost copies, but no data
    yet.  `forked_from` is the source of a fork, as it was called then, and the position before
    which the fork has its records, as ``clicks at 3:17:0``.  Fields with a default are None over
    proxies, which do not know them.
    """

    name: str
    log_id: str
    first: DLSN | None
    last: DLSN | None
    last_txid: int | None
    record_count: int
    size_bytes: int
    segment_count: int
    sealed: bool
    last_timestamp_ms: int
    now_ms: int
    ledger_count: int | None = None
    under_replicated_ledgers: int | None = None
    quorum: QuorumConfig | None = None
    writer: str | None = None
    created_ms: int | None = None
    forked_from: str | None = None

    @property
    def created(self) -> datetime | None:
        """When it was created."""
        if self.created_ms is None:
            return None
        return datetime.fromtimestamp(self.created_ms / 1000, UTC)

    @property
    def age_s(self) -> float | None:
        """How long ago it was created."""
        return None if self.created_ms is None else (self.now_ms - self.created_ms) / 1000

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
                **self._stored(),
                "state": "sealed" if self.sealed else "open",
                "idle for": idle,
            },
        )

    def _stored(self) -> dict[str, object]:
        if self.created is None:
            return {}
        return {
            "ledgers": self.ledger_count,
            "under-replicated ledgers": self.under_replicated_ledgers,
            "E/Qw/Qa": self.quorum,
            "writer": self.writer or "none",
            "created": f"{self.created:%Y-%m-%d %H:%M:%S} UTC",
            "forked from": self.forked_from or "none",
        }
