"""Plans every change of a log's metadata: from the head as read to the operations of one multi.

Rules that hold for all changes:

- Each change puts the head with the version that was read.  That version is the log's only
  compare-and-set token: of two plans made from one head, one is applied.
- At most the last segment is in progress, and only its last extent may be open.
- A segment that ends without any entry is forgotten and its number used again, so that numbers stay
  consecutive.
- The reads, writes and computation of a change do not depend on how much the log holds.  When the
  head has too many final extents, the same transaction moves them to a chunk.

Nothing here does I/O.  `LogStore` applies the operations and finds out the outcome after a lost
reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    ConfigurationError,
    EndOfStreamError,
    LogRenamedError,
    TransactionIdOutOfOrderError,
    UnexpectedError,
)
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.log.metadata.segment import Extent
from dlcore.log.metadata.values import (
    CHUNK_EXTENTS_MAX,
    CHUNKS_PER_SEGMENT_MAX,
    TAIL_EXTENTS_MAX,
    Chunk,
    LogHead,
    LogKey,
    LogMetadata,
    OpenSegment,
    RetainedLog,
    SegmentEnd,
    StoredSettings,
    VersionedHead,
    pack,
)
from dlcore.metadata.port import ANY_VERSION, Create, Delete, Op, Put
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.config import LogConfig
    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.log.typed.schema import LogSchema
    from dlcore.metadata.paths import LogPaths, NamespacePaths
    from dlcore.metadata.port import Versioned

_CHUNKS_PER_REQUEST = 8
"""A log asks for its upkeep after this many more chunks: that is 64 extents at least."""


@dataclass(frozen=True, slots=True)
class Change:
    """Operations of one multi, and the log's head after they are applied."""

    ops: tuple[Op, ...]
    after: VersionedHead


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """When a segment is completed and the next one started: by size or by age."""

    size_bytes_max: int
    age_max_ms: int

    @classmethod
    def of(cls, config: LogConfig) -> SegmentLimits:
        """Return the limits that a log's configuration sets."""
        return cls(
            size_bytes_max=config.segment_bytes_max,
            age_max_ms=int(config.segment_age_max_s * 1000),
        )

    def is_reached(self, *, size_bytes: int, age_ms: int) -> bool:
        """Return whether a segment or ledger of this size and age takes nothing more."""
        return size_bytes >= self.size_bytes_max or age_ms >= self.age_max_ms

    def is_full(self, segment: OpenSegment, *, size_bytes: int, now_ms: int) -> bool:
        """Return whether staged extents must go to another segment."""
        return segment.chunk_count >= CHUNKS_PER_SEGMENT_MAX or self.is_reached(
            size_bytes=size_bytes, age_ms=now_ms - segment.created_ms
        )


