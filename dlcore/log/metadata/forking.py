"""A fork of a log: a new log that begins with the same cold extents, up to a position.

Theory of operation.  A cold ledger is registered with the number of extents that refer to it, as a
staged one, and its objects stay while its metadata does.  A fork copies the nodes of segments, and
counts its own extents to the same ledgers, in the same transactions.  Each of these is guarded by
the versions of the registrations that it changes.  Therefore a truncation, a deletion or a rewrite
of either log either comes before, and the fork begins again with what is left, or it comes after,
and leaves the ledger to the other log.  No list of forks is needed, and forks may be forked.

A fork of few segments is one transaction.  A larger one is made of several: until the last one, its
head is that of a deleted log, and it is listed as one.  If its maker dies, the sweep of deleted
logs removes it, and gives up what it had counted.  docs/architecture/machines.md shows
`TRANSITIONS` as a diagram.

Promises:

* No client sees a fork before it is whole.
* At each moment a ledger's count is that of the extents which refer to it, of all logs.
* Positions, transaction ids and sequence ids are those of the source; the next ones follow.

The driver is `dlcore/log/upkeep/forks.py`.  Each event has one effect.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from msgspec.structs import replace

from dlcore.base.errors import ConfigurationError, DLError, LogExistsError
from dlcore.base.ids import DLSN
from dlcore.base.machines import CallFailed, Ended, Pause, State, StepMachine, Transitions
from dlcore.log.metadata.changes import plan_settings
from dlcore.log.metadata.nodes import decode_node
from dlcore.log.metadata.segment import SegmentState
from dlcore.log.metadata.values import (
    CHUNK_EXTENTS_MAX,
    Chunk,
    LogHead,
    LogMetadata,
    OpenSegment,
    SegmentEnd,
    Totals,
    pack,
)
from dlcore.metadata.attempts import Attempts, Store, pause_after
from dlcore.metadata.port import ANY_VERSION, Create, Delete, Op, Put, Versioned
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dlcore.base.config import LogSettings
    from dlcore.log.metadata.segment import Extent, LogSegment
    from dlcore.log.metadata.values import LogState
    from dlcore.log.typed.schema import LogSchema
    from dlcore.metadata.paths import LogPaths, NamespacePaths


@dataclass(frozen=True, slots=True)
class ForkCut:
    """The beginning of a fork.

    The last of the segments has its whole extents before `at`.  If `at` is within an extent, that
    one is `split`, and its first `split_entries` entries belong to the fork too.
    """

    at: DLSN
    segments: tuple[LogSegment, ...]
    split: Extent | None = None
    split_entries: int = 0

    def whole(self, split: Extent | None) -> tuple[LogSegment, ...]:
        """Return the segments, with `split` as the extent that ends at `at`, if there is one."""
        if split is None:
            return self.segments
        *others, last = self.segments
        return (*others, dataclasses.replace(last, extents=(*last.extents, split)))


def removed_txid_of(state: LogState) -> int:
    """Return the highest transaction id in what a fork leaves out at the front, or -1.

    `state` has the segments that are truncated but still stored.
    """
    known = [
        segment.extents[-1].last_txid
        for segment in state.segments
        if segment.lssn < state.first_active.lssn and segment.extents
    ]
    return max(state.head.removed_txid, *known, -1)


def cut_of(state: LogState, at: DLSN | None) -> ForkCut:
    """Return the beginning of a fork that has all before `at`; None: all that is cold.

    Raises:
        ConfigurationError: no fork can end there; the message names positions that work.
    """
    first = state.first_active
    segments = [each for each in state.segments if each.lssn >= first.lssn]
    limit = _cold_end(segments, first)
    named = f"log {state.name!r}"
    if limit <= first:
        raise ConfigurationError(
            f"{named}: no fork can be made, its records from {first} on are not in objects yet: "
            f"{_how_to_tier(state.name)}"
        )
    if at is None:
        at = limit
    if at.slot_id:
        raise ConfigurationError(
            f"{named}: no fork can end at {at}, within an entry: expected "
            f"{DLSN(at.lssn, at.entry_id, 0)} or {DLSN(at.lssn, at.entry_id + 1, 0)}"
        )
    if at <= first:
        raise ConfigurationError(
            f"{named}: no record is before {at}, the first one is at {first}: expected "
            f"{DLSN(first.lssn, first.entry_id + 1, 0)} … {limit}"
        )
    if at > limit:
        raise ConfigurationError(
            f"{named}: no fork can end at {at}, the records from {limit} on are not in objects "
            f"yet: expected {limit} or less, or first: {_how_to_tier(state.name)}"
        )
    return _cut(named, segments, at)


def _how_to_tier(name: str) -> str:
    return (
        f"dlog log settings {name} --set tier=s3://bucket/folder --set tier_after_s=0, unless it "
        "has a tier, and wait for dlog autorecovery run (docs/tier.md); dlog autorecovery status "
        "says what keeps a worker from it"
    )


def _cold_end(segments: Sequence[LogSegment], first: DLSN) -> DLSN:
    """Return the position after all that is cold from the beginning on."""
    limit = first
    for segment in segments:
        entries = segment.removed_entries
        for extent in segment.extents:
            if not extent.is_cold:
                return max(first, DLSN(segment.lssn, entries, 0))
            entries += extent.entry_count
        if segment.state is not SegmentState.COMPLETED:
            return max(first, DLSN(segment.lssn, entries, 0))
        limit = DLSN(segment.lssn + 1, 0, 0)
    return limit


def _cut(named: str, segments: Sequence[LogSegment], at: DLSN) -> ForkCut:
    before = tuple(each for each in segments if each.lssn < at.lssn)
    if at.entry_id == 0:
        return ForkCut(at, before)
    segment = next(each for each in segments if each.lssn == at.lssn)
    if at.entry_id > segment.closed_entry_count:
        raise ConfigurationError(
            f"{named}: no fork can end at {at}, segment {at.lssn} has "
            f"{segment.closed_entry_count} entries: expected "
            f"{DLSN(at.lssn, segment.closed_entry_count, 0)} or {DLSN(at.lssn + 1, 0, 0)}"
        )
    whole: list[Extent] = []
    left = at.entry_id - segment.removed_entries
    for extent in segment.extents:
        if extent.entry_count > left:
            break
        whole.append(extent)
        left -= extent.entry_count
    last = dataclasses.replace(segment, extents=tuple(whole), state=SegmentState.COMPLETED)
    split = segment.extents[len(whole)] if left else None
    return ForkCut(at, (*before, last), split, left)


OPS_MAX = 300
"""Operations of a transaction, about; each has a few hundred bytes at most, or some KB a node."""


class ForkState(State):
    """The state of the machine; FORKED, OVERTAKEN and FAILED are final."""

    READY = "nothing has begun"
    LOOKING = "the fork's own nodes and the registrations of some ledgers are read"
    STORING = "some segments are being stored, with what they count"
    PAUSING = "a transaction had a conflict, or no answer; its nodes are read again"
    FORKED = "the fork is there"
    OVERTAKEN = "the source gave up a ledger, or a sweep removed the unfinished fork"
    FAILED = "the name is taken, or the metadata cannot be read or changes all the time"


_S = ForkState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.LOOKING: "begin"},
        _S.LOOKING: {
            _S.STORING: "planned",
            _S.LOOKING: "stored by an attempt whose answer was lost; the next segments",
            _S.FORKED: "by an attempt whose answer was lost",
            _S.OVERTAKEN: "a ledger or the fork itself is gone",
            _S.FAILED: "refused, or the name is taken",
        },
        _S.STORING: {
            _S.LOOKING: "stored; the next segments",
            _S.FORKED: "stored; the last segments",
            _S.PAUSING: "conflict, or no answer",
            _S.FAILED: "refused, or too many attempts",
        },
        _S.PAUSING: {_S.LOOKING: "later"},
        _S.FORKED: {},
        _S.OVERTAKEN: {},
        _S.FAILED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    BEGIN = "the source was read"
    STORED = "the transaction was applied"
    PAUSE_OVER = "the pause is over"


@dataclass(frozen=True, slots=True)
class Looked:
    """Event: the nodes of `Look`."""

    nodes: Sequence[Versioned | None]


Event: TypeAlias = Signal | Looked | CallFailed


@dataclass(frozen=True, slots=True)
class Look:
    """Effect: read these nodes in one round trip; answer with `Looked`."""

    paths: tuple[str, ...]


Work: TypeAlias = Look | Store | Pause
Effect: TypeAlias = Work | Ended[bool]
"""`PAUSE_OVER` answers `Pause`.  The outcome is whether the fork is there, False if overtaken."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The segments of one transaction: their nodes, what they count, and the head after them."""

    ops: tuple[Op, ...]
    counts: Mapping[int, int]
    head: LogHead


