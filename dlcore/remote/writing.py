"""The writer of a log over an endpoint: what it accepts is in the log once, whatever breaks.

It numbers its records as a producer of the log.  One task keeps a stream to the proxy that owns the
log, sends what waits in the `Outbox`, and takes out what is acknowledged.  When the stream ends, or
is silent, it opens the next one, where it is sent to or at another proxy, and sends the rest again.

Logs forget producers that are silent for long.  A writer without a name of its own then begins anew
under another one, unless something is in doubt: the log may hold it, and nobody knows any more.
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
    Ready,
    first_message,
    read,
    too_long,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from dlcore.base.records import LogRecord
    from dlcore.log.metadata.values import LogKey
    from dlcore.remote.endpoint import Endpoint

logger = logging.getLogger(__name__)

PENDING_BYTES_MAX = 32 * 1024 * 1024
SILENCE_S = 15.0
"""A proxy that says nothing for so long, though something is to be acknowledged, is left."""
_VISIBLE_LOOKS_EVERY_S = 0.005


def _new_name() -> str:
    return f"{GENERATED_PREFIX}{SystemClock().new_token()}"


class RemoteWriter(RecordsWriter[DLSN | None]):
    """Appends to one log through the proxies of an endpoint.  Use `RemoteLog.open_writer`.

    Any number of writers may be open to a log; their records share its order.  Positions follow the
    order of the calls.  The methods that return futures may be called from any coroutine of one
    loop; a future gives the record's position, or None: it is in the log, and where was not told.

    The log forgets a producer that writes nothing for long.  A writer whose name was made for it
    then goes on under a new one.  One with a name of its own ends with a ProducerFencedError, and
    so does either if something it sent was never acknowledged, which may be in the log or not.
    """

    def __init__(
        self, calls: Endpoint, log: LogKey, producer: str | None, patience_s: float
    ) -> None:
        self._log, self.log_name = log, log.name
        self.producer = _new_name() if producer is None else producer
        """The name under which it numbers its records."""
        self._is_named = producer is not None
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._outbox: Outbox[asyncio.Future[DLSN | None]] = Outbox(bytes_max=PENDING_BYTES_MAX)
        self._claim: Claim | None = None
        self._last_txid = -1
        self.last_dlsn: DLSN | None = None
        """Position of the last record that it knows to be durable, and where."""
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._wake = asyncio.Event()
        self._capacity = asyncio.Event()
        self._error: DLError | None = None
        self._is_closing = self._is_sealing = self._is_told = False
        self._failed_with = 0
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
        """The number of the next record, among all that its producer wrote to the log, from 0."""
        return self._outbox.next_sequence

    @property
    def lost(self) -> int:
        """How many records it accepted that are not known to be durable."""
        return self._failed_with + len(self._outbox)

    # Accepting

    def write(self, record: LogRecord) -> asyncio.Future[DLSN | None]:
        """Accept a record; return the future of its position.

        Raises (nothing is written, the writer stays usable):
            TransactionIdOutOfOrderError: the transaction id is lower than one written before.
            LogRecordTooLongError: the record exceeds RECORD_SIZE_BYTES_MAX.
            OverCapacityError: too much is pending; `wait_for_capacity` first.
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

        It has the columns of a typed log, or `value`; and `_txid` or `txid` where rows have their
        own transaction ids, which are the time otherwise.  A proxy tells what does not fit, which
        ends the writer.

        Raises: ConfigurationError: it has no rows; else as `write`.
        """
        if batch.num_rows == 0:
            raise ConfigurationError("a batch without rows has no position")
        self._require_open()
        future: asyncio.Future[DLSN | None] = self._loop.create_future()
        self._outbox.add_batch(batch, future)
        self._wake.set()
        return future

    async def wait_for_capacity(self) -> None:
        """Wait until a quarter or less is pending of what may be, or it failed.  Raises nothing."""
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
        """Wait until all that was accepted is durable; return the last position known, if any.

        Raises: WriteError, AlreadyClosedError; ProducerFencedError, ProxyUnavailableError and what
            else ended it.
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
        """Flush, and wait until readers that open the log find all of it.

        Returns: as `flush`.  Raises: as `flush`; LogNotFoundError.
        """
        last = await self.flush()
        end = last
        while last is not None and end is not None and end <= last:
            end = DLSN.parse((await get_info(self._calls, self._log.name, self._log.log_id)).end)
            await asyncio.sleep(_VISIBLE_LOOKS_EVERY_S if end <= last else 0)
        return last

    async def mark_end_of_stream(self) -> None:
        """Flush, end, and seal the log: no record can follow.

        If only sealing fails, all that was accepted is durable, and the writer takes nothing more;
        called again, this seals the log unless an attempt has done so that failed.

        Raises: as `flush`; and as `RemoteLog.mark_end_of_stream`.
        """
        again = self._is_sealing and not self.lost
        if not again:
            await self.flush()
            self._is_sealing = True
        await self.aclose()
        await seal(self._calls, self._log, again=again)
        self._is_sealing = False

    async def aclose(self) -> None:
        """Flush and end; harmless when it is closed.

        Raises: as `flush`; what was acknowledged is durable.
        """
        if self._is_closing:
            return
        try:
            if self._error is None or not self._is_told:
                await self.flush()
            self._is_closing = True
            self._wake.set()
            if self._error is None:
                await asyncio.wait([self._task], timeout=SILENCE_S)
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Give up at once: what was not acknowledged may be in the log or not."""
        self._is_closing = True
        left_open.discard(self)
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
        finally:  # cancelled again, nobody else would
            self._fail(WriteCancelledError(f"log {self.log_name!r}: the writer was aborted"))

    def report_unwritten(self, reason: str) -> None:
        """Log as an error what is not known to be written by one that was not closed."""
        if self.lost and not self._is_told and self in left_open:
            told = f"{counted(self.lost)}: the writer was not closed, and {reason}"
            logger.error("log %r: not written: %s", self.log_name, told)
            left_open.discard(self)  # it is told once

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
        except Exception as error:  # noqa: BLE001  # who waits must not wait for ever
            self._fail(UnexpectedError(f"the writer of log {self.log_name!r} broke: {error!r}"))

    def _begins_anew(self) -> bool:
        """Take another name, since the log has forgotten this one; False if something is in doubt.

        What the last stream sent is not: a proxy first acknowledges what it took, and then refuses.
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
        """Send and hear, until all is acknowledged and nothing follows, or EndedError."""
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
            if ready is None or ready.producer is None:
                raise UnexpectedError("a proxy did not say that it is ready")
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
        """Go on behind what is durable by what a new stream says."""
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
        """Return whether a proxy knows less of the claim than was acknowledged, or may do so."""
        first = self._outbox.begin_again()
        if first > claim.base or not self._outbox.is_in_doubt:
            return last < first - 1
        # Nothing was acknowledged yet: that it knows of nothing tells nothing after so long.
        kept_ms = KEPT_MS if self._is_named else GENERATED_KEPT_MS
        return last < first and 1000 * (self._loop.time() - self._heard_at) > kept_ms

    async def _send(
        self, call: Any, schema: pa.Schema, ready: Ready, hearing: asyncio.Task[None]
    ) -> None:
        outbox = self._outbox
        while not hearing.done():
            self._wake.clear()
            message = None if self._is_drained else outbox.look()
            is_last = message is None and self._is_closing and not len(outbox)
            if message is not None and message.batch.schema != schema:
                if not outbox.has_in_flight:
                    return  # the next stream has its columns
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
            await self._wake.wait()
            self._heard_at = self._loop.time()
            return
        async with asyncio.timeout_at(self._heard_at + SILENCE_S):
            await self._wake.wait()

    async def _hear(self, call: Any) -> None:
        """Take what the proxy tells until it ends the stream, which is an EndedError."""
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
                # It has acknowledged all that it accepted, and takes nothing more.
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
                return None if told.dlsn is None else DLSN.parse(told.dlsn)
        except EndedError as end:
            await attempts.failed(end)
        except TimeoutError:
            silence = ProxyUnavailableError(f"a proxy said nothing for {SILENCE_S:g} s")
            await attempts.failed(EndedError(silence, again=True))
        finally:
            call.cancel()
