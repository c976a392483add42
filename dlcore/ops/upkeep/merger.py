"""Merges small extents of a log: copies their entries to one ledger, then runs a `Swap`.

A ledger that a merge fills is registered like a staged one, so after a crash it is removed like any
leftover.  The old ledgers lose their extents in the transaction of the swap.  A ledger without
extents is listed, and removed some time later, so that readers with an older view of the log are
not disturbed.  Any change of the log meanwhile changes its head; the swap then reads it again
(`swap.py`).
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    CorruptMetadataError,
    LedgerNotFoundError,
    LedgerReadError,
    LogNotFoundError,
    MetadataVersionError,
)
from dlcore.log.entries.body import decode_entry_header, move_entry
from dlcore.log.upkeep.staged import (
    create_staged_ledger,
)
from dlcore.ops.autorecovery.copying import Throttle
from dlcore.ops.upkeep.merging import (
    MergeRun,
    StoredSegment,
    merged_extent,
    plan_fold,
    plan_merge,
)
from dlcore.ops.upkeep.rewriting import SegmentRewriter
from dlcore.ops.upkeep.swap import (
    MERGING_IDENTITY,
    Swap,
    is_there,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ledger.writing.writer import LedgerWriter
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import LogKey, VersionedHead
    from dlcore.ops.upkeep.config import MergePolicy

logger = logging.getLogger(__name__)

_IN_FLIGHT_BYTES_MAX = 8 * 1024 * 1024


class LogMerger(SegmentRewriter):
    """Merges extents of any logs, one run after the other.

    Args:
        context: the namespace's adapters.
        owner: the owner of the ledgers that are being filled.
        policy: which extents are merged.
        bytes_per_s: the pace of copying.
    """

    def __init__(
        self, context: LogContext, owner: StagingOwner, *, policy: MergePolicy, bytes_per_s: float
    ) -> None:
        super().__init__(context, owner)
        self._policy = policy
        self._throttle = Throttle(bytes_per_s=bytes_per_s)

    async def merge(self, log: LogKey, *, from_lssn: int = 1) -> int:
        """Merge small extents in the log's segments from `from_lssn` on; return how many runs.

        Raises:
            DLError: entries cannot be read or written now, or the store failed; nothing is lost.
        """
        await self._drop_unused()
        count = 0
        lssn = from_lssn
        while True:
            try:
                at = await self._context.logs.read(log)
                lssn = max(lssn, at.head.first_lssn, at.head.first_active[0])
                if lssn > at.head.max_lssn:
                    return count
                stored = await self._read_segment(at, lssn)
                run = None if stored is None else self._plan(at, stored)
                if stored is None or run is None:
                    await self._fold(at, stored)
                    lssn += 1
                elif await self._merge_run(at, stored, run):
                    count += 1
            except LogNotFoundError:
                return count

    async def _fold(self, at: VersionedHead, stored: StoredSegment | None) -> None:
        """Put the few extents of a completed segment into one node, unless the log just changes."""
        logs = self._context.logs
        change = None if stored is None else plan_fold(logs.paths_of(at.log), at, stored)
        if change is not None:
            with contextlib.suppress(MetadataVersionError):
                await logs.apply(change)

    def _plan(self, at: VersionedHead, stored: StoredSegment) -> MergeRun | None:
        extents = stored.extents
        skipped = 0
        if stored.lssn == at.head.first_active[0]:
            # Truncated extents are not worth a copy.
            left = at.head.first_active[1] - stored.first_entry_id
            while skipped < len(extents) and left >= extents[skipped].entry_count:
                left -= extents[skipped].entry_count
                skipped += 1
        run = plan_merge(extents[skipped:], self._policy)
        return None if run is None else MergeRun(first=run.first + skipped, end=run.end + skipped)

    # One run

    async def _merge_run(self, at: VersionedHead, stored: StoredSegment, run: MergeRun) -> bool:
        """Copy a run and swap it; return False if another change overtook it."""
        parts = stored.extents[run.first : run.end]
        ledger = await self._create_ledger(at.log)
        try:
            await self._copy(ledger, parts)
            await ledger.close()
            merged = merged_extent(parts, ledger_id=ledger.ledger_id)
            merges, paths = at.head.merges, self._context.paths
            is_swapped = await self._swap(Swap(paths, at.log, stored, run, merged, merges=merges))
        except (LedgerNotFoundError, LedgerReadError):
            # A truncation or another merge may have deleted a ledger while it was copied.
            self._unused.add(ledger.ledger_id)
            await ledger.abandon()
            now = await self._context.logs.read(at.log)
            if is_there(now, stored, merges=at.head.merges):
                raise  # no change of the log explains it
            is_swapped = False
        except BaseException:
            # The swap may have been made before the error: `_drop_unused` reads its outcome before
            # it deletes the ledger.
            self._unused.add(ledger.ledger_id)
            await ledger.abandon()
            raise
        if not is_swapped:
            self._unused.add(ledger.ledger_id)
            await self._drop_unused()
            return False
        logger.info(
            "merged log=%s segment=%d extents=%d entries=%d bytes=%d ledger=%d",
            at.name,
            stored.lssn,
            len(parts),
            merged.entry_count,
            merged.size_bytes,
            merged.ledger_id,
        )
        return True

    async def _create_ledger(self, log: LogKey) -> LedgerWriter:
        context = self._context
        metadata = await context.logs.find_again(log)
        return await create_staged_ledger(
            context,
            self._owner,
            metadata.quorum,
            identity=MERGING_IDENTITY,
            custom={"log": log.name},
        )

    async def _copy(self, ledger: LedgerWriter, parts: Sequence[Extent]) -> None:
        """Copy the entries of extents, one after the other, and wait until all are durable."""
        records = in_part = in_flight_bytes = 0
        current: Extent | None = None
        async with aclosing(self._entries(parts)) as entries:
            async for part, frame in entries:
                if part is not current:
                    current, in_part = part, 0
                header = decode_entry_header(frame.body)
                if header.records_before != in_part:
                    raise CorruptMetadataError(
                        f"entry {frame.entry_id} of ledger {part.ledger_id} counts "
                        f"{header.records_before} records before it, expected {in_part}"
                    )
                await self._throttle.take(frame.body.nbytes)
                body = move_entry(
                    frame.body,
                    records_before=records,
                    floor_ms=part.timestamp_floor_ms,
                    assigned_txid=part.assigned_txid,
                )
                ledger.append(body)  # flush raises its error
                records += header.record_count
                in_part += header.record_count
                in_flight_bytes += frame.body.nbytes
                # Bounds the memory of a merge: an append holds its entry until it is durable.
                if in_flight_bytes >= _IN_FLIGHT_BYTES_MAX:
                    await ledger.flush()
                    in_flight_bytes = 0
        await ledger.flush()
        expected = sum(part.record_count for part in parts)
        if records != expected:
            raise CorruptMetadataError(
                f"the extents from ledger {parts[0].ledger_id} on hold {records} records, their "
                f"metadata says {expected}"
            )
