"""The writer of a log over an endpoint: each accepted record is in the log once.

The protocol is `dlcore.flight.producer_client`; this is its public face.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.base.background import outcome_of
from dlcore.base.clock import SystemClock
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    WriteCancelledError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.flight.producer_client import (
    SILENCE_S,
    Abort,
    Begin,
    Close,
    Flush,
    ProducerClient,
    Write,
    WriteBatch,
    counted,
)
from dlcore.log.entries.stamp import GENERATED_PREFIX
from dlcore.log.writing.left_open import left_open
from dlcore.log.writing.records_writer import RecordsWriter
from dlcore.log.writing.transmit import checked_payload, parts_of
from dlcore.remote.planning import get_info, seal
from dlcore.remote.producer_driver import Position, ProducerDriver

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.base.records import LogRecord
    from dlcore.log.metadata.values import LogKey
    from dlcore.remote.endpoint import Endpoint

__all__ = ["RemoteWriter", "append_if", "counted"]

logger = logging.getLogger(__name__)

_VISIBLE_LOOKS_EVERY_S = 0.005


def _new_name() -> str:
    return f"{GENERATED_PREFIX}{SystemClock().new_token()}"


class RemoteWriter(RecordsWriter[DLSN | None]):
    """Appends to one log through the proxies of an endpoint.  Use `RemoteLog.open_writer`.

    Any number of writers may be open to a log; their records share its order.  Positions follow the
    order of the calls.  Any coroutine of one loop may call the methods that return futures.  The
    result of a future is the record's position, or None if the record is in the log at an unknown
    position.

    The log forgets a producer that writes nothing for long.  A writer with a generated name then
    goes on under a new one; a writer with a given name ends with a ProducerFencedError.  Both end
    with it if a record that was sent is still unacknowledged; it may be in the log or not.
    """

    def __init__(
        self, calls: Endpoint, log: LogKey, producer: str | None, patience_s: float
    ) -> None:
        self._log, self.log_name = log, log.name
        name = _new_name() if producer is None else producer
        self._machine: ProducerClient[Position] = ProducerClient(
            log.name, name, is_named=producer is not None
        )
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._driver = ProducerDriver(calls, log, self._machine, patience_s)
        self._last_txid = -1
        self._is_sealing = self._is_told = False
        self._task = asyncio.create_task(self._wait_over(), name=f"remote-writer-{log.name}")
        self._driver.handle(Begin(self._loop.time()))
        left_open.add(self)

    def __repr__(self) -> str:
        return f"<RemoteWriter {self.log_name!r} {self._machine!r}>"

    async def open(self) -> None:
        """Wait until a proxy accepts the writer.

        Raises: LogNotFoundError, ConfigurationError, EndOfStreamError, ProxyUnavailableError.
        """
        try:
            await outcome_of(self._driver.opened)
        except BaseException:
            await self.abort()
            raise

    @property
    def producer(self) -> str:
        """The name under which the writer numbers its records."""
        return self._machine.name

    @property
    def last_dlsn(self) -> DLSN | None:
        """The highest known position of a durable record."""
        return self._machine.last_dlsn

    @property
    def next_sequence(self) -> int:
        """The sequence number of the producer's next record in this log, from 0."""
        return self._machine.next_sequence

    @property
    def lost(self) -> int:
        """The number of accepted records that are not known to be durable."""
        return self._machine.lost

    # Accepting

    def write(self, record: LogRecord) -> asyncio.Future[DLSN | None]:
        """Accept a record; return the future of its position.

        Raises (nothing is written, the writer stays usable):
            TransactionIdOutOfOrderError: the transaction id is lower than one written before.
            LogRecordTooLongError: the record exceeds RECORD_SIZE_BYTES_MAX.
            OverCapacityError: too many bytes are pending; `wait_for_capacity` first.
        Raises (nothing more can be written): WriteError, AlreadyClosedError.
        """
        self._require_open()
        txid, payload = parts_of(record)
        payload = checked_payload(txid, payload, last_txid=self._last_txid)
        future: asyncio.Future[DLSN | None] = self._loop.create_future()
        self._driver.handle(Write(txid, payload, future))
        self._last_txid = txid
        return future

    def write_batch(self, batch: pa.RecordBatch) -> asyncio.Future[DLSN | None]:
        """Accept the rows of a batch; return the future of its last position.

        The batch has the columns of the typed log, or `value` for a byte log.  A column `_txid` or
        `txid` gives transaction ids; without it they are the time.  If the columns do not fit the
        log, a proxy refuses them, and the writer ends with an error.

        Raises: ConfigurationError: the batch has no rows; else as `write`.
        """
        if batch.num_rows == 0:
            raise ConfigurationError("a batch without rows has no position")
        self._require_open()
        future: asyncio.Future[DLSN | None] = self._loop.create_future()
        self._driver.handle(WriteBatch(batch, future))
        return future

    async def wait_for_capacity(self) -> None:
        """Wait until at most a quarter of the limit is pending, or the writer failed.

        Raises nothing.
        """
        progress = self._driver.progress
        while not self._machine.has_room and self._machine.error is None:
            progress.clear()
            await progress.wait()

    def _require_open(self) -> None:
        if self._machine.is_closing:
            raise AlreadyClosedError(f"the writer of log {self.log_name!r} is closed")
        error = self._machine.error
        if error is not None:
            self._is_told = True
            raise WriteError(
                f"the writer of log {self.log_name!r} failed and takes no more records: "
                f"{type(error).__name__}: {error}"
            ) from error

    # Waiting

    async def flush(self) -> DLSN | None:
        """Wait until all accepted records are durable; return the last known position, if any.

        Raises: WriteError, AlreadyClosedError; ProducerFencedError, ProxyUnavailableError or
            another error that ended the writer.
        """
        self._require_open()
        barrier: Position = self._loop.create_future()
        self._driver.handle(Flush(barrier))
        try:
            await barrier
        except DLError:
            self._is_told = True
            raise
        return self.last_dlsn

    async def commit(self) -> DLSN | None:
        """Flush, and wait until a reader that is opened now returns all these records.

        Returns: as `flush`.  Raises: as `flush`; LogNotFoundError.
        """
        last = await self.flush()
        end = last
        while last is not None and end is not None and end <= last:
            end = DLSN.parse((await get_info(self._calls, self._log.name, self._log.log_id)).end)
            await asyncio.sleep(_VISIBLE_LOOKS_EVERY_S if end <= last else 0)
        return last

    async def mark_end_of_stream(self) -> None:
        """Flush, close the writer, and seal the log: no record can follow.

        If only sealing fails, all accepted records are durable, and the writer is closed.  Another
        call then seals the log, unless the failed attempt has sealed it after all.

        Raises: as `flush`; and as `RemoteLog.mark_end_of_stream`.
        """
        # After a failed attempt a sealed log is no error: the attempt may have sealed it.
        again = self._is_sealing and not self.lost
        if not again:
            await self.flush()
            self._is_sealing = True
        await self.aclose()
        await seal(self._calls, self._log, again=again)
        self._is_sealing = False

    async def aclose(self) -> None:
        """Flush and close; harmless if the writer is closed already.

        Raises: as `flush`; acknowledged records are durable.
        """
        if self._machine.is_closing:
            return
        try:
            if self._machine.error is None or not self._is_told:
                await self.flush()
            self._driver.handle(Close(self._loop.time()))
            if self._machine.error is None:
                # Let the stream end in order: the proxy would see a cancellation.
                await asyncio.wait([self._task], timeout=SILENCE_S)
        finally:
            await self.abort()

    async def abort(self) -> None:
        """End at once: unacknowledged records may be in the log or not."""
        left_open.discard(self)
        self._task.cancel()
        # First, because the call may be cancelled: no other code would fail the futures.
        self._driver.handle(
            Abort(WriteCancelledError(f"log {self.log_name!r}: the writer was aborted"))
        )
        await self._driver.aclose()
        await asyncio.gather(self._task, return_exceptions=True)

    def report_unwritten(self, reason: str) -> None:
        """Log an error for a writer that was not closed and has unacknowledged records."""
        if self.lost and not self._is_told and self in left_open:
            told = f"{counted(self.lost)}: the writer was not closed, and {reason}"
            logger.error("log %r: not written: %s", self.log_name, told)
            left_open.discard(self)  # it is reported once

    async def _wait_over(self) -> None:
        """Return when nothing more can be written; report what is lost with the event loop."""
        try:
            await self._driver.over
        except asyncio.CancelledError:
            self.report_unwritten("its event loop ended")
            raise
        if isinstance(self._machine.error, AlreadyClosedError):
            self.report_unwritten("its namespace was closed")


async def append_if(
    calls: Endpoint, log: LogKey, batch: pa.RecordBatch, expected: DLSN | None, patience_s: float
) -> DLSN | None:
    """Append a batch if the log's last record is at `expected`; return its own last position."""
    condition = None if expected is None else str(expected)
    machine: ProducerClient[Position] = ProducerClient(log.name, _new_name(), expected=condition)
    driver = ProducerDriver(calls, log, machine, patience_s)
    position: Position = asyncio.get_running_loop().create_future()
    try:
        driver.handle(WriteBatch(batch, position))
        return await position
    finally:
        await driver.aclose()
