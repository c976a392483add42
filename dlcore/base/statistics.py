"""Statistics of a namespace's client, for monitoring: plain numbers, by name."""

from __future__ import annotations

from dataclasses import dataclass

from dlcore.base.html_tables import ShownFields


@dataclass(slots=True)
class ReadCounts:
    """Records and entries that readers have returned or skipped, counted as it happens."""

    entries: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatistics:
    """Entries and bytes that a ledger client has written."""

    open_ledgers: int
    pending_bytes: int
    entries: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceStatistics(ShownFields):
    """Statistics of one client of a namespace since it was opened.

    `dataclasses.asdict` gives them by name.  Writing and reading records computes nothing for them.
    They are computed at each request, as monitors make every few seconds.
    """

    entries_written: int
    """Acknowledged entries, of writers and of staging."""
    bytes_written: int
    """Bytes of their bodies, before replication."""
    entries_read: int
    """Entries that readers received, without those of scans."""
    bytes_read: int
    sessions_lost: int
    """How often the session with the metadata store expired, and all its locks with it."""
    is_connected: bool
    """Whether the metadata store answers now."""
    open_ledgers: int
    """Ledgers that are being written."""
    pending_bytes: int
    """Bytes of entries that some bookie has not answered yet."""
    open_objects: dict[str, int]
    """Writers, readers and watches that are not closed, by class."""
    followed_logs: int
    """Logs whose last snapshot is kept."""
