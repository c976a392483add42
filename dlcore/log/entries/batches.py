"""Arrow and numpy kernels over record batches: checks, cuts, metadata columns; no row loops."""

from __future__ import annotations

from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import TXID_MAX
from dlcore.base.records import LogRecord, LogRecordWithDLSN
from dlcore.log.entries.batcher import (
    RECORD_OVERHEAD_BYTES,
    check_payload_size,
    txid_out_of_order,
    txid_out_of_range,
)
from dlcore.log.entries.body import byte_log_schema, over, present_txid
from dlcore.log.typed.rows import cut_by

if TYPE_CHECKING:
    from dlcore.base.records import EntryPlace

_ROWS_PER_BATCH = 64 * 1024
"""A table is split into batches of at most this many rows."""


@cache
def read_schema() -> pa.Schema:
    """Return the columns of a byte log, which are the same in every API.

    Spark requires exactly these of its source: nullable, and times in microseconds, though a log
    stores milliseconds.
    """
    position = pa.struct([("lssn", pa.int64()), ("entry", pa.int64()), ("slot", pa.int64())])
    return pa.schema(
        [
            ("log", pa.string()),
            ("dlsn", position),
            ("txid", pa.int64()),
            ("sequence_id", pa.int64()),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            ("value", pa.binary()),
        ]
    )


def byte_log_batch(batch: pa.RecordBatch, *, assigned_txid: int) -> pa.RecordBatch:
    """Return `batch` with exactly the columns txid and value.

    Args:
        batch: has a column value (binary, or a type that is binary inside), and txid (integers).
        assigned_txid: the txid of all rows, if the batch has no such column.

    Raises:
        ConfigurationError: a column is missing, has another type, or holds nulls.
    """
    value = _column(batch, "value")
    if value is None:
        raise ConfigurationError(
            f"a batch needs a column value, it has {batch.schema.names}: a log of bytes takes "
            "value and txid; a log with other columns is created with a schema"
        )
    txid = _column(batch, "txid")
    if txid is None:
        txid = over(np.full(batch.num_rows, assigned_txid, np.int64), pa.int64())
    columns = [_typed("txid", txid, pa.int64()), _typed("value", value, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=byte_log_schema())


def timed_rows(batch: pa.RecordBatch, *, now_ms: int, last_txid: int) -> pa.RecordBatch | LogRecord:
    """Return `byte_log_batch`, with the time as transaction id of rows that come without one."""
    txid = present_txid(now_ms=now_ms, last_txid=last_txid)
    if batch.num_rows == batch.num_columns == 1:
        # A single record is cheaper than a batch of one row, and many small clients send such.
        payload = batch.column(0)[0].as_py()
        if isinstance(payload, bytes):
            return LogRecord(txid, payload)
    return byte_log_batch(batch, assigned_txid=txid)


def batches_from(table: Any) -> list[pa.RecordBatch]:
    """Return the rows of an Arrow table, a data frame, or an object that exports Arrow's stream.

    Raises:
        ConfigurationError: it is none of these.
    """
    try:
        return pa.table(table).to_batches(max_chunksize=_ROWS_PER_BATCH)  # type: ignore[no-any-return]
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"expected a table or frame that Arrow can take, not {type(table).__name__}: {error} "
            "(pa.Table.from_pylist makes one of dictionaries)"
        ) from error


def _column(batch: pa.RecordBatch, name: str) -> Any:
    index = batch.schema.get_field_index(name)
    return None if index < 0 else batch.column(index)


def _typed(name: str, column: Any, wanted: Any) -> Any:
    if column.null_count:
        raise ConfigurationError(f"column {name} holds {column.null_count} nulls, expected none")
    if column.type == wanted:
        return column
    kinds = (
        pa.types.is_integer(column.type)
        if name == "txid"
        else pa.types.is_string(column.type)
        or pa.types.is_large_string(column.type)
        or pa.types.is_large_binary(column.type)
        or pa.types.is_fixed_size_binary(column.type)
    )
    if not kinds:
        raise ConfigurationError(f"column {name} has type {column.type}, expected {wanted}")
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid as error:
        raise ConfigurationError(f"column {name} does not fit {wanted}: {error}") from error


def check_txids(batch: pa.RecordBatch, *, last_txid: int) -> tuple[int, int]:
    """Return the first and last transaction id of a byte log's batch of at least one row.

    Raises:
        ConfigurationError: one is out of range.
        TransactionIdOutOfOrderError: one is lower than the one before it, or than `last_txid`.
    """
    txids = numbers_of(batch.column(0))
    first, last = int(txids[0]), int(txids[-1])
    lowest, highest = int(txids.min()), int(txids.max())
    if lowest < 0 or highest > TXID_MAX:
        raise txid_out_of_range(lowest if lowest < 0 else highest)
    descents = np.flatnonzero(txids[1:] < txids[:-1])
    if first < last_txid:
        raise txid_out_of_order(first, last_txid)
    if descents.size:
        at = int(descents[0])
        raise txid_out_of_order(int(txids[at + 1]), int(txids[at]))
    return first, last


