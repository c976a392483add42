"""The writer of a typed log: batches are made to fit its schema, and records of bytes refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.errors import SchemaMismatchError
from dlcore.ids import TXID_MAX
from dlcore.log.entries.body import with_txid
from dlcore.log.typed.arrow import entry_schemas
from dlcore.log.typed.rows import TypedRows
from dlcore.log.writing.writer import AsyncLogWriter

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from dlcore.ids import DLSN
    from dlcore.log.typed.schema import LogSchema
    from dlcore.records import LogRecord


def fit_rows(log: str, schema: LogSchema, batch: pa.RecordBatch) -> tuple[TypedRows, bool]:
    """Return what entries hold of a batch, and whether its rows have transaction ids.

    Raises:
        SchemaMismatchError, LogRecordTooLongError: it does not fit.
    """
    schemas = entry_schemas(schema)
    fitted, has_txids = schemas.fit(log, batch)
    return TypedRows.of(log, fitted, schemas.latest_id), has_txids


class AsyncTypedLogWriter(AsyncLogWriter):
    """Appends Arrow batches to one typed log, as its only writer.

    Batches have columns of the log's schema, and `_txid` where rows have their own; those without
    get the present time in epoch milliseconds as their transaction id, or the one before, if that
    is higher.  Rows are written by the version of the schema that was the latest when the log was
    opened, or when a batch came that needed a later one.
    """

    def __init__(self, *args: Any, schema: LogSchema) -> None:
        super().__init__(*args)
        self._schema = schema

    def write(self, record: LogRecord) -> asyncio.Future[DLSN]:
        """Refuse a record of bytes.

        Raises:
            SchemaMismatchError: the log is typed; `write_batch` and `submit_table` write to it.
        """
        raise self.refusal()

    def refusal(self) -> SchemaMismatchError:
        """Return the error for a record of bytes."""
        return SchemaMismatchError(
            f"log {self.log_name!r} is typed, and takes no records of bytes: write_batch takes "
            "Arrow batches, write_table (of the async writer submit_table) tables and frames"
        )

    def fitted(self, batch: pa.RecordBatch, *, last_txid: int) -> TypedRows:
        """Return what entries hold of a batch that follows `last_txid`.

        Raises:
            SchemaMismatchError, LogRecordTooLongError: it does not fit.
        """
        rows, has_txids = fit_rows(self.log_name, self._schema, batch)
        if has_txids:
            return rows
        txid = min(max(self._context.clock.now_ms(), last_txid, 0), TXID_MAX)
        return TypedRows(with_txid(rows.batch, txid), rows.schema_id, rows.ends)

    def write_fitted(self, rows: TypedRows) -> asyncio.Future[DLSN]:
        """Accept rows that `fitted` returned."""
        future: asyncio.Future[DLSN] = self._loop.create_future()
        self._machine.add_rows(rows, future)
        self._wake.set()
        return future

    async def submit_batch(self, batch: pa.RecordBatch) -> None:
        """Wait for capacity and write `batch`, by a later version of the schema if it needs one."""
        if batch.num_rows == 0:
            return
        try:
            rows = self.fitted(batch, last_txid=self.last_txid)
        except SchemaMismatchError:
            if not await self.refresh_schema():
                raise
            rows = self.fitted(batch, last_txid=self.last_txid)
        await self.wait_for_capacity()
        self.write_fitted(rows)

    async def refresh_schema(self) -> bool:
        """Read the schema again; return whether it has changed."""
        (schema,) = await self._context.logs.read_schemas([self._log])
        assert schema is not None
        known, self._schema = self._schema, schema
        return schema != known
