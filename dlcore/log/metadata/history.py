"""The history of a log, outside its head: completed segments and chunks, read once and cached.

They are written once and change only by merges, and by a removal of a segment's first extents: the
head counts both.  A reader may use extents from before a merge as long as the old ledgers exist,
because they hold the same records.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from dlcore.base.background import together
from dlcore.base.errors import CorruptMetadataError
from dlcore.log.metadata.segment import Extent, LogSegment, SegmentState
from dlcore.log.metadata.values import (
    Chunk,
    LogKey,
    LogState,
    SegmentEnd,
    Totals,
    VersionedHead,
)
from dlcore.metadata.one_node import persistently
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.log.metadata.store import LogStore
    from dlcore.log.metadata.values import LogHead, OpenSegment
    from dlcore.metadata.paths import LogPaths
    from dlcore.metadata.port import MetadataStore


class ChunkMissingError(Exception):
    """The segment does not have these chunks: it has changed since.

    This error never leaves the log layer.
    """


async def read_chunks(
    store: MetadataStore, paths: LogPaths, lssn: int, numbers: range, *, at_once: int = 500
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the chunks of a segment that cover `numbers`, each with its own number.

    `at_once` chunks are read in one request; the caller may stop early.

    Raises:
        ChunkMissingError: a chunk is missing, or the last one covers further numbers.
        CorruptMetadataError: a chunk does not parse.
    """
    number = numbers.start
    while number < numbers.stop:
        asked = range(number, min(numbers.stop, number + at_once))
        nodes = await store.get_many([paths.chunk(lssn, each) for each in asked])
        while number < asked.stop:
            node, path = nodes[number - asked.start], paths.chunk(lssn, number)
            if node is None:
                raise ChunkMissingError(f"chunk {number} of segment {lssn} is missing")
            chunk = decode(Chunk, node.value, source=path)
            yield number, chunk
            number += chunk.covers
    if number > numbers.stop:
        raise ChunkMissingError(
            f"chunks of segment {lssn} cover numbers up to {number - 1}, expected "
            f"{numbers.stop - 1}"
        )


_SEGMENTS_AT_ONCE = 100
_SEGMENTS_AHEAD = 50
"""Segments whose metadata a reader knows in advance: a log may have very many."""


@dataclass(frozen=True, slots=True)
class _Chunked:
    """The chunks of a segment that were read: those below `count`, after the removed extents.

    `chunked` are the sums of both.
    """

    count: int
    extents: tuple[Extent, ...]
    chunked: Totals
    removed: Totals


