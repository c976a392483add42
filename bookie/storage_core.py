"""What everything in a storage works with."""

from __future__ import annotations

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
