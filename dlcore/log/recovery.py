"""Fences and completes a dead writer's segment, and reads the real contents of an extent."""

from __future__ import annotations

import logging
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from dlcore.base.errors import LedgerNotFoundError, LedgerReadError, MetadataVersionError
from dlcore.log.entries.body import EntryHeader, decode_entry_header
from dlcore.log.metadata.changes import plan_complete
from dlcore.metadata.port import Delete

if TYPE_CHECKING:
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.reading.reader import LedgerReader
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import VersionedHead
    from dlcore.wire.frames import EntryFrame

logger = logging.getLogger(__name__)


async def read_frame(reader: LedgerReader, entry_id: int) -> EntryFrame:
    """Return one entry of a ledger, which must exist."""
    async with aclosing(reader.read(entry_id, entry_id)) as chunks:
        async for frames in chunks:
            for frame in frames:
                return frame
    raise LedgerReadError(f"{reader!r} returned no frame for entry {entry_id}")


async def read_header(reader: LedgerReader, entry_id: int) -> EntryHeader:
    """Return the header of one entry, which must exist."""
    return decode_entry_header((await read_frame(reader, entry_id)).body)


async def bounded_extent(
    reader: LedgerReader, extent: Extent, *, last_entry_id: int, first_txid: int | None = None
) -> Extent | None:
    """Return an open extent as if it ended with `last_entry_id`; None if it is empty then.

    Its first entry is read unless `first_txid` is known.
    """
    if last_entry_id < extent.first_entry_id:
        return None
    last_frame = await read_frame(reader, last_entry_id)
    last = decode_entry_header(last_frame.body)
    if first_txid is None:
        first_txid = (await read_header(reader, extent.first_entry_id)).first_txid
    return structs.replace(
        extent,
        last_entry_id=last_entry_id,
        record_count=last.records_before + last.record_count,
        size_bytes=last_frame.ledger_bytes,
        first_txid=first_txid,
        last_txid=last.last_txid,
        last_timestamp_ms=extent.timestamp_ms(last.write_time_ms),
        stamped=last.stamp_bytes > 0,
    )


async def recover_log(
    context: LogContext, at: VersionedHead, *, only_this: bool = False
) -> VersionedHead:
    """Fence the open extent of a writer that is gone, and complete its segment.

    Several clients may run this at once, and also while the writer lives: it will find its ledger
    fenced.  A client without the writer lock uses `only_this`: if another ledger is open by then,
    it is left to its writer.

    Raises:
        LedgerRecoveryError: too few bookies answer to find the ledger's end; try again later.
    """
    while (extent := at.head.open_extent) is not None:
        try:
            closing = await _recover_extent(context, extent)
        except LedgerNotFoundError:
            known, at = at, await context.logs.read(at.log)
            if at.version == known.version:
                raise
            if only_this and not at.is_open_over(extent.ledger_id):
                return at
            continue  # another client recovered it as empty in the meantime
        change = plan_complete(
            context.logs.paths_of(at.log),
            at,
            now_ms=context.clock.now_ms(),
            closing=closing,
            empty_ledger_id=extent.ledger_id if closing is None else None,
        )
        if closing is None:
            # In the same transaction, so that a client that dies leaves nothing behind.
            deletion = Delete(context.paths.ledger(extent.ledger_id))
            change = replace(change, ops=(*change.ops, deletion))
        lssn = at.head.max_lssn
        try:
            at = await context.logs.apply(change)
        except MetadataVersionError:
            at = await context.logs.read(at.log)
            if only_this and not at.is_open_over(extent.ledger_id):
                return at
            continue
        logger.info(
            "recovered log=%s segment=%d ledger=%d entries=%d",
            at.name,
            lssn,
            extent.ledger_id,
            0 if closing is None else closing.entry_count,
        )
    return at


async def _recover_extent(context: LogContext, extent: Extent) -> Extent | None:
    metadata = await context.ledgers.recover_ledger(extent.ledger_id)
    return await extent_of_closed(context, extent, metadata)


async def extent_of_closed(
    context: LogContext, extent: Extent, metadata: LedgerMetadata
) -> Extent | None:
    """Return the final form of an open extent whose ledger is closed; None if it is empty."""
    reader = context.ledgers.open_ledger_of(metadata)
    return await bounded_extent(reader, extent, last_entry_id=metadata.last_entry_id)
