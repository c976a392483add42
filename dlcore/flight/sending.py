"""Arrow schemas and batches as messages of a DoGet, framed once for any number of readers.

A message is FlightData of flight.proto.  Its bytes are joined here and not by the protobuf library,
which would copy a batch two more times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from dlcore.base.ids import DLSN
    from dlcore.flight.columns import Columns
    from dlcore.wire.frames import BytesLike

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
