"""An export with the segments that became cold after it: their objects say what they hold; pure.

An export names the objects that there were.  Segments that became cold later are in objects too,
each of which has its log, segment, entries and counts in its end, and its ledger's id and token in
its name.  The ledgers and segments that the metadata had are made again out of that:

- A segment gets the objects that follow its cold part without a gap of entries.  If ledgers begin
  with the same entry it gets the one that reaches furthest: leftovers hold the same records.
- An object of a version of the schema that the export does not know is left out.
- Records that lack, by the export or by the next segment's sequence id, become an extent that no
  object has, as which `rebuilding.py` takes them for lost.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from dlcore.ledger.metadata.values import COLD_LAYOUT, LedgerMetadata, LedgerState, StoredObject
from dlcore.log.metadata.segment import ColdExtent, Extent
from dlcore.log.metadata.values import (
    LogHead,
    LogMetadata,
    SegmentEnd,
    StagedLedger,
    Totals,
    pack,
)
from dlcore.log.typed.schema import LogSchema
from dlcore.metadata.stored import decode, encode
from dlcore.ops.backup.archive import Export
from dlcore.ops.backup.rebuilding import cold_part_of, segment_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.cold.facts import ObjectFacts
    from dlcore.metadata.paths import NamespacePaths

NAME = re.compile(r"(?P<ledger>\d{1,19})-(?P<token>.+)-\d+-\d+\.parquet")
"""The name of an object of a cold ledger."""


class FoundObject(NamedTuple):
    """An object that an export does not name: its URL and size, and what it says of itself."""

    url: str
    size_bytes: int
    facts: ObjectFacts
    last_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class _Run:
    """A ledger's objects without a gap: entries [first, end) of a segment."""

    objects: tuple[FoundObject, ...]

    @property
    def first(self) -> int:
        return self.objects[0].facts.first_entry

    @property
    def end(self) -> int:
        last = self.objects[-1].facts
        return last.first_entry + last.entries

    @property
    def first_sequence_id(self) -> int:
        return self.objects[0].facts.first_sequence_id


def adopted(paths: NamespacePaths, export: Export, found: Sequence[FoundObject]) -> Export:
    """Return the export with the segments of the objects, as if it had been made later.

    Raises:
        CorruptMetadataError: a node of the export is damaged.
    """
    nodes = {paths.root + path: value for path, value in export.nodes.items()}
    by_log: dict[str, list[FoundObject]] = defaultdict(list)
    for each in found:
        if each.facts.cluster_id == export.header.cluster_id:
            by_log[each.facts.log_id].append(each)
    prefix = f"{paths.logs}/"
    for path, value in list(nodes.items()):
        if path.startswith(prefix) and path.count("/", len(prefix)) == 1:
            log = decode(LogMetadata, value, source=path)
            if log.log_id in by_log:
                _Adoption(paths, nodes, log).take(by_log[log.log_id])
    start = len(paths.root)
    return Export(export.header, {path[start:]: value for path, value in nodes.items()})


