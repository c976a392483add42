"""The writer of a typed log: fits batches to its schema, and refuses records of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dlcore.base.errors import SchemaMismatchError
from dlcore.log.entries.body import present_txid, with_txid
from dlcore.log.typed.arrow import entry_schemas
from dlcore.log.typed.rows import TypedRows
from dlcore.log.writing.writer import DirectWriter

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecord
    from dlcore.log.metadata.store import LogStore
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.typed.schema import LogSchema
    from dlcore.log.writing.port import RowMark


class FittingSchema:
    """A log's schema as a writer knows it; read again when a batch does not fit the latest."""

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


def records_refused(log: str) -> SchemaMismatchError:
    """Return the error for a record of bytes that a typed log is given."""
    return SchemaMismatchError(
        f"log {log!r} is typed, and takes no records of bytes: write_batch takes "
        "Arrow batches, write_table (of the async writer submit_table) tables and frames"
    )


class DirectTypedWriter(DirectWriter):
    """Appends Arrow batches to one typed log, as its only writer.

    Batches have columns of the log's schema, and `_txid` if rows have their own.  Rows without it
    get the present time in epoch milliseconds as their transaction id, or the last one, if that is
    higher.  Rows are written with the version of the schema that was the latest when the log was
    opened, or when a batch needed a later one.
    """

    def __init__(self, *args: Any, schema: LogSchema) -> None:
        super().__init__(*args)
        self._schema = FittingSchema(self._context.logs, self._log, schema)

    @override
    def write(self, record: LogRecord) -> asyncio.Future[DLSN]:
        raise records_refused(self.log_name)

    @property
    @override
    def is_typed(self) -> bool:
        return True

    @override
    def fitted(self, batch: pa.RecordBatch, *, last_txid: int) -> TypedRows:
        return self._with_txids(self._schema.fit(batch), last_txid)

    @override
    async def fitted_latest(
        self, batch: pa.RecordBatch, *, last_txid: int | None = None
    ) -> TypedRows:
        """Return the same, with a later version of the schema if the batch needs one.

        `last_txid` is by default the writer's, when the batch fits.
        """
        fitted = await self._schema.fit_latest(batch)
        return self._with_txids(fitted, self.last_txid if last_txid is None else last_txid)

    def _with_txids(self, fitted: tuple[TypedRows, bool], last_txid: int) -> TypedRows:
        rows, has_txids = fitted
        if has_txids:
            return rows
        txid = present_txid(now_ms=self._context.clock.now_ms(), last_txid=last_txid)
        return TypedRows(with_txid(rows.batch, txid), rows.schema_id, rows.ends)

    @override
    def write_fitted(
        self, rows: TypedRows, *, mark: RowMark | None = None, whole: bool = False
    ) -> asyncio.Future[DLSN]:
        future: asyncio.Future[DLSN] = self._loop.create_future()
        self.machine.transmitter.add_rows(rows, future, mark=mark, whole=whole)
        self.pump.wake.set()
        return future

    @override
    async def submit_batch(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        fitted = await self._schema.fit_latest(batch)
        await self.wait_for_capacity()
        # Other calls may have written meanwhile.
        self.write_fitted(self._with_txids(fitted, self.last_txid))
