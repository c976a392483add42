"""Conversion between Arrow batches of a log and of Spark, by whole columns.

Small entries are joined into batches of some 64 thousand rows, because Spark's cost of a batch does
not depend on its size; the values of a large entry are handed on as they came, without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlcore.api.schemas import byte_row_schema
from dlcore.base.errors import ConfigurationError, SchemaMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dlcore.sync import ScanRun
    from dlspark.schema import WriteColumns

ROWS_PER_BATCH = 64 * 1024
COUNTED_ROWS_PER_BATCH = 1024 * 1024
"""Rows per batch if only numbers are returned: a row has few bytes, and no read delays it."""
_COUNTED_NAME_BYTES = 32 * 1024 * 1024
"""Bytes of the log's name in such a batch: with a long name there are fewer rows."""
BYTES_PER_BATCH = 8 * 1024 * 1024
_FIRST_BYTES, _GROWTH = 64 * 1024, 2
"""Wanted size of the first batch, and how many times more each next one may have."""
_INT64 = pa.int64()
ROW_SCHEMA = byte_row_schema()
"""The Arrow schema of `dlspark.schema.READ_SCHEMA`."""
_TIMESTAMP = ROW_SCHEMA.field("timestamp").type
_DLSN = ROW_SCHEMA.field("dlsn").type

WRITE_SCHEMA = pa.schema([("value", pa.binary())])
WRITE_SCHEMA_WITH_TXID = pa.schema([("txid", pa.int64()), ("value", pa.binary())])


_KNOWN = tuple(name for name in ROW_SCHEMA.names if name != "value")
"""Columns with the metadata of each record."""
_COUNTED = frozenset({"log", "sequence_id"})
"""Columns of this metadata that are known without reading records."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The rows that Spark expects; each column shows an item of `_KNOWN`, or data of the record."""

    schema: pa.Schema
    known: tuple[str | None, ...]
    data: tuple[str, ...]

    @classmethod
    def of_bytes(cls, columns: Sequence[str]) -> RowShape:
        """Return the shape of rows of byte logs."""
        schema = pa.schema([ROW_SCHEMA.field(column) for column in columns])
        known = tuple(column if column in _KNOWN else None for column in columns)
        return cls(schema, known, ("value",) * len(known))

    @classmethod
    def of_typed(cls, schema: pa.Schema) -> RowShape:
        """Return the shape of rows of typed logs."""
        names = {f"_{name}": name for name in _KNOWN}
        return cls(schema, tuple(names.get(name) for name in schema.names), tuple(schema.names))

    @property
    def log_columns(self) -> frozenset[str]:
        """The columns that the log itself has."""
        columns = zip(self.data, self.known, strict=True)
        return frozenset(name for name, known in columns if known is None)

    @property
    def is_counted(self) -> bool:
        """Whether the rows follow from their numbers, so that no record needs to be read."""
        return _COUNTED.issuperset(self.known)


