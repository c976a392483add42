"""Byte streams over logs: the transaction id of each record is the position where its bytes end.

The records follow each other without gap or overlap from byte 0 on, so a position in the stream is
found like a transaction id.  After a truncation the first bytes are gone, and the others keep their
positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import UnexpectedError
from dlcore.log.entries.batches import numbers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa


def cut(data: memoryview, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield the records of bytes that begin at `position`: the end of each, and its bytes."""
    for start in range(0, len(data), RECORD_SIZE_BYTES_MAX):
        chunk = bytes(data[start : start + RECORD_SIZE_BYTES_MAX])
        yield position + start + len(chunk), chunk


def bytes_of(batch: pa.RecordBatch, log: str) -> tuple[int, memoryview]:
    """Return the position of the first byte of some records, and their bytes without a copy.

    Raises:
        UnexpectedError: a transaction id is not where its record ends: the log is no byte stream.
    """
    value = batch.column("value")
    _, offsets, data = value.buffers()
    ends = np.frombuffer(offsets, np.int32, len(value) + 1, value.offset * 4).astype(np.int64)
    txids = numbers_of(batch.column("txid"))
    begin = int(txids[0]) - int(ends[1] - ends[0])
    wrong = np.flatnonzero(txids - txids[0] != ends[1:] - ends[1])
    if begin < 0 or len(wrong):
        row = int(wrong[0]) if len(wrong) else 0
        place = ":".join(map(str, batch.column("dlsn")[row].as_py().values()))
        expected = begin + int(ends[row + 1] - ends[0])
        raise UnexpectedError(
            f"log {log!r} is no byte stream: its record at {place} has transaction id "
            f"{txids[row]}, and its bytes end at {max(expected, int(ends[1] - ends[0]))}"
        )
    return begin, memoryview(data).cast("B")[int(ends[0]) : int(ends[-1])]
