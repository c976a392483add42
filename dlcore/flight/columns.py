"""An encoder of columns without nulls as an Arrow message, which copies no value.

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TypeAlias

    import numpy as np

    from dlcore.wire.frames import BytesLike

    Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
    Ends: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

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
