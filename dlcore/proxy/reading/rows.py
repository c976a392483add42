"""A log's rows as a proxy sends them: those of the Spark source, of which one may want some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore.errors import SchemaMismatchError
from dlcore.log.reading.ranges import RangeView
from dlcore.schemas import byte_row_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.typed.schema import LogSchema


class RowView:
    """Which columns of a log's rows are wanted.

    Args:
        log: its name.
        schema: of a typed log, whose rows have its own columns, and, if they are named, `_log`,
            `_dlsn`, `_txid`, `_sequence_id` and `_timestamp`.
        columns: by name; None: all of a log of bytes, a typed log's own.

    Raises:
        SchemaMismatchError: the log has no such column.
    """

    def __init__(self, log: str, schema: LogSchema | None, columns: Sequence[str] | None) -> None:
        self._log = log
        self._typed = None if schema is None else RangeView(log, schema, columns)
        self.schema = self._chosen(columns) if self._typed is None else self._typed.schema

    def _chosen(self, columns: Sequence[str] | None) -> pa.Schema:
        rows = byte_row_schema()
        names = rows.names if columns is None else list(columns)
        for name in names:
            if name not in rows.names or names.count(name) > 1:
                raise SchemaMismatchError(
                    f"log {self._log!r}: columns={names}: {name!r} is none of its columns, or "
                    f"there twice; there are {', '.join(rows.names)}"
                )
        return pa.schema([rows.field(name) for name in names])

    def of(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Return the rows of batches, as a reader of the log returns them, in one."""
        take = self._of_bytes if self._typed is None else self._typed.of
        parts = [take(batch) for batch in batches]
        if len(parts) == 1:
            return parts[0]
        (joined,) = pa.Table.from_batches(parts).combine_chunks().to_batches()
        return joined

    def _of_bytes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [self._column(batch, name) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, batch: pa.RecordBatch, name: str) -> Any:
        match name:
            case "log":
                return pa.repeat(pa.scalar(self._log), batch.num_rows)
            case "dlsn":
                fields = list(self.schema.field(name).type)
                return pa.StructArray.from_arrays(batch.columns[:3], fields=fields)
            case "timestamp":
                return batch.column(name).cast(self.schema.field(name).type)
            case "value":
                return batch.column("payload")
            case _:
                return batch.column(name)
