"""The state of a storage: what it accepts, and what it tells people of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bookie.parts import Parts


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


def stats_of(parts: Parts, *, is_read_only: bool, has_failed: bool) -> StorageStats:
    """Return what the parts of a storage say of it."""
    space = parts.disk.space()
    return StorageStats(
        ledger_count=len(parts.ledgers),
        stored_bytes=parts.files.stored_bytes + parts.log.written_bytes,
        disk_free_bytes=space.free_bytes,
        disk_total_bytes=space.total_bytes,
        is_read_only=is_read_only,
        failed=has_failed,
        damaged_entry_count=parts.damage.entry_count,
        repaired_entry_count=parts.damage.repaired_count,
    )
