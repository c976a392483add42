"""Rounds of upkeep that keep a storage in order: garbage collection, compaction, scrubbing.

Each is a pass that its owner starts now and then; passes of different kinds may overlap, those of
one kind wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

from bookie.upkeep.compaction import CompactionReport, Compactor
from bookie.upkeep.garbage import GarbageJudge, GarbageReport
from bookie.upkeep.scrub import Scrubber, ScrubReport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from bookie.config import StorageConfig
    from bookie.storage.status import StorageStatus
    from bookie.storage.storage_core import StorageCore
    from dlcore.clock import Clock

logger = logging.getLogger(__name__)


class Upkeep:
    """The passes over one storage.

    Args:
        status: refuses passes once the storage is closed.
        owner: what every file header must say.
    """

    def __init__(
        self,
        core: StorageCore,
        config: StorageConfig,
        *,
        status: StorageStatus,
        owner: bytes,
        clock: Clock,
    ) -> None:
        self._core = core
        self._status = status
        self._config = config
        self._clock = clock
        self._judge = GarbageJudge(config.garbage)
        self._compactor = Compactor(
            core,
            config.compact,
            room_bytes=self._room_for_copies,
            is_full=lambda: status.is_read_only,
        )
        self._scrubber = Scrubber(core, config.scrub, owner=owner)
        self._garbage_lock = asyncio.Lock()
        self._compaction_lock = asyncio.Lock()
        self._scrub_lock = asyncio.Lock()

    def configure(self, config: StorageConfig) -> None:
        """Go on as another configuration says: rounds that are under way, too."""
        self._config = config
        self._judge.config = config.garbage
        self._compactor.config = config.compact
        self._scrubber.config = config.scrub

    async def collect_garbage(
        self,
        is_unneeded: Callable[[int], Awaitable[bool]],
        *,
        confirm: Callable[[int], AbstractAsyncContextManager[bool]] = lambda _: nullcontext(True),
        is_released: bool = False,
    ) -> GarbageReport:
        """Ask about every ledger, and drop files whose ledgers are all proven unneeded.

        `confirm` has the last word on each; its context keeps others from coming to need it.  With
        `is_released` many at once are believed: an operator says that all is well.
        """
        self._status.check_open()
        async with self._garbage_lock:
            seen = self._core.live_ledgers()
            looks_deleted = [each for each in seen if await is_unneeded(each)]
            verdict = self._judge.judge(
                seen=seen,
                looks_deleted=looks_deleted,
                now_ms=self._clock.now_ms(),
                is_released=is_released,
            )
            if verdict.held:
                logger.warning("garbage collection is held back: %s", verdict.held)
            deleted = set()
            for ledger_id in sorted(verdict.deleted):
                async with confirm(ledger_id) as is_certain:
                    if is_certain and self._core.is_live(ledger_id):
                        self._core.ledgers[ledger_id].is_deleted = True
                        deleted.add(ledger_id)
            self._core.damage.forget_ledgers(deleted)
            dropped = await self._core.files.drop_dead()
        return GarbageReport(
            ledgers_seen=len(seen),
            ledgers_deleted=len(deleted),
            files_deleted=len(dropped),
            bytes_freed=sum(dropped.values()),
            held=verdict.held,
        )

    async def compact(self) -> CompactionReport:
        """Compact every file that is worth it and fits, each at most once.

        Footers known to be damaged are mended first: their files could not be compacted, and the
        entries in them are found no more.  It may be cancelled at any time.

        Raises:
            BookieUnavailableError: the storage is closed.
            BookieStorageError: the log failed.
        """
        self._status.check_open()
        async with self._compaction_lock:
            self._core.log.commits.check()
            await self._scrubber.mend_footers()
            report = await self._compactor.run()
        self._status.look()  # there may be room again
        return report

    async def scrub(self) -> ScrubReport:
        """Read and verify everything stored, once."""
        self._status.check_open()
        async with self._scrub_lock:
            return await self._scrubber.run()

    def _room_for_copies(self) -> int:
        """Return the bytes that compaction may write now: the reserve's, down to its floor."""
        free_bytes = self._core.disk.space().free_bytes - self._core.log.claimed_bytes
        return free_bytes - self._config.compact.floor_bytes