class _Adoption:
    """The adoption of one log's objects."""

    def __init__(self, paths: NamespacePaths, nodes: dict[str, bytes], log: LogMetadata) -> None:
        self._paths = paths
        self._nodes = nodes
        self._log = log
        self._own = paths.log_of(log.log_id)
        self._head = decode(LogHead, nodes[self._own.head], source=self._own.head)
        self._versions = 0
        if log.typed:
            schema = decode(LogSchema, nodes[self._own.schema], source=self._own.schema)
            self._versions = len(schema.versions)

    def take(self, found: Sequence[FoundObject]) -> None:
        """Give the log's segments their objects."""
        head = self._head
        runs = self._runs(found)
        known = head.max_lssn + (head.segment is None)  # the first one whose end is not known
        for lssn in range(min([known, *runs]), max([known, *runs]) + 1):
            following = runs.get(lssn + 1)
            is_last = following is None and lssn >= max(runs, default=0)
            head = self._segment(head, lssn, runs.get(lssn, []), following, is_last=is_last)
        self._nodes[self._own.head] = encode(head)

    def _runs(self, found: Sequence[FoundObject]) -> dict[int, list[_Run]]:
        """Return the runs of each segment that is not truncated."""
        by_ledger: dict[tuple[int, str, str], list[FoundObject]] = defaultdict(list)
        for each in found:
            folder, _, name = each.url.rpartition("/")
            match = NAME.fullmatch(name)
            facts = each.facts
            is_needed = facts.lssn >= self._head.first_active[0]
            if match is not None and is_needed and facts.schema_id <= self._versions:
                by_ledger[facts.lssn, folder, f"{match['ledger']}-{match['token']}"].append(each)
        runs: dict[int, list[_Run]] = defaultdict(list)
        for (lssn, _, _), objects in by_ledger.items():
            row: list[FoundObject] = []
            for each in sorted(objects, key=lambda one: (one.facts.first_entry, one.url)):
                if not row or _Run(tuple(row)).end == each.facts.first_entry:
                    row.append(each)
            runs[lssn].append(_Run(tuple(row)))
        return dict(runs)

    def _segment(
        self,
        head: LogHead,
        lssn: int,
        runs: Sequence[_Run],
        following: Sequence[_Run] | None,
        *,
        is_last: bool,
    ) -> LogHead:
        """Store a segment with its objects; return the head after it."""
        is_known = lssn < self._head.max_lssn + (self._head.segment is None)
        end, extents = self._as_exported(lssn)
        cold = cold_part_of(self._paths, self._nodes, extents)
        more = list(_following(runs, end.chunked.plus(cold).entries))
        if not more and (is_known or is_last):
            return head
        if not extents and more:
            end = replace(end, start_sequence_id=more[0].first_sequence_id)
        cold += [self._extent(run) for run in more]
        have, total = end.chunked.plus(cold), end.chunked.plus(extents)
        next_id = end.start_sequence_id + have.records
        starts = [run.first_sequence_id for run in following or () if run.first == 0]
        lacks = have.entries < total.entries or not cold or (starts and min(starts) > next_id)
        if lacks:
            lost = max(1, total.entries - have.entries)  # no object has them
            cold.append(Extent(ledger_id=0, first_entry_id=0, last_entry_id=lost - 1))
        written_ms = cold[-1].last_timestamp_ms
        changed = replace(
            end,
            completed_ms=max(end.completed_ms, written_ms),
            packed=pack(cold),
        )
        self._nodes[self._own.segment(lssn)] = encode(changed)
        return replace(
            head,
            max_lssn=max(head.max_lssn, lssn),
            segment=head.segment if is_known else None,
            next_sequence_id=max(head.next_sequence_id, next_id),
            max_txid=max(head.max_txid, *(each.last_txid for each in cold)),
            last_timestamp_ms=max(head.last_timestamp_ms, written_ms),
        )

    def _as_exported(self, lssn: int) -> tuple[SegmentEnd, Sequence[Extent]]:
        if lssn <= self._head.max_lssn:
            end, extents, _ = segment_of(self._nodes, self._own, self._head, lssn)
            return end, extents
        made_ms = self._head.last_timestamp_ms
        end = SegmentEnd(
            created_ms=made_ms,
            completed_ms=made_ms,
            start_sequence_id=0,
            chunk_count=0,
            chunked=Totals(),
            packed=(),
        )
        return end, ()

    def _extent(self, run: _Run) -> Extent:
        """Make the ledger of a run; return its extent."""
        folder, _, name = run.objects[0].url.rpartition("/")
        match = NAME.fullmatch(name)
        assert match is not None
        ledger_id = int(match["ledger"])
        first, last = run.objects[0], run.objects[-1]
        size_bytes = sum(each.size_bytes for each in run.objects)
        records = 0
        objects = []
        for each in run.objects:
            at = each.facts.first_entry - run.first
            name, facts = each.url.rpartition("/")[2], each.facts
            objects.append(StoredObject(at, records, name, each.size_bytes, facts.crc32c))
            records += each.facts.records
        ledger = LedgerMetadata(
            layout=COLD_LAYOUT,
            ledger_id=ledger_id,
            quorum=self._log.quorum,
            state=LedgerState.CLOSED,
            ensembles=(),
            token=match["token"],
            created_ms=last.last_timestamp_ms,
            last_entry_id=run.end - run.first - 1,
            length_bytes=size_bytes,
            custom={"log": self._log.name},
            folder=folder,
            objects=tuple(objects),
        )
        staged = StagedLedger(
            ledger_id=ledger_id,
            identity=":merging",
            owner="",
            created_ms=last.last_timestamp_ms,
            extents=1,
            settled=True,
        )
        self._nodes[self._paths.ledger(ledger_id)] = encode(ledger)
        self._nodes[self._paths.staged_ledger(ledger_id)] = encode(staged)
        return ColdExtent(
            ledger_id=ledger_id,
            first_entry_id=0,
            last_entry_id=ledger.last_entry_id,
            record_count=records,
            size_bytes=size_bytes,
            first_txid=first.facts.first_txid,
            last_txid=last.facts.last_txid,
            last_timestamp_ms=last.last_timestamp_ms,
        )


def _following(runs: Sequence[_Run], entries: int) -> list[_Run]:
    """Return the runs that follow so many entries, one after the other."""
    chosen: list[_Run] = []
    while fitting := [run for run in runs if run.first == entries]:
        best = max(fitting, key=lambda run: run.end)
        chosen.append(best)
        entries = best.end
    return chosen
