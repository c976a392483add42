"""The format of the objects of cold ledgers: entries of a segment as rows of one Parquet file.

A row is a record.  The columns `_lssn`, `_entry` and `_slot` are its position; `_txid`,
`_sequence_id` and `_timestamp` are what every reader gives.  The columns of a typed log follow, as
they are in the version of the schema that the entries have; those of a log of bytes are `value`.
Each has a field id that stays the same in all objects of the log.  Rows are sorted by position, and
an entry is in one row group, so that a reader needs the end of the file, and row groups of the
entries that it wants, one at a time.

The file's end has the `ObjectFacts` under ``dlog``, and the Arrow schema of the entries under
``dlog.schema``: Parquet has fewer types.  `records` and `crc32c` are those of the records when they
were read from bookies.  The sum covers what a reader is given, and no bytes that Parquet or Arrow
may arrange differently.  Nothing here does I/O.
"""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import crc32c
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlcore.base.errors import ObjectStoreError, UnsupportedError
from dlcore.log.cold.facts import FORMAT, ObjectFacts
from dlcore.log.entries.body import byte_log_schema
from dlcore.log.typed.arrow import conform, type_of
from dlcore.log.typed.schema import LIST, MAP, STRUCT, Column, LogSchema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from dlcore.wire.frames import BytesLike

TAIL_BYTES = 64 * 1024
"""Bytes at the end of an object that have its footer, mostly."""
ROW_GROUP_BYTES = 8 * 1024 * 1024
_MAGIC = b"PAR1"
_LENGTH = struct.Struct("<I4s")
_FACTS, _SCHEMA, _FIELD_ID = b"dlog", b"dlog.schema", b"PARQUET:field_id"
_FIRST_COLUMN_ID = 101
_ENTRY = struct.Struct("<qqq")
_SIZES = struct.Struct("<qq")


class ColdEntry(NamedTuple):
    """An entry's records: its number in the segment, and its batch with all transaction ids."""

    entry: int
    batch: pa.RecordBatch
    sequence_id: int
    timestamp_ms: int


class RowGroup(NamedTuple):
    """A row group: its entries, both ends included, and the place of its bytes.

    `memory_bytes` are those of its columns, compressed and not.
    """

    first_entry: int
    last_entry: int
    start: int
    end: int
    memory_bytes: int


def _positions() -> pa.Schema:
    kinds = {
        "_lssn": pa.int64(),
        "_entry": pa.int64(),
        "_slot": pa.int32(),
        "_txid": pa.int64(),
        "_sequence_id": pa.int64(),
        "_timestamp": pa.timestamp("ms", tz="UTC"),
    }
    return pa.schema(
        [
            pa.field(name, kind, nullable=False, metadata={_FIELD_ID: str(number)})
            for number, (name, kind) in enumerate(kinds.items(), 1)
        ]
    )


POSITIONS = _positions()


def columns_of_object(schema: LogSchema | None, schema_id: int) -> pa.Schema:
    """Return a log's own columns in an object, with their field ids.

    A column, or a part of one, has the same id in each version of the schema.

    Raises:
        UnsupportedError: Parquet has no such column, or a position has its name.
    """
    if schema is None:
        kind = byte_log_schema().field("value").type
        number = str(_FIRST_COLUMN_ID).encode()
        return pa.schema([pa.field("value", kind, metadata={_FIELD_ID: number})])
    ids: dict[tuple[str, ...], int] = {}
    for columns in schema.versions[:schema_id]:
        for path in _paths(columns):
            ids.setdefault(path, _FIRST_COLUMN_ID + len(ids))
    found = pa.schema([_field(each, (), ids) for each in schema.versions[schema_id - 1]])
    for name in set(found.names) & set(POSITIONS.names):
        raise UnsupportedError(f"a column is called {name!r}, as the position of a cold record")
    return found


