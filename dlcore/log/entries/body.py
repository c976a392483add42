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

Compression costs time at the writer and at each reader, and saves bytes that are sent, stored and
verified three times.  Therefore an entry is stored compressed if that makes it smaller by an eighth
or more.  After an entry for which it does not, the next ones, up to 15 times its size, are not
tried.  With ``auto`` only typed logs' entries that are large enough are tried: each column has
buffers of its own, and each buffer takes some microseconds in both directions.

A few records that were written one by one are encoded and decoded without Arrow (`PlainFormat`).  A
busy writer's entries hold a few records each.  For these, Arrow's conversions cost more than all
other work before the entry is sent, and most of the time until a waiting reader has it.  The reason
is not the computation: Arrow's code is never in the processor's caches by then.  Such messages
differ in their body, and in the numbers of their metadata that follow from the count of records and
their total length.  The places of these numbers are learned from messages that Arrow made, and the
results are compared with Arrow's.  If they are not the same bytes, Arrow makes each message itself.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlcore.base.errors import InvalidEntryError
from dlcore.base.ids import TXID_MAX
from dlcore.base.records import LogRecordWithDLSN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set

    from dlcore.base.records import EntryPlace
    from dlcore.log.typed.arrow import EntrySchemas
    from dlcore.wire.frames import BytesLike


COMPRESSED_BYTES_MIN = 32 * 1024
"""With ``auto`` smaller entries are stored without compression."""
_SAVED_SHARE = 8
_UNTRIED_FACTOR = 15
_STREAM_END_BYTES = 8  # the end-of-stream marker of Arrow's IPC streaming format


class Compressor:
    """Makes the messages of consecutive entries, as `LogConfig.compression` says."""

    def __init__(self, compression: str) -> None:
        self._is_auto = compression == "auto"
        self._options: pa.ipc.IpcWriteOptions | None = None
        if compression != "none":
            codec = "lz4" if self._is_auto else compression
            # Threads would cost more than the columns of an entry.
            self._options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        self._untried_bytes = 0

    @property
    def leaves_bytes(self) -> bool:
        """Whether entries of byte logs are stored without compression."""
        return self._options is None or self._is_auto

    def message(self, batch: pa.RecordBatch, *, typed: bool) -> tuple[pa.Buffer, bool]:
        """Return the encapsulated message of a batch, and whether its buffers are compressed."""
        if self._options is not None and (typed or not self._is_auto):
            size_bytes = batch.nbytes
            if size_bytes <= self._untried_bytes:
                self._untried_bytes -= size_bytes
            elif size_bytes >= COMPRESSED_BYTES_MIN or not self._is_auto:
                message = _compressed(batch, self._options)
                if message.size <= size_bytes - size_bytes // _SAVED_SHARE:
                    return message, True
                self._untried_bytes = _UNTRIED_FACTOR * size_bytes
        return batch.serialize(), False


def _compressed(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions) -> pa.Buffer:
    # `RecordBatch.serialize` takes no options, but a stream does.  Its batch message is after the
    # schema's message (a prefix of 8 bytes with the length, then that many), before the end marker.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue()
    start = 8 + int.from_bytes(memoryview(stream)[4:8], "little")
    return stream.slice(start, stream.size - start - _STREAM_END_BYTES)


ENTRY_HEADER_BYTES = 48
_HEADER = struct.Struct(">BBHIqqqqQ")
ENTRY_VERSION = 1
TXID_ASSIGNED, COMPRESSED, ENCRYPTED = 1, 2, 4
_FLAGS_AT, _FLAGS = 1, TXID_ASSIGNED | COMPRESSED | ENCRYPTED
BYTES_SCHEMA_ID = 0
_FEW_RECORDS = 100
"""Up to this many numbers are summed faster without numpy."""


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


def batch_of(txids: Sequence[int], payloads: Sequence[bytes]) -> pa.RecordBatch:
    """Return a batch of the byte log's schema.

    Arrow gets finished buffers, since its own conversion would load pandas, and at a program's
    first large entry the whole event loop would wait for that.
    """
    binary = [None, pa.py_buffer(ends_of(payloads)), pa.py_buffer(b"".join(payloads))]
    columns = [
        over(array("q", txids), pa.int64()),
        pa.Array.from_buffers(pa.binary(), len(payloads), binary),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=byte_log_schema())


def ends_of(payloads: Sequence[bytes]) -> Any:
    """Return the start of each payload and the end of the last, as memory of 32-bit numbers."""
    if len(payloads) <= _FEW_RECORDS:
        return array("i", accumulate(map(len, payloads), initial=0))
    # Arrow's type `binary` has offsets of 32 bits.
    ends = np.zeros(len(payloads) + 1, np.int32)
    np.fromiter(map(len, payloads), np.int32, len(payloads)).cumsum(out=ends[1:])
    return ends


PARSED_RECORDS_MAX = 100
"""Arrow decodes more records than this at least as fast."""
_ALIGNED_BYTES = 8
_TXID_BYTES = 8
_END_BYTES = 4
_WORD = struct.Struct("<q")
_COMPARED = ((1, 0), (1, 1), (1, 7), (1, 70_000), (2, 9), (3, 777), (100, 1024), (1001, 5))
"""Counts and sizes of sample records, chosen so that no two numbers are equal in all of them."""


