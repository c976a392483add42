"""The writer of a log over an endpoint: each accepted record is in the log once.

The writer numbers its records as a producer of the log.  One task keeps a stream to the proxy that
owns the log, sends the messages of the `Outbox`, and removes acknowledged ones.  If the stream ends
or is silent, the task opens the next one, at the location of a redirection or at another proxy, and
sends the remaining messages again.

A log forgets a producer that writes nothing for long.  A writer with a generated name then
continues under a new name.  If a record is in doubt, it cannot: the log may hold the record, and
could not recognize it under another name.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from dlcore.base.background import outcome_of, refuse
from dlcore.base.clock import SystemClock
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    ProducerFencedError,
    ProxyUnavailableError,
    UnexpectedError,
    WriteCancelledError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.flight.put import Numbered, PutTarget
from dlcore.flight.sending import framed
from dlcore.log.entries.body import byte_log_schema
from dlcore.log.entries.stamp import GENERATED_PREFIX, Claim
from dlcore.log.writing.left_open import left_open
from dlcore.log.writing.producers import GENERATED_KEPT_MS, KEPT_MS
from dlcore.log.writing.records_writer import RecordsWriter
from dlcore.log.writing.transmit import checked_payload, parts_of
from dlcore.remote.outbox import Outbox
from dlcore.remote.planning import get_info, seal
from dlcore.remote.streams import (
    Attempts,
    EndedError,
    first_message,
    read,
    too_long,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from dlcore.base.records import LogRecord
    from dlcore.flight.replies import Ready
    from dlcore.log.metadata.values import LogKey
    from dlcore.remote.endpoint import Endpoint

logger = logging.getLogger(__name__)

PENDING_BYTES_MAX = 32 * 1024 * 1024
SILENCE_S = 15.0
"""If a proxy sends nothing for this time while acknowledgements are due, its stream is ended."""
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
        self.producer = _new_name() if producer is None else producer
        """The name under which the writer numbers its records."""
        self._is_named = producer is not None
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._outbox: Outbox[asyncio.Future[DLSN | None]] = Outbox(bytes_max=PENDING_BYTES_MAX)
        self._claim: Claim | None = None
        self._last_txid = -1
        self.last_dlsn: DLSN | None = None
        """The highest known position of a durable record."""
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._wake = asyncio.Event()
        self._capacity = asyncio.Event()
        self._error: DLError | None = None
        self._is_closing = self._is_sealing = self._is_told = False
        self._failed_with = 0  # number of records that were unacknowledged at the failure
        self._attempts = Attempts(calls, log.name, patience_s)
        self._heard_at = 0.0
        self._stream_first = 0  # the sequence of the first record of the stream
        self._drained_to: str | None = None
        self._is_drained = False
        self._task = asyncio.create_task(self._run(), name=f"remote-writer-{log.name}")
        left_open.add(self)

    def __repr__(self) -> str:
        return f"<RemoteWriter {self.log_name!r} {self._outbox!r}>"

    async def open(self) -> None:
        """Wait until a proxy accepts the writer.

        Raises: LogNotFoundError, ConfigurationError, EndOfStreamError, ProxyUnavailableError.
        """
        try:
            await outcome_of(self._opened)
        except BaseException:
            await self.abort()
            raise

    @property
    def next_sequence(self) -> int:
        """The sequence number of the producer's next record in this log, from 0."""
        return self._outbox.next_sequence

    @property
    def lost(self) -> int:
        """The number of accepted records that are not known to be durable."""
        return self._failed_with + len(self._outbox)

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
        self._outbox.add_record(txid, payload, future)
        self._last_txid = txid
        self._wake.set()
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
        self._outbox.add_batch(batch, future)
        self._wake.set()
        return future

    async def wait_for_capacity(self) -> None:
        """Wait until at most a quarter of the limit is pending, or the writer failed.

        Raises nothing.
        """
        while not self._outbox.has_room and self._error is None:
            self._capacity.clear()
            await self._capacity.wait()

    def _require_open(self) -> None:
        if self._is_closing:
            raise AlreadyClosedError(f"the writer of log {self.log_name!r} is closed")
        if self._error is not None:
            self._is_told = True
            raise WriteError(
                f"the writer of log {self.log_name!r} failed and takes no more records: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error

    # Waiting

    async def flush(self) -> DLSN | None:
        """Wait until all accepted records are durable; return the last known position, if any.

        Raises: WriteError, AlreadyClosedError; ProducerFencedError, ProxyUnavailableError or
            another error that ended the writer.
        """
        self._require_open()
        barrier: asyncio.Future[DLSN | None] = self._loop.create_future()
        if self._outbox.add_barrier(barrier):
            self._wake.set()
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
        if self._is_closing:
            return
        try:
            if self._error is None or not self._is_told:
                await self.flush()
            self._is_closing = True
            self._wake.set()
            if self._error is None:
                # Let the task end its stream in order: the proxy would see a cancellation.
                await asyncio.wait([self._task], timeout=SILENCE_S)
        finally:
            await self.abort()

    async def abort(self) -> None:
        """End at once: unacknowledged records may be in the log or not."""
        self._is_closing = True
        left_open.discard(self)
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
        finally:  # also if this call is cancelled: no other code would fail the futures
            self._fail(WriteCancelledError(f"log {self.log_name!r}: the writer was aborted"))

    def report_unwritten(self, reason: str) -> None:
        """Log an error for a writer that was not closed and has unacknowledged records."""
        if self.lost and not self._is_told and self in left_open:
            told = f"{counted(self.lost)}: the writer was not closed, and {reason}"
            logger.error("log %r: not written: %s", self.log_name, told)
            left_open.discard(self)  # it is reported once

    # The stream

    async def _run(self) -> None:
        try:
            while not (self._is_closing and not len(self._outbox)):
                try:
                    await self._exchange()
                except EndedError as end:
                    if isinstance(end.error, ProducerFencedError) and not self._is_named:
                        end.again = self._begins_anew()
                    await self._attempts.failed(end)
                await self._wait_for_work()
        except asyncio.CancelledError:
            self.report_unwritten("its event loop ended")
            raise
        except AlreadyClosedError as error:
            self.report_unwritten("its namespace was closed")
            self._fail(error)
        except DLError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  # a defect must not leave callers waiting
            self._fail(UnexpectedError(f"the writer of log {self.log_name!r} broke: {error!r}"))

    def _begins_anew(self) -> bool:
        """Take another name, because the log forgot this one; False if a record is in doubt.

        Messages of the last stream are not in doubt: a proxy acknowledges all messages that it took
        before it refuses the stream.
        """
        if self._outbox.is_in_doubt:
            return False
        self._outbox.refused()
        self.producer, self._claim = _new_name(), None
        return True

    async def _wait_for_work(self) -> None:
        """Wait until a stream is needed."""
        while self._opened.done() and not (len(self._outbox) or self._is_closing):
            self._attempts.succeeded()
            self._wake.clear()
            await self._wake.wait()

    async def _exchange(self) -> None:
        """Run one stream until all messages are acknowledged.  Raises: EndedError."""
        # The first stream only opens the writer: its records may be of any schema.
        message = self._outbox.look() if self._opened.done() else None
        schema = byte_log_schema() if message is None else message.batch.schema
        self._outbox.begin_again()
        self._drained_to, self._is_drained = None, False
        call = self._attempts.begin()
        try:
            async with asyncio.timeout(SILENCE_S):
                target = PutTarget(
                    self._log.name,
                    self._log.log_id,
                    self._claim or self.producer,
                    positions=True,
                    unreachable=self._calls.unreached(self.log_name),
                )
                await write(call, first_message(target, schema))
                ready = (await read(call)).ready
            if ready is None or ready.producer is None or ready.sequence is None:
                raise UnexpectedError("a proxy did not say that it is ready for a producer")
            self._calls.is_taken(self.log_name)
            self._take_up(ready.producer, ready.sequence)
            hearing = asyncio.create_task(self._hear(call), name="hearing a proxy")
            hearing.add_done_callback(lambda _: self._wake.set())
            try:
                await self._send(call, schema, ready, hearing)
            finally:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
        except EndedError as end:
            end.location = end.location or self._drained_to
            raise
        except TimeoutError as error:
            silence = ProxyUnavailableError(f"a proxy said nothing for {SILENCE_S:g} s")
            raise EndedError(silence, again=True) from error
        finally:
            call.cancel()

    def _take_up(self, claim: Claim, last: int) -> None:
        """Go on behind the last durable record, whose sequence a new stream reports as `last`."""
        if self._claim is None:
            self._claim = claim
            self._outbox.begin(claim.base)
            if not self._opened.done():
                self._opened.set_result(None)
        elif self._is_forgotten(claim, last):
            told = f"log {self.log_name!r} does not know producer {claim.name!r} any more"
            if self._outbox.is_in_doubt:
                told += f", and may hold some of {counted(len(self._outbox))} that it sent, or not"
            raise EndedError(ProducerFencedError(told), again=False)
        self._tell(self._outbox.durable_before(last))
        self._stream_first = self._outbox.begin_again()
        self._heard_at = self._loop.time()

    def _is_forgotten(self, claim: Claim, last: int) -> bool:
        """Return whether the log may have forgotten acknowledged or doubtful records of the claim.

        It would then take them a second time.
        """
        first = self._outbox.begin_again()
        if first > claim.base or not self._outbox.is_in_doubt:
            return last < first - 1
        # No record was acknowledged yet, so a log that never had one and a log that forgot them
        # answer the same.  Only the time since the last message shows which of them it can be.
        kept_ms = KEPT_MS if self._is_named else GENERATED_KEPT_MS
        return last < first and 1000 * (self._loop.time() - self._heard_at) > kept_ms

    async def _send(
        self, call: Any, schema: pa.Schema, ready: Ready, hearing: asyncio.Task[None]
    ) -> None:
        outbox = self._outbox
        while not hearing.done():
            # Before the state is read: a change after this line wakes the wait below.
            self._wake.clear()
            message = None if self._is_drained else outbox.look()
            is_last = message is None and self._is_closing and not len(outbox)
            if message is not None and message.batch.schema != schema:
                if not outbox.has_in_flight:
                    return  # a stream has one schema: the next stream gets this one
            elif message is not None and outbox.sent_bytes < ready.window_bytes:
                beside = msgspec.json.encode(Numbered(message.first))
                data = framed(message.batch.serialize(), beside)
                if len(data) <= ready.message_bytes_max:
                    outbox.sent()
                    async with asyncio.timeout(SILENCE_S):
                        await write(call, data)
                elif not outbox.split():
                    raise EndedError(too_long(data, ready.message_bytes_max), again=False)
                continue
            elif is_last:
                await call.done_writing()
                await asyncio.wait([hearing], timeout=SILENCE_S)
                return
            await self._wait_for_news()
        hearing.result()

    async def _wait_for_news(self) -> None:
        if not self._outbox.has_in_flight:
            # A proxy without unacknowledged messages may be silent: start its time afterwards.
            await self._wake.wait()
            self._heard_at = self._loop.time()
            return
        async with asyncio.timeout_at(self._heard_at + SILENCE_S):
            await self._wake.wait()

    async def _hear(self, call: Any) -> None:
        """Handle the proxy's messages until the stream ends.  Raises: EndedError."""
        while True:
            told = await read(call)
            self._heard_at = self._loop.time()
            if told.acked is not None:
                first = self._stream_first
                ends = [(first + end.records - 1, end) for end in told.ends]
                self._tell(self._outbox.acknowledged(first + told.acked - 1, ends))
                self._attempts.succeeded()
                self._wake.set()
            elif told.draining is not None:
                # The proxy has acknowledged all accepted messages, and accepts no more.
                self._drained_to, self._is_drained = told.draining.location, True
                await call.done_writing()

    def _tell(self, told: Iterable[tuple[asyncio.Future[DLSN | None], DLSN | None]]) -> None:
        for future, dlsn in told:
            self.last_dlsn = dlsn or self.last_dlsn
            if not future.done():
                future.set_result(dlsn)
        self._capacity.set()

    def _fail(self, error: DLError) -> None:
        if self._error is None:
            self._error = error
            self._failed_with = len(self._outbox)
            if not self._opened.done():
                refuse(self._opened, error)
            for future in self._outbox.drain():
                refuse(future, error)
            self._capacity.set()


def counted(records: int) -> str:
    """Return a number of records, for a message."""
    return "1 record" if records == 1 else f"{records} records"


async def append_if(
    calls: Endpoint, log: LogKey, batch: pa.RecordBatch, expected: DLSN | None, patience_s: float
) -> DLSN | None:
    """Append a batch if the log's last record is at `expected`; return its own last position."""
    attempts = Attempts(calls, log.name, patience_s)
    condition = None if expected is None else str(expected)
    # A producer of its own: if the answer is lost, the retry is recognized by its claim, although
    # the batch itself has moved the end of the log.
    producer: str | Claim = _new_name()
    while True:
        call = attempts.begin()
        try:
            async with asyncio.timeout(SILENCE_S):
                unreachable = calls.unreached(log.name)
                target = PutTarget(
                    log.name, log.log_id, producer, expected=condition, unreachable=unreachable
                )
                await write(call, first_message(target, batch.schema))
                ready = (await read(call)).ready
                assert ready is not None
                assert ready.producer is not None
                calls.is_taken(log.name)
                producer = ready.producer
                beside = msgspec.json.encode(Numbered(producer.base))
                data = framed(batch.serialize(), beside)
                if len(data) > ready.message_bytes_max:
                    raise too_long(data, ready.message_bytes_max)
                await write(call, data)
                await call.done_writing()
                told = await read(call)
                while told.acked is None:
                    told = await read(call)
                return DLSN.parse(told.dlsn) if isinstance(told.dlsn, str) else None
        except EndedError as end:
            await attempts.failed(end)
        except TimeoutError:
            silence = ProxyUnavailableError(f"a proxy said nothing for {SILENCE_S:g} s")
            await attempts.failed(EndedError(silence, again=True))
        finally:
            call.cancel()
