"""Reads the cold part of a log's chain: the objects that its table may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import CorruptMetadataError, TableError
from dlcore.log.metadata.chunks import ChunkMissingError
from dlcore.log.upkeep.removal import read_moved
from dlcore.ops.upkeep.rewriting import SegmentRewriter
from dlcore.ops.upkeep.table_commits import FILES_PER_COMMIT_MAX, Chain, ObjectAt

if TYPE_CHECKING:
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.cold.table_format import Field, Place, TableForm
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import LogKey, VersionedHead


class ChainReader(SegmentRewriter):
    """Reads the chains of any logs."""

    async def read_chain(self, log: LogKey, url: str, form: TableForm, start: Place) -> Chain:
        """Return a part of the cold part of a log from a place on, whose objects are below a URL.

        Fields are those of the table's format.

        Raises:
            LogNotFoundError: the log was deleted.
            TableError: an object is elsewhere.
        """
        fields = await self._fields_of(log, form)
        at = await self._context.logs.read(log)
        while True:
            try:
                return await self._walk(at, url, start, fields)
            except ChunkMissingError as error:
                at = await read_moved(self._context, at, error)

    async def _fields_of(self, log: LogKey, form: TableForm) -> tuple[Field, ...]:
        from dlcore.log.cold.parquet import columns_of_object

        found = await self._context.logs.find_again(log)
        (schema,) = await self._context.logs.read_schemas([found])
        return form.fields_of(columns_of_object(schema, 0 if schema is None else schema.latest_id))

    async def _walk(
        self, at: VersionedHead, url: str, start: Place, fields: tuple[Field, ...]
    ) -> Chain:
        head = at.head
        first: Place = head.first_active[:2]
        start = max(start, first)
        end, objects, goes_on = first, list[ObjectAt](), False
        for lssn in range(start[0], head.max_lssn + (head.segment is None)):
            if len(objects) >= FILES_PER_COMMIT_MAX:
                goes_on = True  # perhaps by nothing that is cold
                break
            found = await self._cold_part(at, lssn)
            if found is None:
                continue
            ledgers, end_entry, is_whole = found
            end = max(end, (lssn, end_entry))
            for base, extent, ledger in ledgers:
                held = _objects_of(ledger, extent, f"{url}/{lssn}", (lssn, base))
                objects += [each for each in held if each.end > start]
            if not is_whole:
                break
        return Chain(first, end, tuple(objects), fields, goes_on=goes_on)

    async def _cold_part(
        self, at: VersionedHead, lssn: int
    ) -> tuple[list[tuple[int, Extent, LedgerMetadata]], int, bool] | None:
        """Return a segment's extents with their ledgers up to one that is not cold.

        Each has its first entry in the segment.  Also returned are the entry after these, and
        whether that is all of the segment.  None: it is being removed.

        Raises:
            ChunkMissingError: the log has changed meanwhile.
        """
        stored = await self._read_segment(at, lssn)
        if stored is None or stored.end is None:
            if lssn <= at.head.first_active[0]:
                return None
            raise ChunkMissingError(f"segment {lssn} is not as its head says")
        parts: list[tuple[int, Extent]] = []
        base = stored.first_entry_id
        for extent in stored.extents:
            if not extent.is_cold:
                break
            parts.append((base, extent))
            base += extent.entry_count
        found = await self._context.ledger_store.read_many([each.ledger_id for _, each in parts])
        ledgers = []
        for first, extent in parts:
            ledger = found.get(extent.ledger_id)
            if ledger is None:
                raise ChunkMissingError(f"ledger {extent.ledger_id} of segment {lssn} is gone")
            if isinstance(ledger, CorruptMetadataError):
                raise ledger
            ledgers.append((first, extent, ledger))
        return ledgers, base, len(parts) == len(stored.extents)


def _objects_of(
    ledger: LedgerMetadata, extent: Extent, folder: str, start: Place
) -> list[ObjectAt]:
    if ledger.folder != folder:
        raise TableError(
            f"segment {start[0]} has its objects in {ledger.folder}, and the table can only name "
            f"those in {folder}; to do: set `tier` as it was, or unset `table`"
        )
    lssn, base = start
    objects = ledger.objects
    entries = [*(each.first_entry_id for each in objects[1:]), ledger.last_entry_id + 1]
    records = [*(each.records_before for each in objects[1:]), extent.record_count]
    return [
        ObjectAt(
            name=f"{lssn}/{each.name}",
            size_bytes=each.size_bytes,
            start=(lssn, base + each.first_entry_id),
            end=(lssn, base + entry),
            records=record - each.records_before,
        )
        for each, entry, record in zip(objects, entries, records, strict=True)
    ]
