"""Bugs of who believes a metadata server that lags, and of writes without a version, put back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dlcore.ledger.reading.reader import LedgerReader
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import encode
from dlcore.ops.autorecovery.repair import LedgerRepairer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.ledger.metadata.values import LedgerMetadata


@contextlib.contextmanager
def a_repair_writes_without_a_version() -> Iterator[None]:
    """BOOKKEEPER-584: a swap overwrites what its writer or its recovery stored meanwhile."""
    swap = LedgerRepairer._swap

    async def blind(self: LedgerStore, metadata: LedgerMetadata, **_more: object) -> int:
        path = self._paths.ledger(metadata.ledger_id)
        return await self._store.put(path, encode(metadata), version=ANY_VERSION)

    async def swap_blindly(self: LedgerRepairer, *about: Any) -> bool:
        ledgers = self._context.ledger_store
        with patch.object(ledgers, "write", blind.__get__(ledgers)):
            return await swap(self, *about)

    with patch.object(LedgerRepairer, "_swap", swap_blindly):
        yield


@contextlib.contextmanager
def a_lac_read_asks_a_replaced_ensemble() -> Iterator[None]:
    """Section 1.4: the LAC is asked of the ensemble that an old answer of the store names."""
    refresh = LedgerReader.refresh

    async def stale(self: LedgerReader, *, fresh: bool = False) -> LedgerMetadata:
        return await refresh(self, fresh=False)

    with patch.object(LedgerReader, "refresh", stale):
        yield


MUTANTS = (
    a_lac_read_asks_a_replaced_ensemble,
    a_repair_writes_without_a_version,
)