class LogHistory:
    """Reads the states of one log, each time only the new parts; concurrent calls take turns."""

    def __init__(self, logs: LogStore, log: LogKey, *, keeps_truncated: bool = False) -> None:
        self._logs = logs
        self._keeps_truncated = keeps_truncated  # also truncated segments that are still stored
        self._log = log
        self._paths = logs.paths_of(log)
        self._segments: dict[int, LogSegment] = {}
        self._chunks: dict[int, _Chunked] = {}
        self._merges = 0
        self._state: LogState | None = None
        self._turn = asyncio.Lock()  # a call may drop what the one before has read

    async def read(self, *, from_lssn: int = 1, count: int | None = None) -> LogState:
        """Return the log's state with every change that completed before this call.

        Segments below `from_lssn` may be left out, now and at later calls.  With `count` at most
        that many segments are returned.

        Raises:
            LogNotFoundError: the log was deleted.
            CorruptMetadataError: the stored state contradicts itself.
        """
        async with self._turn:
            return await self._state_of(await self._logs.read(self._log), from_lssn, count)

    async def read_ahead(self, from_lssn: int) -> LogState:
        """Return the log's state with the next segments for a reader that is in this one.

        Raises: as `read`.
        """
        return await self.read(from_lssn=from_lssn, count=_SEGMENTS_AHEAD)

    async def state_of(
        self, at: VersionedHead, *, from_lssn: int = 1, count: int | None = None
    ) -> LogState:
        """Return the state as of `at`, or of a later head if the log has moved on."""
        async with self._turn:
            return await self._state_of(at, from_lssn, count)

    async def _state_of(self, at: VersionedHead, from_lssn: int, count: int | None) -> LogState:
        while True:
            state = self._state
            if (
                state is not None
                and state.version == at.version
                and self._reaches(state, from_lssn, count)
            ):
                return state
            try:
                assemble = partial(self._assemble, at, from_lssn, count)
                self._state = state = await persistently(assemble)
            except ChunkMissingError as error:
                known, at = at, await self._logs.read(self._log)
                self.forget()
                # Only a newer head can explain the missing node.
                if at.version == known.version:
                    raise CorruptMetadataError(f"log {self._log.name!r}: {error}") from None
            else:
                return state

    def _first_lssn(self, head: LogHead) -> int:
        """Return the first segment that is worth reading."""
        first = head.first_lssn
        if not self._keeps_truncated:
            first = max(head.first_lssn, head.first_active[0])
        return min(first, head.max_lssn + 1)

    def _reaches(self, state: LogState, from_lssn: int, count: int | None) -> bool:
        wanted = max(from_lssn, self._first_lssn(state.head))
        known = state.known_lssn
        if known is not None and (count is None or wanted > known):
            return False
        return not state.segments or state.segments[0].lssn <= wanted

    def forget(self) -> None:
        """Read everything again next time."""
        self._state = None
        self._segments.clear()
        self._chunks.clear()

    def _heed_merges(self, head: LogHead) -> None:
        rewritten = head.rewritten_since(self._merges)
        self._merges = head.merges
        if rewritten is None:
            self.forget()
        for lssn in rewritten or ():
            self._segments.pop(lssn, None)
            self._chunks.pop(lssn, None)

    async def _assemble(self, at: VersionedHead, from_lssn: int, count: int | None) -> LogState:
        head = at.head
        self._heed_merges(head)
        first = max(from_lssn, self._first_lssn(head))
        last = head.max_lssn if head.segment is None else head.max_lssn - 1
        # `known` is None if all segments are read, because the open one then belongs to them.
        known = None if count is None or first + count > last else first + count - 1
        last = last if known is None else known
        self._segments = {n: s for n, s in self._segments.items() if first <= n <= last}
        missing = [lssn for lssn in range(first, last + 1) if lssn not in self._segments]
        bounds = [*range(0, len(missing), _SEGMENTS_AT_ONCE), len(missing)]
        for start, end in pairwise(bounds):
            await self._read_segments(head, missing[start:end])
        segments = [self._segments[lssn] for lssn in range(first, last + 1)]
        if head.segment is not None and known is None:
            segments.append(await self._open_segment(head))
        return LogState(
            log=self._log,
            head=head,
            version=at.version,
            segments=tuple(segments),
            known_lssn=known,
        )

    async def _read_segments(self, head: LogHead, lssns: list[int]) -> None:
        nodes = await self._logs.metadata_store.get_many([self._paths.segment(n) for n in lssns])
        ends = {}
        for lssn, node in zip(lssns, nodes, strict=True):
            if node is None or not node.value:
                raise ChunkMissingError(f"segment {lssn} is missing")
            ends[lssn] = decode(SegmentEnd, node.value, source=self._paths.segment(lssn))
        chunked = await together(*(self._read_chunks(head, n, end) for n, end in ends.items()))
        for (lssn, end), found in zip(ends.items(), chunked, strict=True):
            # The completed segment has its extents now; chunks are kept only while more may come.
            self._chunks.pop(lssn, None)
            self._segments[lssn] = LogSegment(
                lssn=lssn,
                state=SegmentState.COMPLETED,
                created_ms=end.created_ms,
                start_sequence_id=end.start_sequence_id,
                extents=(*found.extents, *end.tail),
                completed_ms=end.completed_ms,
                removed_entries=found.removed.entries,
                removed_records=found.removed.records,
            )

    async def _open_segment(self, head: LogHead) -> LogSegment:
        segment = head.segment
        assert segment is not None
        found = await self._read_chunks(head, head.max_lssn, segment)
        return LogSegment(
            lssn=head.max_lssn,
            state=SegmentState.IN_PROGRESS,
            created_ms=segment.created_ms,
            start_sequence_id=segment.start_sequence_id,
            extents=(*found.extents, *segment.tail),
            removed_entries=found.removed.entries,
            removed_records=found.removed.records,
        )

    async def _read_chunks(
        self, head: LogHead, lssn: int, segment: SegmentEnd | OpenSegment
    ) -> _Chunked:
        """Return the chunks of a segment; those that are known are not read again.

        Raises:
            ChunkMissingError: they do not belong to `segment`, or it does not belong to the head.
        """
        known, count = self._chunks.get(lssn), segment.chunk_count
        first = head.first_chunk if lssn == head.first_lssn else 0
        found: list[Extent] = []
        start: tuple[int, int] | None = None
        numbers = range(first if known is None else known.count, count)
        async for _, chunk in read_chunks(self._logs.metadata_store, self._paths, lssn, numbers):
            if start is None:
                start = chunk.first_entry_id, chunk.first_sequence_id - segment.start_sequence_id
            found += chunk.extents
        if known is None:
            removed = segment.chunked.minus(found)
            is_truncated = (lssn, removed.entries, 0) <= max(head.first_active, (lssn, 0, 0))
            fits = start in (None, (removed.entries, removed.records)) and is_truncated
        else:
            removed = known.removed
            fits = known.count <= count and known.chunked.plus(found) == segment.chunked
        if not fits:
            # A merge or a removal came after the head was read, or between two reads of chunks.
            raise ChunkMissingError(f"the chunks of segment {lssn} are not those of its head")
        extents = tuple(found) if known is None else (*known.extents, *found)
        chunked = self._chunks[lssn] = _Chunked(count, extents, segment.chunked, removed)
        return chunked
