"""Taking snapshots of a log, and finding positions in them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlcore.errors import LedgerNotFoundError
from dlcore.ids import DLSN
from dlcore.ledger.metadata import LedgerMetadata, LedgerState
from dlcore.log.batches import first_row_not_less
from dlcore.log.entry import EntryHeader, decode_entry_batch, decode_entry_header
from dlcore.log.recovery import bounded_extent, read_frame, read_header
from dlcore.log.scan import ExtentView, LogSnapshot, SegmentView
from dlcore.log.segment import Extent, LogSegment, Truncation

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.ids import BookieId
    from dlcore.ledger.reader import LedgerReader
    from dlcore.log.context import LogContext
    from dlcore.log.metadata import LogState

_READS_AT_ONCE = 64


class LedgerCache:
    """Metadata of closed ledgers, which say where entries are; the last snapshot's are kept."""

    def __init__(self, context: LogContext) -> None:
        self._context = context
        self._closed: dict[int, LedgerMetadata] = {}

    async def read(self, ledger_ids: set[int]) -> dict[int, LedgerMetadata]:
        """Return the metadata of each ledger."""
        found = {i: self._closed[i] for i in ledger_ids if i in self._closed}
        missing = sorted(ledger_ids - found.keys())
        for start in range(0, len(missing), _READS_AT_ONCE):
            part = missing[start : start + _READS_AT_ONCE]
            stored = await asyncio.gather(*(self._context.ledger_store.read(i) for i in part))
            # The custom attributes are for people, and would only make each scan range larger.
            found |= {each.metadata.ledger_id: _plain(each.metadata) for each in stored}
        self._closed = {i: m for i, m in found.items() if m.state is LedgerState.CLOSED}
        return found


def _plain(metadata: LedgerMetadata) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=metadata.ledger_id,
        quorum=metadata.quorum,
        state=metadata.state,
        ensembles=metadata.ensembles,
        token=metadata.token,
        created_ms=metadata.created_ms,
        last_entry_id=metadata.last_entry_id,
        length_bytes=metadata.length_bytes,
        custom={},
    )


async def take_snapshot(
    context: LogContext, state: LogState, cache: LedgerCache
) -> tuple[LogSnapshot, LogState]:
    """Return what is readable now, and the state it was made from.

    Truncation and recovery may delete ledgers of `state`; then it is read again.
    """
    while True:
        try:
            return await _snapshot_of(context, state, cache), state
        except LedgerNotFoundError:
            known, state = state, await context.logs.read(state.name)
            if state.version == known.version:
                raise


async def _snapshot_of(context: LogContext, state: LogState, cache: LedgerCache) -> LogSnapshot:
    active = [s for s in state.segments if s.truncation is not Truncation.TRUNCATED]
    ledgers = await cache.read({extent.ledger_id for s in active for extent in s.extents})
    segments = [await _view_of(context, segment, ledgers) for segment in active]
    first = state.first_active
    ends = [DLSN(s.lssn, s.entry_count, 0) for s in segments if s.entry_count]
    end = max([first, *ends])
    snapshot = LogSnapshot(
        log=state.name,
        log_id=state.metadata.log_id,
        first=first,
        end=end,
        segments=tuple(segments),
        sealed=state.max_lssn.sealed,
        cluster_id=context.cluster_id,
        addresses=await _addresses(context),
    )
    if first < end and first != (canonical := snapshot.canonical(first)):
        return snapshot.starting_at(canonical)
    return snapshot


async def _addresses(context: LogContext) -> dict[BookieId, str]:
    return {info.bookie: info.address for info in await context.registry.get_bookies()}


async def _view_of(
    context: LogContext, segment: LogSegment, ledgers: dict[int, LedgerMetadata]
) -> SegmentView:
    views: list[ExtentView] = []
    base = 0
    sequence_id = segment.start_sequence_id
    for each in segment.extents:
        ledger = ledgers[each.ledger_id]
        extent: Extent | None = each
        if each.is_open:
            reader = await context.ledgers.open_ledger(each.ledger_id)
            confirmed = await reader.read_last_add_confirmed()
            extent = await bounded_extent(reader, each, last_entry_id=confirmed)
            ledger = _plain(reader.metadata)
        if extent is None:
            break
        view = _extent_view(extent, ledger, base_entry_id=base, sequence_id=sequence_id)
        views.append(view)
        base = view.end_entry_id
        sequence_id += view.record_count
    return SegmentView(
        lssn=segment.lssn, start_sequence_id=segment.start_sequence_id, extents=tuple(views)
    )


