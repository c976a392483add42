"""Garbage collection of one bookie: it finds ledgers that the metadata store does not need here.

A ledger is unneeded here in two cases: its metadata is gone, or it is closed and no ensemble names
this bookie.  The latter happens if the bookie was away and its copies were made again elsewhere, or
if it got a copy from a repair that another repair overtook.  Three conditions guard this decision:
the metadata must belong to the bookie's own cluster, it must not be older than the data, and two
reads must agree.  The storage decides how long this must remain so.

This is why no client needs a copy that the metadata does not name:

- While a ledger is open or in recovery, its writer or recoverer may be about to name this bookie
  for entries that it holds already.  Therefore only closed ledgers count, and closed is final.
- Only repairs change the ensembles of a closed ledger, and they read, copy from and repair only the
  bookies that the metadata names.  The one exception is the new member that a repair has chosen:
  the repair copies entries there first, has the bookie prove that it holds all of them, and then
  stores the change.  All of this happens under the ledger's repair lock.  Therefore the last check
  is made under this lock, too, and a ledger that waits for repair is kept.
- A repair that lost its lock with its session cannot store its change any more: it stores the
  change together with a check that the lock is in the state that a repair creates.  The lock of a
  garbage collection has another state.
- After the last check the storage reports the ledger as unknown.  The next repair therefore finds
  nothing proven here, and copies again.
"""

from __future__ import annotations

import contextlib
import logging
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    CorruptMetadataError,
    MetadataConnectionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import BookieCookie, LedgerMetadata, LedgerState
from dlcore.metadata.binding import Restored, read_binding
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import decode, decode_or_tell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from bookie.upkeep.garbage import GarbageReport
    from bookie.upkeep.rounds import Upkeep
    from dlcore.base.ids import BookieId
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)


