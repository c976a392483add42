"""Takes snapshots of a log, and finds positions in them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.background import together
from dlcore.base.config import require_kind
from dlcore.base.errors import LedgerNotFoundError
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField, RecordPlace
from dlcore.log.entries.batches import first_row_not_less
from dlcore.log.entries.body import EntryHeader, decode_entry_batch, decode_entry_header
from dlcore.log.entries.encryption import EntryDecryptor
from dlcore.log.metadata.history import LogHistory
from dlcore.log.metadata.values import LogMetadata, VersionedHead
from dlcore.log.reading.cursor import truncated_away
from dlcore.log.reading.scan import ExtentView, LogSnapshot, SegmentView
from dlcore.log.recovery import bounded_extent, read_frame, read_header
from dlcore.log.typed.arrow import entry_schemas
from dlcore.metadata.one_node import persistently
from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.reading.reader import LedgerReader
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import Extent, LogSegment
    from dlcore.log.metadata.values import LogKey, LogState
    from dlcore.log.typed.schema import LogSchema
    from dlcore.metadata.port import Unsubscribe

_PLACES_AT_ONCE = 64
_GUESSES_MAX = 4
"""Guesses at a record's entry by proportion; after these the search halves the rest."""


class LogFollower:
    """Takes snapshots of one log, each from the last one and the later changes."""

    def __init__(self, context: LogContext, log: LogKey, *, from_lssn: int = 1) -> None:
        self._context = context
        self.log = log
        self._from_lssn = from_lssn
        self._history = LogHistory(context.logs, log)
        self._views: dict[int, tuple[LogSegment, SegmentView]] = {}
        self._state: LogState | None = None
        self._snapshot: LogSnapshot | None = None
        self._watches: list[Unsubscribe] = []
        self.heard = 0
        """Number of change notifications so far; a head read from now on reflects all of them."""
        self._covered = -1  # the notifications that the snapshot reflects

    @property
    def segment_count(self) -> int:
        """How many segments it keeps of the last snapshot."""
        return len(self._views)

    def watch(self) -> None:
        """Watch for changes, so that `unchanged` can answer."""
        if not self._watches:
            paths = self._context.logs.paths_of(self.log)
            watched = [paths.head, paths.schema] if self._is_typed else [paths.head]
            watch = self._context.store.watch
            self._watches = [watch(path, self._mark, children=False) for path in watched]
            self._mark()  # earlier changes were not notified

    @property
    def _is_typed(self) -> bool:
        return isinstance(self.log, LogMetadata) and self.log.typed

    def _mark(self) -> None:
        self.heard += 1

    def close(self) -> None:
        """Stop watching."""
        watches, self._watches = self._watches, []
        for unwatch in watches:
            unwatch()

    def unchanged(self) -> LogSnapshot | None:
        """Return the last snapshot if no change was notified since; for watched logs."""
        if self._snapshot is None or not (self._is_final and self._is_current):
            return None
        is_current = self._snapshot.addresses is self._context.registry.known_addresses
        return self._snapshot if is_current else None

    def head(self) -> VersionedHead | None:
        """Return the last head on the same condition; bookies may know more of an open extent."""
        state = self.known_state()
        if state is None:
            return None
        return VersionedHead(log=self.log, head=state.head, version=state.version)

    def known_state(self) -> LogState | None:
        """Return the log's last state under the same condition."""
        return self._state if self._is_current else None

    @property
    def is_being_written(self) -> bool:
        """Whether only an open extent can have more, as far as was notified; for watched logs."""
        return self._is_current and not self._is_final

    @property
    def _is_final(self) -> bool:
        """Whether the snapshot stays valid until the head changes."""
        return self._state is not None and self._state.head.open_extent is None

    @property
    def _is_current(self) -> bool:
        is_connected = self._context.store.session_state is SessionState.CONNECTED
        return bool(self._watches) and self._covered >= self.heard and is_connected

    async def state(self) -> LogState:
        """Return the log's state, read now."""
        return await self._history.read(from_lssn=self._from_lssn)

    async def take(self) -> LogSnapshot:
        """Return a snapshot with every change that completed before this call."""
        # Before the read: a notification during it may be of a change that the read missed.
        heard = self.heard
        return await self.take_at(await self._context.logs.read(self.log), heard=heard)

    async def take_at(self, at: VersionedHead, *, heard: int = -1) -> LogSnapshot:
        """Return a snapshot as of a head, or a later one; `heard` is from before its read."""
        while True:
            same, last = self._snapshot, self._state
            # With the same head only addresses and schema can differ: they have nodes of their own.
            if same and last and self._is_final and at.version <= last.version:
                addresses = await persistently(self._context.registry.get_addresses)
                schema = await self._read_schema()
                if self._snapshot is not same:
                    continue  # another call has a later one
                if schema != same.schema or addresses is not same.addresses:
                    same = dataclasses.replace(same, schema=schema, addresses=addresses)
                self._snapshot, self._covered = same, max(self._covered, heard)
                return same
            try:
                state = await self._history.state_of(at, from_lssn=self._from_lssn)
                snapshot = await self._snapshot_of(state)
            except LedgerNotFoundError:
                # It was truncated, recovered or merged in the meantime.
                known, at = at, await self._context.logs.read(self.log)
                self._history.forget()
                if at.version == known.version:
                    raise
            else:
                # Another call may have seen a later head.
                if self._state is None or state.version >= self._state.version:
                    self._snapshot, self._state = snapshot, state
                self._covered = max(self._covered, heard)
                return snapshot

    async def _snapshot_of(self, state: LogState) -> LogSnapshot:
        views = await self._views_of(state)
        first = state.first_active
        ends = (DLSN(v.lssn, v.entry_count, 0) for v in reversed(views) if v.entry_count)
        snapshot = LogSnapshot(
            log=state.name,
            log_id=state.log.log_id,
            first=first,
            end=max(first, next(ends, first)),
            segments=tuple(views),
            sealed=state.head.sealed,
            cluster_id=self._context.cluster_id,
            addresses=await persistently(self._context.registry.get_addresses),
            schema=await self._read_schema(),
            removed_txid=state.head.removed_txid,
            next_sequence_id=state.head.next_sequence_id,
            rewrites=state.head.merges,
        )
        if first < snapshot.end and first != (canonical := snapshot.canonical(first)):
            return snapshot.starting_at(canonical)
        return snapshot

    async def _read_schema(self) -> LogSchema | None:
        """Return the schema, read after the entries: no readable entry has a later version."""
        if not (isinstance(self.log, LogMetadata) and self.log.typed):
            return None
        return (await self._context.logs.read_schemas([self.log]))[0]

    async def _views_of(self, state: LogState) -> list[SegmentView]:
        kept: dict[int, tuple[LogSegment, SegmentView]] = {}
        wanted: dict[int, int] = {}
        changed: list[tuple[LogSegment, SegmentView | None, int]] = []
        for segment in state.segments:
            before = self._views.get(segment.lssn)
            # The history keeps unchanged segments as the same objects.
            if before is not None and before[0] is segment and not segment.has_open_extent:
                kept[segment.lssn] = before
                continue
            same = 0 if before is None else _common_length(before[0], segment)
            changed.append((segment, None if before is None else before[1], same))
            for extent in segment.extents[same:]:
                last = -1 if extent.last_entry_id is None else extent.last_entry_id
                wanted[extent.ledger_id] = max(last, wanted.get(extent.ledger_id, -1))
        ledgers = await self._context.ledger_cache.read(wanted)
        for segment, view, same in changed:
            view = await _view_of(self._context, segment, ledgers, view, same)
            kept[segment.lssn] = segment, view
        self._views = kept
        return [kept[segment.lssn][1] for segment in state.segments]


