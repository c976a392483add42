"""The nodes of a namespace whose bookies are lost, out of an export: what is cold stays; pure.

The import of an export (`importing.py`) supposes that bookies start again on their folders.  Here
they are gone, and so are the ledgers that they held.  A log keeps its name, settings,
schema and subscriptions, and the records that are in objects:

- Of each segment its cold extents from the beginning on remain.  An extent that follows a lost one
  is lost too, because entries of a segment have no gaps.  Later segments do not suffer by it.
- A segment of which nothing remains stays as an empty one, and its number is not given again.  At
  the beginning of the log it is left out, as if it were truncated.
- After the last segment that the export knows come as many empty ones as may have been begun after
  the export.  The next record gets a higher number.
- Sequence ids have no gaps: records that follow lost ones get lower ids, and so do new ones.
- The segment in progress ends.  The last numbers of producers are lost, since they were on bookies.
- Truncated records are left out, and their objects are swept later.

Ledgers that bookies held, cookies, staged records and the work of auto-recovery are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.ids import DLSN
from dlcore.ledger.metadata.values import LedgerMetadata
from dlcore.log.metadata.values import (
    Chunk,
    LogHead,
    LogMetadata,
    SegmentEnd,
    StagedLedger,
    Totals,
    pack,
)
from dlcore.metadata.stored import decode, encode
from dlcore.metadata.tree import parent_of
from dlcore.ops.backup.archive import Export

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dlcore.log.metadata.segment import Extent
    from dlcore.metadata.paths import LogPaths, NamespacePaths

SEGMENTS_SKIPPED = 100
"""Numbers of segments that are left out in each log, for those begun after the export."""


@dataclass(frozen=True, slots=True)
class LostRange:
    """Records from one position up to another one, which is None if their number is unknown."""

    start: DLSN
    end: DLSN | None

    def __str__(self) -> str:
        return (
            f"{self.start} and all after it" if self.end is None else f"{self.start} … {self.end}"
        )


@dataclass(frozen=True, slots=True)
class RebuiltLog:
    """The remains of a log; `next_position` is where the next record goes."""

    name: str
    records: int
    lost: tuple[LostRange, ...]
    next_position: DLSN


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The export of what remains, and what that is."""

    export: Export
    logs: tuple[RebuiltLog, ...]


def rebuilt(
    paths: NamespacePaths, export: Export, *, segments_skipped: int = SEGMENTS_SKIPPED
) -> Rebuilt:
    """Return what remains of an export when all bookies are lost.

    Args:
        paths: the paths of the namespace that is made.
        export: an export of a namespace.
        segments_skipped: how many numbers of segments are left out in each log.

    Raises:
        CorruptMetadataError: a node of the export is damaged.
    """
    nodes = {paths.root + path: value for path, value in export.nodes.items()}
    work = _Rebuilding(paths, nodes, segments_skipped)
    logs = tuple(sorted(work.logs(), key=lambda each: each.name))
    work.take_ledgers()
    work.take_rest()
    start = len(paths.root)
    header = replace(export.header, ledgers=len(work.references))
    kept = {path[start:]: value for path, value in work.kept.items()}
    return Rebuilt(Export(header, kept), logs)


