"""The schema of a typed log, as far as a writer of it knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import SchemaMismatchError
from dlcore.log.typed.arrow import entry_schemas
from dlcore.log.typed.rows import TypedRows

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.log.metadata.store import LogStore
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.typed.schema import LogSchema


class FittingSchema:
    """All versions of a log's schema; read again when a batch does not fit the latest known one."""

    def __init__(self, logs: LogStore, log: LogMetadata, known: LogSchema) -> None:
        self._logs = logs
        self._log = log
        self._known = known

    def fit(self, batch: pa.RecordBatch) -> tuple[TypedRows, bool]:
        """Return a batch as entries hold it, and whether its rows have transaction ids.

        Raises:
            SchemaMismatchError, LogRecordTooLongError: it does not fit.
        """
        schemas = entry_schemas(self._known)
        fitted, has_txids = schemas.fit(self._log.name, batch)
        return TypedRows.of(self._log.name, fitted, schemas.latest_id), has_txids

    async def fit_latest(self, batch: pa.RecordBatch) -> tuple[TypedRows, bool]:
        """Return the same, with a later version of the schema if the batch needs one."""
        try:
            return self.fit(batch)
        except SchemaMismatchError:
            (schema,) = await self._logs.read_schemas([self._log])
            assert schema is not None
            known, self._known = self._known, schema
            if schema == known:
                raise
        return self.fit(batch)
