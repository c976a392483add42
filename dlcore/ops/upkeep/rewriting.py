"""The part that merging and tiering share: reading a segment, and the swap of its extents."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, assert_never

from dlcore.base.machines import Pause, run_to_end
from dlcore.log.metadata.history import ChunkMissingError, read_chunks
from dlcore.log.metadata.segment import adjacent
from dlcore.log.metadata.values import SegmentEnd
from dlcore.log.upkeep.staged import drop, read_staged
from dlcore.metadata.attempts import Store
from dlcore.metadata.one_node import persistently
from dlcore.metadata.stored import decode
from dlcore.ops.upkeep.merging import StoredSegment
from dlcore.ops.upkeep.swap import (
    Event,
    Look,
    Looked,
    Signal,
    Swap,
    Verified,
    Verify,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import Chunk, VersionedHead
    from dlcore.wire.frames import EntryFrame

logger = logging.getLogger(__name__)


class SegmentRewriter:
    """Reads extents of a segment, and puts others in their place.

    Args:
        context: the namespace's adapters.
        owner: the owner of the ledgers that are being filled.
        kept_ms: how much longer old ledgers stay than those of merges.
    """

    def __init__(self, context: LogContext, owner: StagingOwner, *, kept_ms: int = 0) -> None:
        self._context = context
        self._owner = owner
        self._kept_ms = kept_ms
        self._unused: set[int] = set()  # ledgers that no swap needs

    async def _read_segment(self, at: VersionedHead, lssn: int) -> StoredSegment | None:
        """Return a segment; None if it was removed or changes now."""
        head, paths = at.head, self._context.logs.paths_of(at.log)
        first = head.first_chunk if lssn == head.first_lssn else 0
        end: SegmentEnd | None = None
        if lssn == head.max_lssn and head.segment is not None:
            count = head.segment.chunk_count
        else:
            path = paths.segment(lssn)
            node = await persistently(lambda: self._context.store.get(path))
            if node is None or not node.value:
                return None
            end = decode(SegmentEnd, node.value, source=path)
            count = end.chunk_count

        async def read() -> list[tuple[int, Chunk]]:
            chunks = read_chunks(self._context.store, paths, lssn, range(first, count))
            return [each async for each in chunks]

        try:
            chunks = await persistently(read)
        except ChunkMissingError:
            return None  # the log has moved on
        return StoredSegment(lssn=lssn, chunks=tuple(chunks), end=end, first_chunk=first)

    async def _entries(
        self, parts: Sequence[Extent]
    ) -> AsyncGenerator[tuple[Extent, EntryFrame], None]:
        """Yield the verified entries of extents in order, each with its extent."""
        for group in adjacent(parts):
            first, last = group[0].first_entry_id, group[-1].last_entry_id
            assert last is not None
            reader = await self._context.ledgers.open_ledger(group[0].ledger_id)
            index = 0
            async with aclosing(reader.read(first, last)) as chunks:
                async for frames in chunks:
                    for frame in frames:
                        while frame.entry_id > (group[index].last_entry_id or 0):
                            index += 1
                        yield group[index], frame

    # The swap

    async def _swap(self, swap: Swap) -> bool:
        """Replace a run; return False if it is not there any more."""
        return await run_to_end(swap, Signal.BEGIN, self._answer_of)

    async def _answer_of(self, work: Work) -> Event:
        context = self._context
        match work:
            case Look(paths):
                nodes = await persistently(lambda: context.store.get_many(paths, fresh=True))
                # The grace of a ledger begins at this time: a later one keeps the old ledgers for
                # longer.
                return Looked(nodes, context.clock.now_ms() + self._kept_ms)
            case Verify(ledger_ids):
                readers = [await context.ledgers.open_ledger(each) for each in ledger_ids]
                pairs = zip(ledger_ids, readers, strict=True)
                return Verified([each for each, at in pairs if "staged_by" in at.metadata.custom])
            case Store(ops):
                await context.store.multi(ops)
                return Signal.STORED
            case Pause(s_max, error):
                logger.info("a swap is tried again: %s", error)
                await asyncio.sleep(context.rng.uniform(0, s_max))
                return Signal.PAUSE_OVER
            case _:
                assert_never(work)

    async def _drop_unused(self) -> None:
        """Delete ledgers that no swap used; those that cannot be deleted now are tried again."""
        context = self._context
        for ledger_id in list(self._unused):
            node = (await read_staged(context, [ledger_id])).get(ledger_id)
            if node is not None and not node.staged.settled:
                await drop(context, node)
            else:
                self._unused.discard(ledger_id)
