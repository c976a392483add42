"""The body of a log's entries: a small header, and one Arrow IPC record batch without its schema.

Header, big-endian, 48 bytes: version u8 | flags u8 | schema id u16 | record count u32 | first txid
i64 | last txid i64 | records before this entry in its extent i64 | write time (epoch ms) i64 |
stamp bytes u64.  The stamp is between header and batch, and says which producers' records follow
(`dlcore.log.entries.stamp`); most entries have none.  With the flag `TXID_ASSIGNED` every record
has the header's first txid, whatever the batch says: staged records get theirs at the commit, long
after they were encoded.  `COMPRESSED` says that the batch's buffers are compressed, `ENCRYPTED`
that the batch is encrypted (`dlcore.log.entries.encryption`).

The batch is an encapsulated Arrow IPC message, so reading is zero-copy; buffer compression is
Arrow's own.  Schema id 0 is that of a byte log, `byte_log_schema`; other ids are versions of the
log's own schema (`dlcore.log.typed.schema`), which also begins with the column of transaction ids.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dlcore.base.errors import InvalidEntryError
from dlcore.base.ids import TXID_MAX

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Set

    from dlcore.log.entries.compression import Compressor
    from dlcore.log.typed.arrow import EntrySchemas
    from dlcore.wire.frames import BytesLike

ENTRY_HEADER_BYTES = 48
_HEADER = struct.Struct(">BBHIqqqqQ")
ENTRY_VERSION = 1
TXID_ASSIGNED, COMPRESSED, ENCRYPTED = 1, 2, 4
_FLAGS_AT, _FLAGS = 1, TXID_ASSIGNED | COMPRESSED | ENCRYPTED
BYTES_SCHEMA_ID = 0


@cache
def byte_log_schema() -> pa.Schema:
    """Return the schema of the entries of a byte log."""
    return pa.schema([("txid", pa.int64()), ("value", pa.binary())])


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryHeader:
    """The contents of an entry's header, by which it is found without decoding its batch."""

    record_count: int
    first_txid: int
    last_txid: int
    records_before: int
    write_time_ms: int
    txid_assigned: bool = False
    schema_id: int = BYTES_SCHEMA_ID
    compressed: bool = False
    encrypted: bool = False
    stamp_bytes: int = 0


def encode_entry(
    batch: pa.RecordBatch,
    *,
    first_txid: int,
    last_txid: int,
    records_before: int,
    write_time_ms: int,
    compressor: Compressor,
    schema_id: int = BYTES_SCHEMA_ID,
    stamp: bytes = b"",
) -> list[BytesLike]:
    """Return the parts of an entry's body: its header, its stamp and the serialized `batch`.

    `batch` has the schema of `schema_id`, and at least one record.
    """
    assert batch.num_rows > 0
    message, is_compressed = compressor.message(batch, typed=schema_id != BYTES_SCHEMA_ID)
    header = encode_entry_header(
        record_count=batch.num_rows,
        first_txid=first_txid,
        last_txid=last_txid,
        records_before=records_before,
        write_time_ms=write_time_ms,
        schema_id=schema_id,
        compressed=is_compressed,
        stamp=stamp,
    )
    return [header, memoryview(message)]


def encode_entry_header(
    *,
    record_count: int,
    first_txid: int,
    last_txid: int,
    records_before: int,
    write_time_ms: int,
    schema_id: int = BYTES_SCHEMA_ID,
    compressed: bool = False,
    stamp: bytes = b"",
) -> bytes:
    """Return the bytes before the batch in an entry's body."""
    header = _HEADER.pack(
        ENTRY_VERSION,
        COMPRESSED if compressed else 0,
        schema_id,
        record_count,
        first_txid,
        last_txid,
        records_before,
        write_time_ms,
        len(stamp),
    )
    return header + stamp


def decode_entry_header(body: BytesLike) -> EntryHeader:
    """Parse the header of an entry's body.

    Raises:
        InvalidEntryError: not an entry of this version.
    """
    if memoryview(body).nbytes < ENTRY_HEADER_BYTES:
        raise InvalidEntryError(
            f"entry body of {memoryview(body).nbytes} bytes is shorter than its header"
        )
    version, flags, schema_id, count, first, last, before, write_time_ms, stamp_bytes = (
        _HEADER.unpack_from(body)
    )
    if version != ENTRY_VERSION or flags & ~_FLAGS:
        raise InvalidEntryError(
            f"entry of format {version} and flags {flags:#x}, expected {ENTRY_VERSION} and no "
            f"flags above {_FLAGS:#x}"
        )
    if count < 1 or before < 0:
        raise InvalidEntryError(f"entry with {count} records, {before} before it")
    if ENTRY_HEADER_BYTES + stamp_bytes > memoryview(body).nbytes:
        raise InvalidEntryError(
            f"entry body of {memoryview(body).nbytes} bytes says that its stamp has {stamp_bytes}"
        )
    return EntryHeader(
        record_count=count,
        first_txid=first,
        last_txid=last,
        records_before=before,
        write_time_ms=write_time_ms,
        txid_assigned=bool(flags & TXID_ASSIGNED),
        schema_id=schema_id,
        compressed=bool(flags & COMPRESSED),
        encrypted=bool(flags & ENCRYPTED),
        stamp_bytes=stamp_bytes,
    )


