"""The blocking range of a log: batches, tables, frames, and an Arrow stream for other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.sync.reader import LogReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    import pyarrow as pa

    from dlcore.log.reading.log_range import LogRange as AsyncLogRange
    from dlcore.log.reading.ranges import RangeExtent
    from dlcore.sync.portal import Portal


class LogRange:
    """The records of a log in [start, end), fixed at its creation; use `log.read`.

    Iterating yields Arrow batches with the columns of `schema`.  DuckDB, Polars and other tools
    with Arrow's stream interface scan it directly, batch by batch.  Each use reads again.  Records
    that are truncated before they are read raise `AlreadyTruncatedError`.
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
        """The bounds of the range."""
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
            # The records were readable when the range was created, perhaps from other bookies than
            # this reader asks.  Therefore it waits for them.
            batches = reader.batches(follow=True)
            while reader.position < end and (batch := next(batches, None)) is not None:
                part = self._range.view.of(rows_before(batch, end))
                if part.num_rows:
                    yield part

    def to_arrow(self) -> pa.Table:
        """Return all records as a table, without copying them.

        Raises: AlreadyTruncatedError, and as `LogReader.read_batch`.
        """
        import pyarrow as pa

        return pa.Table.from_batches(list(self), self.schema)

    def to_pandas(self) -> pd.DataFrame:
        """Return all records as a pandas frame; `frame["dlsn"].struct` has parts of positions.

        Raises: as `to_arrow`.
        """
        from dlcore.log.reading.ranges import pandas_from_arrow

        return pandas_from_arrow(self.to_arrow())

    def to_polars(self) -> Any:
        """Return all records as a Polars frame.

        Raises:
            ConfigurationError: Polars is not installed.
        """
        from dlcore.log.reading.ranges import polars_from_arrow

        make = polars_from_arrow()
        return make(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow as pa

        reader = pa.RecordBatchReader.from_batches(self.schema, iter(self))
        return reader.__arrow_c_stream__(requested_schema)
