"""The part of a log that can have rows which a filter of Arrow keeps; no I/O.

Sequence ids, times and segment numbers never fall along a log.  Arrow is asked whether a filter can
hold for any row between two places, as it asks for the partitions of a dataset.  The longest
beginning of the log for which it cannot hold is left out, and the longest end, too.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.records import RecordPlace

ROWS_LEFT = 1_000
"""A search ends when it knows the place with this exactness."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = pa.timestamp("us", "UTC")


def narrowed(
    where: pc.Expression,
    schema: pa.Schema,
    place_at: Callable[[int], RecordPlace],
    first: RecordPlace,
    end: RecordPlace,
) -> tuple[RecordPlace, RecordPlace]:
    """Return the places between which all rows are that a filter keeps.

    Args:
        where: the filter.
        schema: the columns of the log's table.
        place_at: gives the place of the record with a sequence id.
        first: the place of the first record.
        end: the place after the last one.
    """

    def may_hold(low: RecordPlace, high: RecordPlace) -> bool:
        return _may_hold(where, schema, low, high)

    low, high = first, end
    while high.sequence_id - low.sequence_id > ROWS_LEFT:
        middle = place_at((low.sequence_id + high.sequence_id) // 2)
        if may_hold(first, middle):
            high = middle
        else:
            low = middle
    start, low, high = low, low, end
    while high.sequence_id - low.sequence_id > ROWS_LEFT:
        middle = place_at((low.sequence_id + high.sequence_id) // 2)
        if may_hold(middle, end):
            low = middle
        else:
            high = middle
    return start, high


def _may_hold(
    where: pc.Expression, schema: pa.Schema, first: RecordPlace, end: RecordPlace
) -> bool:
    """Return whether the filter can hold for any row in [first, end)."""
    form, nowhere = ds.ParquetFileFormat(), pafs.LocalFileSystem()
    fragment = form.make_fragment(
        "none", nowhere, partition_expression=_known_of(schema, first, end)
    )
    rows = ds.FileSystemDataset([fragment], schema, form, nowhere)
    return any(True for _ in rows.get_fragments(where))


def _known_of(schema: pa.Schema, first: RecordPlace, end: RecordPlace) -> pc.Expression:
    """Return what holds for all rows in [first, end)."""
    mark = "_" if "_dlsn" in schema.names else ""
    number, time = pc.field(f"{mark}sequence_id"), pc.field(f"{mark}timestamp")
    segment = pc.field(f"{mark}dlsn", "lssn")
    return (
        (number >= first.sequence_id)
        & (number < end.sequence_id)
        & (time >= _time(first.timestamp_ms))
        & (time <= _time(end.timestamp_ms))
        & (segment >= first.dlsn.lssn)
        & (segment <= end.dlsn.lssn)
    )


def _time(epoch_ms: int) -> pa.Scalar:
    return pa.scalar(_EPOCH + timedelta(milliseconds=epoch_ms), _TIME)


def columns_in(where: pc.Expression, schema: pa.Schema) -> list[str]:
    """Return the columns that a filter needs: without one of them it cannot be evaluated."""
    rows = pa.Table.from_batches([], schema)
    return [name for name in schema.names if not _holds_on(where, rows.drop_columns([name]))]


def _holds_on(where: pc.Expression, rows: pa.Table) -> bool:
    try:
        rows.filter(where)
    except pa.ArrowException:
        return False
    return True
