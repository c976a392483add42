"""Every change of a log's metadata, planned: from the state read to the operations of one multi.

Rules that hold for all of them:

- A change that touches the segment list also puts ``max_lssn`` with the version that was read.
  That
  version is the log's only compare-and-set token: of two plans made from one state, one is applied.
- At most the last segment is in progress, and only its last extent may be open.
- A segment that ends without any entry is removed and its number used again, so that numbers stay
  consecutive; unless it is the only one left that knows the log's next sequence id.

Nothing here does I/O.  `LogStore` applies the operations; a lost reply is classified there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlcore.errors import EndOfStreamError, TransactionIdOutOfOrderError, UnexpectedError
from dlcore.ids import DLSN, TXID_MAX
from dlcore.log import codec
from dlcore.log.metadata import LogMetadata, LogState, MaxLssn
from dlcore.log.segment import (
    EXTENTS_PER_SEGMENT_MAX,
    Extent,
    LogSegment,
    SegmentState,
    Truncation,
)
from dlcore.metadata.port import ANY_VERSION, Create, Delete, Op, Put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.scan import StagedExtent
    from dlcore.metadata.paths import LogPaths


@dataclass(frozen=True, slots=True)
class Change:
    """Operations of one multi, and the log's state once they are applied."""

    ops: tuple[Op, ...]
    state: LogState


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """When a segment is completed and the next one started: by size or by age."""

    size_bytes_max: int
    age_max_ms: int

    def is_full(self, segment: LogSegment, *, now_ms: int) -> bool:
        """Return whether staged extents must go to another segment."""
        return (
            len(segment.extents) >= EXTENTS_PER_SEGMENT_MAX
            or segment.closed_size_bytes >= self.size_bytes_max
            or now_ms - segment.created_ms >= self.age_max_ms
        )


class _Draft:
    """A change being put together: the log's state as it will be, and what to write for it."""

    def __init__(self, paths: LogPaths, state: LogState) -> None:
        self._paths = paths
        self._before = state
        self._segments = {segment.lssn: segment for segment in state.segments}
        self._existing = frozenset(self._segments)
        self._touched: set[int] = set()
        self.max_lssn = state.max_lssn
        self.max_txid = state.max_txid

    @property
    def last(self) -> LogSegment | None:
        return self._segments.get(self.max_lssn.max_lssn)

    def put(self, segment: LogSegment) -> None:
        self._segments[segment.lssn] = segment
        self._touched.add(segment.lssn)
        self.max_lssn = replace(self.max_lssn, max_lssn=max(self.max_lssn.max_lssn, segment.lssn))

    def remove(self, lssn: int) -> None:
        del self._segments[lssn]
        self._touched.add(lssn)
        if lssn == self.max_lssn.max_lssn:
            self.max_lssn = replace(self.max_lssn, max_lssn=lssn - 1)

    def finish(self) -> Change:
        ops = [op for lssn in sorted(self._touched) if (op := self._op_of(lssn)) is not None]
        ops.append(
            Put(self._paths.max_lssn, codec.encode_max_lssn(self.max_lssn), self._before.version)
        )
        if self.max_txid != self._before.max_txid:
            value = codec.encode_max_txid(self.max_txid)
            ops.append(Put(self._paths.max_txid, value, ANY_VERSION))
        state = replace(
            self._before,
            max_lssn=self.max_lssn,
            version=self._before.version + 1,
            max_txid=self.max_txid,
            segments=tuple(self._segments[lssn] for lssn in sorted(self._segments)),
        )
        return Change(tuple(ops), state)

    def _op_of(self, lssn: int) -> Op | None:
        path = self._paths.segment(lssn)
        segment = self._segments.get(lssn)
        if segment is None:
            return Delete(path) if lssn in self._existing else None
        value = codec.encode_segment(segment)
        return Put(path, value, ANY_VERSION) if lssn in self._existing else Create(path, value)


def plan_create(paths: LogPaths, metadata: LogMetadata) -> tuple[Op, ...]:
    """Return the operations that create an empty log."""
    return (
        Create(paths.node, codec.encode_log(metadata)),
        Create(paths.max_lssn, codec.encode_max_lssn(MaxLssn(max_lssn=0))),
        Create(paths.max_txid, codec.encode_max_txid(-1)),
        Create(paths.segments),
    )