def numbers_of(column: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return 64-bit integers without a copy; Arrow's own conversion would load pandas."""
    if not len(column):
        return np.zeros(0, np.int64)
    return np.frombuffer(column.buffers()[1], np.int64, len(column), column.offset * 8)


def payload_offsets(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the start of each payload and the end of the last, counted from 0."""
    payload = batch.column(1)
    buffer = payload.buffers()[1]
    if buffer is None or batch.num_rows == 0:
        return np.zeros(batch.num_rows + 1, np.int64)
    # A slice shares the buffers of its batch, so its first payload may begin anywhere.
    offsets = np.frombuffer(buffer, np.int32)[payload.offset : payload.offset + len(payload) + 1]
    return offsets.astype(np.int64) - int(offsets[0])


def cut(batch: pa.RecordBatch, *, entry_bytes: int) -> list[tuple[pa.RecordBatch, int]]:
    """Cut a byte log's batch into slices like `cut_by`.

    Raises:
        LogRecordTooLongError: a record is larger than any entry may be.
    """
    offsets = payload_offsets(batch)
    check_payload_size(int(np.max(np.diff(offsets), initial=0)))
    costs = offsets + RECORD_OVERHEAD_BYTES * np.arange(len(offsets), dtype=np.int64)
    return list(cut_by(batch, costs, entry_bytes))


def first_row_not_less(batch: pa.RecordBatch, txid: int) -> int:
    """Return the first row with `txid` or more; the number of rows if there is none."""
    return int(np.searchsorted(numbers_of(batch.column(0)), txid, side="left"))


def read_batch(
    batch: pa.RecordBatch, place: EntryPlace, *, first_slot: int, log: str
) -> pa.RecordBatch:
    """Return rows of one entry, the first at `first_slot`, with all columns of `read_schema`."""
    dlsn, sequence_id, timestamp = _known_of(batch, place, first_slot)
    names = repeated_text(log, batch.num_rows)
    columns = [names, dlsn, batch.column(0), sequence_id, timestamp, batch.column(1)]
    return pa.RecordBatch.from_arrays(columns, schema=read_schema())


def repeated_text(text: str, count: int) -> pa.Array:
    """Return a column that has the same text in each of its rows."""
    data = text.encode()
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(data * count))


def _known_of(batch: pa.RecordBatch, place: EntryPlace, first_slot: int) -> list[pa.Array]:
    """Return columns for rows of an entry: the DLSN, the sequence id and the time."""
    count = batch.num_rows
    numbers = np.empty((5, count), np.int64)
    numbers[0] = place.lssn
    numbers[1] = place.entry_id
    numbers[2] = np.arange(first_slot, first_slot + count)
    numbers[3] = numbers[2] + place.sequence_id
    numbers[4] = place.timestamp_ms * 1000
    position, number, time = _known_types()
    *parts, sequence_id = (over(row, number) for row in numbers[:4])
    dlsn = pa.Array.from_buffers(position, count, [None], children=parts)
    return [dlsn, sequence_id, over(numbers[4], time)]


@cache
def _known_types() -> tuple[pa.DataType, ...]:
    """Return the types of DLSN, sequence id and time; cached, since a lookup takes longer."""
    return tuple(read_schema().field(name).type for name in ("dlsn", "sequence_id", "timestamp"))


@cache
def typed_read_fields() -> tuple[pa.Field, ...]:
    """Return the columns of a typed log's batches that come before the log's own columns."""
    names = ("dlsn", "txid", "sequence_id", "timestamp")
    return tuple(read_schema().field(name).with_name(f"_{name}") for name in names)


def typed_read_batch(
    batch: pa.RecordBatch, place: EntryPlace, *, first_slot: int
) -> pa.RecordBatch:
    """Return rows of one entry of a typed log, the first at `first_slot`, with those columns."""
    dlsn, sequence_id, timestamp = _known_of(batch, place, first_slot)
    columns = [dlsn, batch.column(0), sequence_id, timestamp, *batch.columns[1:]]
    schema = pa.schema([*typed_read_fields(), *list(batch.schema)[1:]])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def records_of(
    batch: pa.RecordBatch, place: EntryPlace, *, first_slot: int
) -> list[LogRecordWithDLSN]:
    """Return rows of one entry, the first at `first_slot`, as records."""
    slots = range(first_slot, first_slot + batch.num_rows)
    txids, payloads = batch.column(0).to_pylist(), batch.column(1).to_pylist()
    return list(map(LogRecordWithDLSN, txids, payloads, slots, repeat(place)))