class ForkRun(StepMachine[ForkState, Event, Work, bool]):
    """Makes one fork.

    Args:
        paths: the namespace's nodes.
        log: the fork, under an id that no other log has.
        segments: what it begins with: at least one segment, each with one extent at least, all of
            them cold.
        first_active: the position below which the source is truncated, in the first segment.
        removed_txid: the highest transaction id of what the source had before, or -1.
        settings: the fork's settings.
        schema: the schema of a typed log.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        paths: NamespacePaths,
        log: LogMetadata,
        segments: Sequence[LogSegment],
        *,
        first_active: tuple[int, int, int],
        removed_txid: int,
        settings: LogSettings,
        schema: LogSchema | None,
    ) -> None:
        self.state = ForkState.READY
        self._paths = paths
        self._own = own = paths.log_of(log.log_id)
        self._log = log
        start = LogHead(
            first_lssn=segments[0].lssn, first_active=first_active, removed_txid=removed_txid
        )
        self._steps = tuple(_steps_of(own, segments, start))
        extents = [extent for segment in segments for extent in segment.extents]
        assert all(extent.is_cold for extent in extents)
        assert len(extents) == sum(sum(step.counts.values()) for step in self._steps)
        show: list[Op] = [Create(paths.log(log.name), encode(log))]
        show += plan_settings(paths, log, None, settings)
        show += [] if schema is None else [Create(own.schema, encode(schema))]
        self._show = tuple(show)  # the part of the last transaction that shows the fork
        self._number = 0  # of the step that is next, or being stored
        self._version: int | None = None  # of the fork's head, as far as it is known
        self._attempted: bytes | None = None  # the head of the last attempt of this step
        self._attempts = Attempts(f"forking to log {log.name!r}", "to store a part of it")

    def handle(self, event: Event) -> Effect:
        """Take one event."""
        try:
            match event:
                case Signal.STORED:
                    return self._advance(0 if self._version is None else self._version + 1)
                case Signal.BEGIN | Signal.PAUSE_OVER:
                    return self._look()
                case Looked(nodes):
                    return self._looked(nodes)
                case CallFailed(error):
                    return self._call_failed(error)
                case _:
                    assert_never(event)
        except DLError as error:
            self._become(ForkState.FAILED)
            return Ended(error)

    def _look(self) -> Effect:
        self._become(ForkState.LOOKING)
        step = self._steps[self._number]
        staged = map(self._paths.staged_ledger, step.counts)
        return Look((self._own.head, self._paths.log(self._log.name), *staged))

    def _looked(self, nodes: Sequence[Versioned | None]) -> Effect:
        head, name, *staged = nodes
        if name is not None:
            found = decode(LogMetadata, name.value, source=self._paths.log(self._log.name))
            if found.log_id == self._log.log_id:
                return self._end(ForkState.FORKED)  # the last attempt's answer was lost
            raise LogExistsError(f"log {self._log.name!r} exists")
        # The whole head is compared: no other client writes this one, so it is our last attempt.
        if head is not None and head.value == self._attempted:
            return self._advance(head.version)
        if (None if head is None else head.version) != self._version:
            return self._end(ForkState.OVERTAKEN)
        puts: list[Op] = []
        for (ledger_id, count), node in zip(
            self._steps[self._number].counts.items(), staged, strict=True
        ):
            known = decode_node(self._paths, ledger_id, node)
            # Without an extent that refers to it the ledger may be removed at any moment.
            if known is None or not known.staged.extents:
                return self._end(ForkState.OVERTAKEN)
            puts.append(known.put(replace(known.staged, extents=known.staged.extents + count)))
        return self._store(puts)

    def _store(self, puts: Sequence[Op]) -> Effect:
        self._become(ForkState.STORING)
        step = self._steps[self._number]
        own, log = self._own, self._log
        listed = self._paths.deleted_log(log.log_id)
        value = self._attempted = encode(step.head)
        if self._version is None:
            ops: list[Op] = [Create(own.head, value)]
        else:
            ops = [Put(own.head, value, self._version)]
        ops += [*step.ops, *puts]
        if self._number == len(self._steps) - 1:
            ops += self._show
            ops += [Delete(listed)] if self._number else []
        elif not self._number:
            ops.append(Create(listed, encode(log)))
        return Store(tuple(ops))

    def _advance(self, version: int) -> Effect:
        self._number += 1
        self._version, self._attempted = version, None
        self._attempts = self._attempts.none()
        if self._number == len(self._steps):
            return self._end(ForkState.FORKED)
        return self._look()

    def _end(self, state: ForkState) -> Effect:
        self._become(state)
        return Ended(state is ForkState.FORKED)

    def _call_failed(self, error: DLError) -> Effect:
        if self.state is not ForkState.STORING:
            raise error
        self._attempts = self._attempts.failed(error)
        self._become(ForkState.PAUSING)
        return pause_after(error)

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert [step.head.deleted for step in self._steps[:-1]] == [True] * (len(self._steps) - 1)
        assert not self._steps[-1].head.deleted
        assert (self._version is None) == (self._number == 0)
        assert self._attempted or self.state not in (ForkState.STORING, ForkState.PAUSING)


def _steps_of(own: LogPaths, segments: Sequence[LogSegment], head: LogHead) -> Iterator[_Step]:
    """Yield the steps; the heads of all but the last are those of a deleted log."""
    ops: list[Op] = []
    counts: Counter[int] = Counter()
    for node_ops, extents, after in _nodes_of(own, segments, head):
        if ops and len(ops) + len(counts) + len(node_ops) + len(extents) > OPS_MAX:
            yield _Step(tuple(ops), counts, replace(head, deleted=True))
            ops, counts = [], Counter()
        head = after
        ops += node_ops
        counts.update(extent.ledger_id for extent in extents)
    yield _Step(tuple(ops), counts, head)


def _nodes_of(
    own: LogPaths, segments: Sequence[LogSegment], head: LogHead
) -> Iterator[tuple[list[Op], Sequence[Extent], LogHead]]:
    """Yield the nodes of all segments in order, each with its extents and the head after it."""
    for segment in segments:
        lssn, extents = segment.lssn, segment.extents
        # One is subtracted, so that the tail is never empty: the head after it needs a last extent.
        count = (len(extents) - 1) // CHUNK_EXTENTS_MAX
        chunked = Totals(entries=segment.removed_entries, records=segment.removed_records)
        for number in range(count):
            part = extents[number * CHUNK_EXTENTS_MAX : (number + 1) * CHUNK_EXTENTS_MAX]
            chunk = Chunk(
                first_entry_id=chunked.entries,
                first_sequence_id=segment.start_sequence_id + chunked.records,
                packed=pack(part),
            )
            chunked = chunked.plus(part)
            opened = OpenSegment(
                created_ms=segment.created_ms,
                start_sequence_id=segment.start_sequence_id,
                chunk_count=number + 1,
                chunked=chunked,
            )
            head = _after(replace(head, max_lssn=lssn, segment=opened), part, chunked.entries)
            ops: list[Op] = [] if number else [Create(own.segment(lssn))]
            yield [*ops, Create(own.chunk(lssn, number), encode(chunk))], part, head
        tail = extents[count * CHUNK_EXTENTS_MAX :]
        end = SegmentEnd(
            created_ms=segment.created_ms,
            completed_ms=segment.completed_ms,
            start_sequence_id=segment.start_sequence_id,
            chunk_count=count,
            chunked=chunked,
            packed=pack(tail),
        )
        path, value = own.segment(lssn), encode(end)
        next_id = segment.start_sequence_id + segment.closed_record_count
        head = replace(head, max_lssn=lssn, segment=None, next_sequence_id=next_id)
        head = _after(head, tail, segment.closed_entry_count)
        yield [Put(path, value, ANY_VERSION) if count else Create(path, value)], tail, head


def _after(head: LogHead, extents: Sequence[Extent], entries: int) -> LogHead:
    """Return the head after a segment's next extents, with which it has so many entries."""
    return replace(
        head,
        end=(head.max_lssn, entries),
        max_txid=max(head.max_txid, extents[-1].last_txid),
        last_timestamp_ms=max(head.last_timestamp_ms, extents[-1].last_timestamp_ms),
    )
