"""The blocking range of a log: batches, tables, frames, and a stream that others scan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from dlcore.blocking.reader import LogReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    import pyarrow as pa

    from dlcore.blocking.portal import Portal
    from dlcore.log.reading.log_range import LogRange as AsyncLogRange
    from dlcore.log.reading.ranges import RangeExtent


class Framed(ABC):
    """What gives frames, because it gives a table."""

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """Return all of it as a table."""

    def to_pandas(self) -> pd.DataFrame:
        """Return all of it as a pandas frame; parts of positions are `frame["dlsn"].struct`'s.

        Raises: as `to_arrow`.
        """
        from dlcore.log.reading.ranges import pandas_from_arrow

        return pandas_from_arrow(self.to_arrow())

    def to_polars(self) -> Any:
        """Return all of it as a Polars frame.

        Raises:
            ConfigurationError: Polars is not installed.
        """
        from dlcore.log.reading.ranges import polars_from_arrow

        make = polars_from_arrow()
        return make(self.to_arrow())


class LogRange(Framed):
    """The records of a log in [start, end), fixed when it was made; use `log.read`.

    Iterating yields Arrow batches with the columns of `schema`.  DuckDB, Polars and others that
    know Arrow's stream interface scan it as it is, batch by batch.  Each use reads again; what is
    truncated before it is read is an `AlreadyTruncatedError`.
    """

    def __init__(self, portal: Portal, log_range: AsyncLogRange) -> None:
        self._portal = portal
        self._range = log_range

    def __repr__(self) -> str:
        return f"<LogRange {self.extent}>"

    def _repr_html_(self) -> str:
        return self.extent._repr_html_()

    @property
    def extent(self) -> RangeExtent:
        """What it covers."""
        return self._range.extent

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self._range.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        from dlcore.log.reading.ranges import rows_before

        end = self.extent.end
        if self.extent.is_empty:
            return
        with LogReader(self._portal, self._portal.call(self._range.open_reader())) as reader:
            # What the range covers was readable when it was made, perhaps by other bookies than
            # those that this reader asks: it is waited for.
            batches = reader.batches(follow=True)
            while reader.position < end and (batch := next(batches, None)) is not None:
                part = self._range.view.of(rows_before(batch, end))
                if part.num_rows:
                    yield part

    def to_arrow(self) -> pa.Table:
        """Return all of it as a table; the records are not copied.

        Raises: AlreadyTruncatedError, and as `LogReader.read_batch`.
        """
        import pyarrow as pa

        return pa.Table.from_batches(list(self), self.schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow as pa

        reader = pa.RecordBatchReader.from_batches(self.schema, iter(self))
        return reader.__arrow_c_stream__(requested_schema)
