"""Arrow schemas and batches as messages of a DoGet, framed once for any number of readers.

A message is FlightData of flight.proto.  Its bytes are joined here and not by the protobuf library,
which would copy a batch two more times.

Columns without nulls are encoded as an Arrow message without a copy of a value (`Columns`).
Arrow's own encoder copies values twice, into the columns of a batch and into its buffers, and takes
longer than the send does.  This module writes the table RecordBatch of Arrow's Message.fbs.  The
table has only numbers, so its flatbuffer has one fixed layout:

at 0   the offset of the table Message, and its vtable;
at 16  Message: the offset of its header, the body's length, version, kind;
at 36  the vtable of RecordBatch, then at 48 the table: offsets of nodes and buffers, row count;
at 68  the vector of nodes, with the rows and nulls of each column; behind it, also 4 bytes before a
       multiple of 8, the vector of buffers, each with its offset in the body and its length.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import pyarrow as pa

    from dlcore.base.ids import DLSN
    from dlcore.wire.frames import BytesLike


Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Ends: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"

_FIXED = struct.Struct("<I6HiIqhBx5H2xiIqII")
_NODES_AT, _BUFFERS_FIELD_AT = 68, 64
_COUNT_BYTES, _PAIR_BYTES = 4, 16
_METADATA_V5, _RECORD_BATCH = 4, 3
_ALIGNMENT = 8


class Columns:
    """The columns of a message in the order of their addition; each has `row_count` rows."""

    def __init__(self, row_count: int) -> None:
        self.row_count = row_count
        self.size_bytes = 0
        self.body: list[BytesLike] = []
        self._node_count = 0
        self._buffers: list[int] = []  # offset and length of each one

    def add_struct(self) -> None:
        """Add a struct; its fields are the columns that are added next."""
        self._node_count += 1
        self._add_buffer(())  # the validity bitmap: empty means that no value is null

    def add_numbers(self, numbers: Integers) -> None:
        """Add a column of 64-bit numbers."""
        self.add_struct()
        self._add_buffer((numbers.data.cast("B"),))

    def add_values(self, ends: Ends, values: Iterable[BytesLike]) -> None:
        """Add a column of bytes or text; `ends` has a zero, then the end of each value."""
        self.add_struct()
        self._add_buffer((ends.data.cast("B"),))
        self._add_buffer(values)

    def _add_buffer(self, parts: Iterable[BytesLike]) -> None:
        start = self.size_bytes
        for part in parts:
            self.body.append(part)
            self.size_bytes += len(part)
        self._buffers += (start, self.size_bytes - start)
        if padding := -self.size_bytes % _ALIGNMENT:
            self.body.append(bytes(padding))
            self.size_bytes += padding

    def header(self) -> bytes:
        """Return the message's header, which comes before its body."""
        nodes_end = _NODES_AT + _COUNT_BYTES + self._node_count * _PAIR_BYTES
        buffer_count = len(self._buffers) // 2
        fixed = _FIXED.pack(
            *(16, 12, 20, 16, 18, 4, 8),
            *(12, 48 - 20, self.size_bytes, _METADATA_V5, _RECORD_BATCH),
            *(10, 20, 8, 4, 16),
            *(12, _NODES_AT - 52, self.row_count),
            *(nodes_end + _COUNT_BYTES - _BUFFERS_FIELD_AT, self._node_count),
        )
        nodes = (self.row_count, 0) * self._node_count
        pairs = f"<{len(nodes)}q4xI{len(self._buffers)}q"
        return fixed + struct.pack(pairs, *nodes, buffer_count, *self._buffers)


_HEADER = b"\x12"
_APP_METADATA = b"\x1a"
_BODY = b"\xc2\x3e"
"""Tags of the fields 2, 3 and 1000 of protobuf; each field is of bytes."""
_PREFIX_BYTES = 8
"""Length of the prefix of an Arrow message: a marker, and the length of its header."""


class Passed(msgspec.Struct, frozen=True):
    """The metadata of each batch of a DoGet: the position behind its rows."""

    next: str

    def encode(self) -> bytes:
        """Return the metadata as JSON."""
        return msgspec.json.encode(self)


def schema_message(schema: pa.Schema) -> bytes:
    """Return the first message of a stream."""
    return framed(schema.serialize(), b"")


def batch_message(batch: pa.RecordBatch, following: DLSN) -> bytes:
    """Return a message with rows; `following` is the position behind them."""
    return framed(batch.serialize(), Passed(str(following)).encode())


def columns_message(columns: Columns, following: DLSN) -> bytes:
    """Return a message with rows that are given as columns."""
    return _joined(columns.header(), columns.body, Passed(str(following)).encode())


def framed(arrow: pa.Buffer, app_metadata: bytes) -> bytes:
    """Return an Arrow message and its metadata as a message of Flight."""
    view = memoryview(arrow)
    body_at = _PREFIX_BYTES + int.from_bytes(view[4:8], "little")
    return _joined(view[_PREFIX_BYTES:body_at], [view[body_at:]], app_metadata)


def _joined(header: BytesLike, body: Sequence[BytesLike], app_metadata: bytes) -> bytes:
    parts: list[BytesLike] = [_HEADER, _varint(len(header)), header]
    if app_metadata:
        parts += [_APP_METADATA, _varint(len(app_metadata)), app_metadata]
    if size_bytes := sum(map(len, body)):
        parts += [_BODY, _varint(size_bytes), *body]
    return b"".join(parts)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
