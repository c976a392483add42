"""Garbage collection of one bookie: which ledgers the metadata store says are gone.

Absence is believed only of the bookie's own cluster, by metadata that is not older than the data,
and only when two reads agree; how long a ledger must stay absent the storage decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.errors import CorruptMetadataError
from dlcore.metadata.binding import read_binding

if TYPE_CHECKING:
    from bookie.garbage import GarbageReport
    from bookie.storage import LedgerStorage
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore


class GarbageCollector:
    """Collects the garbage of one storage.

    Args:
        store: the session to read by; stays its opener's.
        cluster_id: the cluster that the storage belongs to.
    """

    def __init__(
        self,
        storage: LedgerStorage,
        *,
        store: MetadataStore,
        paths: NamespacePaths,
        cluster_id: str,
    ) -> None:
        self._storage = storage
        self._store = store
        self._paths = paths
        self._cluster_id = cluster_id

    async def collect(self) -> GarbageReport:
        """Run one pass.

        Raises:
            CorruptMetadataError: the metadata is of another cluster, or older than the data.
            MetadataError: the store did not answer; nothing was dropped because of this pass.
        """
        binding = await read_binding(self._store, self._paths)
        if binding.cluster_id != self._cluster_id:
            raise CorruptMetadataError(
                f"the namespace is now cluster {binding.cluster_id}, this bookie belongs to "
                f"{self._cluster_id}: no ledger counts as deleted"
            )
        await self._check_metadata_is_not_older()
        return await self._storage.collect_garbage(self._is_ledger_deleted)

    async def _check_metadata_is_not_older(self) -> None:
        """Refuse to collect by metadata that knows less than this bookie: a restored backup.

        Every ledger made after the backup would look deleted.  Ids only rise, so one that was never
        given out gives the backup away.

        Raises:
            CorruptMetadataError: the next ledger id is missing, or not above every id held here.
        """
        path = self._paths.ledger_idgen
        highest = max(self._storage.ledgers(), default=-1)  # looked at first: ids rise meanwhile
        await self._store.sync(path)
        node = await self._store.get(path)
        if node is None or not node.value.isdigit():
            raise CorruptMetadataError(
                f"{path} does not hold the next ledger id: no ledger counts as deleted"
            )
        if highest >= int(node.value):
            raise CorruptMetadataError(
                f"this bookie holds ledger {highest}, but {path} says that the next new ledger is "
                f"{int(node.value)}: the metadata was restored from an old backup, and no ledger "
                f"counts as deleted; to go on, set it to more than {highest}"
            )

    async def _is_ledger_deleted(self, ledger_id: int) -> bool:
        """Return whether the ledger has no metadata, read twice: the second time after a sync."""
        path = self._paths.ledger(ledger_id)
        if await self._store.get(path) is not None:
            return False
        await self._store.sync(path)
        return await self._store.get(path) is None
