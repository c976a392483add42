"""What everything in a storage works with, and what a storage tells of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bookie.disks.port import Disk
    from bookie.files.damage import DamageLog
    from bookie.files.entry_log import EntryLog
    from bookie.files.entry_reader import EntryReader
    from bookie.files.sealed_files import SealedFiles
    from bookie.ledger_state import LedgerState


class StorageCore(NamedTuple):
    """What everything else in a storage works with; used on one event loop."""

    disk: Disk
    log: EntryLog
    reader: EntryReader
    files: SealedFiles
    ledgers: dict[int, LedgerState]
    """By id; all that are known, those proven deleted too."""
    damage: DamageLog

    def is_live(self, ledger_id: int) -> bool:
        """Return whether the ledger is known, and not proven deleted."""
        state = self.ledgers.get(ledger_id)
        return state is not None and not state.is_deleted


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


def stats_of(core: StorageCore, *, is_read_only: bool, has_failed: bool) -> StorageStats:
    """Return what a storage says of it."""
    space = core.disk.space()
    return StorageStats(
        ledger_count=len(core.ledgers),
        stored_bytes=core.files.stored_bytes + core.log.written_bytes,
        disk_free_bytes=space.free_bytes,
        disk_total_bytes=space.total_bytes,
        is_read_only=is_read_only,
        failed=has_failed,
        damaged_entry_count=core.damage.entry_count,
        repaired_entry_count=core.damage.repaired_count,
    )
