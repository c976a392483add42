"""Makes objects of a run's entries, one after the other, each with what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import CorruptMetadataError, UnsupportedError
from dlcore.log.entries.body import (
    byte_log_schema,
    decode_entry_batch,
    decode_entry_header,
    with_txid,
)
from dlcore.log.typed.arrow import entry_schemas

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from dlcore.log.cold.facts import ObjectFacts
    from dlcore.log.cold.parquet import ColdEntry, ObjectEncoder
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.typed.schema import LogSchema
    from dlcore.ops.upkeep.tiering import RunPlace
    from dlcore.wire.frames import EntryFrame


class ColdEntries:
    """The entries of a run, as they are written to objects: decoded, numbered and checked.

    Args:
        entries: all entries of the run, each with its extent.
        log: the log.
        schema: the schema of a typed log.
        start: where the run begins.
        take: called before each entry with its size; it sets the pace.
    """

    def __init__(
        self,
        entries: AsyncGenerator[tuple[Extent, EntryFrame], None],
        *,
        log: LogMetadata,
        schema: LogSchema | None,
        start: RunPlace,
        take: Callable[[int], Awaitable[None]],
    ) -> None:
        self.log = log
        self.schema = schema
        self.schemas = None if schema is None else entry_schemas(schema)
        self._entries = entries
        self._at = start
        self._take = take
        self._part: Extent | None = None
        self._in_part = 0

    @property
    def lssn(self) -> int:
        """The segment."""
        return self._at.lssn

    async def next(self) -> tuple[int, ColdEntry] | None:
        """Return the next entry, and the version of the schema that it has; None at the end."""
        from dlcore.log.cold.parquet import ColdEntry

        found = await anext(self._entries, None)
        if found is None:
            return None
        part, frame = found
        if part is not self._part:
            self._part, self._in_part = part, 0
        await self._take(frame.body.nbytes)
        header = decode_entry_header(frame.body)
        if header.records_before != self._in_part:
            raise CorruptMetadataError(
                f"entry {frame.entry_id} of ledger {part.ledger_id} counts {header.records_before} "
                f"records before it, expected {self._in_part}"
            )
        at = self._at
        if header.encrypted:
            raise UnsupportedError(
                f"log {self.log.name!r}: segment {at.lssn} is encrypted, and stays on bookies"
            )
        batch = decode_entry_batch(frame.body, header, self.schemas)
        if part.assigned_txid is not None:
            batch = with_txid(batch, part.assigned_txid)
        entry = ColdEntry(at.entry, batch, at.sequence_id, part.timestamp_ms(header.write_time_ms))
        self._at = at.after(entries=1, records=header.record_count)
        self._in_part += header.record_count
        return header.schema_id, entry


class ObjectMaker:
    """Takes a run's entries, which are read as they are needed, and makes objects of them.

    Args:
        context: the namespace's adapters.
        entries: those of the run, or of a part of it.
        bytes_max: an object takes no more entries once they have this many bytes.
    """

    def __init__(
        self,
        context: LogContext,
        entries: ColdEntries,
        *,
        bytes_max: int,
    ) -> None:
        self._context = context
        self._entries = entries
        self._bytes_max = bytes_max
        self._waiting: tuple[int, ColdEntry] | None = None  # of another version of the schema
        self.made: tuple[memoryview, ObjectFacts] | None = None
        """The last object, and what it holds."""

    async def make(self) -> tuple[memoryview, ObjectFacts]:
        """Return the next object; there are entries left.

        Raises:
            UnsupportedError: an entry is encrypted, or Parquet cannot hold it.
            CorruptMetadataError: the entries are not those of their extents.
            DLError: an entry cannot be read.
        """
        self.made = None  # it is large
        run, entries = self._context.cold.run, self._entries
        encoder: ObjectEncoder | None = None
        used = 0
        while encoder is None or encoder.size_bytes < self._bytes_max:
            found, self._waiting = self._waiting or await entries.next(), None
            if found is None:
                break
            schema_id, entry = found
            if encoder is None:
                used, encoder = schema_id, self._encoder(schema_id)
            elif schema_id != used:
                self._waiting = found
                break
            if encoder.add(entry):
                await run(encoder.flush)
        if encoder is None:
            raise CorruptMetadataError(
                f"log {entries.log.name!r}: segment {entries.lssn} has fewer entries than its "
                "extents"
            )
        self.made = await run(encoder.finish)
        return self.made

    def _encoder(self, schema_id: int) -> ObjectEncoder:
        from dlcore.log.cold.parquet import ObjectEncoder, columns_of_object

        entries = self._entries
        schemas = entries.schemas
        return ObjectEncoder(
            cluster_id=self._context.cluster_id,
            log_id=entries.log.log_id,
            lssn=entries.lssn,
            schema_id=schema_id,
            schema=byte_log_schema() if schemas is None else schemas.of(schema_id),
            columns=columns_of_object(entries.schema, schema_id),
        )
