"""Bulks and tables: the part that the async writers of a log and over an endpoint share."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dlcore.base.background import refuse
from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import DLError, WriteCancelledError
from dlcore.log.entries.batches import batches_from

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from dlcore.base.records import LogRecord

_Position = TypeVar("_Position")


class RecordsWriter(AsyncClosing, Generic[_Position]):
    """A writer whose futures give positions; subclasses do the writing."""

    @abstractmethod
    def write(self, record: LogRecord) -> asyncio.Future[_Position]:
        """Accept a record; return the future of its position."""

    @abstractmethod
    def write_batch(self, batch: pa.RecordBatch) -> asyncio.Future[_Position]:
        """Accept the rows of a batch; return the future of its last position."""

    @abstractmethod
    async def wait_for_capacity(self) -> None:
        """Wait until a quarter of the limits or less is pending, or it failed.  Raises nothing."""

    def write_bulk(self, records: Iterable[LogRecord]) -> list[asyncio.Future[_Position]]:
        """Write `records`; those after one that is refused are cancelled.  Raises: by futures."""
        futures: list[asyncio.Future[_Position]] = []
        refusal: DLError | None = None
        for record in records:
            try:
                if refusal is not None:
                    raise WriteCancelledError(f"an earlier record of the bulk failed: {refusal}")
                futures.append(self.write(record))
            except DLError as error:
                refusal = refusal or error
                futures.append(asyncio.get_running_loop().create_future())
                refuse(futures[-1], error)
        return futures

    async def submit_table(self, table: Any) -> None:
        """Write the rows of an Arrow table, a frame or a stream.  Raises: as `submit_batch`."""
        for batch in batches_from(table):
            await self.submit_batch(batch)

    async def submit_batch(self, batch: pa.RecordBatch) -> None:
        """Wait for capacity and write `batch`; later calls raise its error if it failed.

        Raises: as `write_batch`.
        """
        if batch.num_rows:
            await self.wait_for_capacity()
            self.write_batch(batch)
