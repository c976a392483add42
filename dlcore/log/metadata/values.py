"""Metadata of logs, appends and staged ledgers: immutable values.

Each stored value is declared here once; `dlcore.metadata.stored` encodes it.  Values that are
written with every change (the head) or are numerous (segments, chunks) are positional.

A log's history is in three places, by age: chunks of its segments, which are written once; the tail
of the segment in progress, some extents in the head; and the open extent's ledger.  A change reads
and writes the head and, now and then, one new chunk, but never older parts.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from dlcore.base.config import LogSettings, QuorumConfig
from dlcore.base.errors import CorruptMetadataError, UnexpectedError
from dlcore.base.features import UNKNOWN_RELEASE, Release
from dlcore.base.ids import DLSN, LogId
from dlcore.log.metadata.segment import ColdExtent, Extent, LogSegment, SegmentState
from dlcore.metadata.stored import LAYOUT, Count, Number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TAIL_EXTENTS_MAX = 8
"""This many final extents in the head are moved to a chunk: measured, see benchmarks."""
CHUNK_EXTENTS_MAX = 64
"""An append of more extents than this makes several chunks."""
CHUNKS_PER_SEGMENT_MAX = 10_000
"""A segment with this many chunks is completed, whatever its size and age."""
MERGES_REMEMBERED = 16
"""The head names the segments of so many changes by merges and removals, the latest ones."""
COMMITTED_RUNS_MAX = 16
_CALENDAR_END_MS = 253_402_300_800_000
"""The year 10000, which Python's calendar does not have."""

Txid: TypeAlias = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
_Packed: TypeAlias = tuple[int, ...]

_INTS_PER_EXTENT = 10
_ASSIGNED, _OPEN, _STAMPED, _COLD = 1, 2, 4, 8


def pack(extents: Iterable[Extent]) -> _Packed:
    """Return extents as integers, mostly small: each is encoded as the difference to the last."""
    flat: list[int] = []
    ledger_id = end = txid = time_ms = 0
    for extent in extents:
        last = extent.last_entry_id
        flags = (_ASSIGNED if extent.txid_assigned else 0) | (_OPEN if last is None else 0)
        flags |= (_STAMPED if extent.stamped else 0) | (_COLD if extent.is_cold else 0)
        flat += (
            flags,
            extent.ledger_id - ledger_id,
            extent.first_entry_id - (end if extent.ledger_id == ledger_id else 0),
            0 if last is None else last - extent.first_entry_id,
            extent.record_count,
            extent.size_bytes,
            extent.first_txid - txid,
            extent.last_txid - extent.first_txid,
            extent.timestamp_floor_ms - time_ms,
            extent.last_timestamp_ms - extent.timestamp_floor_ms,
        )
        ledger_id, txid, time_ms = extent.ledger_id, extent.last_txid, extent.last_timestamp_ms
        end = extent.first_entry_id if last is None else last + 1
    return tuple(flat)


def unpack(flat: _Packed) -> tuple[Extent, ...]:
    """Invert `pack`; raise `CorruptMetadataError` if that is impossible."""
    if len(flat) % _INTS_PER_EXTENT:
        raise CorruptMetadataError(
            f"{len(flat)} integers, expected a multiple of {_INTS_PER_EXTENT} for extents"
        )
    extents: list[Extent] = []
    ledger_id = end = txid = time_ms = 0
    for start in range(0, len(flat), _INTS_PER_EXTENT):
        (flags, ledger, first, more, records, size, first_txid, txids, floor_ms, last_ms) = flat[
            start : start + _INTS_PER_EXTENT
        ]
        first += end if ledger == 0 and start else 0
        ledger_id, txid = ledger_id + ledger, txid + first_txid
        floor_ms += time_ms
        time_ms = floor_ms + last_ms
        numbers = (ledger_id, first, more, records, size)
        if min(numbers) < 0 or max(*numbers, first + more, txid + txids, time_ms) >= 2**63:
            raise CorruptMetadataError(f"an extent with a number below 0 or above 2**63-1: {flat}")
        extents.append(
            (ColdExtent if flags & _COLD else Extent)(
                ledger_id=ledger_id,
                first_entry_id=first,
                last_entry_id=None if flags & _OPEN else first + more,
                record_count=records,
                size_bytes=size,
                first_txid=txid,
                last_txid=txid + txids,
                txid_assigned=bool(flags & _ASSIGNED),
                timestamp_floor_ms=floor_ms,
                last_timestamp_ms=time_ms,
                stamped=bool(flags & _STAMPED),
            )
        )
        end = first if flags & _OPEN else first + more + 1
        txid += txids
    return tuple(extents)