class _Layout(NamedTuple):
    """The numbers that follow from the count of records and their total length."""

    body_bytes: int
    record_count: int
    ends_at: int
    ends_bytes: int
    payload_at: int
    payload_bytes: int

    @classmethod
    def of(cls, count: int, payload_bytes: int) -> _Layout:
        ends_at, ends_bytes = _TXID_BYTES * count, _END_BYTES * (count + 1)
        payload_at = ends_at + _padded(ends_bytes)
        body_bytes = payload_at + _padded(payload_bytes)
        return cls(body_bytes, count, ends_at, ends_bytes, payload_at, payload_bytes)


_PAYLOAD_BYTES = _Layout._fields.index("payload_bytes")


class PlainRecords(NamedTuple):
    """The records of a message."""

    txids: Sequence[int]
    ends: Sequence[int]
    """The start of each payload in `payloads`, and the end of the last."""
    payloads: memoryview

    def records(self, place: EntryPlace, first_slot: int) -> list[LogRecordWithDLSN]:
        """Return the records from `first_slot` on."""
        payloads = bytes(self.payloads)  # slices of bytes are cheap
        found = [payloads[start:end] for start, end in pairwise(self.ends[first_slot:])]
        slots = range(first_slot, len(self.txids))
        return list(map(LogRecordWithDLSN, self.txids[first_slot:], found, slots, repeat(place)))


class PlainFormat:
    """The common part of all messages of plain records; made by `learn`."""

    def __init__(self, words: Sequence[int], places: Sequence[tuple[int, int]]) -> None:
        self._words = words
        self._places = places  # indices of words in the metadata, and of numbers in a layout
        self._head = struct.Struct(f"<{len(words)}q")
        self._size_at = next(
            (_WORD.size * at for at, number in places if number == _PAYLOAD_BYTES), 0
        )

    @classmethod
    def learn(
        cls, serialize: Callable[[Sequence[int], Sequence[bytes]], bytes]
    ) -> PlainFormat | None:
        """Return the format of the messages of `serialize`; None if it is not of this kind."""
        layouts = [_Layout.of(count, count * size) for count, size in _COMPARED]
        records = [(range(count), [b"\xff" * size] * count) for count, size in _COMPARED]
        messages = [serialize(*each) for each in records]
        metadata = [
            message[: len(message) - layout.body_bytes]
            for message, layout in zip(messages, layouts, strict=True)
        ]
        whole_bytes = len(metadata[0]) // _WORD.size * _WORD.size
        words = [[each for (each,) in _WORD.iter_unpack(every[:whole_bytes])] for every in metadata]
        if len(set(map(len, words))) > 1:
            return None
        numbers = [list(each) for each in zip(*layouts, strict=True)]
        places = [
            (at, numbers.index(list(column)))
            for at, column in enumerate(zip(*words, strict=True))
            if list(column) in numbers
        ]
        found = cls(words[0], places)
        is_same = all(
            b"".join(found.message(*each)) == message
            for each, message in zip(records, messages, strict=True)
        )
        return found if is_same else None

    def message(self, txids: Sequence[int], payloads: Sequence[bytes]) -> list[BytesLike]:
        """Return the parts of the records' message; a lone payload is not copied."""
        payload = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        layout = _Layout.of(len(txids), len(payload))
        ends = ends_of(payloads)
        between = bytes(layout.payload_at - layout.ends_at - layout.ends_bytes)
        head = b"".join((self._metadata(layout), array("q", txids), ends, between))
        return [head, payload, bytes(-len(payload) % _ALIGNED_BYTES)]

    def parse(self, message: memoryview, count: int) -> PlainRecords | None:
        """Return the `count` records of a message; None if it has another format."""
        size = self._head.size
        if len(message) < size:
            return None
        (payload_bytes,) = _WORD.unpack_from(message, self._size_at)
        if not 0 <= payload_bytes <= len(message):
            return None
        layout = _Layout.of(count, payload_bytes)
        if len(message) != size + layout.body_bytes or message[:size] != self._metadata(layout):
            return None
        txids = struct.unpack_from(f"<{count}q", message, size)
        ends = struct.unpack_from(f"<{count + 1}i", message, size + layout.ends_at)
        if ends[0] != 0 or ends[-1] != payload_bytes or list(ends) != sorted(ends):
            return None
        payload_at = size + layout.payload_at
        return PlainRecords(txids, ends, message[payload_at : payload_at + payload_bytes])

    def _metadata(self, layout: _Layout) -> bytes:
        words = list(self._words)
        for at, number in self._places:
            words[at] = layout[number]
        return self._head.pack(*words)


def _padded(size: int) -> int:
    return size + -size % _ALIGNED_BYTES


def _serialize(txids: Sequence[int], payloads: Sequence[bytes]) -> bytes:
    return batch_of(txids, payloads).serialize().to_pybytes()  # type: ignore[no-any-return]


@cache
def plain_format() -> PlainFormat | None:
    """Return the format of this Arrow's messages; None if it has another one."""
    return PlainFormat.learn(_serialize)
