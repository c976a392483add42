"""Records and rows as JSON objects, on the command line and over HTTP.

On the command line a row of a typed log takes the place of a payload.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from dlcore.api.schemas import describe_schema
from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.log.entries.batches import typed_read_fields
from dlcore.log.typed.arrow import null_in, plain_schema
from dlcore.log.typed.json_values import from_json, json_rows, json_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.reading.rows_reader import AsyncLogReader


_READ_NAMES = [field.name for field in typed_read_fields()]
_MS = pa.timestamp("ms", "UTC")


class TypedRow(NamedTuple):
    """A row in the form of a record: its payload is a JSON object of its columns."""

    dlsn: DLSN
    txid: int
    sequence_id: int
    timestamp_ms: int
    payload: bytes

    @property
    def row(self) -> dict[str, Any]:
        """The columns by name, as JSON values."""
        found: dict[str, Any] = json.loads(self.payload)
        return found


class RowReader(AsyncClosing):
    """A reader of a typed log that returns rows in the form of records."""

    def __init__(self, reader: AsyncLogReader) -> None:
        self._reader = reader
        self._left: pa.RecordBatch | None = None

    async def read_bulk(self, count: int, *, until_caught_up: bool = False) -> list[TypedRow]:
        """Return up to `count` rows, of one entry.  Raises: as `AsyncLogReader.read_batch`."""
        batch = self._left
        if batch is None:
            batch = await self._reader.read_batch(until_caught_up=until_caught_up)
        if batch is None:
            return []
        self._left = batch.slice(count) if batch.num_rows > count else None
        return rows_of(batch.slice(0, count))

    async def aclose(self) -> None:
        """Close the reader."""
        await self._reader.aclose()


def rows_of(batch: pa.RecordBatch) -> list[TypedRow]:
    """Return the rows of a batch from a reader of a typed log."""
    dlsns, txids, sequence_ids = (batch.column(name).to_pylist() for name in _READ_NAMES[:3])
    times = pc.cast(pc.cast(batch.column("_timestamp"), _MS, safe=False), pa.int64()).to_pylist()
    return [
        TypedRow(DLSN(*dlsn.values()), txid, sequence_id, timestamp_ms, row.encode())
        for dlsn, txid, sequence_id, timestamp_ms, row in zip(
            dlsns,
            txids,
            sequence_ids,
            times,
            json_rows(batch.drop_columns(_READ_NAMES)),
            strict=True,
        )
    ]


def batch_of_json(lines: Sequence[bytes], schema: pa.Schema, *, written: int) -> pa.RecordBatch:
    """Convert JSON objects, one in each line, to rows of a typed log.

    Args:
        lines: the objects; columns that are in none of them are left out.
        schema: the log's schema.
        written: number of earlier lines, which were written.

    Raises:
        ConfigurationError: a line is something else; the error names it, and what is expected.
    """
    try:
        return _parsed(lines, schema)
    except (pa.ArrowException, ValueError):
        # Arrow's error does not name the line: each is parsed alone, which would be slow for all.
        for number, line in enumerate(lines, written + 1):
            if problem := _problem_of(line, schema):
                columns = describe_schema(schema)
                raise ConfigurationError(
                    f"line {number}: {problem}: expected a JSON object with columns of "
                    f"({columns}); the first {written} lines were written"
                ) from None
        raise


def _parsed(lines: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    data = b"\n".join(lines)
    read = [pa.field(field.name, json_type(field.type)) for field in schema]
    table = pyarrow.json.read_json(
        pa.BufferReader(data),
        pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        pyarrow.json.ParseOptions(pa.schema(read), True, "error"),
    )
    if table.num_rows != len(lines):
        raise pa.ArrowInvalid("it holds no object, or several")
    (batch,) = table.combine_chunks().to_batches()
    arrays = [_made(batch.column(field.name), field) for field in plain_schema(schema)]
    rows = pa.RecordBatch.from_arrays(arrays, names=schema.names)
    null = null_in(rows, schema)
    if null is not None:
        raise ValueError(f"column {null!r} is null, and cannot be")
    return rows


def _made(column: pa.Array, field: pa.Field) -> pa.Array:
    try:
        return from_json(column, field.type)
    except ValueError as error:  # also Arrow's errors
        raise ValueError(f"column {field.name!r}: {error}") from error


def _problem_of(line: bytes, schema: pa.Schema) -> str | None:
    try:
        _parsed([line], schema)
    except (pa.ArrowException, ValueError) as error:
        unknown = _names_in(line).difference(schema.names)
        return f"column {min(unknown)!r}" if unknown else str(error).removesuffix(" in row 0")
    return None


def _names_in(line: bytes) -> set[str]:
    try:
        found = json.loads(line)
    except ValueError:
        return set()
    if not isinstance(found, dict):
        return set()
    return {name for name, value in found.items() if value is not None}


def payload_json(payload: bytes) -> dict[str, str]:
    """Return a payload without loss: as text, or as base64 if it is not UTF-8."""
    try:
        return {"value": payload.decode("utf-8")}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(payload).decode("ascii")}


def record_json(record: LogRecordWithDLSN | TypedRow) -> dict[str, Any]:
    """Return a record, or the row of a typed log with its columns, as a JSON object."""
    row = getattr(record, "row", None)
    return {
        "dlsn": str(record.dlsn),
        "txid": record.txid,
        "sequence_id": record.sequence_id,
        "timestamp_ms": record.timestamp_ms,
        **(payload_json(record.payload) if row is None else {"row": row}),
    }