class LogKey(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a log: each created log gets a new `log_id`, also under a reused name."""

    name: str
    log_id: LogId


class ForkOrigin(LogKey, frozen=True, kw_only=True):
    """The log that a fork was made of, by its name at that time, and the position `at`."""

    at: str


class LogMetadata(LogKey, frozen=True, kw_only=True):
    """The value of the name's node: a log's name, and the metadata fixed at its creation."""

    layout: int = LAYOUT
    created_ms: Count
    quorum: QuorumConfig
    """The quorum of its ledgers."""
    typed: bool = False
    """Whether it has a schema (`LogSchema`), which may change."""
    origin: ForkOrigin | None = None
    """The source of a fork, which may be gone."""


class StoredSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a log; there is no such node while the log has only the writers' settings."""

    layout: int = LAYOUT
    settings: LogSettings


class RetainedLog(LogKey, frozen=True, kw_only=True):
    """Lists a log whose settings have a retention or a tier: workers visit it now and then."""

    layout: int = LAYOUT


class Chunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Extents that left the head: written once, then replaced only by merges and removal.

    The first extent begins at entry `first_entry_id` of the segment, with `first_sequence_id`.  A
    merged chunk covers `covers` numbers: its own and the following ones, which have no nodes any
    more.
    """

    layout: int = LAYOUT
    covers: Number = 1
    first_entry_id: Count
    first_sequence_id: Count
    packed: _Packed

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Its extents, all final."""
        return unpack(self.packed)


class Totals(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sums over extents."""

    entries: Count = 0
    records: Count = 0
    size_bytes: Count = 0

    def plus(self, extents: Sequence[Extent]) -> Totals:
        """Return the sums with more extents."""
        return Totals(
            entries=self.entries + sum(extent.entry_count for extent in extents),
            records=self.records + sum(extent.record_count for extent in extents),
            size_bytes=self.size_bytes + sum(extent.size_bytes for extent in extents),
        )

    def minus(self, extents: Sequence[Extent]) -> Totals:
        """Return the sums without some extents."""
        less = Totals().plus(extents)
        return Totals(
            entries=self.entries - less.entries,
            records=self.records - less.records,
            size_bytes=self.size_bytes - less.size_bytes,
        )


class SegmentEnd(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A completed segment: chunks 0 … chunk_count - 1, with the sums `chunked`, then `packed`.

    The sums also count extents at the front that were removed.
    """

    layout: int = LAYOUT
    created_ms: Count
    completed_ms: Count
    start_sequence_id: Count
    chunk_count: Count
    chunked: Totals
    packed: _Packed

    @property
    def tail(self) -> tuple[Extent, ...]:
        """The extents that are in no chunk."""
        return unpack(self.packed)


class OpenSegment(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The segment in progress: chunks as in `SegmentEnd`, then the tail, whose last may be open."""

    created_ms: Count
    start_sequence_id: Count
    chunk_count: Count = 0
    chunked: Totals = Totals()
    packed: _Packed = ()

    @property
    def tail(self) -> tuple[Extent, ...]:
        """The newest extents."""
        return unpack(self.packed)

    @property
    def size_bytes(self) -> int:
        """Bytes in its final extents."""
        return self.chunked.size_bytes + sum(extent.size_bytes for extent in self.tail)


class LogHead(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The variable state of a log, with everything that the next change needs.

    Segments are numbered first_lssn … max_lssn without gaps; the last one is `segment` if it is in
    progress.  `end` is the position after the last record of a final extent.  Everything below
    `first_active` is truncated; the chunks below `first_chunk` of segment `first_lssn` are removed.
    `merges` counts the changes of stored extents by merges, and by a removal of some of a segment;
    `merged_lssns` are the segments of the latest ones.
    `name` is the log's name after a rename.  `producers_lssn` is the last segment in which a final
    extent has stamps of producers; 0 if there is none.  The last entry with a stamp is the last of
    its first `producers_entries` entries; 0: of all entries.  `removed_txid` is the highest
    transaction id of removed extents, -1 if none was removed since this is recorded.
    """

    layout: int = LAYOUT
    # Positional: a new field comes last and has a default, so that older values still parse.
    max_lssn: Count = 0
    sealed: bool = False
    deleted: bool = False
    max_txid: Txid = -1
    next_sequence_id: Count = 0
    last_timestamp_ms: Count = 0
    end: tuple[Number, Count] = (1, 0)
    first_active: tuple[Number, Count, Count] = (1, 0, 0)
    first_lssn: Number = 1
    first_chunk: Count = 0
    merges: Count = 0
    merged_lssns: tuple[Number, ...] = ()
    segment: OpenSegment | None = None
    name: str = ""
    producers_lssn: Count = 0
    producers_entries: Count = 0
    removed_txid: Txid = -1

    @property
    def end_dlsn(self) -> DLSN:
        """`end` as a position."""
        return DLSN(*self.end, 0)

    @property
    def first_active_dlsn(self) -> DLSN:
        """`first_active` as a position."""
        return DLSN(*self.first_active)

    @property
    def open_extent(self) -> Extent | None:
        """The extent that a writer is appending to, or was when it died."""
        if self.segment is None or not self.segment.packed:
            return None
        last = self.segment.tail[-1]
        return last if last.is_open else None

    def with_rewritten(self, lssn: int) -> LogHead:
        """Return the head after some stored extents of a segment were replaced or removed."""
        merged = (*self.merged_lssns, lssn)[-MERGES_REMEMBERED:]
        return replace(self, merges=self.merges + 1, merged_lssns=merged)

    def rewritten_since(self, merges: int) -> tuple[int, ...] | None:
        """Return the segments that changed so since the head had counted `merges`.

        None: these were too many, or the head is an older one, so any segment may have changed.
        """
        missed = self.merges - merges
        if not 0 <= missed <= len(self.merged_lssns):
            return None
        return self.merged_lssns[len(self.merged_lssns) - missed :]


class VersionedHead(msgspec.Struct, frozen=True, kw_only=True):
    """A log's head as it was read, and the version for a compare-and-set of it."""

    log: LogKey
    head: LogHead
    version: int

    @property
    def name(self) -> str:
        """The log's name."""
        return self.log.name

    def is_open_over(self, ledger_id: int) -> bool:
        """Return whether the log ends with an open extent over this ledger."""
        extent = self.head.open_extent
        return extent is not None and extent.ledger_id == ledger_id

    def with_head(self, head: LogHead) -> VersionedHead:
        """Return the stored value after `head` replaced this one."""
        return VersionedHead(log=self.log, head=head, version=self.version + 1)


class LogState(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent view of a log: the segments that are not wholly truncated, as of one head.

    Readers that do not need the oldest segments leave them out.  Readers that are far from the end
    know segments up to `known_lssn` only.  Otherwise the last segment is never missing, unless no
    segment of the log holds records.
    """

    log: LogKey
    head: LogHead
    version: int
    segments: tuple[LogSegment, ...]
    known_lssn: int | None = None

    def __post_init__(self) -> None:
        found = [segment.lssn for segment in self.segments]
        last = self.head.max_lssn if self.known_lssn is None else self.known_lssn
        if found != list(range(last - len(found) + 1, last + 1)):
            raise UnexpectedError(
                f"log {self.name!r}: its segments are {found}, expected consecutive numbers up to "
                f"{last}"
            )
        early = [s.lssn for s in self.segments[:-1] if s.state is SegmentState.IN_PROGRESS]
        if early:
            raise UnexpectedError(
                f"log {self.name!r}: segments {early} are in progress, not the last"
            )

    @property
    def name(self) -> str:
        """The log's name."""
        return self.log.name

    @property
    def first_active(self) -> DLSN:
        """The first position that is not truncated."""
        return self.head.first_active_dlsn

    def segment(self, lssn: int) -> LogSegment | None:
        """Return one of the segments."""
        if not self.segments or not self.segments[0].lssn <= lssn <= self.segments[-1].lssn:
            return None
        return self.segments[lssn - self.segments[0].lssn]


Turn: TypeAlias = Literal["refused", "free", "asked", "given"]


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a subscription that a client has seen: its version and the reader's token."""

    version: Count
    token: str


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a log's writer lock, or of a subscriber's; `owner` is for people.

    `token` names one acquisition, which was at `since_ms` (0: not known).  `turn` says whether an
    atomic append may change the log meanwhile.  ``refused``: no; ``free``: on demand; ``asked``: an
    append waits for its turn; ``given``: the holder has no extent open, and begins none until the
    turn is over.  `wanted_by` is a writer that waits for the lock: a holder that gives turns
    releases the lock for it.
    `release` is that of the holder.
    """

    layout: int = LAYOUT
    owner: str
    token: str
    turn: Turn = "refused"
    since_ms: Count = 0
    wanted_by: str = ""
    release: Release = UNKNOWN_RELEASE

    def described(self, client_id: str) -> str:
        """Return the holder and the time of acquisition, as text for the client of that id."""
        when = ""
        if 0 < self.since_ms < _CALENDAR_END_MS:
            since = datetime.fromtimestamp(self.since_ms / 1000, UTC)
            when = f" since {since:%Y-%m-%dT%H:%M:%SZ}"
        return f"{self.owner}{when}{', this client itself' * (self.owner == client_id)}"


class UpkeepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A log that has extents to merge, in its segments from `from_lssn` on."""

    layout: int = LAYOUT
    name: str
    log_id: LogId
    from_lssn: Number


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last version that an identity committed, and how far; `commits.py` decides by it.

    `token` names the append that wrote this.  `committed` appends of the version are in the logs.
    `run` is the run that appended or skipped last ("" for an appender that appends each version
    once), and `thread` the thread in it.  `seen` is how many of the version's appends the run has
    made.  `last_ns` is when the run began to commit the last one, by its own monotonic clock.
    `earlier` are the tokens of the run's appends before it.  `superseded` are the runs before it.
    `conflicting` says that two appends of one run have no order.  `logs` are digests of the ids of
    the version's logs, if they are known.  `committed_ms` is the wall clock's time of the last
    change, by which old records are removed.
    """

    layout: int = LAYOUT
    version: Count
    token: str
    committed: Count
    run: str
    thread: str = ""
    seen: Count
    last_ns: int
    earlier: tuple[str, ...] = ()
    superseded: tuple[str, ...] = ()
    conflicting: bool = False
    committed_ms: Count = 0
    logs: bytes | None = None


class StagedLedger(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger whose entries may belong to several extents, of several logs or of none yet.

    `owner` is the token of the process that fills it, "" once none does.  `extents` counts the
    extents of logs that refer to it.  `committed` are the ranges of entry ids that were committed
    to logs; none is committed twice.  Once the ledger is `settled`, no more of it is committed: it
    is no longer listed under its identity, and it is removed with its last extent.  If a merge took
    that extent, it is removed some time after `released_ms`.  `left_in` is the round that found
    that no process fills it, for appends that share staged ledgers.
    """

    layout: int = LAYOUT
    ledger_id: Count
    identity: str
    owner: str
    created_ms: Count
    extents: Count = 0
    committed: tuple[tuple[Count, Count], ...] = ()
    settled: bool = False
    released_ms: Count = 0
    left_in: str = ""

    def with_committed(self, extents: Sequence[tuple[int, int]]) -> StagedLedger | None:
        """Return it with more extents (first and last entry id); None if one was committed before.

        At most `COMMITTED_RUNS_MAX` ranges are kept: if there are more, the lowest gaps are closed.
        """
        taken = sorted([*self.committed, *extents])
        if any(start <= end for (_, end), (start, _) in pairwise(taken)):
            return None
        joined: list[tuple[int, int]] = []
        for start, end in taken:
            if joined and start == joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        while len(joined) > COMMITTED_RUNS_MAX:
            joined[:2] = [(joined[0][0], joined[1][1])]
        return replace(self, extents=self.extents + len(extents), committed=tuple(joined))

    def released(self, extents: int) -> StagedLedger:
        """Return the registration with `extents` extents fewer."""
        if extents > self.extents:
            raise UnexpectedError(
                f"staged ledger {self.ledger_id}: {extents} extents are given up, {self.extents} "
                "are counted"
            )
        return replace(self, extents=self.extents - extents)
