"""A range of a log's records, fixed when it is made, as Arrow batches or a table."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from dlcore._html import fields_html
from dlcore.errors import ConfigurationError
from dlcore.ids import DLSN
from dlcore.log.entries.batches import READ_SCHEMA

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from dlcore.log.reading.reader import AsyncLogReader
    from dlcore.log.reading.snapshot import Finder

Bound: TypeAlias = DLSN | int | datetime
"""A position, a transaction id, or a time with a time zone."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def timestamp_ms_of(time: datetime) -> int:
    """Return the first millisecond since the epoch that is not before `time`."""
    if time.tzinfo is None:
        raise ConfigurationError(
            f"{time!r} has no time zone: expected one, as of datetime.now(UTC)"
        )
    return -((_EPOCH - time) // _MILLISECOND)


async def position_of(finder: Finder, bound: Bound) -> DLSN:
    """Return the position of the first readable record at or behind `bound`, or the end."""
    if isinstance(bound, datetime):
        return await finder.not_less_than_timestamp(timestamp_ms_of(bound))
    if isinstance(bound, int):
        return await finder.not_less_than_txid(bound)
    return finder.snapshot.canonical(bound)


def rows_before(batch: pa.RecordBatch, end: DLSN) -> pa.RecordBatch:
    """Return the rows of one entry, with `READ_SCHEMA`'s columns, that are before `end`."""
    first = DLSN(*(batch.column(index)[0].as_py() for index in range(3)))
    if (first.lssn, first.entry_id) < (end.lssn, end.entry_id):
        return batch
    if (first.lssn, first.entry_id) > (end.lssn, end.entry_id):
        return batch.slice(0, 0)
    return batch.slice(0, max(0, end.slot_id - first.slot_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeExtent:
    """What a range covers: the records in [start, end), and about how many they are."""

    log: str
    start: DLSN
    end: DLSN
    record_count_estimate: int
    size_bytes_estimate: int

    @property
    def is_empty(self) -> bool:
        """Whether it holds no record."""
        return self.start >= self.end

    def _repr_html_(self) -> str:
        return fields_html(
            f"records of log {self.log}",
            {
                "positions": f"{self.start} … {self.end}",
                "records, about": self.record_count_estimate,
                "bytes, about": self.size_bytes_estimate,
            },
        )

    def __str__(self) -> str:
        return (
            f"{self.log!r} from {self.start} to {self.end}, about {self.record_count_estimate:,} "
            f"records, {self.size_bytes_estimate / 1e6:,.1f} MB"
        )


class LogRange:
    """The records of a log in [start, end), fixed when it was made; use `log.read`.

    `async for batch in log_range` yields Arrow batches with `READ_SCHEMA`'s columns.  Each
    iteration reads again; what is truncated before it is read is an `AlreadyTruncatedError`.
    """

    def __init__(
        self, extent: RangeExtent, open_reader: Callable[[], Awaitable[AsyncLogReader]]
    ) -> None:
        self.extent = extent
        self._open_reader = open_reader

    def __repr__(self) -> str:
        return f"<LogRange {self.extent}>"

    def _repr_html_(self) -> str:
        return self.extent._repr_html_()

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return READ_SCHEMA

    async def open_reader(self) -> AsyncLogReader:
        """Open a reader at the start; it does not stop at the end."""
        return await self._open_reader()

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        end = self.extent.end
        if self.extent.is_empty:
            return
        async with await self.open_reader() as reader:
            while reader.position < end:
                batch = await reader.read_batch()
                part = rows_before(batch, end)
                if part.num_rows:
                    yield part

    async def to_arrow(self) -> pa.Table:
        """Return all of it as a table; the records are not copied."""
        return pa.Table.from_batches([batch async for batch in self], READ_SCHEMA)
