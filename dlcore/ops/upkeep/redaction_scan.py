"""Scans a log for rows that are to be redacted, and for what would forbid that."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.errors import LedgerNotFoundError, LedgerReadError
from dlcore.log.metadata.history import ChunkMissingError, LogHistory
from dlcore.log.metadata.listing import list_pages
from dlcore.log.upkeep.staged import read_staged
from dlcore.ops.upkeep.redaction import Run, Scanned, plan_runs
from dlcore.ops.upkeep.rewriting import SegmentRewriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dlcore.log.context import LogContext
    from dlcore.log.entries.redacted_rows import RowRedactor
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.ops.upkeep.config import MergePolicy

_SCANS_MAX = 10
_NAMES_SHOWN_MAX = 5
_NAMES_AT_ONCE = 500


class _Segment(NamedTuple):
    lssn: int
    extents: tuple[Extent, ...]
    rows: list[int]
    """Rows to redact, of each extent."""


class RedactionScanner(SegmentRewriter):
    """Scans logs.

    Args:
        context: the namespace's adapters.
        owner: the owner of ledgers that are being filled; a scan fills none.
        policy: the limits of one run.
        progress: called with the number of records read.
    """

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        *,
        policy: MergePolicy,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(context, owner)
        self._policy = policy
        self._progress = progress
        self._read = 0

    async def scan(self, log: LogMetadata, redactor: RowRedactor, *, is_begun: bool) -> Scanned:
        """Read all entries of a log that are stored, truncated ones too; return what was found.

        Raises:
            LogNotFoundError: the log was deleted.
            DLError: entries cannot be read now.
        """
        self._read = 0
        for attempt in range(1, _SCANS_MAX + 1):
            at = await self._context.logs.read(log)
            try:
                return await self._scan(at, redactor, is_begun=is_begun)
            except (ChunkMissingError, LedgerNotFoundError, LedgerReadError):
                now = await self._context.logs.read(log)
                if now.version == at.version or attempt == _SCANS_MAX:
                    raise  # no change of the log explains it
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _scan(self, at: VersionedHead, redactor: RowRedactor, *, is_begun: bool) -> Scanned:
        head = at.head
        end = head.max_lssn + (head.segment is None)
        segments = []
        for lssn in range(head.first_lssn, end):
            stored = await self._read_segment(at, lssn)
            if stored is None:
                raise ChunkMissingError(f"segment {lssn} is not as its head says")
            rows = await self._count(stored.extents, redactor)
            segments.append(_Segment(lssn, stored.extents, rows))
        opened = await self._open_segment(at, redactor)
        tainted = {
            extent.ledger_id
            for segment in (*segments, opened)
            for extent, rows in zip(segment.extents, segment.rows, strict=True)
            if rows
        }
        active = head.first_active[0]
        kept = [each for each in segments if each.lssn < active and any(each.rows)]
        runs: list[Run] = []
        for each in segments:
            if each.lssn >= active:
                runs += plan_runs(
                    each.extents, each.rows, self._policy, lssn=each.lssn, tainted=tainted
                )
        own = Counter(part.ledger_id for each in (*segments, opened) for part in each.extents)
        return Scanned(
            runs=tuple(runs),
            open_rows=sum(opened.rows),
            must_complete=any(part.ledger_id in tainted for part in opened.extents),
            obstacles=tuple(await self._shared(at.log.log_id, tainted, own)),
            kept=tuple(
                f"segment {each.lssn} is truncated, and has {sum(each.rows)} such rows until it is "
                "removed"
                for each in kept
            ),
            is_begun=is_begun,
        )

    async def _count(self, extents: Sequence[Extent], redactor: RowRedactor) -> list[int]:
        rows = [0] * len(extents)
        index = 0
        async with aclosing(self._entries(extents)) as entries:
            async for part, frame in entries:
                while extents[index] is not part:
                    index += 1
                rows[index] += redactor.count(frame.body)
                await self._turn()
        return rows

    async def _turn(self) -> None:
        """Let others run now and then, and tell how far the scan is."""
        self._read += 1
        if self._read % 100 == 0:
            self._progress(self._read)
            await asyncio.sleep(0)

    async def _open_segment(self, at: VersionedHead, redactor: RowRedactor) -> _Segment:
        """Return the segment in progress, with the extent that a writer appends to."""
        segment = at.head.segment
        if segment is None:
            return _Segment(at.head.max_lssn + 1, (), [])
        stored = await self._read_segment(at, at.head.max_lssn)
        if stored is None:
            raise ChunkMissingError("the segment in progress is not as its head says")
        closed = (*stored.extents, *(each for each in segment.tail if not each.is_open))
        rows = await self._count(closed, redactor)
        extent = at.head.open_extent
        if extent is None:
            return _Segment(stored.lssn, closed, rows)
        reader = await self._context.ledgers.open_ledger(extent.ledger_id)
        last = await reader.read_last_add_confirmed()
        found = 0
        if last >= extent.first_entry_id:
            async with aclosing(reader.read(extent.first_entry_id, last)) as chunks:
                async for frames in chunks:
                    found += sum(redactor.count(frame.body) for frame in frames)
                    await self._turn()
        return _Segment(stored.lssn, (*closed, extent), [*rows, found])

    async def _shared(self, log_id: str, tainted: Iterable[int], own: Counter[int]) -> list[str]:
        """Return sentences on ledgers that other logs have extents of."""
        nodes = await read_staged(self._context, sorted(tainted))
        shared = {each for each, node in nodes.items() if node.staged.extents > own[each]}
        if not shared:
            return []
        names = await self._logs_with(shared, but=log_id)
        shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN_MAX])
        if len(names) > _NAMES_SHOWN_MAX:
            shown += f" and {len(names) - _NAMES_SHOWN_MAX} more"
        whose = shown or "a log that is being deleted"
        obstacle = (
            f"{len(shared)} ledgers with such rows, like {min(shared)}, are also those of {whose}, "
            "as a fork or by a common append: the bytes would stay there; delete these logs first"
        )
        return [obstacle]

    async def _logs_with(self, shared: set[int], *, but: str) -> list[str]:
        """Return the names of the other logs that have extents of these ledgers: all are read."""
        context = self._context
        found = []
        async for page in list_pages(
            context.store, context.paths, "", after=None, page_size=_NAMES_AT_ONCE
        ):
            for log in await context.logs.find_existing(page):
                if log.log_id == but:
                    continue
                state = await LogHistory(context.logs, log, keeps_truncated=True).read()
                parts = (part for segment in state.segments for part in segment.extents)
                if any(part.ledger_id in shared for part in parts):
                    found.append(log.name)
        return found
