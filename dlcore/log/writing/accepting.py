"""The accepting half of a log's writer: records in, futures out, and what is told of a failure."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import weakref
from typing import TYPE_CHECKING

from dlcore.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    EndOfStreamError,
    OverCapacityError,
    WriteCancelledError,
    WriteError,
)
from dlcore.log.entries.batches import byte_log_batch, check_txids, cut
from dlcore.log.writing.transmit import Group, Slice, Transmitter, Unwritten, checked_payload

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from dlcore.config import LogConfig
    from dlcore.ids import DLSN
    from dlcore.records import LogRecord

logger = logging.getLogger(__name__)

PENDING_BYTES_SOFT = 32 * 1024 * 1024
"""`wait_for_capacity` waits while more than this is not acknowledged."""
PENDING_BYTES_MAX = 128 * 1024 * 1024
"""Beyond this a write is refused with `OverCapacityError`."""


class Acceptor:
    """Takes records for one log until it fails or is closed; `AsyncLogWriter` sends them."""

    def __init__(self, name: str, config: LogConfig, *, last_txid: int) -> None:
        self._name = name
        self._config = config
        self._transmitter: Transmitter[asyncio.Future[DLSN]] = Transmitter(
            entry_bytes=config.entry_bytes
        )
        self._last_txid = last_txid
        self._failure: DLError | None = None
        self._ended = False  # sealed by us
        self._closed = False
        self._given_up = False
        self._untold: Unwritten | None = None  # given up, and no caller has met the error
        self._wake = asyncio.Event()
        self._capacity = asyncio.Event()
        _left_open.add(self)

    def _forget(self) -> None:
        _left_open.discard(self)

    @property
    def log_name(self) -> str:
        """The name of the log."""
        return self._name

    @property
    def last_txid(self) -> int:
        """The highest transaction id accepted, or found in the log; -1 if there is none."""
        return self._last_txid

    @property
    def unwritten(self) -> Unwritten | None:
        """Records accepted and not acknowledged, unless a call has failed because of them."""
        return self._untold or self._transmitter.unacknowledged()

    def write(self, record: LogRecord) -> asyncio.Future[DLSN]:
        """Accept a record; return the future of its position, completed in order once durable.

        Raises (nothing is written, the writer stays usable):
            TransactionIdOutOfOrderError: the transaction id is lower than the one before.
            LogRecordTooLongError: the record exceeds RECORD_SIZE_BYTES_MAX.
            OverCapacityError: too much is pending; `wait_for_capacity` first.
        Raises (nothing more can be written):
            EndOfStreamError, AlreadyClosedError, WriteError.
        """
        self._require_writable()
        payload = checked_payload(record.txid, record.payload, last_txid=self._last_txid)
        future = self._new_future()
        self._transmitter.add_record(record.txid, payload, future)
        self._last_txid = record.txid
        self._wake.set()
        return future

    def write_bulk(self, records: Iterable[LogRecord]) -> list[asyncio.Future[DLSN]]:
        """Write each of `records`; after the first that is refused, the rest is cancelled."""
        futures: list[asyncio.Future[DLSN]] = []
        refusal: DLError | None = None
        for record in records:
            if refusal is None:
                try:
                    futures.append(self.write(record))
                    continue
                except DLError as error:
                    refusal = error
                    futures.append(self._failed_future(error))
                    continue
            futures.append(
                self._failed_future(
                    WriteCancelledError(f"an earlier record of the bulk failed: {refusal}")
                )
            )
        return futures

    def write_batch(self, batch: pa.RecordBatch) -> asyncio.Future[DLSN]:
        """Accept the rows of `batch` (txid, payload); return the future of its last position.

        The batch is cut to entries; it is refused as a whole or accepted as a whole.
        """
        self._require_writable()
        if batch.num_rows == 0:
            raise ConfigurationError("a batch without rows has no position")
        batch = byte_log_batch(batch)
        _, last_txid = check_txids(batch, last_txid=self._last_txid)
        slices = [
            Slice(part, part.column(0)[0].as_py(), part.column(0)[-1].as_py(), size_bytes)
            for part, size_bytes in cut(batch, entry_bytes=self._config.entry_bytes)
        ]
        future = self._new_future()
        self._transmitter.add_slices(slices, future)
        self._last_txid = last_txid
        self._wake.set()
        return future

    async def submit_batch(self, batch: pa.RecordBatch) -> None:
        """Wait for capacity and write `batch`; its failure shows in the next call."""
        if batch.num_rows == 0:
            return
        await self.wait_for_capacity()
        self.write_batch(batch)

    async def wait_for_capacity(self) -> None:
        """Wait until less than PENDING_BYTES_SOFT is pending, or the writer has failed."""
        while self._transmitter.pending_bytes > PENDING_BYTES_SOFT and self._failure is None:
            self._capacity.clear()
            await self._capacity.wait()

    def _require_writable(self) -> None:
        self._require_usable()
        if self._ended:
            raise EndOfStreamError(f"log {self._name!r} is sealed: no record can follow")
        if self._transmitter.pending_bytes > PENDING_BYTES_MAX:
            raise OverCapacityError(
                f"log {self._name!r}: {self._transmitter.pending_bytes} bytes are pending, "
                f"the limit is {PENDING_BYTES_MAX}: await wait_for_capacity() between writes"
            )

    def _require_usable(self) -> None:
        if self._failure is not None:
            self._untold = None
            raise self._write_error() from self._failure
        if self._closed:
            raise AlreadyClosedError(f"the writer of log {self._name!r} is closed")

    def _write_error(self) -> WriteError:
        return WriteError(
            f"the writer of log {self._name!r} failed and takes no more records: "
            f"{type(self._failure).__name__}: {self._failure}"
        )

    def _new_future(self) -> asyncio.Future[DLSN]:
        future: asyncio.Future[DLSN] = asyncio.get_running_loop().create_future()
        # The writer reports a failure in its next call too, so nobody needs to look at each future.
        future.add_done_callback(_retrieve)
        return future

    def _failed_future(self, error: DLError) -> asyncio.Future[DLSN]:
        future = self._new_future()
        future.set_exception(error)
        return future

    def _report_unwritten(self, reason: str) -> None:
        unwritten = self.unwritten
        if unwritten is not None and not self._closed:
            logger.error(
                "log %r: not written: %s: the writer was not closed, and %s",
                self._name,
                unwritten,
                reason,
            )

    def _fail(self, error: DLError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        logger.warning("writer of log=%s failed: %s: %s", self._name, type(error).__name__, error)
        self._give_up(error)

    def _give_up(self, error: DLError) -> None:
        self._given_up = True
        self._untold = self._transmitter.unacknowledged()
        in_flight, queued = self._transmitter.drain()
        if not in_flight:
            in_flight, queued = queued[:1], queued[1:]  # the one that could not be sent
        _fail_all(in_flight, error)
        if queued:
            cancelled = WriteCancelledError(f"never sent, an earlier write failed: {error}")
            cancelled.__cause__ = error
            _fail_all(queued, cancelled)
        self._capacity.set()
        self._wake.set()


_left_open: weakref.WeakSet[Acceptor] = weakref.WeakSet()


def _report_left_open() -> None:
    for writer in list(_left_open):
        writer._report_unwritten("the process ended")
        writer._closed = True  # it is told once


atexit.register(_report_left_open)
os.register_at_fork(after_in_child=_left_open.clear)  # they are the parent's


def _retrieve(future: asyncio.Future[DLSN]) -> None:
    if not future.cancelled():
        future.exception()


def _fail_all(groups: list[Group[asyncio.Future[DLSN]]], error: DLError) -> None:
    for group in groups:
        for _, future in group.tickets:
            if not future.done():
                future.set_exception(error)
