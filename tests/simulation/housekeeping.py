"""Housekeeping of a simulated bookie: the real garbage collection, compaction, repair."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bookie.upkeep.erasing import Eraser
from bookie.upkeep.garbage_collector import GarbageCollector
from bookie.upkeep.repair import Repairer
from dlcore.base.errors import DLError
from dlcore.ledger.metadata.store import LedgerStore

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Coroutine

    from bookie.ledger_storage import LedgerStorage
    from dlcore.base.ids import BookieId
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.wire.port import BookieClient
    from tests.simulation.clients import GatedStore


class Housekeeping:
    """The passes over one storage, for as long as its process lives.

    Args:
        on_collected: takes the ledgers that a pass gave up.
        interval_s: between passes of garbage collection; compaction and scrubbing are rarer.
        erases: whether it answers requests to erase.
        note: takes what is worth a line of the trace.
    """

    def __init__(
        self,
        storage: LedgerStorage,
        *,
        bookie: BookieId,
        on_collected: Callable[[set[int]], None],
        session: GatedStore,
        paths: NamespacePaths,
        cluster_id: str,
        interval_s: float,
        erases: bool,
        rng: random.Random,
        note: Callable[[str], None],
    ) -> None:
        self._storage = storage
        self._bookie = bookie
        self._on_collected = on_collected
        self._session = session
        self._paths = paths
        self._cluster_id = cluster_id
        self._interval_s = interval_s
        self._rng = rng
        self._note = note
        self._eraser = Eraser(
            storage.upkeep,
            self._collector(),
            bookie=bookie,
            store=session,
            paths=paths,
            retry_s=interval_s,
        )
        self._erases = erases

    def works(self, client: BookieClient) -> list[Coroutine[Any, Any, None]]:
        """Return what is to run beside the storage, each until it is cancelled."""
        repairer = Repairer(
            self._storage.writes,
            self._storage.core.damage,
            bookie=self._bookie,
            ledgers=LedgerStore(self._session, self._paths),
            client=client,
        )
        erasing = [self._repeat(self._erase, self._interval_s)] if self._erases else []
        return [
            *erasing,
            self._repeat(self._collect_garbage, self._interval_s),
            self._repeat(self._compact, 2 * self._interval_s),
            self._repeat(self._scrub, 4 * self._interval_s),
            repairer.run(),
        ]

    async def _repeat(self, once: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * interval_s)
            try:
                await once()
            except DLError as error:
                self._note(f"housekeeping failed: {type(error).__name__}: {error}")

    async def _collect_garbage(self) -> None:
        ledgers = self._storage.core.live_ledgers()
        self._session.hidden_paths = {self._paths.ledger(each) for each in ledgers}
        report = await self._collector().collect()
        self._on_collected(set(ledgers) - set(self._storage.core.live_ledgers()))
        if report.ledgers_deleted or report.files_deleted:
            self._note(f"collected {report.ledgers_deleted} ledgers, {report.files_deleted} files")
        if report.held:
            self._note(f"holds back: {report.held}")

    def _collector(self) -> GarbageCollector:
        return GarbageCollector(
            self._storage.upkeep,
            bookie=self._bookie,
            store=self._session,
            paths=self._paths,
            cluster_id=self._cluster_id,
        )

    async def _erase(self) -> None:
        ledgers = set(self._storage.core.live_ledgers())
        count = await self._eraser.run()
        self._on_collected(ledgers - set(self._storage.core.live_ledgers()))
        if count:
            self._note(f"answered {count} requests to erase")

    async def _compact(self) -> None:
        report = await self._storage.upkeep.compact()
        if report.files_compacted:
            self._note(f"compacted {report.files_compacted} files")

    async def _scrub(self) -> None:
        report = await self._storage.upkeep.scrub()
        if report.damaged_records or report.damaged_files or report.footers_made_again:
            self._note(
                f"scrub found {report.damaged_records} damaged records, damaged files "
                f"{report.damaged_files}, made {report.footers_made_again} footers again"
            )
