"""Metadata of ledgers, kept for all logs of a namespace."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.background import BackgroundTasks, outcome_of, reported_to_callers
from dlcore.base.errors import CorruptMetadataError, LedgerNotFoundError
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.metadata.one_node import persistently

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.ledger.metadata.store import LedgerStore, ReadLedgers

_LEDGERS_KEPT_MAX = 20_000
"""Ledgers whose metadata is kept for later snapshots of any log; some hundred bytes each."""


class LedgerCache:
    """Metadata of ledgers, which says where entries are, for all logs of a namespace.

    For a closed ledger it stays valid, except after entries moved to other bookies; readers
    `correct` it then.  For an open ledger the cached metadata is valid up to the last entry that
    was confirmed when it was read.  Asking for a later entry reads it again.
    """

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._known: OrderedDict[int, tuple[LedgerMetadata, int]] = OrderedDict()
        self._wanted: dict[int, int] = {}
        self._reading: asyncio.Task[ReadLedgers] | None = None
        self._reads = BackgroundTasks(reported_to_callers)  # a caller may leave while one runs

    async def read(self, wanted: Mapping[int, int]) -> dict[int, LedgerMetadata]:
        """Return the metadata of each ledger, valid for entries up to the given one.

        Concurrent calls share one read.

        Raises:
            LedgerNotFoundError: one of them is gone; CorruptMetadataError: damaged.
        """
        found = {i: self._known[i][0] for i, last in wanted.items() if self._reaches(i, last)}
        missing = {i: last for i, last in wanted.items() if i not in found}
        if missing:
            for ledger_id, last in missing.items():
                self._wanted[ledger_id] = max(last, self._wanted.get(ledger_id, last))
            if self._reading is None:
                self._reading = self._reads.start(self._read_wanted(), name="ledger-cache")
            there = await outcome_of(self._reading)
            for ledger_id in missing:
                metadata = there.get(ledger_id)
                if metadata is None:
                    raise LedgerNotFoundError(f"ledger {ledger_id} does not exist")
                if isinstance(metadata, CorruptMetadataError):
                    raise metadata.with_traceback(None)  # other callers may get it too
                found[ledger_id] = metadata
        return found

    def correct(self, metadata: LedgerMetadata) -> None:
        """Keep newer metadata of a closed ledger: auto-recovery has moved its entries."""
        if metadata.state is LedgerState.CLOSED:
            self._keep(metadata, metadata.last_entry_id)

    def _reaches(self, ledger_id: int, last_entry_id: int) -> bool:
        known = self._known.get(ledger_id)
        if known is None or known[1] < last_entry_id:
            return False
        self._known.move_to_end(ledger_id)
        return True

    async def _read_wanted(self) -> ReadLedgers:
        """Return the wanted ledgers, without those that are gone."""
        await asyncio.sleep(0)  # other calls may join
        wanted, self._wanted, self._reading = self._wanted, {}, None
        found = await persistently(lambda: self._ledgers.read_many(sorted(wanted)))
        for ledger_id, last_entry_id in wanted.items():
            self._known.pop(ledger_id, None)
            metadata = found.get(ledger_id)
            if isinstance(metadata, LedgerMetadata):
                found[ledger_id] = self._keep(metadata, last_entry_id)
        return found

    def _keep(self, metadata: LedgerMetadata, last_entry_id: int) -> LedgerMetadata:
        """Keep metadata as valid up to this entry, or for all if it is closed; return it."""
        # The custom attributes are for people, and would only make each scan range larger.
        kept = replace(metadata, custom={})
        is_final = kept.state is LedgerState.CLOSED
        self._known[kept.ledger_id] = kept, 2**63 if is_final else last_entry_id
        self._known.move_to_end(kept.ledger_id)
        if len(self._known) > _LEDGERS_KEPT_MAX:
            self._known.popitem(last=False)
        return kept