class _Draft:
    """A change under construction: the future head, and the other nodes to write."""

    def __init__(self, paths: LogPaths, at: VersionedHead) -> None:
        self._paths = paths
        self._at = at
        self._ops: list[Op] = []
        head = at.head
        self._existing = (
            head.max_lssn if head.segment is not None and head.segment.chunk_count else None
        )
        self.head = head
        self._tail = list(head.segment.tail) if head.segment is not None else []

    @property
    def segment(self) -> OpenSegment | None:
        """The segment in progress, without its tail."""
        return self.head.segment

    @property
    def tail(self) -> list[Extent]:
        return self._tail

    @property
    def size_bytes(self) -> int:
        """Bytes in the final extents of the segment in progress."""
        assert self.segment is not None
        return self.segment.chunked.size_bytes + sum(extent.size_bytes for extent in self._tail)

    def open_segment(self, *, now_ms: int) -> None:
        assert self.segment is None
        segment = OpenSegment(created_ms=now_ms, start_sequence_id=self.head.next_sequence_id)
        self.head = replace(self.head, max_lssn=self.head.max_lssn + 1, segment=segment)

    def begin_extent(self, ledger_id: int) -> None:
        self._tail.append(Extent(ledger_id=ledger_id, first_entry_id=0, last_entry_id=None))

    def append(self, extent: Extent) -> None:
        """Add a final extent to the segment in progress."""
        head = self.head
        lssn = head.max_lssn
        entries = head.end[1] if head.end[0] == lssn else 0
        self._tail.append(extent)
        self.head = replace(
            head,
            end=(lssn, entries + extent.entry_count),
            next_sequence_id=head.next_sequence_id + extent.record_count,
            max_txid=max(head.max_txid, extent.last_txid),
            last_timestamp_ms=max(head.last_timestamp_ms, extent.last_timestamp_ms),
        )
        if len(self._tail) >= CHUNK_EXTENTS_MAX:
            self._move_to_chunk()

    def _move_to_chunk(self) -> None:
        segment, lssn = self.segment, self.head.max_lssn
        assert segment is not None
        extents, self._tail = self._tail, []
        chunk = Chunk(
            first_entry_id=segment.chunked.entries,
            first_sequence_id=segment.start_sequence_id + segment.chunked.records,
            packed=pack(extents),
        )
        if self._existing != lssn:
            self._ops.append(Create(self._paths.segment(lssn)))
            self._existing = lssn
        path = self._paths.chunk(lssn, segment.chunk_count)
        self._ops.append(Create(path, encode(chunk)))
        self.head = replace(
            self.head,
            segment=replace(
                segment,
                chunk_count=segment.chunk_count + 1,
                chunked=segment.chunked.plus(extents),
            ),
        )

    def complete(self, *, now_ms: int) -> None:
        """Complete the segment in progress, or forget it if it holds nothing."""
        segment, lssn = self.segment, self.head.max_lssn
        assert segment is not None
        if not self._tail and segment.chunk_count == 0:
            self.head = replace(self.head, max_lssn=lssn - 1, segment=None)
            return
        value = encode(
            SegmentEnd(
                created_ms=segment.created_ms,
                completed_ms=now_ms,
                start_sequence_id=segment.start_sequence_id,
                chunk_count=segment.chunk_count,
                chunked=segment.chunked,
                packed=pack(self._tail),
            )
        )
        path = self._paths.segment(lssn)
        exists = self._existing == lssn
        # Any version: that of the head guards all nodes of the log.
        self._ops.append(Put(path, value, ANY_VERSION) if exists else Create(path, value))
        self._tail = []
        self.head = replace(self.head, segment=None)

    def finish(self) -> Change:
        if self.segment is not None:
            # A chunk is written once, and an open extent is not final: the tail moves as a whole,
            # when its last extent has ended.
            closed = self._tail[:-1] if self._tail and self._tail[-1].is_open else self._tail
            if len(closed) >= TAIL_EXTENTS_MAX and closed is self._tail:
                self._move_to_chunk()
            segment = replace(self.segment, packed=pack(self._tail))
            self.head = replace(self.head, segment=segment)
        value = encode(self.head)
        ops = (*self._ops, Put(self._paths.head, value, self._at.version))
        return Change(ops, self._at.with_head(self.head))


def plan_create(
    paths: NamespacePaths, log: LogMetadata, settings: LogSettings, schema: LogSchema | None = None
) -> tuple[Op, ...]:
    """Return the operations that create an empty log, with a schema if it is typed."""
    assert log.typed is (schema is not None)
    own = paths.log_of(log.log_id)
    return (
        Create(paths.log(log.name), encode(log)),
        Create(own.head, encode(LogHead())),
        *plan_settings(paths, log, None, settings),
        *(() if schema is None else (Create(own.schema, encode(schema)),)),
    )


def plan_settings(
    paths: NamespacePaths,
    log: LogKey,
    node: Versioned | None,
    settings: LogSettings,
    *,
    known: LogSettings | None = None,
) -> tuple[Op, ...]:
    """Return the operations that store a log's settings; `node` holds the old ones.

    `known` replaces the old settings if the node is damaged: as much as the list of retained logs
    says.
    """
    path = paths.log_of(log.log_id).settings
    value = encode(StoredSettings(settings=settings))
    ops: list[Op] = []
    had = LogSettings()
    if node is not None:
        had = known or decode(StoredSettings, node.value, source=path).settings
        is_gone = settings == LogSettings()
        ops.append(Delete(path, node.version) if is_gone else Put(path, value, node.version))
    elif settings != LogSettings():
        ops.append(Create(path, value))
    listed = paths.retained_log(log.log_id)
    if settings.needs_visits and not had.needs_visits:
        ops.append(Create(listed, encode(RetainedLog(name=log.name, log_id=log.log_id))))
    elif had.needs_visits and not settings.needs_visits:
        ops.append(Delete(listed))
    return tuple(ops)