@dataclass(slots=True)
class _Rebuilding:
    paths: NamespacePaths
    nodes: dict[str, bytes]
    skipped: int
    kept: dict[str, bytes] = field(default_factory=dict)
    references: Counter[int] = field(default_factory=Counter)

    def logs(self) -> Iterator[RebuiltLog]:
        """Take all logs with their segments."""
        prefix = f"{self.paths.logs}/"
        for path, value in self.nodes.items():
            if path.startswith(prefix) and path.count("/", len(prefix)) == 1:
                log = decode(LogMetadata, value, source=path)
                yield self._log(log)

    def _log(self, log: LogMetadata) -> RebuiltLog:
        own = self.paths.log_of(log.log_id)
        head = decode(LogHead, self.nodes[own.head], source=own.head)
        first, last = head.first_active, head.max_lssn
        ends: list[tuple[int, SegmentEnd, list[Extent]]] = []
        lost: list[LostRange] = []
        removed_txid = head.removed_txid
        for lssn in range(first[0], last + 1):
            end, extents, is_open = segment_of(self.nodes, own, head, lssn)
            cold = cold_part_of(self.paths, self.nodes, extents)
            if len(cold) < len(extents) or is_open:
                start = DLSN(lssn, end.chunked.plus(cold).entries, 0)
                _note(lost, start, None if is_open else DLSN(lssn + 1, 0, 0))
            if ends or cold:
                ends.append((lssn, end, cold))
            else:  # it is left out, as if it were truncated
                removed_txid = max(removed_txid, *(each.last_txid for each in extents), -1)
                first = (lssn + 1, 0, 0)
        last = max(last, first[0] - 1)
        if not head.sealed:
            ends += self._skipped(head, last) if ends else []
            last += self.skipped
        if not ends:
            first = (last + 1, 0, 0)
        records, entries, next_id = self._put(own, ends, head)
        self.kept[own.head] = encode(
            replace(
                head,
                max_lssn=last,
                next_sequence_id=next_id,
                end=(last, entries) if ends else first[:2],
                first_active=first,
                first_lssn=first[0],
                first_chunk=0,
                segment=None,
                producers_lssn=0,
                producers_entries=0,
                removed_txid=removed_txid,
            )
        )
        return RebuiltLog(head.name or log.name, records, tuple(lost), DLSN(last + 1, 0, 0))

    def _skipped(self, head: LogHead, last: int) -> list[tuple[int, SegmentEnd, list[Extent]]]:
        """Return empty segments that follow the last one."""
        empty = SegmentEnd(
            created_ms=head.last_timestamp_ms,
            completed_ms=head.last_timestamp_ms,
            start_sequence_id=0,
            chunk_count=0,
            chunked=Totals(),
            packed=(),
        )
        return [(lssn, empty, []) for lssn in range(last + 1, last + 1 + self.skipped)]

    def _put(
        self,
        own: LogPaths,
        ends: Sequence[tuple[int, SegmentEnd, list[Extent]]],
        head: LogHead,
    ) -> tuple[int, int, int]:
        """Store segments; return the records, the entries of the last one, and the next id."""
        first_id = next_id = ends[0][1].start_sequence_id if ends else head.next_sequence_id
        entries = 0
        for lssn, end, extents in ends:
            sums = end.chunked.plus(extents)
            self.references.update(extent.ledger_id for extent in extents)
            kept = replace(end, start_sequence_id=next_id, chunk_count=0, packed=pack(extents))
            self.kept[own.segment(lssn)] = encode(kept)
            next_id += sums.records
            entries = sums.entries
        return next_id - first_id, entries, next_id

    def take_ledgers(self) -> None:
        """Take the cold ledgers that logs name."""
        for ledger_id, count in self.references.items():
            path, staged_path = self.paths.ledger(ledger_id), self.paths.staged_ledger(ledger_id)
            decode(LedgerMetadata, self.nodes[path], source=path)
            self.kept[path] = self.nodes[path]
            staged = decode(StagedLedger, self.nodes[staged_path], source=staged_path)
            self.kept[staged_path] = encode(replace(staged, extents=count, owner="", settled=True))

    def take_rest(self) -> None:
        """Take what is of no segment and of no bookie, and the lists that are always there."""
        paths = self.paths
        left_out = (
            *(paths.ledgers, paths.staging, paths.merged, paths.cookies, paths.upkeep_requests),
            *(paths.under_replicated, paths.last_check, paths.check_progress),
            *(f"{paths.root}/bookies/held", paths.garbage_releases, paths.restored),
            *(paths.erasures, paths.redactions),
            *(paths.bookies_available, paths.bookies_readonly),
        )
        heads = f"{paths.heads}/"
        for path, value in self.nodes.items():
            parts = path[len(heads) :].split("/") if path.startswith(heads) else []
            is_of_segment = len(parts) > 2 and parts[2].isdecimal()
            is_left_out = any(f"{path}/".startswith(f"{above}/") for above in left_out)
            if not (path in self.kept or is_of_segment or is_left_out):
                self.kept[path] = value
        lists = (paths.ledgers, paths.merged, paths.cookies, paths.bookies_available)
        self.kept.update(dict.fromkeys((*lists, paths.bookies_readonly), b""))
        self.kept.update(dict.fromkeys(paths.buckets, b""))
        self.kept[paths.ledger_idgen] = self.nodes[paths.ledger_idgen]
        for path in [*self.kept]:
            self._take_parents(path)

    def _take_parents(self, path: str) -> None:
        while path != self.paths.root:
            path = parent_of(path)
            if path in self.kept:
                return
            self.kept[path] = self.nodes.get(path, b"")


def segment_of(
    nodes: Mapping[str, bytes], own: LogPaths, head: LogHead, lssn: int
) -> tuple[SegmentEnd, Sequence[Extent], bool]:
    """Return a segment's end, its final extents, and whether it may have had more.

    The end has no chunks but those that were removed, and their sums.
    """
    if lssn == head.max_lssn and head.segment is not None:
        opened = head.segment
        end = SegmentEnd(
            created_ms=opened.created_ms,
            completed_ms=max(opened.created_ms, head.last_timestamp_ms),
            start_sequence_id=opened.start_sequence_id,
            chunk_count=opened.chunk_count,
            chunked=opened.chunked,
            packed=(),
        )
        tail = [extent for extent in opened.tail if not extent.is_open]
    else:
        path = own.segment(lssn)
        end = decode(SegmentEnd, nodes[path], source=path)
        tail = list(end.tail)
    extents: list[Extent] = []
    number = first = head.first_chunk if lssn == head.first_lssn else 0
    while number < end.chunk_count:
        path = own.chunk(lssn, number)
        chunk = decode(Chunk, nodes[path], source=path)
        extents += chunk.extents
        number += chunk.covers
    is_open = lssn == head.max_lssn and head.segment is not None
    end = replace(end, chunk_count=first, chunked=end.chunked.minus(extents))
    return end, [*extents, *tail], is_open


def cold_part_of(
    paths: NamespacePaths, nodes: Mapping[str, bytes], extents: Sequence[Extent]
) -> list[Extent]:
    """Return the extents up to the first one that is not in objects."""
    found = []
    for extent in extents:
        if not extent.is_cold or paths.ledger(extent.ledger_id) not in nodes:
            break
        found.append(extent)
    return found


def _note(lost: list[LostRange], start: DLSN, end: DLSN | None) -> None:
    """Add a range of lost records; one that follows the last one makes it longer."""
    if lost and lost[-1].end == start:
        start = lost.pop().start
    lost.append(LostRange(start, end))
