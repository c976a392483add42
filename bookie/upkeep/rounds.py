"""Passes of background work on a storage: garbage collection, compaction, scrubbing.

The owner starts a pass now and then.  Passes of different kinds may overlap; passes of one kind
wait for each other.
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
    from dlcore.base.clock import Clock

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
        self._scrubbed_ms = clock.now_ms()
        self.freed_bytes = 0
        """Bytes that garbage collection and compaction have freed."""

    @property
    def scrub_age_s(self) -> float:
        """The seconds since the last pass of scrubbing ended; without one, since the start."""
        return max(0, self._clock.now_ms() - self._scrubbed_ms) / 1000

    def configure(self, config: StorageConfig) -> None:
        """Apply another configuration, also to passes in progress."""
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
        """Check every ledger, and drop files that hold only ledgers that are proven unneeded.

        `confirm` makes the last check of each ledger.  Its context prevents new users of the ledger
        until it ends.  With `is_released` many deletions at once are accepted, because an operator
        has confirmed them.
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
                logger.warning(
                    "garbage collection is held back: %s; to do: see whether ledgers were deleted "
                    "by accident; if all is right, dlog bookie collect NAME",
                    verdict.held,
                )
            deleted = set()
            for ledger_id in sorted(verdict.deleted):
                async with confirm(ledger_id) as is_certain:
                    if is_certain and self._core.is_live(ledger_id):
                        self._core.ledgers[ledger_id].is_deleted = True
                        deleted.add(ledger_id)
            self._core.damage.forget_ledgers(deleted)
            dropped = await self._core.files.drop_dead()
            self.freed_bytes += sum(dropped.values())
        return GarbageReport(
            ledgers_seen=len(seen),
            ledgers_deleted=len(deleted),
            files_deleted=len(dropped),
            bytes_freed=sum(dropped.values()),
            held=verdict.held,
        )

    async def compact(self) -> CompactionReport:
        """Compact every file that is worth it and fits, each at most once.

        Damaged footers are made again first: without a footer a file cannot be compacted, and its
        entries cannot be found.  The pass may be cancelled at any time.

        Raises:
            BookieUnavailableError: the storage is closed.
            BookieStorageError: the log failed.
        """
        self._status.check_open()
        async with self._compaction_lock:
            self._core.log.commits.check()
            await self._scrubber.mend_footers()
            report = await self._compactor.run()
        self.freed_bytes += report.bytes_freed
        self._status.look()  # the pass may have freed space
        return report

    async def scrub(self) -> ScrubReport:
        """Read and verify all stored data once."""
        self._status.check_open()
        async with self._scrub_lock:
            report = await self._scrubber.run()
            self._scrubbed_ms = self._clock.now_ms()
            return report

    def _room_for_copies(self) -> int:
        """Return the bytes that compaction may write now: the free space above its floor."""
        free_bytes = self._core.disk.space().free_bytes - self._core.log.claimed_bytes
        return free_bytes - self._config.compact.floor_bytes
