"""The schema of a typed log, as far as a reader of it knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.log.typed.arrow import EntrySchemas, entry_schemas
from dlcore.log.typed.schema import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from dlcore.log.metadata.store import LogStore
    from dlcore.log.metadata.values import LogMetadata


class KnownSchemas:
    """All versions of a log's schema; read again when an entry has a later version."""

    def __init__(self, logs: LogStore, log: LogMetadata, known: EntrySchemas) -> None:
        self._logs = logs
        self._log = log
        self.entries = known

    @classmethod
    async def read(cls, logs: LogStore, log: LogMetadata) -> KnownSchemas | None:
        """Read the schema of a log; None for a byte log, for which nothing is read."""
        (schema,) = await logs.read_schemas([log])
        return None if schema is None else cls(logs, log, entry_schemas(schema))

    async def learn(self, schema_id: int) -> None:
        """Read the schema again unless it has a version of this number."""
        if schema_id > self.entries.latest_id:
            (schema,) = await self._logs.read_schemas([self._log])
            assert schema is not None
            self.entries = entry_schemas(schema)


async def find_schemas(logs: LogStore, names: Sequence[str]) -> dict[str, pa.Schema | None]:
    """Return the columns of each existing log; None for a byte log."""
    found = await logs.find_existing(names)
    schemas = await logs.read_schemas(found)
    return {
        log.name: None if schema is None else entry_schemas(schema).columns
        for log, schema in zip(found, schemas, strict=True)
    }


async def find_targets(logs: LogStore, names: Sequence[str]) -> dict[str, Target]:
    """Return what a writer of each existing log has to know."""
    return {
        name: Target(None if schema is None else entry_schemas(schema).columns, at.head.sealed)
        for name, (at, schema) in (await logs.find_targets(names)).items()
    }
