"""Reads scan ranges: from entries on bookies to Arrow batches, without the metadata store."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.log.entries.body import decode_entry_batch, decode_entry_header, with_txid
from dlcore.log.entries.encryption import EntryDecryptor
from dlcore.log.entries.runs import decode_entries
from dlcore.log.metadata.segment import adjacent
from dlcore.log.reading.scan import ExtentView, ScanBatch, ScanRange
from dlcore.log.reading.scan_run import ExtentPlaces, ScanGrowth, ScanRun, joinable
from dlcore.log.typed.arrow import entry_schemas

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.base.access.encryption_keys import EncryptionKeys
    from dlcore.ledger.client import LedgerClient
    from dlcore.wire.frames import EntryFrame

_FEW_ENTRIES = 4
"""Up to this many are decoded at least as fast one by one, and are not copied."""


async def scan_range(
    part: ScanRange, ledgers: LedgerClient, keys: EncryptionKeys | None = None
) -> AsyncGenerator[ScanRun, None]:
    """Yield the records of one range from the bookies in its metadata: small entries joined.

    The first requests are small, so that little was read in vain if the caller needs few records.
    """
    decryptor = EntryDecryptor(keys, part.log, part.log_id)
    growth = ScanGrowth()
    for group in adjacent(part.extents):
        reader = ledgers.open_ledger_of(part.ledgers[group[-1].ledger_id])
        scanned = _ScannedExtents(part, group, decryptor)
        for first, last in growth.sections(group):
            async with aclosing(reader.read(first, last)) as chunks:
                async for frames in chunks:
                    for few in joinable(frames):
                        async for run in scanned.decode(few):
                            yield run


async def by_entry(runs: AsyncGenerator[ScanRun, None]) -> AsyncGenerator[ScanBatch, None]:
    """Yield the records of a scan entry by entry."""
    async with aclosing(runs):
        async for run in runs:
            for entry in run.entries():
                yield entry


class _ScannedExtents:
    """Decodes entries of adjacent extents of one ledger."""

    def __init__(
        self, part: ScanRange, extents: Sequence[ExtentView], decryptor: EntryDecryptor
    ) -> None:
        self._part = part
        self._extents = extents
        self._decryptor = decryptor
        self._places = ExtentPlaces(part, extents)
        self._schemas = None if part.schema is None else entry_schemas(part.schema)

    async def decode(self, frames: Sequence[EntryFrame]) -> AsyncGenerator[ScanRun, None]:
        """Yield the records of consecutive entries: joined, if that is possible and pays."""
        columns, schemas = self._part.columns, self._schemas
        joined = None
        if len(frames) > _FEW_ENTRIES:
            joined = decode_entries([frame.body for frame in frames], schemas, columns)
        if joined is None:
            for frame in frames:
                entry = await self._decode_one(frame)
                if entry is not None:
                    yield ScanRun.of(entry)
            return
        if schemas is not None:
            batch = schemas.promote(joined.batch, joined.schema_id, columns)
            joined = joined._replace(batch=batch)
        yield self._places.place(frames[0].entry_id, joined)

    async def _decode_one(self, frame: EntryFrame) -> ScanBatch | None:
        part, schemas = self._part, self._schemas
        header = decode_entry_header(frame.body)
        await self._decryptor.learn(frame.body, header)
        body, header = self._decryptor.decrypt(frame.body, header)
        at = bisect_left(self._extents, frame.entry_id, key=lambda extent: extent.last_entry_id)
        extent = self._extents[at]
        entry_id = extent.in_segment(frame.entry_id)
        batch = decode_entry_batch(body, header, schemas, part.columns)
        if schemas is not None:
            batch = schemas.promote(batch, header.schema_id, part.columns)
        first = part.start.slot_id if entry_id == part.start.entry_id else 0
        end = part.end.slot_id if entry_id == part.end.entry_id else header.record_count
        if first > 0 or end < header.record_count:
            batch = batch.slice(first, max(0, end - first))
        if batch.num_rows == 0:
            return None
        if extent.assigned_txid is not None:
            batch = with_txid(batch, extent.assigned_txid)
        return ScanBatch(
            batch=batch,
            lssn=part.lssn,
            entry_id=entry_id,
            first_slot=first,
            sequence_id=extent.start_sequence_id + header.records_before + first,
            timestamp_ms=extent.timestamp_ms(header.write_time_ms),
        )
