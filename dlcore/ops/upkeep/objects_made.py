"""Makes objects of a run's entries, one after the other, each with what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
    from dlcore.wire.digest import EntryFrame


class RunStart(NamedTuple):
    """The place of a run's first record: its segment, its entry there, and its sequence id."""

    lssn: int
    entry: int
    sequence_id: int


class ObjectMaker:
    """Takes a run's entries, which are read as they are needed, and makes objects of them.

    Args:
        context: the namespace's adapters.
        entries: all entries of the run, each with its extent.
        log: the log.
        schema: the schema of a typed log.
        start: where the run begins.
        bytes_max: an object takes no more entries once they have this many bytes.
        take: called before each entry with its size; it sets the pace.
    """

    def __init__(
        self,
        context: LogContext,
        entries: AsyncGenerator[tuple[Extent, EntryFrame], None],
        *,
        log: LogMetadata,
        schema: LogSchema | None,
        start: RunStart,
        bytes_max: int,
        take: Callable[[int], Awaitable[None]],
    ) -> None:
        self._context = context
        self._entries = entries
        self._log = log
        self._schema = schema
        self._schemas = None if schema is None else entry_schemas(schema)
        self._lssn, self._entry, self._sequence_id = start
        self._bytes_max = bytes_max
        self._take = take
        self._part: Extent | None = None
        self._in_part = 0
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
        run = self._context.cold.run
        encoder: ObjectEncoder | None = None
        used = 0
        while encoder is None or encoder.size_bytes < self._bytes_max:
            found, self._waiting = self._waiting or await self._next(), None
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
                f"log {self._log.name!r}: segment {self._lssn} has fewer entries than its extents"
            )
        self.made = await run(encoder.finish)
        return self.made

    def _encoder(self, schema_id: int) -> ObjectEncoder:
        from dlcore.log.cold.parquet import ObjectEncoder, columns_of_object

        return ObjectEncoder(
            cluster_id=self._context.cluster_id,
            log_id=self._log.log_id,
            lssn=self._lssn,
            schema_id=schema_id,
            schema=byte_log_schema() if self._schemas is None else self._schemas.of(schema_id),
            columns=columns_of_object(self._schema, schema_id),
        )

    async def _next(self) -> tuple[int, ColdEntry] | None:
        """Return the next entry, and the version of the schema that it has."""
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
        if header.encrypted:
            raise UnsupportedError(
                f"log {self._log.name!r}: segment {self._lssn} is encrypted, and stays on bookies"
            )
        batch = decode_entry_batch(frame.body, header, self._schemas)
        if part.assigned_txid is not None:
            batch = with_txid(batch, part.assigned_txid)
        entry = ColdEntry(
            self._entry, batch, self._sequence_id, part.timestamp_ms(header.write_time_ms)
        )
        self._entry += 1
        self._sequence_id += header.record_count
        self._in_part += header.record_count
        return header.schema_id, entry