class RowBuilder:
    """Turns scanned batches of one log into batches of rows for Spark, with the wanted columns."""

    def __init__(self, log: str, shape: RowShape) -> None:
        self._shape = shape
        self._schema = shape.schema
        self._name = log
        self._log = log.encode()
        self._names = pa.nulls(0, pa.string())
        self._ramp = np.arange(0, dtype=np.int64)

    def build(self, runs: Iterable[ScanRun]) -> Iterator[pa.RecordBatch]:
        """Yield rows in the order of `runs`, joining small ones.

        The first batches are small, for a query that stops when it has a few rows.
        """
        waiting: list[ScanRun] = []
        rows = size_bytes = 0
        wanted_bytes = _FIRST_BYTES
        for run in runs:
            if waiting and (
                rows + run.batch.num_rows > ROWS_PER_BATCH
                or size_bytes + run.batch.nbytes > wanted_bytes
            ):
                yield self._join(waiting)
                waiting, rows, size_bytes = [], 0, 0
                wanted_bytes = min(_GROWTH * wanted_bytes, BYTES_PER_BATCH)
            waiting.append(run)
            rows += run.batch.num_rows
            size_bytes += run.batch.nbytes
            if size_bytes >= wanted_bytes:
                yield self._join(waiting)
                waiting, rows, size_bytes = [], 0, 0
                wanted_bytes = min(_GROWTH * wanted_bytes, BYTES_PER_BATCH)
        if waiting:
            yield self._join(waiting)

    def count(self, first_sequence_id: int, records: int) -> Iterator[pa.RecordBatch]:
        """Yield rows that show only their log and number, without reading records."""
        rows_max = min(COUNTED_ROWS_PER_BATCH, _COUNTED_NAME_BYTES // len(self._log))
        for start in range(0, records, rows_max):
            row = self._row_numbers(min(rows_max, records - start))
            numbers = _over(row + (first_sequence_id + start))
            columns = {"log": self._repeated_name(len(row)), "sequence_id": numbers}
            arrays = [columns[known or ""] for known in self._shape.known]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _join(self, parts: list[ScanRun]) -> pa.RecordBatch:
        def of_entries(name: str) -> Any:
            return _concatenated([getattr(part, name) for part in parts])

        counts = of_entries("records")
        row = self._row_numbers(int(counts.sum()))

        def of_rows(name: str) -> Any:
            return np.repeat(of_entries(name), counts)

        def row_in_entry() -> Any:
            return row - np.repeat(np.cumsum(counts) - counts, counts)

        def dlsn() -> pa.StructArray:
            lssn = np.repeat([part.lssn for part in parts], [part.batch.num_rows for part in parts])
            slot = of_rows("first_slots") + row_in_entry()
            numbers = [_over(column) for column in (lssn, of_rows("entry_ids"), slot)]
            return pa.StructArray.from_arrays(numbers, fields=list(_DLSN))

        # Functions, because a query often wants few of the columns.  Spark's times are in
        # microseconds.
        columns: dict[str, Callable[[], pa.Array]] = {
            "log": lambda: self._repeated_name(len(row)),
            "dlsn": dlsn,
            "txid": lambda: _joined([part.batch.column(0) for part in parts]),
            "sequence_id": lambda: _over(of_rows("sequence_ids") + row_in_entry()),
            "timestamp": lambda: _over(of_rows("timestamps_ms") * 1000, _TIMESTAMP),
        }
        arrays = [
            columns[known]() if known is not None else self._data(parts, name, field)
            for field, known, name in zip(
                self._schema, self._shape.known, self._shape.data, strict=True
            )
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _data(self, parts: list[ScanRun], name: str, field: pa.Field) -> pa.Array:
        """Return a column of the records in Spark's type; nulls if the log does not have it."""
        kind = field.type
        if parts[0].batch.schema.get_field_index(name) < 0:
            array = pa.nulls(sum(part.batch.num_rows for part in parts), kind)
        else:
            array = _joined([part.batch.column(name) for part in parts])
        if array.null_count and not field.nullable:
            # In a column that is not nullable Spark ignores nulls, and would use the bytes below.
            raise SchemaMismatchError(
                f"log {self._name!r}: column {name!r} is not nullable in this read, and has "
                f"{array.null_count} nulls. If the log's schema has changed since, start the "
                "query again"
            )
        if array.type.equals(kind):
            return array
        try:
            return array.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaMismatchError(
                f"log {self._name!r}: column {name!r} is {array.type}, and not all of its values "
                f"fit {kind}, the type of this read: {error}. If the log's schema has changed "
                "since, start the query again"
            ) from error

    def _row_numbers(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if len(self._ramp) < count:
            self._ramp = np.arange(count, dtype=np.int64)
        return self._ramp[:count]

    def _repeated_name(self, count: int) -> pa.StringArray:
        # Spark's schema allows no dictionary encoding, so each row repeats the name.  All batches
        # share one array of it.
        if len(self._names) < count:
            ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(self._log))
            self._names = pa.StringArray.from_buffers(
                count, pa.py_buffer(ends), pa.py_buffer(self._log * count)
            )
        return self._names.slice(0, count)


def _over(numbers: np.ndarray[Any, np.dtype[np.int64]], kind: pa.DataType = _INT64) -> pa.Array:
    # A view of the existing memory: Arrow's own conversion would load pandas, in each worker.
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _concatenated(
    arrays: list[np.ndarray[Any, np.dtype[np.int64]]],
) -> np.ndarray[Any, np.dtype[np.int64]]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def batches_by_log(
    batch: pa.RecordBatch, columns: WriteColumns, *, log: str | None
) -> list[tuple[str, pa.RecordBatch]]:
    """Return what to write to which log: the columns ``value`` and, if rows have one, ``txid``.

    All rows go to `log` if that is given, else each row to the log that its column ``log`` names,
    in order.  For typed logs all columns are written, and ``_log`` names the log.

    Raises:
        ConfigurationError: a value, txid or log is null.
    """
    if batch.num_rows == 0:
        return []
    if columns.typed is not None:
        if columns.has_txid and batch.column("_txid").null_count == batch.num_rows:
            batch = batch.drop_columns(["_txid"])
        elif columns.has_txid:
            _required(batch, "_txid")
        return _by_log(batch, batch, log, "_log")
    arrays = [_required(batch, "value").cast(pa.binary())]
    # SQL's INSERT fills columns that it does not name with nulls: then no row has a txid.
    has_txid = columns.has_txid and batch.column("txid").null_count < batch.num_rows
    if has_txid:
        arrays.insert(0, _required(batch, "txid"))
    schema = WRITE_SCHEMA_WITH_TXID if has_txid else WRITE_SCHEMA
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return _by_log(rows, batch, log, "log")


def _by_log(
    rows: pa.RecordBatch, batch: pa.RecordBatch, log: str | None, column: str
) -> list[tuple[str, pa.RecordBatch]]:
    if log is not None:
        return [(log, rows)]
    # A stable sort by log: the order of each log's rows is the order of the batch.
    names = _required(batch, column)
    encoded = names.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    if len(distinct) == 1:
        return [(distinct[0], rows)]
    codes = encoded.indices.to_numpy()
    grouped = rows.take(_over(np.argsort(codes, kind="stable")))
    ends = np.cumsum(np.bincount(codes)).tolist()
    return [
        (name, grouped.slice(start, end - start))
        for name, start, end in zip(distinct, [0, *ends], ends, strict=False)
    ]


def _required(batch: pa.RecordBatch, column: str) -> pa.Array:
    array = batch.column(column)
    if array.null_count:
        row = pc.index(array.is_null(), pa.scalar(value=True)).as_py()
        raise ConfigurationError(
            f"the column {column!r} is null in {array.null_count} of {batch.num_rows} rows (first "
            f"in row {row} of its batch), which a log cannot store: filter these rows out, or fill "
            f"them with coalesce({column}, …); nothing was written"
        )
    return array