def plan_start(
    paths: LogPaths, state: LogState, *, ledger_id: int, now_ms: int, closing: Extent | None = None
) -> Change:
    """Start the next segment with an open extent over `ledger_id`; complete the one in progress.

    `closing` is the final form of the open extent of the segment in progress.

    Raises:
        EndOfStreamError: the log is sealed.
    """
    require_unsealed(state)
    assert closing is not None or state.open_segment is None
    draft = _Draft(paths, state)
    _complete_last(draft, closing, now_ms=now_ms)
    extent = Extent(ledger_id=ledger_id, first_entry_id=0, last_entry_id=None)
    draft.put(_next_segment(draft, (extent,), now_ms=now_ms))
    return draft.finish()


def plan_complete(
    paths: LogPaths,
    state: LogState,
    *,
    now_ms: int,
    closing: Extent | None,
    empty_ledger_id: int | None = None,
    seal: bool = False,
) -> Change:
    """Complete the segment in progress, if there is one, and `seal` the log.

    Args:
        paths: the log's.
        state: the log as it was read.
        now_ms: the present time.
        closing: the final form of the segment's open extent, if it has one that holds entries.
        empty_ledger_id: a closed ledger without entries: an open extent over it is dropped.
        seal: let nothing follow.

    Raises:
        UnexpectedError: there is an open extent of which the caller says nothing.
    """
    draft = _Draft(paths, state)
    _complete_last(draft, closing, now_ms=now_ms, empty_ledger_id=empty_ledger_id)
    if seal:
        draft.max_lssn = replace(draft.max_lssn, sealed=True)
    return draft.finish()


def _complete_last(
    draft: _Draft, closing: Extent | None, *, now_ms: int, empty_ledger_id: int | None = None
) -> None:
    last = draft.last
    if last is None or last.state is SegmentState.COMPLETED:
        assert closing is None
        return
    extents = last.closed_extents
    if closing is not None:
        assert last.has_open_extent
        assert last.extents[-1].ledger_id == closing.ledger_id
        extents = (*extents, closing)
        draft.max_txid = max(draft.max_txid, closing.last_txid)
    elif last.has_open_extent and last.extents[-1].ledger_id != empty_ledger_id:
        raise UnexpectedError(
            f"segment {last.lssn} cannot be completed without ledger {last.extents[-1].ledger_id}, "
            "which is open and may hold records"
        )
    is_first = last.lssn == min(draft._segments)
    if not extents and not (is_first and last.start_sequence_id > 0):
        draft.remove(last.lssn)
        return
    draft.put(replace(last, extents=extents).completed(now_ms=now_ms))


def _next_segment(draft: _Draft, extents: tuple[Extent, ...], *, now_ms: int) -> LogSegment:
    last = draft.last
    assert last is None or last.state is SegmentState.COMPLETED
    sequence_id = 0 if last is None else last.start_sequence_id + last.closed_record_count
    return LogSegment(
        lssn=draft.max_lssn.max_lssn + 1,
        state=SegmentState.IN_PROGRESS,
        created_ms=now_ms,
        start_sequence_id=sequence_id,
        extents=extents,
    )


def require_unsealed(state: LogState) -> None:
    """Raise `EndOfStreamError` if no record can follow."""
    if state.max_lssn.sealed:
        raise EndOfStreamError(f"log {state.name!r} is sealed: no record can follow")


