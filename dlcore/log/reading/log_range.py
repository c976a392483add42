"""A range of a log's records, fixed when it is made, as Arrow batches, a table or a frame."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore.base.errors import EndOfStreamError
from dlcore.log.reading.ranges import pandas_from_arrow, polars_from_arrow, rows_before

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    import pandas as pd

    from dlcore.log.reading.ranges import RangeExtent, RangeView
    from dlcore.log.reading.rows_reader import AsyncLogReader


class LogRange:
    """The records of a log in [start, end), fixed when it was made; use `log.read`.

    `async for batch in log_range` yields Arrow batches with the columns of `schema`.  Each
    iteration reads again; records truncated before they are read are an `AlreadyTruncatedError`.
    """

    def __init__(
        self,
        extent: RangeExtent,
        open_reader: Callable[[], Coroutine[Any, Any, AsyncLogReader]],
        view: RangeView,
    ) -> None:
        self.extent = extent
        self.view = view
        self.open_reader = open_reader
        """Opens a reader at the start, whose stream ends with the entry that contains the end."""

    def __repr__(self) -> str:
        return f"<LogRange {self.extent}>"

    def _repr_html_(self) -> str:
        return self.extent._repr_html_()

    @property
    def schema(self) -> pa.Schema:
        """The columns of its batches."""
        return self.view.schema

    async def __aiter__(self) -> AsyncGenerator[pa.RecordBatch, None]:
        end = self.extent.end
        if self.extent.is_empty:
            return
        async with await self.open_reader() as reader:
            with suppress(EndOfStreamError):
                while reader.position < end:
                    batch = await reader.read_batch()
                    part = self.view.of(rows_before(batch, end))
                    if part.num_rows:
                        yield part

    async def to_arrow(self) -> pa.Table:
        """Return all of it as a table; the records are not copied.

        Raises: AlreadyTruncatedError, and as `AsyncLogReader.read_batch`.
        """
        return pa.Table.from_batches([batch async for batch in self], self.schema)

    async def to_pandas(self) -> pd.DataFrame:
        """Return all of it as a pandas frame, made in a thread, so that the loop is not blocked.

        Parts of positions are `frame["dlsn"].struct`'s.

        Raises: as `to_arrow`.
        """
        return await asyncio.to_thread(pandas_from_arrow, await self.to_arrow())

    async def to_polars(self) -> Any:
        """Return all of it as a Polars frame.

        Raises:
            ConfigurationError: Polars is not installed.
        """
        make = polars_from_arrow()
        return await asyncio.to_thread(make, await self.to_arrow())
