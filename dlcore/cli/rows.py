"""Rows of typed logs on the command line: JSON objects, as records are bytes."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from dlcore.closing import AsyncClosing
from dlcore.errors import ConfigurationError
from dlcore.ids import DLSN
from dlcore.log.entries.batches import typed_read_fields
from dlcore.log.manager import DistributedLogManager
from dlcore.schemas import describe_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.reading.reader import AsyncLogReader
    from dlcore.remote.log import RemoteLog
    from dlcore.remote.reader import RemoteReader

_READ_NAMES = [field.name for field in typed_read_fields()]
_MS = pa.timestamp("ms", "UTC")
_PLAIN_KINDS = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_string,
    pa.types.is_timestamp,
    pa.types.is_decimal,
)


class TypedRow(NamedTuple):
    """A row, as what shows records wants one: its payload is a JSON object of its columns."""

    dlsn: DLSN
    txid: int
    sequence_id: int
    timestamp_ms: int
    payload: bytes

    @property
    def row(self) -> dict[str, Any]:
        """The columns, by name, as JSON has them."""
        found: dict[str, Any] = json.loads(self.payload)
        return found


class RowReader(AsyncClosing):
    """A reader of a typed log, which gives rows as others give records."""

    def __init__(self, reader: AsyncLogReader | RemoteReader) -> None:
        self._reader = reader
        self._left: pa.RecordBatch | None = None

    @classmethod
    async def open(
        cls,
        reader: AsyncLogReader | RemoteReader,
        log: DistributedLogManager | RemoteLog,
        **start: Any,
    ) -> RowReader:
        """Make one of a reader of a log, or of another one that is opened with all columns."""
        if isinstance(log, DistributedLogManager):
            return cls(reader)
        await reader.aclose()
        names = [*_READ_NAMES, *(await log.get_schema()).names]
        return cls(await log.open_reader(**start, columns=names))

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
    """Return the rows of a batch that a reader of a typed log gave."""
    dlsns, txids, sequence_ids = (batch.column(name).to_pylist() for name in _READ_NAMES[:3])
    times = pc.cast(pc.cast(batch.column("_timestamp"), _MS, safe=False), pa.int64()).to_pylist()
    return [
        TypedRow(DLSN(*dlsn.values()), txid, sequence_id, timestamp_ms, json_of(columns).encode())
        for dlsn, txid, sequence_id, timestamp_ms, columns in zip(
            dlsns,
            txids,
            sequence_ids,
            times,
            batch.drop_columns(_READ_NAMES).to_pylist(),
            strict=True,
        )
    ]


def json_of(columns: dict[str, Any]) -> str:
    """Return a row as JSON: bytes in base64, times as ISO 8601 has them, decimals as text."""
    return json.dumps(columns, ensure_ascii=False, default=_text)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return str(value)


def batch_of_json(lines: Sequence[bytes], schema: pa.Schema, *, written: int) -> pa.RecordBatch:
    """Return the rows of a typed log that JSON objects are, a line each.

    Args:
        lines: the objects; columns that none of them names are left out.
        schema: the log's.
        written: how many lines came before, and were written.

    Raises:
        ConfigurationError: it tells which line is something else, and what would be right.
    """
    try:
        return _parsed(lines, schema)
    except (pa.ArrowException, ValueError):
        for number, line in enumerate(lines, written + 1):
            if problem := _problem_of(line, schema):
                columns = describe_schema(_readable(schema))
                raise ConfigurationError(
                    f"line {number}: {problem}: expected a JSON object with columns of "
                    f"({columns}); the first {written} lines were written"
                ) from None
        raise


def _readable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if _is_text(field.type) or _is_plain(field.type)])


def _is_text(kind: pa.DataType) -> bool:
    """Return whether Arrow reads values of this type from no text, but makes them of it."""
    return _is_binary(kind) or bool(pa.types.is_date(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether Arrow reads values of this type from JSON."""
    if pa.types.is_list(kind) or pa.types.is_struct(kind):
        return all(_is_plain(kind.field(index).type) for index in range(kind.num_fields))
    return any(is_kind(kind) for is_kind in _PLAIN_KINDS)


def _read_as(kind: pa.DataType) -> pa.DataType:
    if _is_text(kind):
        return pa.string()
    return kind if _is_plain(kind) else pa.null()


def _parsed(lines: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    data = b"\n".join(lines)
    read = [pa.field(field.name, _read_as(field.type)) for field in schema]
    table = pyarrow.json.read_json(
        pa.BufferReader(data),
        pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        pyarrow.json.ParseOptions(pa.schema(read), True, "error"),
    )
    if table.num_rows != len(lines):
        raise pa.ArrowInvalid("it holds no object, or several")
    (batch,) = table.combine_chunks().to_batches()
    columns = _readable(schema)
    arrays = [_made(batch.column(field.name), field.type) for field in columns]
    return pa.RecordBatch.from_arrays(arrays, names=columns.names)


def _made(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if _is_binary(kind):
        values = [
            None if text is None else base64.b64decode(text, validate=True)
            for text in column.to_pylist()
        ]
        return pa.array(values, kind)
    return column if column.type == kind else column.cast(kind)


def _problem_of(line: bytes, schema: pa.Schema) -> str | None:
    try:
        _parsed([line], schema)
    except (pa.ArrowException, ValueError) as error:
        unknown = _names_in(line).difference(_readable(schema).names)
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
