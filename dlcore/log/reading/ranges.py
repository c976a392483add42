"""The bounds and columns of a range of a log's records, and which rows are in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from dlcore.base.errors import ConfigurationError, SchemaMismatchError
from dlcore.base.html_tables import fields_html
from dlcore.base.ids import DLSN
from dlcore.log.entries.batches import read_schema, repeated_text, typed_read_fields
from dlcore.log.typed.arrow import conform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd
    import pyarrow.compute as pc

    from dlcore.log.reading.snapshot import Finder

Bound: TypeAlias = DLSN | int | datetime
"""A position, a transaction id, or a time with a time zone."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_LOG = "_log"
_ALIGNMENT_BYTES = 16
"""The alignment of Arrow's widest numbers, decimals."""


def timestamp_ms_of(time: datetime) -> int:
    """Return the first millisecond since the epoch that is not before `time`."""
    if time.tzinfo is None:
        raise ConfigurationError(
            f"{time!r} has no time zone: expected one, as of datetime.now(UTC)"
        )
    return -((_EPOCH - time) // _MILLISECOND)


def require_bound(bound: Bound | None) -> None:
    """Raise `ConfigurationError` unless `bound` may bound a range; None is right."""
    if isinstance(bound, datetime):
        timestamp_ms_of(bound)  # raises if it has no time zone
    elif isinstance(bound, bool) or not isinstance(bound, DLSN | int | None):
        raise ConfigurationError(
            f"{bound!r}: expected a DLSN, a transaction id, or a time with a time zone; "
            "DLSN.parse('1:0:0') makes a DLSN of text"
        )


def require_columns(columns: Sequence[str] | None) -> None:
    """Raise `ConfigurationError` unless `columns` is a list; None is right, and one text is not."""
    if isinstance(columns, str):
        raise ConfigurationError(f"columns={columns!r}: expected a list, like [{columns!r}]")
    if not isinstance(columns, Iterable | None):
        raise ConfigurationError(f"columns={columns!r}: expected a list of names")


async def position_of(finder: Finder, bound: Bound) -> DLSN:
    """Return the position of the first readable record at or after `bound`, or the end."""
    if isinstance(bound, datetime):
        return await finder.not_less_than_timestamp(timestamp_ms_of(bound))
    if isinstance(bound, int):
        return await finder.not_less_than_txid(bound)
    return finder.snapshot.canonical(bound)


def rows_before(batch: pa.RecordBatch, end: DLSN) -> pa.RecordBatch:
    """Return the rows of one entry, as a reader's batch has them, that are before `end`."""
    first = _first_dlsn(batch)
    if (first.lssn, first.entry_id) < (end.lssn, end.entry_id):
        return batch
    if (first.lssn, first.entry_id) > (end.lssn, end.entry_id):
        return batch.slice(0, 0)
    return batch.slice(0, max(0, end.slot_id - first.slot_id))


def _first_dlsn(batch: pa.RecordBatch) -> DLSN:
    return DLSN(*batch.column(_position_name(batch.schema))[0].as_py().values())


def _position_name(schema: pa.Schema) -> str:
    typed = str(typed_read_fields()[0].name)
    return typed if schema.names[0] == typed else "dlsn"


class RangeView:
    """The columns and rows of a log that are wanted.

    Args:
        log: the log's name.
        own: the columns of a typed log; None for a byte log.
        columns: the names of columns, of metadata too; by default the log's own, or all of a byte
            log.  Those of a byte log may have their old names.
        where: a filter of rows over any of these columns.
        narrows: whether readers return only the columns that are needed, see `columns_read`.

    Raises:
        SchemaMismatchError: the log has no such column, or `where` makes no sense for it.
    """

    def __init__(
        self,
        log: str,
        own: pa.Schema | None = None,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        *,
        narrows: bool = False,
    ) -> None:
        self._log = log
        self._where = where
        self._read = read_schema()
        default = read_schema().names
        if own is not None:
            self._read = pa.schema([*typed_read_fields(), *own])
            default = own.names
        names = list(default if columns is None else columns)
        self.is_typed = is_typed = own is not None
        available = pa.schema([*self._read, *([pa.field(_LOG, pa.string())] if is_typed else [])])
        for name in names:
            if available.get_field_index(name) < 0 or names.count(name) > 1:
                raise SchemaMismatchError(
                    f"log {log!r}: columns={names}: {name!r} is not one of its columns, or named "
                    f"twice; expected some of {', '.join(available.names)}"
                )
        self.schema = pa.schema([available.field(name) for name in names])
        if where is not None:
            self._check(where)
        if narrows and where is None:
            # Positions are always needed, to find the end of the range.
            needed = {_position_name(self._read), *names}
            self._read = pa.schema([field for field in self._read if field.name in needed])
        self._takes_all = where is None and self.schema.equals(self._read)

    @property
    def columns_read(self) -> list[str]:
        """The names of the columns of the batches that `of` takes."""
        return list(self._read.names)

    def _check(self, where: pc.Expression) -> None:
        """Raise unless rows can be filtered by `where`."""
        try:
            pa.Table.from_batches([], self._read).filter(where)
        except (pa.ArrowException, TypeError) as error:
            raise SchemaMismatchError(
                f"log {self._log!r}: where={where}: expected a pyarrow.compute.Expression over "
                f"{', '.join(self._read.names)}: {error}"
            ) from error

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the wanted rows and columns of a reader's batch."""
        if self._takes_all and batch.schema.equals(self.schema):
            return batch
        if not batch.schema.equals(self._read):
            batch = conform(batch, self._read)  # the log's schema has changed since
        if self._where is not None:
            batch = _aligned(batch).filter(self._where)
        arrays = [self._column(batch, name) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        if name == _LOG:
            return repeated_text(self._log, batch.num_rows)
        return batch.column(name)


def _aligned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with aligned buffers, since Arrow's filters warn of others.

    Columns are views into received bytes, where entries begin at any address.
    """

    def moved(array: pa.Array) -> pa.Array:
        addresses = [buffer.address for buffer in array.buffers() if buffer is not None]
        if all(address % _ALIGNMENT_BYTES == 0 for address in addresses):
            return array
        return pa.concat_arrays([array, array[:0]])  # a single one would stay a view

    return pa.RecordBatch.from_arrays(list(map(moved, batch.columns)), schema=batch.schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeExtent:
    """The bounds [start, end) of a range, and estimates of its size."""

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


def pandas_from_arrow(table: pa.Table) -> pd.DataFrame:
    """Return a pandas frame of a table, in which positions stay Arrow values.

    As dictionaries, pandas' default, 200,000 positions take 170 ms; as Arrow values a millisecond.
    """
    import pandas as pd

    position = read_schema().field("dlsn").type
    kinds = {position: pd.ArrowDtype(position)}
    frame: pd.DataFrame = table.to_pandas(types_mapper=kinds.get)
    return frame


def polars_from_arrow() -> Callable[[pa.Table], Any]:
    """Return the function that makes a Polars frame of a table.

    Raises:
        ConfigurationError: Polars is not installed.
    """
    try:
        import polars
    except ImportError as error:
        raise ConfigurationError("to_polars() needs Polars: pip install polars") from error
    return polars.from_arrow
