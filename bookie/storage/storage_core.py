"""The objects that all parts of a storage share: disk, log, and states of ledgers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bookie.disks.port import Disk
    from bookie.files.damage import DamageLog
    from bookie.files.entry_log import EntryLog
    from bookie.files.entry_reader import EntryReader
    from bookie.files.index import LedgerState
    from bookie.files.sealed_files import SealedFiles, SealedHandles


class StorageCore(NamedTuple):
    """The shared objects of a storage; used on one event loop."""

    disk: Disk
    log: EntryLog
    handles: SealedHandles
    reader: EntryReader
    files: SealedFiles
    ledgers: dict[int, LedgerState]
    """All known ledgers by id, with those that are proven deleted."""
    damage: DamageLog
    """Entries that are known to be damaged and are needed."""

    def is_live(self, ledger_id: int) -> bool:
        """Return whether the ledger is known, and not proven deleted."""
        state = self.ledgers.get(ledger_id)
        return state is not None and not state.is_deleted

    def live_ledgers(self) -> list[int]:
        """Return the known ledgers, ascending, without those that are proven deleted."""
        return sorted(each for each, state in self.ledgers.items() if not state.is_deleted)