class GarbageCollector:
    """Collects the garbage of one storage.

    Args:
        upkeep: of the storage.
        bookie: owner of the storage.
        store: the session for reads; the caller closes it.
        cluster_id: the cluster that the storage belongs to.
    """

    def __init__(
        self,
        upkeep: Upkeep,
        *,
        bookie: BookieId,
        store: MetadataStore,
        paths: NamespacePaths,
        cluster_id: str,
    ) -> None:
        self._upkeep = upkeep
        self._bookie = bookie
        self._store = store
        self._paths = paths
        self._ledgers = LedgerStore(store, paths)
        self._cluster_id = cluster_id

    async def collect(self, *, at_once: Collection[int] = ()) -> GarbageReport:
        """Run one pass; ledgers of `at_once` go without the time that others must look deleted.

        Raises:
            CorruptMetadataError: the metadata is of another cluster, was imported, or is older than
                the data.
            MetadataError: the store did not answer; nothing was dropped because of this pass.
        """
        # All three before any ledger is looked up: in wrong metadata each of them would be missing.
        await self._check_identity()
        await self._check_restored()
        await self._check_metadata_is_not_older()
        path = self._paths.garbage_release(self._bookie.name)
        release = await self._store.get(path)
        report = await self._upkeep.collect_garbage(
            self._is_unneeded,
            confirm=self._confirm,
            is_released=release is not None and release.value == self._bookie.incarnation.encode(),
            at_once=at_once,
        )
        if release is not None and not report.held:  # a release is valid once
            with contextlib.suppress(NoNodeError):
                await self._store.delete(path, version=release.version)
        return report

    async def _check_identity(self) -> None:
        """Verify that the metadata belongs to the bookie's own cluster, and knows the bookie."""
        binding = await read_binding(self._store, self._paths, fresh=True)
        if binding.cluster_id != self._cluster_id:
            raise CorruptMetadataError(
                f"the namespace is now cluster {binding.cluster_id}, this bookie belongs to "
                f"{self._cluster_id}: no ledger counts as deleted"
            )
        path = self._paths.cookie(self._bookie.name)
        node = await self._store.get(path)
        if node is None or decode(BookieCookie, node.value, source=path).bookie != self._bookie:
            raise CorruptMetadataError(
                f"{path} is not the cookie of bookie {self._bookie}: no ledger counts as deleted"
            )

    async def _check_restored(self) -> None:
        """Refuse metadata that was imported, until an operator accepts it.

        Ledgers that were made after the export would look deleted, and so would copies that repairs
        made after it on bookies which the export does not name.
        """
        path = self._paths.restored
        node = await self._store.get(path, fresh=True)
        if node is not None:
            since = datetime.fromtimestamp(
                decode(Restored, node.value, source=path).exported_ms / 1000, UTC
            )
            raise CorruptMetadataError(
                f"the metadata was imported, as it was at {since:%Y-%m-%dT%H:%M:%SZ}: no ledger "
                "counts as deleted; when dlog log inspect and dlog ledger check find what they "
                "should, dlog metadata accept lets bookies delete again"
            )

    async def _check_metadata_is_not_older(self) -> None:
        """Refuse metadata that knows fewer ledgers than this bookie: a restored backup.

        Every ledger created after the backup would look deleted.  Ids only rise, and the storage
        accepts no ledger whose id is not allocated.  Therefore a held ledger with a higher id
        proves that the metadata is a backup.

        Raises:
            CorruptMetadataError: the next ledger id is missing, or not above every id held here.
        """
        # Read this before the next id, because ids rise meanwhile.
        highest = max(self._upkeep.core.live_ledgers(), default=-1)
        try:
            next_id = await self._ledgers.next_ledger_id()
        except CorruptMetadataError as error:
            raise CorruptMetadataError(f"{error}: no ledger counts as deleted") from error
        if highest >= next_id:
            raise CorruptMetadataError(
                f"this bookie holds ledger {highest}, but {self._paths.ledger_idgen} says that the "
                f"next new ledger is {next_id}: the metadata was restored from an old backup, and "
                f"no ledger counts as deleted; to go on, set it to more than {highest}"
            )

    async def _is_unneeded(self, ledger_id: int) -> bool:
        """Return whether two reads agree that the ledger is not needed here.

        The second read misses no earlier write.
        """
        if await self._is_needed(ledger_id):
            return False
        return not await self._is_needed(ledger_id, fresh=True)

    async def _is_needed(self, ledger_id: int, *, fresh: bool = False) -> bool:
        path = self._paths.ledger(ledger_id)
        node = await self._store.get(path, fresh=fresh)
        if node is None:
            return False
        tell = partial(logger.warning, "kept: %s")
        metadata = decode_or_tell(LedgerMetadata, node, source=path, tell=tell)
        if metadata is None or metadata.state is not LedgerState.CLOSED:
            return True
        if any(self._bookie in ensemble.bookies for ensemble in metadata.ensembles):
            return True
        # A repair that is due may read from here.
        return await self._store.get(self._paths.under_replicated_ledger(ledger_id)) is not None

    @contextlib.asynccontextmanager
    async def _confirm(self, ledger_id: int) -> AsyncIterator[bool]:
        """Make the last check, and keep repairs away until the context ends."""
        if await self._store.get(self._paths.ledger(ledger_id), fresh=True) is None:
            # Without metadata no repair can begin, so no lock is needed.
            yield True  # its metadata is gone
            return
        lock = self._paths.repair_lock(ledger_id)
        if not await self._take(lock):
            yield False
            return
        try:
            yield not await self._is_needed(ledger_id, fresh=True)
        finally:
            with contextlib.suppress(NoNodeError):
                await self._store.delete(lock)

    async def _take(self, lock: str) -> bool:
        """Take a repair lock, in a state that no repair creates."""
        mine = f"garbage collection of {self._bookie}".encode()
        try:
            await self._store.create(lock, mine, ephemeral=True)
        except NoNodeError:
            # No repair was ever made: the next pass tries again.
            with contextlib.suppress(NodeExistsError):
                await self._store.create(lock.rpartition("/")[0], make_parents=True)
            return False
        except (NodeExistsError, MetadataConnectionError):
            node = await self._store.get(lock)
            if node is None or node.value != mine:  # else the lock is ours, and a reply was lost
                return False
        await self._store.put(lock, mine, version=ANY_VERSION)  # repairs check for version 0
        return True