def _common_length(before: LogSegment, after: LogSegment) -> int:
    """Return how many final extents at the front are equal."""
    pairs = zip(before.closed_extents, after.closed_extents, strict=False)
    same = 0
    for old, new in pairs:
        if old is not new and old != new:
            break
        same += 1
    return same


async def _view_of(
    context: LogContext,
    segment: LogSegment,
    ledgers: Mapping[int, LedgerMetadata],
    known: SegmentView | None,
    same: int,
) -> SegmentView:
    """Return the readable part of a segment; `known` has its first `same` extents."""
    views = [] if known is None else list(known.extents[:same])
    base = views[-1].end_entry_id if views else segment.removed_entries
    sequence_id = segment.start_sequence_id + segment.removed_records
    if views:
        sequence_id = views[-1].start_sequence_id + views[-1].record_count
    named = (
        {} if known is None else {each.ledger_id: known.ledgers[each.ledger_id] for each in views}
    )
    for each in segment.extents[same:]:
        ledger = ledgers[each.ledger_id]
        extent: Extent | None = each
        if each.is_open:
            if known is not None:  # its metadata is newer, and this decides which bookies are asked
                ledger = known.ledgers.get(each.ledger_id, ledger)
            reader = context.ledgers.open_ledger_of(ledger)
            extent = await _readable_extent(reader, each, known)
            ledger = replace(reader.metadata, custom={})
        if extent is None:
            break  # the open extent has no readable entry yet, and it is the last one
        named[each.ledger_id] = ledger
        last = extent.last_entry_id
        assert last is not None
        # With keyword arguments: there may be a hundred thousand views, and this takes a sixth of
        # the time of a dictionary.
        views.append(
            ExtentView(
                ledger_id=extent.ledger_id,
                first_entry_id=extent.first_entry_id,
                last_entry_id=last,
                record_count=extent.record_count,
                size_bytes=extent.size_bytes,
                first_txid=extent.first_txid,
                last_txid=extent.last_txid,
                txid_assigned=extent.txid_assigned,
                timestamp_floor_ms=extent.timestamp_floor_ms,
                last_timestamp_ms=extent.last_timestamp_ms,
                base_entry_id=base,
                start_sequence_id=sequence_id,
            )
        )
        base += last - extent.first_entry_id + 1
        sequence_id += extent.record_count
    return SegmentView(
        lssn=segment.lssn,
        start_sequence_id=segment.start_sequence_id,
        extents=tuple(views),
        ledgers=named,
    )