def plan_start(
    paths: LogPaths,
    at: VersionedHead,
    *,
    ledger_id: int,
    now_ms: int,
    closing: Extent | None = None,
    limits: SegmentLimits | None = None,
) -> Change:
    """Start the next segment with an open extent over `ledger_id`; complete the one in progress.

    `closing` is the final form of the open extent of the segment in progress.  Without it, and with
    `limits`, a segment in progress that is not full is continued with the new extent.

    Raises:
        EndOfStreamError: the log is sealed.
    """
    require_unsealed(at)
    assert closing is not None or at.head.open_extent is None
    draft = _Draft(paths, at)
    segment = draft.segment
    if (
        limits is None
        or closing is not None
        or segment is None
        or limits.is_full(segment, size_bytes=draft.size_bytes, now_ms=now_ms)
    ):
        _complete_last(draft, closing, now_ms=now_ms)
        draft.open_segment(now_ms=now_ms)
    draft.begin_extent(ledger_id)
    return draft.finish()


def plan_pause(paths: LogPaths, at: VersionedHead, *, closing: Extent) -> Change:
    """Close the open extent, and leave its segment in progress: others may append to it."""
    draft = _Draft(paths, at)
    _close_last(draft, closing)
    return draft.finish()


def plan_complete(
    paths: LogPaths,
    at: VersionedHead,
    *,
    now_ms: int,
    closing: Extent | None,
    empty_ledger_id: int | None = None,
    seal: bool = False,
) -> Change:
    """Complete the segment in progress, if there is one, and `seal` the log.

    Args:
        paths: the log's paths.
        at: the log as it was read.
        now_ms: the present time.
        closing: the final form of the segment's open extent, if it has one that holds entries.
        empty_ledger_id: a closed ledger without entries: an open extent over it is dropped.
        seal: whether to seal the log.

    Raises:
        UnexpectedError: neither `closing` nor `empty_ledger_id` is about the open extent.
    """
    draft = _Draft(paths, at)
    _complete_last(draft, closing, now_ms=now_ms, empty_ledger_id=empty_ledger_id)
    if seal:
        draft.head = replace(draft.head, sealed=True)
    return draft.finish()


def _complete_last(
    draft: _Draft, closing: Extent | None, *, now_ms: int, empty_ledger_id: int | None = None
) -> None:
    if draft.segment is None:
        assert closing is None
        return
    if closing is not None:
        _close_last(draft, closing)
    elif draft.tail and draft.tail[-1].is_open:
        extent = draft.tail.pop()
        if extent.ledger_id != empty_ledger_id:
            raise UnexpectedError(
                f"segment {draft.head.max_lssn} cannot be completed without ledger "
                f"{extent.ledger_id}, which is open and may hold records"
            )
    draft.complete(now_ms=now_ms)


def _close_last(draft: _Draft, closing: Extent) -> None:
    """Replace the open extent by its final form."""
    extent = draft.tail.pop()
    assert (extent.is_open, extent.ledger_id) == (True, closing.ledger_id)
    draft.append(closing)
    if closing.stamped:
        lssn, entries = draft.head.end
        draft.head = replace(draft.head, producers_lssn=lssn, producers_entries=entries)


def require_unsealed(at: VersionedHead) -> None:
    """Raise `EndOfStreamError` if no record can follow."""
    if at.head.sealed:
        raise EndOfStreamError(f"log {at.name!r} is sealed: no record can follow")


