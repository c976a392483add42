"""The Arrow message of a batch of one record, put together and taken apart without Arrow.

For one record Arrow's conversions cost more than all else that an append does before it is sent,
and a third of what it takes to bring it to a reader that waits.
Messages of one record differ in the transaction id, the payload, and the two numbers that say how
long that is; the rest is taken from a message that Arrow made, and what comes out is compared with
what Arrow makes.  Where they are not the same bytes, Arrow is asked each time.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

from dlcore.log.entries.body import byte_log_schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.wire.digest import BytesLike

_INT64 = struct.Struct("<q")
_ALIGNED_BYTES = 8
_FIXED_BYTES = 16  # of a message's body: the transaction id, and where the payload begins and ends
_SAMPLE_BYTES = 100_003  # a number that stands for nothing else in a message, padded or not
_COMPARED_BYTES = (0, 1, 7, 8, 9, 1024, 70_000)


class LoneRecordFormat:
    """What all messages of one record have in common; made by `learn`."""

    def __init__(self, metadata: bytes, size_at: int, body_size_at: int) -> None:
        self._before = metadata[:body_size_at]
        self._between = metadata[body_size_at + _INT64.size : size_at]
        self._after = metadata[size_at + _INT64.size :]
        self._head = struct.Struct(
            f"<{len(self._before)}sq{len(self._between)}sq{len(self._after)}sqii"
        )

    @classmethod
    def learn(cls, serialize: Callable[[int, bytes], bytes]) -> LoneRecordFormat | None:
        """Return the format of what `serialize` makes of a record, None if it is another one."""
        message = serialize(0, bytes(_SAMPLE_BYTES))
        body_bytes = _FIXED_BYTES + _SAMPLE_BYTES + -_SAMPLE_BYTES % _ALIGNED_BYTES
        metadata = message[:-body_bytes]
        body_size_at = metadata.find(_INT64.pack(body_bytes))
        size_at = metadata.find(_INT64.pack(_SAMPLE_BYTES))
        if not 0 <= body_size_at <= size_at - _INT64.size:
            return None
        found = cls(metadata, size_at, body_size_at)
        is_same = all(
            b"".join(found.message(size + 1, b"\xff" * size)) == serialize(size + 1, b"\xff" * size)
            for size in _COMPARED_BYTES
        )
        return found if is_same else None

    def message(self, txid: int, payload: bytes) -> list[BytesLike]:
        """Return the parts of a record's message; the payload is not copied."""
        size = len(payload)
        padding = -size % _ALIGNED_BYTES
        body_bytes = _FIXED_BYTES + size + padding
        head = self._head.pack(
            self._before, body_bytes, self._between, size, self._after, txid, 0, size
        )
        return [head, payload, bytes(padding)]

    def parse(self, message: memoryview) -> tuple[int, bytes] | None:
        """Return transaction id and payload of a message; None if it is another one than these."""
        payload_at = self._head.size
        if len(message) < payload_at:
            return None
        before, body_bytes, between, size, after, txid, start, end = self._head.unpack_from(message)
        if (before, between, after) != (self._before, self._between, self._after):
            return None
        padded = size + -size % _ALIGNED_BYTES
        is_whole = len(message) == payload_at + padded and body_bytes == _FIXED_BYTES + padded
        if not is_whole or start != 0 or not 0 <= size == end:
            return None
        return txid, bytes(message[payload_at : payload_at + size])


def _serialize(txid: int, payload: bytes) -> bytes:
    # From buffers: whenever Arrow converts Python's values it imports pandas, if that is installed.
    ends = pa.py_buffer(struct.pack("<ii", 0, len(payload)))
    columns = [
        pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(_INT64.pack(txid))]),
        pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(payload)]),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=byte_log_schema())
    return batch.serialize().to_pybytes()  # type: ignore[no-any-return]


@cache
def lone_record_format() -> LoneRecordFormat | None:
    """Return the format of this Arrow's messages; None if it makes others."""
    return LoneRecordFormat.learn(_serialize)
