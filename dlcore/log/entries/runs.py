"""Many small entries decoded together: with one call of Arrow, instead of one for each.

Their messages one after the other are a stream as Arrow reads it, and their headers an array.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from dlcore.base.errors import InvalidEntryError
from dlcore.log.entries.batches import numbers_of
from dlcore.log.entries.body import (
    COMPRESSED,
    ENTRY_HEADER_BYTES,
    ENTRY_VERSION,
    TXID_ASSIGNED,
    entry_schema,
    open_stream,
    over,
)

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from numpy.typing import NDArray

    from dlcore.log.typed.arrow import EntrySchemas


@cache
def _header_dtype() -> np.dtype[np.void]:
    names = ("version", "flags", "schema_id", "records", "first_txid", "last_txid", "before")
    kinds = ("u1", "u1", ">u2", ">u4", ">i8", ">i8", ">i8")
    return np.dtype([*zip(names, kinds, strict=True), ("write_time_ms", ">i8"), ("stamp", ">u8")])


class EntryRun(NamedTuple):
    """Decoded entries, in order; the arrays have an item for each.

    `batch` has the records of all, with the version of the schema that they were written with.
    """

    batch: pa.RecordBatch
    schema_id: int
    records: NDArray[np.int64]
    records_before: NDArray[np.int64]
    write_times_ms: NDArray[np.int64]


def decode_entries(
    bodies: Sequence[memoryview], schemas: EntrySchemas | None, columns: Set[str] | None
) -> EntryRun | None:
    """Return the records of entries; None if they are to be decoded one by one.

    They are if they are encrypted, of different versions of the schema, or not valid: only a single
    entry's error names it.  Arguments and batch are those of `decode_entry_batch`, but other
    columns are left out in any case.
    """
    headers = _headers_of(bodies)
    if headers is None:
        return None
    schema_id = int(headers["schema_id"][0])
    if (headers["schema_id"] != schema_id).any():
        return None
    starts = (headers["stamp"] + ENTRY_HEADER_BYTES).tolist()
    messages = [body[start:] for body, start in zip(bodies, starts, strict=True)]
    try:
        schema = entry_schema(schema_id, schemas)
        table = open_stream(schema, messages, columns).read_all()
    except (InvalidEntryError, pa.ArrowInvalid, OSError):
        return None
    records = headers["records"].astype(np.int64)
    if [len(chunk) for chunk in table.column(0).chunks] != records.tolist():
        return None
    (batch,) = table.combine_chunks().to_batches()
    is_assigned = headers["flags"] & TXID_ASSIGNED != 0
    if is_assigned.any():
        batch = with_txids(batch, records, is_assigned, headers["first_txid"])
    return EntryRun(
        batch,
        schema_id,
        records,
        headers["before"].astype(np.int64),
        headers["write_time_ms"].astype(np.int64),
    )


def _headers_of(bodies: Sequence[memoryview]) -> NDArray[np.void] | None:
    """Return the headers; None if one is not valid or encrypted."""
    sizes = np.fromiter(map(len, bodies), np.uint64, len(bodies))
    if sizes.min() < ENTRY_HEADER_BYTES:
        return None
    joined = b"".join([body[:ENTRY_HEADER_BYTES] for body in bodies])
    headers = np.frombuffer(joined, _header_dtype())
    is_plain = (
        (headers["version"] == ENTRY_VERSION)
        & (headers["flags"] & ~np.uint8(TXID_ASSIGNED | COMPRESSED) == 0)
        & (headers["records"] > 0)
        & (headers["before"] >= 0)
        & (headers["stamp"] <= sizes - np.uint64(ENTRY_HEADER_BYTES))
    )
    return headers if is_plain.all() else None


def with_txids(
    batch: pa.RecordBatch,
    records: NDArray[np.int64],
    is_assigned: NDArray[np.bool_],
    txids: NDArray[np.int64],
) -> pa.RecordBatch:
    """Return a batch of entries with so many records; some of these get a transaction id."""
    rows = np.repeat(is_assigned, records)
    given = np.where(rows, np.repeat(txids, records), numbers_of(batch.column(0)))
    column = over(given.astype(np.int64), pa.int64())
    return pa.RecordBatch.from_arrays([column, *batch.columns[1:]], schema=batch.schema)
