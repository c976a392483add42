"""What a storage accepts, and what it tells people of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StorageState(Enum):
    """What the storage accepts."""

    WRITABLE = "writable"
    READ_ONLY = "read-only"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """A snapshot of the storage, for people and for the service's info request."""

    ledger_count: int
    stored_bytes: int
    disk_free_bytes: int
    disk_total_bytes: int
    is_read_only: bool
    failed: bool
    damaged_entry_count: int
    """Known to be damaged, and not repaired yet."""
    repaired_entry_count: int
    """Since the start."""