def plan_append(
    paths: LogPaths,
    at: VersionedHead,
    extents: Sequence[StagedExtent],
    *,
    now_ms: int,
    limits: SegmentLimits,
    replaces: bool = False,
) -> tuple[Change, DLSN, DLSN]:
    """Append staged `extents` in the given order; return the change and the range of positions.

    With `replaces` the same change truncates everything that the log held before.

    Raises:
        EndOfStreamError: the log is sealed.
        TransactionIdOutOfOrderError: an extent begins below a transaction id that precedes it.
    """
    require_unsealed(at)
    assert extents
    assert at.head.open_extent is None
    draft = _Draft(paths, at)
    first: DLSN | None = None
    for staged in extents:
        extent = _extent_of(at.name, staged, draft.head, now_ms=now_ms)
        segment = draft.segment
        if segment is not None and limits.is_full(
            segment, size_bytes=draft.size_bytes, now_ms=now_ms
        ):
            draft.complete(now_ms=now_ms)
        if draft.segment is None:
            draft.open_segment(now_ms=now_ms)
        draft.append(extent)
        end = draft.head.end_dlsn
        first = first or DLSN(end.lssn, end.entry_id - extent.entry_count, 0)
    assert first is not None
    if replaces:
        draft.head = replace(draft.head, first_active=(first.lssn, first.entry_id, first.slot_id))
    return draft.finish(), first, end


def _extent_of(log: str, staged: StagedExtent, head: LogHead, *, now_ms: int) -> Extent:
    if staged.has_txids:
        first, last = staged.first_txid, staged.last_txid
        if first < head.max_txid:
            raise TransactionIdOutOfOrderError(
                f"log {log!r}: staged records begin with transaction id {first}, lower than "
                f"{head.max_txid}, which the log already holds"
            )
    else:
        first = last = min(max(now_ms, head.max_txid, 0), TXID_MAX)
    floor_ms = head.last_timestamp_ms
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


def lssn_to_merge(before: LogHead, after: LogHead) -> int | None:
    """Return the segment for which a commit asks for upkeep; None if it is not time.

    It is time when a segment is completed, and after a number of chunks: not with each batch.
    """
    segment = before.segment
    if segment is None:
        return None
    if after.max_lssn > before.max_lssn or after.segment is None:
        return before.max_lssn
    count = after.segment.chunk_count
    is_time = segment.chunk_count // _CHUNKS_PER_REQUEST < count // _CHUNKS_PER_REQUEST
    return after.max_lssn if is_time else None


def plan_empty(paths: LogPaths, at: VersionedHead) -> tuple[Op, ...]:
    """Return the operations that truncate everything in a log: a replacing append of no records.

    Raises:
        EndOfStreamError: the log is sealed.
    """
    require_unsealed(at)
    change = plan_truncate(paths, at, at.head.end_dlsn)
    return () if change is None else change.ops


def plan_truncate(paths: LogPaths, at: VersionedHead, dlsn: DLSN) -> Change | None:
    """Truncate everything below `dlsn`, which is not beyond the log's end; None: no change."""
    head = at.head
    # The end of the log is the end of its last segment.  Said as the next segment's beginning, it
    # lets the removal take that one whole.
    if head.segment is None and dlsn == head.end_dlsn and head.max_lssn:
        dlsn = DLSN(head.max_lssn + 1, 0, 0)
    if dlsn <= head.first_active_dlsn:
        return None
    draft = _Draft(paths, at)
    draft.head = replace(head, first_active=(dlsn.lssn, dlsn.entry_id, dlsn.slot_id))
    return draft.finish()


