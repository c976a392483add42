"""Copies runs without their rows: the merger and the tierer, whose entries pass a redactor."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.ops.upkeep.merger import LogMerger
from dlcore.ops.upkeep.merging import MergeRun
from dlcore.ops.upkeep.rewriting import SegmentRewriter
from dlcore.ops.upkeep.tierer import LogTierer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from dlcore.log.context import LogContext
    from dlcore.log.entries.redacted_rows import RowRedactor
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.metadata.port import Op
    from dlcore.ops.upkeep.config import UpkeepConfig
    from dlcore.ops.upkeep.merging import StoredSegment
    from dlcore.ops.upkeep.redaction import Run
    from dlcore.ops.upkeep.swap import Swap
    from dlcore.wire.frames import EntryFrame


class _RedactingRewriter(SegmentRewriter):
    """Reads entries without the rows, and notes in each swap how many these were."""

    redactor: RowRedactor
    note: Callable[[int], Op]
    rows = 0

    async def _entries(
        self, parts: Sequence[Extent]
    ) -> AsyncGenerator[tuple[Extent, EntryFrame], None]:
        async with aclosing(super()._entries(parts)) as entries:
            async for part, frame in entries:
                found = self.redactor.redact(frame.body)
                self.rows += found.rows
                yield part, frame._replace(body=memoryview(found.body))

    async def _swap(self, swap: Swap) -> bool:
        swap.also = (self.note(self.rows),)
        return await super()._swap(swap)


class HotCopier(_RedactingRewriter, LogMerger):
    """Copies extents to a new ledger."""

    def __init__(self, context: LogContext, owner: StagingOwner, config: UpkeepConfig) -> None:
        super().__init__(context, owner, policy=config.merge, bytes_per_s=config.merge_bytes_per_s)

    async def copy(self, at: VersionedHead, stored: StoredSegment, run: MergeRun) -> bool:
        """Copy a run and swap it; return False if another change was first."""
        return await self._merge_run(at, stored, run)


class ColdCopier(_RedactingRewriter, LogTierer):
    """Copies cold extents to new objects, in the same tier."""

    async def copy(self, at: VersionedHead, stored: StoredSegment, run: MergeRun) -> bool:
        """Copy a run and swap it; return False if another change was first."""
        ledger_id = stored.extents[run.first].ledger_id
        ledger = (await self._context.ledger_store.read(ledger_id)).metadata
        tier = ledger.folder.rsplit("/", 3)[0]  # before cluster, log and segment
        return await self._tier_run(at, stored, run, tier)


class RunCopier:
    """Copies the runs of one redaction.

    Args:
        context: the namespace's adapters.
        owner: the owner of the ledgers that are being filled.
        config: the pace, and the size of objects.
        log: the log.
        redactor: removes the rows.
    """

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        config: UpkeepConfig,
        *,
        log: LogMetadata,
        redactor: RowRedactor,
    ) -> None:
        self._context = context
        self._log = log
        self._hot = HotCopier(context, owner, config)
        self._cold = ColdCopier(context, owner, config)
        self._hot.redactor = self._cold.redactor = redactor

    async def copy(self, run: Run, note: Callable[[int], Op]) -> bool:
        """Copy a run without its rows and swap it; return False if another change was first.

        Args:
            run: the run, as it was scanned.
            note: returns the operation that notes the swap of so many rows, in its transaction.

        Raises:
            DLError: entries cannot be read or written now, or the store failed; nothing is lost.
        """
        at = await self._context.logs.read(self._log)
        copier = self._cold if run.is_cold else self._hot
        stored = await copier._read_segment(at, run.lssn)
        merged = MergeRun(first=run.first, end=run.first + len(run.parts))
        if stored is None or stored.extents[merged.first : merged.end] != run.parts:
            return False
        copier.note, copier.rows = note, 0
        return await copier.copy(at, stored, merged)

    async def tidy(self) -> None:
        """Delete the ledgers of runs that failed."""
        await self._hot._drop_unused()
        await self._cold._drop_unused()
