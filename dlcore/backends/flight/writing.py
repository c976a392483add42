"""The writer of a log over an endpoint: each accepted record is in the log once.

The protocol is `dlcore.flight.producer_client`; this is its public face.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dlcore.backends.flight.planning import get_info, seal
from dlcore.backends.flight.producer_driver import Position, ProducerDriver
from dlcore.base.background import BackgroundTasks, end_tasks, outcome_of
from dlcore.base.clock import SystemClock
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    WriteCancelledError,
)
from dlcore.base.ids import DLSN
from dlcore.flight.producer_client import (
    SILENCE_S,
    Abort,
    Begin,
    Close,
    Flush,
    ProducerClient,
    WriteBatch,
    counted,
)
from dlcore.log.entries.batcher import parts_of
from dlcore.log.entries.stamp import GENERATED_PREFIX
from dlcore.log.writing.records_writer import AsyncLogWriter, left_open

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.base.config import LogConfig
    from dlcore.base.records import LogRecord
    from dlcore.log.entries.stamp import Claim
    from dlcore.log.metadata.values import LogKey


logger = logging.getLogger(__name__)

_VISIBLE_LOOKS_EVERY_S = 0.005


def _new_name() -> str:
    return f"{GENERATED_PREFIX}{SystemClock().new_token()}"


class FlightWriter(AsyncLogWriter):
    """Appends to one log through proxies.  Use `FlightLog.open_writer`."""

    def __init__(
        self,
        calls: Endpoint,
        log: LogKey,
        producer: str | None,
        patience_s: float,
        config: LogConfig,
    ) -> None:
        self._log, self._config = log, config
        name = _new_name() if producer is None else producer
        self._machine: ProducerClient[Position] = ProducerClient(
            log.name, name, is_named=producer is not None
        )
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._driver = ProducerDriver(calls, log, self._machine, patience_s)
        self._is_sealing = False
        self._tasks = BackgroundTasks()
        self._task = self._tasks.start(self._wait_over(), name=f"remote-writer-{log.name}")
        self._driver.handle(Begin(self._loop.time()))
        left_open.add(self)

    def __repr__(self) -> str:
        return f"<AsyncLogWriter {self.log_name!r} {self._machine!r}>"

    async def _open(self) -> None:
        """Wait until a proxy accepts the writer.

        Raises: LogNotFoundError, ConfigurationError, EndOfStreamError, ProxyUnavailableError.
        """
        try:
            await outcome_of(self._driver.opened)
        except BaseException:
            await self.abort()
            raise

    @property
    @override
    def producer(self) -> str:
        return self._machine.identity.name

    @property
    @override
    def last_dlsn(self) -> DLSN | None:
        return self._machine.last_dlsn

    @property
    @override
    def next_sequence(self) -> int:
        return self._machine.outbox.next_sequence

    @property
    @override
    def last_txid(self) -> int:
        return self._machine.outbox.last_txid

    @override
    def _describe_unwritten(self, waiting: Sequence[Any]) -> str | None:
        count = self._machine.lost + sum(int(each.num_rows) for each in waiting)
        return counted(count) if count else None

    # Accepting

    @override
    def write(self, record: LogRecord) -> asyncio.Future[DLSN | None]:
        future: asyncio.Future[DLSN | None] = self._loop.create_future()
        if effects := self._machine.write(*parts_of(record), future):
            self._driver.perform(effects)
        return future

    @override
    def write_batch(self, batch: pa.RecordBatch) -> asyncio.Future[DLSN | None]:
        if batch.num_rows == 0:
            raise ConfigurationError("a batch without rows has no position")
        future: asyncio.Future[DLSN | None] = self._loop.create_future()
        self._driver.handle(WriteBatch(batch, future))
        return future

    @override
    async def wait_for_capacity(self) -> None:
        progress = self._driver.progress
        while not self._machine.outbox.has_room and self._machine.error is None:
            progress.clear()
            await progress.wait()

    # Waiting

    @override
    async def flush(self) -> DLSN | None:
        self._machine.require_open()
        barrier: Position = self._loop.create_future()
        self._driver.handle(Flush(barrier))
        try:
            await barrier
        except DLError:
            self._machine.is_error_reported = True
            raise
        return self.last_dlsn

    @override
    async def commit(self) -> DLSN | None:
        last = await self.flush()
        end = last
        while last is not None and end is not None and end <= last:
            end = DLSN.parse((await get_info(self._calls, self._log.name, self._log.log_id)).end)
            await asyncio.sleep(_VISIBLE_LOOKS_EVERY_S if end <= last else 0)
        return last

    @override
    async def mark_end_of_stream(self) -> None:
        # After a failed attempt a sealed log is no error: the attempt may have sealed it.
        again = self._is_sealing and not self._machine.lost
        if not again:
            await self.flush()
            self._is_sealing = True
        await self.aclose()
        await seal(self._calls, self._log, again=again)
        self._is_sealing = False

    @override
    async def aclose(self) -> None:
        if self._machine.is_closing:
            return
        try:
            if self._machine.error is None or not self._machine.is_error_reported:
                await self.flush()
            self._driver.handle(Close(self._loop.time()))
            if self._machine.error is None:
                # Let the stream end in order: the proxy would see a cancellation.
                await asyncio.wait([self._task], timeout=SILENCE_S)
        finally:
            await self.abort()

    @override
    async def abort(self) -> None:
        left_open.discard(self)
        self._task.cancel()
        # First, because the call may be cancelled: no other code would fail the futures.
        self._driver.handle(
            Abort(WriteCancelledError(f"log {self.log_name!r}: the writer was aborted"))
        )
        await self._driver.aclose()
        await end_tasks(self._task)

    def report_unwritten(self, reason: str) -> None:
        """Log an error for a writer that was not closed and has unacknowledged records."""
        lost = self._machine.lost
        if lost and not self._machine.is_error_reported and self in left_open:
            text = f"{counted(lost)}: the writer was not closed, and {reason}"
            logger.error(
                "log %r: not written: %s; to do: write these records again if they are needed",
                self.log_name,
                text,
            )
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
    return await _append(calls, log, batch, machine, patience_s)


async def append_once(
    calls: Endpoint, log: LogKey, batch: pa.RecordBatch, claim: Claim, patience_s: float
) -> DLSN | None:
    """Append a batch unless the log holds it under this claim; return its last position."""
    machine: ProducerClient[Position] = ProducerClient(log.name, claim.name, claim=claim)
    return await _append(calls, log, batch, machine, patience_s)


async def _append(
    calls: Endpoint,
    log: LogKey,
    batch: pa.RecordBatch,
    machine: ProducerClient[Position],
    patience_s: float,
) -> DLSN | None:
    driver = ProducerDriver(calls, log, machine, patience_s)
    position: Position = asyncio.get_running_loop().create_future()
    try:
        driver.handle(WriteBatch(batch, position))
        return await position
    finally:
        await driver.aclose()
