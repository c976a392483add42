"""Reads scan ranges: from entries on bookies to Arrow batches, without the metadata store."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.log.entries.body import decode_entry_batch, decode_entry_header, with_txid
from dlcore.log.metadata.segment import adjacent
from dlcore.log.reading.scan import ExtentView, ScanBatch, ScanRange
from dlcore.log.typed.arrow import entry_schemas

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.ledger.client import LedgerClient
    from dlcore.ledger.reading.reader import LedgerReader
    from dlcore.log.typed.arrow import EntrySchemas
    from dlcore.wire.digest import EntryFrame


async def scan_range(part: ScanRange, ledgers: LedgerClient) -> AsyncGenerator[ScanBatch, None]:
    """Yield the records of one range, entry by entry, from the bookies in its metadata."""
    for group in adjacent(part.extents):
        reader = ledgers.open_ledger_of(part.ledgers[group[-1].ledger_id])
        async with aclosing(_read_extents(part, group, reader)) as batches:
            async for batch in batches:
                yield batch


async def _read_extents(
    part: ScanRange, group: Sequence[ExtentView], reader: LedgerReader
) -> AsyncGenerator[ScanBatch, None]:
    schemas = None if part.schema is None else entry_schemas(part.schema)
    extents = iter(group)
    extent = next(extents)
    async with aclosing(reader.read(extent.first_entry_id, group[-1].last_entry_id)) as chunks:
        async for frames in chunks:
            for frame in frames:
                if frame.entry_id > extent.last_entry_id:
                    extent = next(extents)
                batch = _scan_batch(part, extent, frame, schemas)
                if batch is not None:
                    yield batch


def _scan_batch(
    part: ScanRange, extent: ExtentView, frame: EntryFrame, schemas: EntrySchemas | None
) -> ScanBatch | None:
    header = decode_entry_header(frame.body)
    batch = decode_entry_batch(frame.body, header, schemas, part.columns)
    if schemas is not None:
        batch = schemas.promote(batch, header.schema_id, part.columns)
    entry_id = extent.in_segment(frame.entry_id)
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
