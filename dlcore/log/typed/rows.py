"""Cuts batches by the bytes of each row: with numpy, no row loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from dlcore.base.config import MIB, RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import LogRecordTooLongError

if TYPE_CHECKING:
    from collections.abc import Iterator

_Sizes: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
_OFFSET_BYTES = 4
_REST_SHARE = 32
_LARGE_BYTES = 64 * 1024
"""Smaller entries than this are cut to the exact size that the caller asks for."""


def row_sizes(batch: pa.RecordBatch) -> _Sizes:
    """Return the bytes of each row of a batch whose columns have a log's types."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        sizes += _sizes_of(column)
    return sizes


def _sizes_of(array: Any) -> _Sizes | int:
    """Return the bytes of each value, or one number for all; nulls count like values."""
    kind = array.type
    if pa.types.is_struct(kind):
        total: _Sizes | int = 0
        for index in range(kind.num_fields):
            total = total + _sizes_of(array.field(index))
        return total
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        ends = _int32s(array.buffers()[1], array.offset, len(array) + 1)
        # The children of a map are its keys and values, which have the same positions.
        children = (array.keys, array.items) if pa.types.is_map(kind) else (array.values,)
        total = _OFFSET_BYTES
        for child in children:
            # A running sum, because a row's values are those between two offsets.
            each = np.broadcast_to(_sizes_of(child), len(child))
            before = np.concatenate([[0], np.cumsum(each)])
            total = total + np.diff(before[ends])
        return total
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        ends = _int32s(array.buffers()[1], array.offset, len(array) + 1)
        return np.diff(ends) + _OFFSET_BYTES
    if pa.types.is_null(kind):
        return 0
    return max(1, int(kind.bit_width) // 8)


def _int32s(buffer: Any, offset: int, count: int) -> _Sizes:
    # Arrow may leave out the offsets of an array without values.
    if buffer is None or count == 1:
        return np.zeros(count, np.int64)
    return np.frombuffer(buffer, np.int32, count, offset * 4).astype(np.int64)


def cut_by(
    batch: pa.RecordBatch, ends: _Sizes, entry_bytes: int
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield slices of at most `entry_bytes`, or of one row, each with its size in bytes.

    With large entries, the last slice may be a little larger, up to a MiB, if that takes all rows:
    a small rest would cost as much as a full entry.  Therefore a MiB of rows becomes two entries
    without a rest, although rows take more than their payloads.

    Args:
        batch: the batch to cut.
        ends: how many bytes the rows up to each one take, from 0.
        entry_bytes: the size of a full entry.
    """
    start, count = 0, batch.num_rows
    last_bytes = entry_bytes
    if _LARGE_BYTES <= entry_bytes < MIB:
        last_bytes = min(entry_bytes + entry_bytes // _REST_SHARE, MIB)
    while start < count:
        stop = count
        if ends[count] - ends[start] > last_bytes:
            limit = ends[start] + entry_bytes
            stop = max(start + 1, int(np.searchsorted(ends, limit, side="right")) - 1)
        yield batch.slice(start, stop - start), int(ends[stop] - ends[start])
        start = stop


@dataclass(frozen=True, slots=True)
class TypedRows:
    """Rows of a typed log that will become entries, and the version of their schema.

    `ends` are the bytes that the rows up to each one take, from 0.
    """

    batch: pa.RecordBatch
    schema_id: int
    ends: _Sizes

    @classmethod
    def of(cls, log: str, batch: pa.RecordBatch, schema_id: int) -> TypedRows:
        """Measure rows for an entry.

        Raises:
            LogRecordTooLongError: a row is larger than a record may be.
        """
        sizes = row_sizes(batch)
        if batch.num_rows and (largest := int(sizes.max())) > RECORD_SIZE_BYTES_MAX:
            raise LogRecordTooLongError(
                f"log {log!r}: row {int(sizes.argmax())} of the batch has {largest} bytes, which "
                f"exceeds the limit of {RECORD_SIZE_BYTES_MAX}"
            )
        return cls(batch, schema_id, np.concatenate([[0], np.cumsum(sizes)]))

    def cut(self, entry_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield slices like `cut_by`."""
        return cut_by(self.batch, self.ends, entry_bytes)