def _extent_view(
    extent: Extent, ledger: LedgerMetadata, *, base_entry_id: int, sequence_id: int
) -> ExtentView:
    assert extent.last_entry_id is not None
    return ExtentView(
        ledger=ledger,
        first_entry_id=extent.first_entry_id,
        last_entry_id=extent.last_entry_id,
        base_entry_id=base_entry_id,
        start_sequence_id=sequence_id,
        record_count=extent.record_count,
        size_bytes=extent.size_bytes,
        first_txid=extent.first_txid,
        last_txid=extent.last_txid,
        txid_assigned=extent.txid_assigned,
        timestamp_floor_ms=extent.timestamp_floor_ms,
        last_timestamp_ms=extent.last_timestamp_ms,
    )


class Finder:
    """Finds positions in one snapshot: binary search over extents, then over entry headers."""

    def __init__(self, context: LogContext, snapshot: LogSnapshot) -> None:
        self._context = context
        self._snapshot = snapshot

    async def last_dlsn(self) -> DLSN | None:
        """Return the position of the last record, or None if there is none."""
        snapshot = self._snapshot
        for segment in reversed(snapshot.segments):
            if segment.extents and snapshot.first < snapshot.end:
                view = segment.extents[-1]
                header = await self._header(view, view.last_entry_id)
                return DLSN(segment.lssn, view.end_entry_id - 1, header.record_count - 1)
        return None

    async def not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end."""
        for segment, view in self._extents():
            if view.last_txid < txid:
                continue
            if view.txid_assigned:
                return self._clamped(DLSN(segment.lssn, view.base_entry_id, 0))
            entry_id = await self._first_entry(view, lambda header: header.last_txid >= txid)
            frame = await read_frame(self._reader(view), entry_id)
            header = decode_entry_header(frame.body)
            row = first_row_not_less(decode_entry_batch(frame.body, header), txid)
            return self._clamped(DLSN(segment.lssn, _in_segment(view, entry_id), row))
        return self._snapshot.end

    async def not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end."""
        for segment, view in self._extents():
            if view.last_timestamp_ms < timestamp_ms:
                continue
            if view.timestamp_floor_ms >= timestamp_ms:
                return self._clamped(DLSN(segment.lssn, view.base_entry_id, 0))
            entry_id = await self._first_entry(
                view, lambda header: header.write_time_ms >= timestamp_ms
            )
            return self._clamped(DLSN(segment.lssn, _in_segment(view, entry_id), 0))
        return self._snapshot.end

    async def sequence_id(self, dlsn: DLSN) -> int:
        """Return the sequence id of the first record at or after `dlsn`."""
        snapshot = self._snapshot
        position = snapshot.canonical(dlsn)
        last: ExtentView | None = None
        for segment, view in self._extents():
            last = view
            if segment.lssn != position.lssn or position.entry_id >= view.end_entry_id:
                continue
            header = await self._header(
                view, view.first_entry_id + position.entry_id - view.base_entry_id
            )
            slot = min(position.slot_id, header.record_count)
            return view.start_sequence_id + header.records_before + slot
        return 0 if last is None else last.start_sequence_id + last.record_count

    def _extents(self) -> list[tuple[SegmentView, ExtentView]]:
        return [(segment, view) for segment in self._snapshot.segments for view in segment.extents]

    def _clamped(self, dlsn: DLSN) -> DLSN:
        return max(dlsn, self._snapshot.first)

    def _reader(self, view: ExtentView) -> LedgerReader:
        return self._context.ledgers.open_ledger_of(view.ledger)

    async def _header(self, view: ExtentView, entry_id: int) -> EntryHeader:
        return await read_header(self._reader(view), entry_id)

    async def _first_entry(self, view: ExtentView, reached: Callable[[EntryHeader], bool]) -> int:
        """Return the first entry of the extent whose header has `reached`; its last one has."""
        low, high = view.first_entry_id, view.last_entry_id
        while low < high:
            middle = (low + high) // 2
            if reached(await self._header(view, middle)):
                high = middle
            else:
                low = middle + 1
        return low


async def find_last_dlsn(context: LogContext, state: LogState) -> DLSN | None:
    """Return the position of the log's last record; None if it holds none."""
    snapshot, _ = await take_snapshot(context, state, LedgerCache(context))
    return await Finder(context, snapshot).last_dlsn()


def _in_segment(view: ExtentView, entry_id: int) -> int:
    return view.base_entry_id + entry_id - view.first_entry_id
