"""Byte streams over logs: each record holds some bytes, and its transaction id says where they end.

So the records follow each other without gap or overlap from byte 0 on, and a position in the stream
is found as a transaction id is.  Once the log is truncated its first bytes are gone, and the others
keep their positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlcore.config import RECORD_SIZE_BYTES_MAX
from dlcore.errors import UnexpectedError
from dlcore.log.entries.batches import numbers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa


def cut(data: memoryview, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield the records of bytes that begin at `position`: where each ends, and its bytes."""
    for start in range(0, len(data), RECORD_SIZE_BYTES_MAX):
        chunk = bytes(data[start : start + RECORD_SIZE_BYTES_MAX])
        yield position + start + len(chunk), chunk


def bytes_of(batch: pa.RecordBatch, log: str) -> tuple[int, memoryview]:
    """Return where the bytes of some records begin, and the bytes, which are not copied.

    Raises:
        UnexpectedError: their transaction ids do not say where they end: it is no byte stream.
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