def plan_append(
    paths: LogPaths,
    state: LogState,
    extents: Sequence[StagedExtent],
    *,
    now_ms: int,
    limits: SegmentLimits,
) -> tuple[Change, DLSN, DLSN]:
    """Append staged `extents` in the given order; return the change and the range of positions.

    Raises:
        EndOfStreamError: the log is sealed.
        TransactionIdOutOfOrderError: an extent begins below a transaction id that precedes it.
    """
    require_unsealed(state)
    assert extents
    assert state.open_segment is None
    draft = _Draft(paths, state)
    timestamp_ms = state.last_timestamp_ms
    first: DLSN | None = None
    for staged in extents:
        extent = _extent_of(state.name, staged, draft.max_txid, timestamp_ms, now_ms=now_ms)
        segment = _segment_for_append(draft, limits, now_ms=now_ms)
        first = first or DLSN(segment.lssn, segment.closed_entry_count, 0)
        segment = replace(segment, extents=(*segment.extents, extent))
        draft.put(segment)
        draft.max_txid = extent.last_txid
        timestamp_ms = extent.last_timestamp_ms
        end = DLSN(segment.lssn, segment.closed_entry_count, 0)
    assert first is not None
    return draft.finish(), first, end


def _segment_for_append(draft: _Draft, limits: SegmentLimits, *, now_ms: int) -> LogSegment:
    last = draft.last
    if last is not None and last.state is SegmentState.IN_PROGRESS:
        if not limits.is_full(last, now_ms=now_ms):
            return last
        _complete_last(draft, None, now_ms=now_ms)
    return _next_segment(draft, (), now_ms=now_ms)


def _extent_of(
    log: str, staged: StagedExtent, max_txid: int, floor_ms: int, *, now_ms: int
) -> Extent:
    if staged.has_txids:
        first, last = staged.first_txid, staged.last_txid
        if first < max_txid:
            raise TransactionIdOutOfOrderError(
                f"log {log!r}: staged records begin with transaction id {first}, lower than "
                f"{max_txid}, which the log already holds"
            )
    else:
        first = last = min(max(now_ms, max_txid, 0), TXID_MAX)
    return Extent(
        ledger_id=staged.ledger_id,
        first_entry_id=staged.first_entry_id,
        last_entry_id=staged.last_entry_id,
        record_count=staged.record_count,
        size_bytes=staged.size_bytes,
        first_txid=first,
        last_txid=last,
        txid_assigned=not staged.has_txids,
        timestamp_floor_ms=floor_ms,
        last_timestamp_ms=max(floor_ms, staged.last_timestamp_ms),
    )


def plan_truncate(paths: LogPaths, state: LogState, dlsn: DLSN) -> Change | None:
    """Truncate all below `dlsn`, which is not beyond the log's end; None: nothing changes."""
    if dlsn <= state.first_active:
        return None
    draft = _Draft(paths, state)
    for segment in state.segments:
        if segment.truncation is Truncation.TRUNCATED or segment.lssn > dlsn.lssn:
            continue
        is_passed = segment.state is SegmentState.COMPLETED and (
            segment.lssn < dlsn.lssn or dlsn.entry_id >= segment.closed_entry_count
        )
        if is_passed:
            draft.put(replace(segment, truncation=Truncation.TRUNCATED))
        elif dlsn > segment.min_active and segment.lssn == dlsn.lssn:
            partly = replace(
                segment,
                truncation=Truncation.PARTIALLY_TRUNCATED,
                min_active_entry_id=dlsn.entry_id,
                min_active_slot_id=dlsn.slot_id,
            )
            draft.put(partly)
    return draft.finish()


def removable_segments(state: LogState) -> tuple[LogSegment, ...]:
    """Return the truncated segments whose data can go.

    The last segment stays whatever its truncation: it knows the log's next sequence id.
    """
    return tuple(s for s in state.segments[:-1] if s.truncation is Truncation.TRUNCATED)


def plan_remove(paths: LogPaths, state: LogState, lssns: Sequence[int]) -> Change:
    """Remove the nodes of segments whose ledgers are gone."""
    draft = _Draft(paths, state)
    for lssn in lssns:
        draft.remove(lssn)
    return draft.finish()


def plan_delete(paths: LogPaths, state: LogState) -> tuple[Op, ...]:
    """Return the operations that delete the log's nodes, the writer lock (held by us) too."""
    return (
        *(Delete(paths.segment(segment.lssn)) for segment in state.segments),
        Delete(paths.segments),
        Delete(paths.max_lssn, state.version),
        Delete(paths.max_txid),
        Delete(paths.lock),
        Delete(paths.node),
    )
