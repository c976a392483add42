"""The writer of a log: one class for its users, whatever takes the records."""

from __future__ import annotations

import asyncio
import atexit
import os
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from dlcore.base.background import refuse
from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import DLError, UnsupportedError, WriteCancelledError
from dlcore.log.entries.batches import batches_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    from dlcore.base.config import LogConfig
    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecord
    from dlcore.log.metadata.values import LogKey


class Unclosed(Protocol):
    """An object that can report what it has not written."""

    def report_unwritten(self, reason: str) -> None:
        """Log the unwritten records as an error, with the reason."""


left_open: weakref.WeakSet[Unclosed] = weakref.WeakSet()
"""Writers that were not closed: at the end of the process they log what they could not write."""


def _report_left_open() -> None:
    # A copy, because each one removes itself when it has reported.
    for writer in list(left_open):
        writer.report_unwritten("the process ended")


atexit.register(_report_left_open)
os.register_at_fork(after_in_child=left_open.clear)  # they belong to the parent


class AsyncLogWriter(AsyncClosing):
    """Appends to one log.  Use `DistributedLogManager.open_writer`.

    A direct writer is the only one of its log.  Through proxies any number of writers may be open
    to a log, and their records share its order.

    The methods that return futures may be called from any coroutine of one loop; positions follow
    the order of the calls.  The result of a future is the record's position (`DLSN`); through
    proxies it is None if the record is in the log at an unknown position.  These futures, and the
    methods that wait for written records, raise the error that refused the record or ended the
    writer: `WriteError` and its kind, `EndOfStreamError`, `AlreadyClosedError`; through proxies
    also `ProducerFencedError` and `ProxyUnavailableError`, after which records may be in the log or
    not.

    A log forgets a producer that writes nothing for long.  A writer with a generated name then goes
    on under a new one; a writer with a given name ends with a ProducerFencedError.  Both end with
    it if a record that was sent is still unacknowledged.
    """

    _log: LogKey
    _config: LogConfig

    @property
    def log_name(self) -> str:
        """The log's name."""
        return self._log.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._log.log_id

    @property
    def config(self) -> LogConfig:
        """The configuration at opening, without the log's settings."""
        return self._config

    @property
    @abstractmethod
    def last_txid(self) -> int:
        """The highest transaction id accepted, or found in the log by a direct writer; or -1.

        Through proxies only those of single records count, and not those of batches.
        """

    @property
    @abstractmethod
    def last_dlsn(self) -> DLSN | None:
        """The position of the last record that this writer knows is durable."""

    @property
    def producer(self) -> str | None:
        """The name under which it numbers its records through proxies; None: it is direct."""
        return None

    @property
    def next_sequence(self) -> int:
        """The sequence number of the producer's next record in this log, from 0.

        Raises: UnsupportedError: the writer is direct, and numbers no records.
        """
        raise UnsupportedError(
            f"log {self.log_name!r}: a direct writer has no producer and no `next_sequence`"
        )

    @property
    def is_typed(self) -> bool:
        """Whether the writer knows that the log is typed: it takes batches then, and no records."""
        return False

    # Accepting

    @abstractmethod
    def write(self, record: LogRecord) -> asyncio.Future[Any]:
        """Accept a record; return the future of its position, completed in order once durable.

        Raises (nothing is written, the writer stays usable):
            TransactionIdOutOfOrderError: the transaction id is lower than the one before.
            LogRecordTooLongError: the record exceeds RECORD_SIZE_BYTES_MAX.
            LogNotReadyError: the next segment is being started, with `fail_while_rolling`.
            OverCapacityError: too much is pending; `wait_for_capacity` first.
        Raises (nothing more can be written): EndOfStreamError, AlreadyClosedError, WriteError.
        """

    @abstractmethod
    def write_batch(self, batch: pa.RecordBatch) -> asyncio.Future[Any]:
        """Accept the rows of a batch; return the future of its last position.

        The batch has the columns `txid` (int64) and `value` (binary), or those of the typed log.
        Rows without a column `txid` (`_txid` for a typed log) get the time as transaction id.  The
        batch is cut to entries; it is refused as a whole or accepted as a whole.

        Raises:
            ConfigurationError: it has no rows, or not these columns; else as `write`.  A proxy may
                refuse the columns later, which ends the writer.
        """

    @abstractmethod
    async def wait_for_capacity(self) -> None:
        """Wait until a quarter of the limits or less is pending, or it failed.  Raises nothing."""

    def write_bulk(self, records: Iterable[LogRecord]) -> list[asyncio.Future[Any]]:
        """Write `records`; those after one that is refused are cancelled.  Raises: by futures."""
        futures: list[asyncio.Future[Any]] = []
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

    # Waiting

    @abstractmethod
    async def flush(self) -> DLSN | None:
        """Wait until all accepted records are durable; return the last known position, if any.

        Raises: WriteError, EndOfStreamError, AlreadyClosedError; and the errors of the class.
        """

    @abstractmethod
    async def commit(self) -> DLSN | None:
        """Flush, and wait until the followers of the log have these records.

        A read that begins later sees durable records without this call.

        Returns: of a direct writer, the position of the log's last record, of any writer; None if
            it holds none.  Through proxies, as `flush`.

        Raises: as `flush`; LogNotFoundError, LedgerReadError, MetadataError.
        """

    async def truncate(
        self, dlsn: DLSN | None = None, *, txid: int | None = None, timestamp_ms: int | None = None
    ) -> bool:
        """Drop the records below a position, a transaction id or a time, as the log's method does.

        Returns: whether this call dropped anything.

        Raises: as the log's method, the error that ended the writer; UnsupportedError through
            proxies, where the log's own method does it.
        """
        raise UnsupportedError(
            f"log {self.log_name!r}: a writer through proxies does not truncate; "
            "`truncate` of the log does"
        )

    @abstractmethod
    async def mark_end_of_stream(self) -> None:
        """Flush and seal the log: no record can follow.

        If only sealing fails, all accepted records are durable.  Another call then seals the log.

        Raises: as `flush`, and as `mark_end_of_stream` of the log.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Flush and close, and release the log; a second call does nothing.

        Raises: as `flush`: records failed; acknowledged ones are durable.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Stop at once, as a crash would; unacknowledged records may be in the log or not."""

    # For the blocking writer

    def fitted(self, batch: pa.RecordBatch, *, last_txid: int) -> Any:
        """Return the argument of `write_fitted` for a batch that follows `last_txid`."""
        return batch

    def write_fitted(self, rows: Any) -> asyncio.Future[Any]:
        """Accept a result of `fitted`, as `write_batch`."""
        return self.write_batch(rows)

    @abstractmethod
    def _describe_unwritten(self, waiting: Sequence[Any]) -> str | None:
        """Return a text of the records that are not known to be durable; None: there are none.

        `waiting` has batches and results of `fitted` that come after the accepted ones.
        """
