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
    from collections.abc import Awaitable, Callable, Collection
    from contextlib import AbstractAsyncContextManager

    from bookie.config import StorageConfig
    from bookie.storage.status import StorageStatus
    from bookie.storage.storage_core import StorageCore
    from dlcore.base.clock import Clock

logger = logging.getLogger(__name__)
_SEAL_POLLS = 200
"""Ten seconds in all: to seal a file takes a footer and a new file."""
_SEAL_POLL_S = 0.05
_LEDGERS_AT_A_TIME = 1000


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
        self.core = core
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
        self.scrubber = Scrubber(core, config.scrub, owner=owner, clock=clock)
        self._garbage_lock = asyncio.Lock()
        self._compaction_lock = asyncio.Lock()
        self.freed_bytes = 0
        """Bytes that garbage collection and compaction have freed."""

    def configure(self, config: StorageConfig) -> None:
        """Apply another configuration, also to passes in progress."""
        self._config = config
        self._judge.config = config.garbage
        self._compactor.config = config.compact
        self.scrubber.config = config.scrub

    async def collect_garbage(
        self,
        is_unneeded: Callable[[int], Awaitable[bool]],
        *,
        confirm: Callable[[int], AbstractAsyncContextManager[bool]] = lambda _: nullcontext(True),
        is_released: bool = False,
        at_once: Collection[int] = (),
    ) -> GarbageReport:
        """Check every ledger, and drop files that hold only ledgers that are proven unneeded.

        `confirm` makes the last check of each ledger.  Its context prevents new users of the ledger
        until it ends.  With `is_released` many deletions at once are accepted, because an operator
        has confirmed them; those of `at_once` without waiting.
        """
        self._status.check_open()
        async with self._garbage_lock:
            seen = self.core.live_ledgers()
            looks_deleted = [each for each in seen if await is_unneeded(each)]
            verdict = self._judge.judge(
                seen=seen,
                looks_deleted=looks_deleted,
                now_ms=self._clock.now_ms(),
                is_released=is_released,
                at_once=at_once,
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
                    if is_certain and self.core.is_live(ledger_id):
                        # Marked and not removed: an add that comes after all must still find the
                        # fence.
                        self.core.ledgers[ledger_id].is_deleted = True
                        deleted.add(ledger_id)
            self.core.damage.forget_ledgers(deleted)
            dropped = await self.core.files.drop_dead()
            self.freed_bytes += sum(dropped.values())
        return GarbageReport(
            ledgers_deleted=len(deleted),
            files_deleted=len(dropped),
            bytes_freed=sum(dropped.values()),
            held=verdict.held,
            waiting=self._judge.waiting,
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
            self.core.log.commits.check()
            await self.scrubber.mend_footers()
            report = await self._compactor.run()
        self.freed_bytes += report.bytes_freed
        self._status.look()  # the pass may have freed space
        return report

    async def erase(
        self,
        collect: Callable[[], Awaitable[GarbageReport]],
        *,
        awaited: frozenset[int] | None = None,
    ) -> tuple[str, frozenset[int]]:
        """Remove every byte of ledgers that are gone; return why some are left, or nothing.

        `collect` finds the ledgers that are gone.  Ledgers without a proof yet are returned; the
        caller passes them as `awaited` to the next call.  Ledgers deleted later are not waited
        for, because a busy cluster always has some.  The file that takes records is sealed, each
        file with anything of these ledgers is compacted, however little that is, and no space is
        kept for later files, because it has the old bytes.

        Raises:
            BookieError: the storage is closed, or the log failed.
            DLError: `collect` failed.
        """
        self._status.check_open()
        core = self.core
        # First: a file that is recycled from now on would keep its old bytes.
        await core.disk.use_spares(allowed=False)
        try:
            garbage = await collect()
            unproven = garbage.waiting if awaited is None else garbage.waiting & awaited
            if unproven:
                waits = garbage.held or (
                    f"{len(unproven)} ledgers look deleted, and are not proven so yet: they must "
                    f"look so for {self._config.garbage.age_ms / 1000:g} s (garbage_age_ms)"
                )
                return waits, unproven
            async with self._compaction_lock:
                if not await self._seal_newest():
                    return "the newest file could not be sealed yet", unproven
                await self.scrubber.mend_footers()
                compacted = await self._compactor.run(only=await self._files_of_deleted())
                # This also deletes files that an earlier pass dropped and could not delete.
                await core.files.drop_dead()
                left = await self._files_of_deleted()
            self.freed_bytes += compacted.bytes_freed
            return _why_left(left, compacted), unproven
        finally:
            await core.disk.use_spares(allowed=True)
            self._status.look()

    async def _seal_newest(self) -> bool:
        """Continue in a new file, without old bytes behind its end; return False if that lasts."""
        log = self.core.log
        number = log.unsealed.current.index.number
        if log.unsealed.current.position.sequence == 0:
            log.append_mark()  # a file without records is never full
        log.roll_from(number)
        for _ in range(_SEAL_POLLS):
            log.commits.check()
            await log.commits.flush()
            if all(each.number > number for each in log.unsealed.indexes()):
                return True
            await asyncio.sleep(_SEAL_POLL_S)
        return False

    async def _files_of_deleted(self) -> set[int]:
        """Return the sealed files with records of ledgers that are proven deleted."""
        found: set[int] = set()
        for position, state in enumerate(list(self.core.ledgers.values()), 1):
            if state.is_deleted:
                found.update(state.files())
            if position % _LEDGERS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return found & set(self.core.files.numbers())

    async def scrub(self) -> ScrubReport:
        """Read and verify all stored data once."""
        self._status.check_open()
        return await self.scrubber.run()

    def _room_for_copies(self) -> int:
        """Return the bytes that compaction may write now: the free space above its floor."""
        free_bytes = self.core.disk.space().free_bytes - self.core.log.claimed_bytes
        return free_bytes - self._config.compact.floor_bytes


def _why_left(left: set[int], report: CompactionReport) -> str:
    """Return why files still have bytes of deleted ledgers; nothing if none has."""
    if not left:
        return ""
    damaged = sorted(left.intersection(report.files_left_alone))
    if damaged:
        return f"files {damaged} are damaged, and stay until they are repaired"
    if report.files_without_room:
        return f"{len(left)} files could not be copied for want of space"
    return f"{len(left)} files are still to be copied"