def _paths(columns: Sequence[Column], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for column in columns:
        yield (*above, column.name)
        yield from _paths(column.fields, (*above, column.name))


def _field(column: Column, above: tuple[str, ...], ids: Mapping[tuple[str, ...], int]) -> pa.Field:
    path = (*above, column.name)
    parts = [_field(each, path, ids) for each in column.fields]
    kind = type_of(column)
    if column.type == STRUCT:
        kind = pa.struct(parts)
    elif column.type == LIST:
        kind = pa.list_(parts[0])
    elif column.type == MAP:
        kind = pa.map_(parts[0].with_nullable(False), parts[1])
    return pa.field(
        column.name, kind, column.nullable, metadata={_FIELD_ID: str(ids[path]).encode()}
    )


class ObjectEncoder:
    """Makes one object; it holds the rows of one row group, and the compressed bytes.

    Args:
        cluster_id: the cluster of the log.
        log_id: the log.
        lssn: the segment.
        schema_id: the version of the log's schema that all entries have; 0 for a log of bytes.
        schema: the schema of the entries' batches.
        columns: the result of `columns_of_object`.

    Raises:
        UnsupportedError: Parquet cannot hold a column.
    """

    def __init__(
        self,
        *,
        cluster_id: str,
        log_id: str,
        lssn: int,
        schema_id: int,
        schema: pa.Schema,
        columns: pa.Schema,
    ) -> None:
        self._origin = (cluster_id, log_id, lssn)
        self._schema_id = schema_id
        self._schema = schema
        self._written = pa.schema([*POSITIONS, *columns])
        self._sink = pa.BufferOutputStream()
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._sum = FactsCounter()
        self.size_bytes = 0
        """Bytes of the entries' batches until now, which are not compressed."""
        texts = [
            each.name
            for each in columns
            if schema_id and (pa.types.is_string(each.type) or pa.types.is_binary(each.type))
        ]
        try:
            self._writer = pq.ParquetWriter(
                self._sink,
                self._written,
                compression="zstd",
                # Dictionaries of numbers would make equal what only compares equal.
                use_dictionary=["_lssn", *texts],
                column_encoding=dict.fromkeys(POSITIONS.names[1:], "DELTA_BINARY_PACKED"),
                write_statistics=[*POSITIONS.names, *(columns.names if schema_id else ())],
                store_schema=True,
                write_page_checksum=True,
            )
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise UnsupportedError(f"Parquet cannot hold the log's columns: {error}") from error

    def add(self, entry: ColdEntry) -> bool:
        """Add the next entry; return whether `flush` is due."""
        self._sum.add(entry)
        rows = entry.batch.num_rows
        positions = (
            np.full(rows, self._origin[2]),
            np.full(rows, entry.entry),
            np.arange(rows, dtype=np.int32),
            entry.batch.column(0),
            np.arange(entry.sequence_id, entry.sequence_id + rows),
            np.full(rows, entry.timestamp_ms),
        )
        arrays = [
            pa.array(column, kind)
            for column, kind in zip(positions[:5], POSITIONS.types[:5], strict=True)
        ]
        times = pa.array(positions[5], pa.int64()).cast(POSITIONS.types[5])
        self._pending.append(
            pa.RecordBatch.from_arrays(
                [*arrays, times, *entry.batch.columns[1:]], schema=self._written
            )
        )
        self._pending_bytes += entry.batch.nbytes
        self.size_bytes += entry.batch.nbytes
        return self._pending_bytes >= ROW_GROUP_BYTES

    def flush(self) -> None:
        """Compress the pending entries to a row group."""
        table = pa.Table.from_batches(self._pending)
        self._pending, self._pending_bytes = [], 0
        self._writer.write_table(table, row_group_size=table.num_rows)

    def finish(self) -> tuple[memoryview, ObjectFacts]:
        """Return the object, which holds one entry at least, and what it holds."""
        if self._pending:
            self.flush()
        facts = self._sum.facts(self._origin, self._schema_id)
        self._writer.add_key_value_metadata(
            {
                _FACTS: msgspec.json.encode(facts),
                _SCHEMA: base64.b64encode(self._schema.serialize()),
            }
        )
        self._writer.close()
        return memoryview(self._sink.getvalue()).cast("B"), facts


def footer_bytes(tail: BytesLike, name: str) -> int:
    """Return how many bytes at its end an object's footer takes, by the last ones.

    Raises:
        ObjectStoreError: it is no Parquet file.
    """
    if len(tail) >= _LENGTH.size:
        length, magic = _LENGTH.unpack_from(tail, len(tail) - _LENGTH.size)
        if magic == _MAGIC:
            return int(length) + _LENGTH.size
    raise ObjectStoreError(f"{name} is damaged: it does not end as a Parquet file", is_damaged=True)


class ObjectLayout:
    """The footer of an object: what it holds, and where its row groups are.

    Args:
        tail: the object's last bytes, with the whole footer.
        size_bytes: the size of the object.
        name: the object, for errors.

    Raises:
        ObjectStoreError: it is no object of this format.
    """

    def __init__(self, tail: BytesLike, size_bytes: int, name: str) -> None:
        self._name = name
        self._size_bytes = size_bytes
        try:
            # Arrow begins with the end of a file, and reads no more of this one.
            self.metadata = pq.read_metadata(pa.BufferReader(pa.py_buffer(tail)))
            """The footer as Parquet has it."""
            stored = self.metadata.metadata or {}
            self.facts = msgspec.json.decode(stored[_FACTS], type=ObjectFacts)
            self.schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(stored[_SCHEMA])))
            groups = range(self.metadata.num_row_groups)
            self.row_groups = [self._group(number) for number in groups]
        except (pa.ArrowException, OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
            raise ObjectStoreError(
                f"{name} is no object of a cold ledger: {error}", is_damaged=True
            ) from error
        if self.facts.format != FORMAT:
            raise ObjectStoreError(
                f"{name} has the format {self.facts.format}, this release reads {FORMAT}"
            )

    def _group(self, number: int) -> RowGroup:
        group = self.metadata.row_group(number)
        chunks = [group.column(each) for each in range(group.num_columns)]
        starts = [
            chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
            for chunk in chunks
        ]
        ends = [
            start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)
        ]
        entries = chunks[1].statistics
        start, end = min(starts), max(ends)
        memory_bytes = end - start + group.total_byte_size
        return RowGroup(entries.min, entries.max, start, end, memory_bytes)

    @property
    def last_timestamp_ms(self) -> int:
        """The time of its last record."""
        times = self.metadata.row_group(len(self.row_groups) - 1).column(5).statistics
        last: datetime = times.max
        return round(last.timestamp() * 1000)

    def decode(self, number: int, data: BytesLike) -> list[ColdEntry]:
        """Return the entries of a row group, whose bytes are `data`.

        Raises:
            ObjectStoreError: the bytes are damaged.
        """
        try:
            # The library wants a whole file.  The other bytes are never read, and the system
            # gives no memory to pages of zeros that are not touched.
            whole = np.zeros(self._size_bytes, np.uint8)
            start = self.row_groups[number].start
            whole[start : start + len(data)] = np.frombuffer(data, np.uint8)
            file = pq.ParquetFile(
                pa.BufferReader(pa.py_buffer(whole)),
                metadata=self.metadata,
                page_checksum_verification=True,
            )
            table = file.read_row_group(number, use_threads=False).combine_chunks()
            (batch,) = table.to_batches()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ObjectStoreError(
                f"{self._name}, row group {number}: {error}", is_damaged=True
            ) from error
        rows = pa.RecordBatch.from_arrays(
            [batch.column("_txid"), *batch.columns[len(POSITIONS) :]], names=self.schema.names
        )
        rows = conform(rows, self.schema)
        entries, sequence_ids, times = (
            np.asarray(batch.column(name).cast(pa.int64()))
            for name in ("_entry", "_sequence_id", "_timestamp")
        )
        starts = np.flatnonzero(np.diff(entries, prepend=entries[0] - 1)).tolist()
        return [
            ColdEntry(
                int(entries[start]),
                rows.slice(start, end - start),
                int(sequence_ids[start]),
                int(times[start]),
            )
            for start, end in zip(starts, [*starts[1:], len(entries)], strict=True)
        ]