def plan_reset_txid(paths: LogPaths, at: VersionedHead, txid: int) -> Change | None:
    """Let transaction ids follow `txid`, in a log without records; None: they do already.

    Raises:
        ConfigurationError: there are records, which no lower id could follow, or a writer.
    """
    head = at.head
    if head.open_extent is not None:
        raise ConfigurationError(
            f"log {at.name!r} has a writer, or a segment of a dead writer: close the writer, or "
            "recover the log first"
        )
    if head.first_active_dlsn < head.end_dlsn:
        raise ConfigurationError(
            f"log {at.name!r} holds records from {head.first_active_dlsn} to {head.end_dlsn}, "
            "and they are found by their transaction ids: copy records that are still needed, and "
            f"truncate the log to {head.end_dlsn} first"
        )
    if head.max_txid == txid:
        return None
    draft = _Draft(paths, at)
    draft.head = replace(head, max_txid=txid)
    return draft.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk of a segment to remove, or the rest of the segment after its chunks are removed.

    For the rest `chunk` is None; its node exists if the segment is completed or had chunks.  If
    only some extents of a node go, `left` is the node without them, and the piece is the last one.
    """

    lssn: int
    chunk: int | None
    extents: tuple[Extent, ...]
    covers: int = 1
    has_node: bool = True
    left: Chunk | SegmentEnd | None = None


def plan_remove(
    paths: LogPaths, at: VersionedHead, pieces: Sequence[Piece], releases: Sequence[Op]
) -> Change:
    """Remove the first pieces of the log, which are truncated or belong to a deleted log.

    `releases` are the operations that release the ledgers of their extents.
    """
    head = at.head
    lssn, chunk, segment = head.first_lssn, head.first_chunk, head.segment
    ops: list[Op] = []
    for piece in pieces:
        assert piece.lssn == lssn
        if piece.left is not None:
            number = piece.chunk
            path = paths.segment(lssn) if number is None else paths.chunk(lssn, number)
            ops.append(Put(path, encode(piece.left), ANY_VERSION))
            break
        if piece.chunk is not None:
            assert piece.chunk == chunk
            ops.append(Delete(paths.chunk(lssn, chunk)))
            chunk += piece.covers
            continue
        if piece.has_node:
            ops.append(Delete(paths.segment(lssn)))
        if lssn == head.max_lssn:
            segment = None
        lssn, chunk = lssn + 1, 0
    after = replace(
        head,
        first_lssn=lssn,
        first_chunk=chunk,
        first_active=max(head.first_active, (lssn, 0, 0)),
        segment=segment,
        removed_txid=max(
            head.removed_txid, *(each.last_txid for piece in pieces for each in piece.extents), -1
        ),
    )
    if pieces and pieces[-1].lssn == lssn:  # readers know extents of it that have gone
        after = after.with_rewritten(lssn)
    put = Put(paths.head, encode(after), at.version)
    return Change((*ops, *releases, put), at.with_head(after))


def plan_delete(paths: NamespacePaths, log: LogMetadata, at: VersionedHead) -> tuple[Op, ...]:
    """Return the operations that delete a log and free its name; the caller holds the writer lock.

    The log's ledgers and nodes are removed later, by the list of deleted logs.

    Raises:
        LogRenamedError: the log has another name than `log` says.
    """
    require_name(log, at.head)
    own = paths.log_of(log.log_id)
    # The head stays, for it names what the sweep of deleted logs has to remove.
    head = replace(at.head, deleted=True)
    return (
        Put(own.head, encode(head), at.version),
        Delete(own.lock),
        Delete(paths.log(log.name)),
        Create(paths.deleted_log(log.log_id), encode(log)),
    )


def plan_rename(
    paths: NamespacePaths, log: LogMetadata, at: VersionedHead, name: str
) -> tuple[LogMetadata, tuple[Op, ...]]:
    """Return the log under its new name, and the operations that give it this name.

    Everything else of the log is stored below its id.  Clients that know the log by an older name
    find the new one in the head.  If two renames are planned from one head, one of them is applied.

    Raises:
        LogRenamedError: the log has another name than `log` says.
    """
    require_name(log, at.head)
    head = replace(at.head, name=name)
    renamed = replace(log, name=name)
    ops = (
        Put(paths.log_of(log.log_id).head, encode(head), at.version),
        Delete(paths.log(log.name)),
        Create(paths.log(name), encode(renamed)),
    )
    return renamed, ops


def require_name(log: LogKey, head: LogHead) -> None:
    """Raise `LogRenamedError` if the log has another name than `log` says."""
    if head.name not in ("", log.name):
        raise LogRenamedError(
            f"log {log.name!r} is called {head.name!r} now (id {log.log_id}): open it by that name"
        )