def stamp_of(body: BytesLike, header: EntryHeader) -> memoryview:
    """Return the stamp of an entry's body, empty if it has none."""
    return memoryview(body)[ENTRY_HEADER_BYTES : ENTRY_HEADER_BYTES + header.stamp_bytes]


def batch_message_of(body: BytesLike, header: EntryHeader) -> memoryview:
    """Return the Arrow message of an entry's body, or what is in its place if it is encrypted."""
    return memoryview(body)[ENTRY_HEADER_BYTES + header.stamp_bytes :]


def marked_encrypted(head: BytesLike, *, encrypted: bool) -> bytes:
    """Return the bytes before an entry's message, which is encrypted or not."""
    changed = bytearray(head)
    changed[_FLAGS_AT] = changed[_FLAGS_AT] & ~ENCRYPTED | (ENCRYPTED if encrypted else 0)
    return bytes(changed)


def move_entry(
    body: BytesLike, *, records_before: int, floor_ms: int, assigned_txid: int | None
) -> list[BytesLike]:
    """Return the parts of an entry's body for another extent, with the same records.

    The new entry itself says what the old extent said about its records.

    Args:
        body: the body of the entry as it was read.
        records_before: how many records precede it in the other extent.
        floor_ms: the records' timestamp is at least this.
        assigned_txid: the transaction id of all its records; None: they keep their own.

    Raises:
        InvalidEntryError: not an entry of this version.
    """
    header = decode_entry_header(body)
    flags = memoryview(body)[_FLAGS_AT] | (0 if assigned_txid is None else TXID_ASSIGNED)
    head = _HEADER.pack(
        ENTRY_VERSION,
        flags,
        header.schema_id,
        header.record_count,
        header.first_txid if assigned_txid is None else assigned_txid,
        header.last_txid if assigned_txid is None else assigned_txid,
        records_before,
        max(header.write_time_ms, floor_ms),
        header.stamp_bytes,
    )
    return [head, memoryview(body)[ENTRY_HEADER_BYTES:]]


def entry_schema(schema_id: int, schemas: EntrySchemas | None) -> pa.Schema:
    """Return the schema of an entry; `schemas` are those of a typed log.

    Raises:
        InvalidEntryError: the log does not have this schema.
    """
    if schema_id != BYTES_SCHEMA_ID:
        if schemas is None:
            raise InvalidEntryError(f"an entry of a byte log has schema {schema_id}")
        return schemas.of(schema_id)
    if schemas is not None:
        raise InvalidEntryError("an entry of a typed log has no schema")
    return byte_log_schema()


def decode_entry_batch(
    body: BytesLike,
    header: EntryHeader,
    schemas: EntrySchemas | None = None,
    columns: Set[str] | None = None,
) -> pa.RecordBatch:
    """Return the batch of an entry's body, as views into it if it is not compressed.

    The transaction ids are those of the header if it assigns them.  `schemas` must be given for a
    typed log; the batch has the version of the schema that it was written with.  If the batch is
    compressed, only the transaction ids and `columns` are decompressed and returned; None: all
    columns.  An encrypted entry must have been decrypted.

    Raises:
        InvalidEntryError: the batch does not parse, contradicts its header, or has a schema that
            the log does not have.
    """
    assert not header.encrypted
    schema = entry_schema(header.schema_id, schemas)
    view = batch_message_of(body, header)
    try:
        if header.compressed:
            # Only the reader of a stream can select columns and do without threads, which would
            # cost more than the columns of an entry.
            batch = open_stream(schema, [view], columns).read_next_batch()
        else:
            batch = pa.ipc.read_record_batch(pa.py_buffer(view), schema)
    except (pa.ArrowInvalid, OSError, StopIteration) as error:
        raise InvalidEntryError(f"an entry's Arrow batch does not parse: {error}") from error
    if batch.num_rows != header.record_count:
        raise InvalidEntryError(
            f"an entry's batch has {batch.num_rows} records, its header says {header.record_count}"
        )
    return with_txid(batch, header.first_txid) if header.txid_assigned else batch


def open_stream(
    schema: pa.Schema, messages: Iterable[memoryview], columns: Set[str] | None
) -> pa.RecordBatchStreamReader:
    """Return a reader of entries' messages: of the transaction ids and `columns`; None: of all.

    The messages are copied.
    """
    wanted = None
    if columns is not None:
        wanted = [0, *(n for n, name in enumerate(schema.names) if n and name in columns)]
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    return pa.ipc.open_stream(b"".join((_serialized(schema), *messages)), options=options)


@lru_cache(maxsize=256)
def _serialized(schema: pa.Schema) -> bytes:
    return bytes(schema.serialize())


def with_txid(batch: pa.RecordBatch, txid: int) -> pa.RecordBatch:
    """Return an entry's batch whose records all have `txid`."""
    column = over(np.full(batch.num_rows, txid, np.int64), pa.int64())
    return pa.RecordBatch.from_arrays([column, *batch.columns[1:]], schema=batch.schema)


def present_txid(*, now_ms: int, last_txid: int) -> int:
    """Return the present time as a transaction id, or `last_txid`, if that is higher."""
    return min(max(now_ms, last_txid, 0), TXID_MAX)


def over(numbers: np.ndarray[Any, np.dtype[np.int64]] | array[int], kind: pa.DataType) -> pa.Array:
    """Return an Arrow array over the memory of `numbers`, whose width is that of `kind`.

    Arrow's own conversions cost as much as all other work per entry, and load pandas.
    """
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])