class FactsCounter:
    """Counts entries, and sums what a reader is given of them."""

    def __init__(self) -> None:
        self._first: ColdEntry | None = None
        self._last_txid = -1
        self._entries = self._records = self._crc = 0

    def add(self, entry: ColdEntry) -> None:
        """Count the next entry."""
        if self._first is None:
            self._first = entry
        rows = entry.batch.num_rows
        crc = crc32c.crc32c(
            _ENTRY.pack(entry.entry, entry.sequence_id, entry.timestamp_ms), self._crc
        )
        for column in entry.batch.columns:
            crc = _sum_of(column, crc)
        self._crc = crc
        self._entries += 1
        self._records += rows
        self._last_txid = entry.batch.column(0)[rows - 1].as_py()

    def facts(self, origin: tuple[str, str, int], schema_id: int) -> ObjectFacts:
        """Return the facts, of one entry at least."""
        first = self._first
        assert first is not None
        cluster_id, log_id, lssn = origin
        return ObjectFacts(
            cluster_id=cluster_id,
            log_id=log_id,
            lssn=lssn,
            schema_id=schema_id,
            first_entry=first.entry,
            entries=self._entries,
            first_sequence_id=first.sequence_id,
            records=self._records,
            first_txid=first.batch.column(0)[0].as_py(),
            last_txid=self._last_txid,
            crc32c=self._crc,
        )


def _sum_of(array: Any, crc: int) -> int:
    """Return the CRC32C of an array's values: equal ones give the same, however they are stored."""
    kind = array.type
    crc = crc32c.crc32c(_SIZES.pack(len(array), array.null_count), crc)
    if array.null_count:
        crc = crc32c.crc32c(np.asarray(array.is_valid()).tobytes(), crc)
        array = array.drop_null()
    if not len(array):
        return crc
    types = pa.types
    if types.is_struct(kind):
        for part in array.flatten():
            crc = _sum_of(part, crc)
    elif types.is_list(kind) or types.is_map(kind):
        offsets = np.asarray(array.offsets)
        crc = crc32c.crc32c(np.diff(offsets).tobytes(), crc)
        parts = (array.keys, array.items) if types.is_map(kind) else (array.values,)
        for part in parts:
            crc = _sum_of(part.slice(offsets[0], offsets[-1] - offsets[0]), crc)
    elif types.is_boolean(kind):
        crc = crc32c.crc32c(np.asarray(array).tobytes(), crc)
    elif types.is_string(kind) or types.is_binary(kind):
        _, ends, data = array.buffers()
        bounds = np.frombuffer(ends, np.int32)[array.offset : array.offset + len(array) + 1]
        crc = crc32c.crc32c(np.diff(bounds).tobytes(), crc)
        crc = crc32c.crc32c(memoryview(data or b"")[bounds[0] : bounds[-1]], crc)
    else:
        width = kind.bit_width // 8
        start = array.offset * width
        data = memoryview(array.buffers()[1])
        crc = crc32c.crc32c(data[start : start + len(array) * width], crc)
    return crc
