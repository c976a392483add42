"""The objects that all parts of a storage share: disk, log, states of ledgers, and followers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bookie.files.index import LedgerState
from dlcore.base.ids import INVALID_ENTRY_ID

if TYPE_CHECKING:
    from collections.abc import Callable, KeysView

    from bookie.disks.port import Disk
    from bookie.files.damage import DamageLog
    from bookie.files.entry_log import EntryLog
    from bookie.files.entry_reader import EntryReader
    from bookie.files.sealed_files import SealedFiles, SealedHandles


class Followers:
    """Callbacks for changes of a ledger; nothing is queued for a follower."""

    def __init__(self) -> None:
        self._callbacks: dict[int, dict[Callable[[], None], None]] = {}

    def watch(self, ledger_id: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` at every change of the ledger, until the returned function is called."""
        callbacks = self._callbacks.setdefault(ledger_id, {})
        callbacks[callback] = None

        def end() -> None:
            callbacks.pop(callback, None)
            if not callbacks and self._callbacks.get(ledger_id) is callbacks:
                del self._callbacks[ledger_id]

        return end

    def __len__(self) -> int:
        return sum(map(len, self._callbacks.values()))

    def ledgers(self) -> KeysView[int]:
        """Return the ledgers that are followed."""
        return self._callbacks.keys()

    def wake(self, ledger_id: int) -> None:
        """Call the callbacks of the ledger's followers."""
        # A copy, because a callback may end its own watch.
        for callback in tuple(self._callbacks.get(ledger_id, ())):
            callback()

    def wake_all(self) -> None:
        """Call the callbacks of all followers."""
        for ledger_id in tuple(self._callbacks):
            self.wake(ledger_id)


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

    def ledger_for_change(self, ledger_id: int) -> LedgerState:
        """Return the ledger's state for a change; a ledger thought deleted is in use again.

        The files with such a ledger's fence and LAC may be dropped already, so these are logged
        again.
        """
        state = self.ledgers.get(ledger_id)
        if state is None:
            state = self.ledgers[ledger_id] = LedgerState()
        elif state.is_deleted:
            state.is_deleted = False
            if state.fenced:
                self.log.append_fence(ledger_id)
            if state.last_add_confirmed != INVALID_ENTRY_ID:
                self.log.copy_lac(ledger_id, state.last_add_confirmed)
        return state