async def _readable_extent(
    reader: LedgerReader, extent: Extent, known: SegmentView | None
) -> Extent | None:
    """Return the readable part of an open extent; parts that `known` has are not read again."""
    confirmed = await reader.read_last_add_confirmed()
    last = () if known is None else known.extents[-1:]
    place = extent.ledger_id, extent.first_entry_id
    view = next((v for v in last if (v.ledger_id, v.first_entry_id) == place), None)
    if view is not None and view.last_entry_id == confirmed:
        return view
    first_txid = None if view is None else view.first_txid
    return await bounded_extent(reader, extent, last_entry_id=confirmed, first_txid=first_txid)


class Finder:
    """Finds positions in one snapshot: binary search over extents, then over entry headers."""

    def __init__(self, context: LogContext, snapshot: LogSnapshot) -> None:
        self._context = context
        self._snapshot = snapshot

    @property
    def snapshot(self) -> LogSnapshot:
        """The snapshot that it searches."""
        return self._snapshot

    async def last_dlsn(self) -> DLSN | None:
        """Return the position of the last record, or None if there is none."""
        snapshot = self._snapshot
        for segment in reversed(snapshot.segments):
            if segment.extents and snapshot.first < snapshot.end:
                view = segment.extents[-1]
                header = await self._header(segment, view, view.last_entry_id)
                return DLSN(segment.lssn, view.end_entry_id - 1, header.record_count - 1)
        return None

    async def require_left(self, start: DLSN | NotLessThan, *, is_exact: bool = False) -> None:
        """Raise if a reader that starts at `start` would miss truncated records.

        The lowest position, sequence id and transaction id mean the beginning, which is the first
        remaining record, unless a position is exact.  A time never counts as truncated.

        Raises:
            AlreadyTruncatedError: the message has the first remaining position, and how to begin
                there.
        """
        first = self._snapshot.first
        if first == DLSN.INITIAL:
            return
        match start:
            case DLSN():
                what = f"position {start}"
                is_lost = start < first and (is_exact or start > DLSN.INITIAL)
            case NotLessThan(RecordField.SEQUENCE_ID, number):
                what = f"sequence_id {number}"
                is_lost = 0 < number < await self._first_sequence_id()
            case NotLessThan(RecordField.TXID, txid):
                what = f"transaction id {txid}"
                is_lost = txid > 0 and (
                    txid <= self._snapshot.truncated_txid or await self._txid_at(txid) < first
                )
            case _:
                return
        if is_lost:
            raise truncated_away(self._snapshot.log, what, first)

    async def _first_sequence_id(self) -> int:
        if self._snapshot.is_empty:
            return self._snapshot.next_sequence_id
        return (await self._place_at(self._snapshot.first)).sequence_id

    async def not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end."""
        require_kind("txid", txid, int)
        return self._clamped(await self._txid_at(txid))

    async def _txid_at(self, txid: int) -> DLSN:
        """Return the same, also in truncated parts, as far as their segment exists."""
        for segment, view in self._extents():
            if view.last_txid < txid:
                continue
            # All records of an append without own ids share one: the first of them is the answer.
            if view.txid_assigned:
                return DLSN(segment.lssn, view.base_entry_id, 0)
            entry_id = await self._first_entry(
                segment, view, lambda header: header.last_txid >= txid
            )
            frame = await read_frame(self._reader(segment, view), entry_id)
            decryptor = EntryDecryptor(
                self._context.encryption_keys, self._snapshot.log, self._snapshot.log_id
            )
            header = decode_entry_header(frame.body)
            await decryptor.learn(frame.body, header)
            body, header = decryptor.decrypt(frame.body, header)
            schema = self._snapshot.schema
            schemas = None if schema is None else entry_schemas(schema)
            row = first_row_not_less(decode_entry_batch(body, header, schemas), txid)
            return DLSN(segment.lssn, view.in_segment(entry_id), row)
        return self._snapshot.end

    async def not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end."""
        require_kind("timestamp_ms", timestamp_ms, int)
        for segment, view in self._extents():
            if view.last_timestamp_ms < timestamp_ms:
                continue
            if view.timestamp_floor_ms >= timestamp_ms:
                return self._clamped(DLSN(segment.lssn, view.base_entry_id, 0))
            entry_id = await self._first_entry(
                segment, view, lambda header: header.write_time_ms >= timestamp_ms
            )
            return self._clamped(DLSN(segment.lssn, view.in_segment(entry_id), 0))
        return self._snapshot.end

    async def place(self, wanted: DLSN | NotLessThan) -> RecordPlace:
        """Return the place of the first readable record at `wanted` or after it, or of the end."""
        match wanted:
            case DLSN():
                return await self._place_at(wanted)
            case NotLessThan(RecordField.TXID, txid):
                return await self._place_at(await self.not_less_than_txid(txid))
            case NotLessThan(RecordField.TIMESTAMP_MS, timestamp_ms):
                return await self._place_at(await self.not_less_than_timestamp(timestamp_ms))
            case NotLessThan(_, sequence_id):
                return await self._place_of(sequence_id)

    async def _place_at(self, dlsn: DLSN) -> RecordPlace:
        position = self._snapshot.canonical(dlsn)
        for segment, view in self._extents():
            if segment.lssn == position.lssn and position.entry_id < view.end_entry_id:
                entry_id = view.first_entry_id + position.entry_id - view.base_entry_id
                header = await self._header(segment, view, entry_id)
                if position.slot_id < header.record_count:
                    return _place(position, view, header)
                return await self._place_at(DLSN(position.lssn, position.entry_id + 1, 0))
        return self._end_place()

    async def _place_of(self, sequence_id: int) -> RecordPlace:
        for segment, view in self._extents():
            target = sequence_id - view.start_sequence_id
            if target >= view.record_count:
                continue
            entry_id, header = await self._entry_of(segment, view, max(0, target))
            slot = max(0, target) - header.records_before
            found = DLSN(segment.lssn, view.in_segment(entry_id), slot)
            if found < self._snapshot.first:
                return await self._place_at(self._snapshot.first)
            return _place(found, view, header)
        return self._end_place()

    async def _entry_of(
        self, segment: SegmentView, view: ExtentView, record: int
    ) -> tuple[int, EntryHeader]:
        """Return the entry of an extent that holds its n-th record, and the entry's header.

        Entries of one extent are mostly alike, so the first guesses are by proportion.
        """
        low, high = view.first_entry_id, view.last_entry_id + 1
        before, after = 0, view.record_count
        guesses = 0
        while True:
            proportion = (record - before) * (high - low) // max(1, after - before)
            guess = low + (proportion if guesses < _GUESSES_MAX else (high - low) // 2)
            header = await self._header(segment, view, guess)
            if record < header.records_before:
                high, after = guess, header.records_before
            elif record >= header.records_before + header.record_count:
                low, before = guess + 1, header.records_before + header.record_count
            else:
                return guess, header
            guesses += 1

    def _end_place(self) -> RecordPlace:
        extents = [view for _, view in self._extents()]
        return RecordPlace(
            dlsn=self._snapshot.end,
            sequence_id=extents[-1].start_sequence_id + extents[-1].record_count if extents else 0,
            timestamp_ms=extents[-1].last_timestamp_ms if extents else 0,
        )

    def _extents(self) -> list[tuple[SegmentView, ExtentView]]:
        return [(segment, view) for segment in self._snapshot.segments for view in segment.extents]

    def _clamped(self, dlsn: DLSN) -> DLSN:
        return max(dlsn, self._snapshot.first)

    def _reader(self, segment: SegmentView, view: ExtentView) -> LedgerReader:
        return self._context.ledgers.open_ledger_of(segment.ledgers[view.ledger_id])

    async def _header(self, segment: SegmentView, view: ExtentView, entry_id: int) -> EntryHeader:
        return await read_header(self._reader(segment, view), entry_id)

    async def _first_entry(
        self, segment: SegmentView, view: ExtentView, reached: Callable[[EntryHeader], bool]
    ) -> int:
        """Return the first entry of the extent with `reached(header)`; the last one has it."""
        low, high = view.first_entry_id, view.last_entry_id
        while low < high:
            middle = (low + high) // 2
            if reached(await self._header(segment, view, middle)):
                high = middle
            else:
                low = middle + 1
        return low


async def find_places(
    context: LogContext, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
) -> list[RecordPlace]:
    """Return the place of each wanted record, in its snapshot."""
    limit = asyncio.Semaphore(_PLACES_AT_ONCE)

    async def find(snapshot: LogSnapshot, key: DLSN | NotLessThan) -> RecordPlace:
        async with limit:
            return await Finder(context, snapshot).place(key)

    return list(await together(*(find(snapshot, key) for snapshot, key in wanted)))


async def take_last(context: LogContext, log: LogKey) -> LogSnapshot:
    """Return a snapshot that begins with the segment of the last record."""
    at = await context.logs.read(log)
    follower = LogFollower(context, log, from_lssn=at.head.end[0])
    return await follower.take_at(at)


async def find_last_dlsn(context: LogContext, log: LogKey) -> DLSN | None:
    """Return the position of the log's last record; None if it holds none."""
    return await Finder(context, await take_last(context, log)).last_dlsn()


def _place(dlsn: DLSN, view: ExtentView, header: EntryHeader) -> RecordPlace:
    return RecordPlace(
        dlsn=dlsn,
        sequence_id=view.start_sequence_id + header.records_before + dlsn.slot_id,
        timestamp_ms=view.timestamp_ms(header.write_time_ms),
    )
