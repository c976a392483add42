"""The log's writer for applications: the driver of the machine in `append.py`.

`Pump` drives the machine: it performs the steps one after the other, and it alone starts and
completes segments.  `DirectWriter` has the calls of users, the lock, and the end.  The first
failure ends the writer, and a new writer recovers the durable entries.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from typing_extensions import override

from dlcore.base.background import BackgroundTasks, end_tasks, fulfil, refuse
from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    EncryptionKeyError,
    UnexpectedError,
    WriteCancelledError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.log.entries.batcher import parts_of
from dlcore.log.entries.batches import byte_log_batch, timed_rows
from dlcore.log.entries.body import present_txid
from dlcore.log.entries.encryption import encryptor_for
from dlcore.log.reading.rows_reader import ReadStart
from dlcore.log.reading.snapshot import LogFollower, find_last_dlsn
from dlcore.log.upkeep.removal import remove_truncated
from dlcore.log.writing.append import (
    Abort,
    Accepted,
    Acknowledge,
    AppendEntry,
    AwaitCapacity,
    AwaitTurn,
    CloseLedger,
    CompleteSegment,
    Ended,
    Ending,
    EntryDurable,
    Event,
    Fail,
    HasCapacity,
    HeadChanged,
    LogAppender,
    MayChange,
    RecoverLog,
    Refuse,
    Resumed,
    StartSegment,
    Step,
    SteppedBack,
    Suspended,
)
from dlcore.log.writing.changing import first_to_keep, truncate_log
from dlcore.log.writing.open_segment import OpenSegment
from dlcore.log.writing.records_writer import AsyncLogWriter, left_open
from dlcore.log.writing.transmit import Unwritten
from dlcore.metadata.one_node import NodeFollower

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    import pyarrow as pa

    from dlcore.base.clock import Clock
    from dlcore.base.config import LogConfig, LogSettings
    from dlcore.base.records import LogRecord
    from dlcore.log.context import LogContext
    from dlcore.log.entries.encryption import EntryEncryptor
    from dlcore.log.metadata.values import LogHead, LogMetadata, VersionedHead
    from dlcore.log.writing.lock import WriterLock
    from dlcore.log.writing.port import Attendant, RowMark, WriterExtension

logger = logging.getLogger(__name__)


# An old segment with records in flight is due at once, again and again: look no more often.
_AGE_LOOKS_EVERY_S_MIN = 0.01


class Pump:
    """Drives the machine of a writer: performs its effects, and feeds the answers back.

    Args:
        machine: decides what is done next.
        segment: the segment that is open.
        clock: the time of entries and segments.
        read_head: reads the log's head.
    """

    def __init__(
        self,
        machine: LogAppender[asyncio.Future[DLSN]],
        segment: OpenSegment,
        clock: Clock,
        read_head: Callable[[], Awaitable[VersionedHead]],
    ) -> None:
        self.machine = machine
        self.segment = segment
        self.changing = asyncio.Lock()
        """Held during a change of the log's metadata: there is one at a time."""
        self.wake = asyncio.Event()
        """Set when calls were accepted, or anything else may make a step due."""
        self.is_asleep = False
        """Whether it waits for `wake`."""
        self._clock = clock
        self._read_head = read_head
        self._step: Step | None = None  # is performed next
        self._capacity = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None  # fires when the segment is old

    async def run(self) -> None:
        """Perform steps as they become due, without end."""
        while True:
            # Cleared before the machine looks: what is accepted behind that look sets it again.
            self.wake.clear()
            self.handle(Accepted(self.now_ms()))
            while (step := self._take_step()) is not None:
                try:
                    if isinstance(step, AwaitCapacity):
                        await self._append()
                    else:
                        await self._change_in_turn(step)
                except DLError as error:
                    self.fail(error)
            self._look_at_age()
            self.is_asleep = True
            await self.wake.wait()
            self.is_asleep = False

    def handle(self, event: Event) -> None:  # noqa: C901 - one case for each kind
        """Feed the machine, and perform the effects that need no waiting."""
        for effect in self.machine.handle(event):
            match effect:
                case AppendEntry():
                    assert self.segment.ledger is not None
                    self.segment.ledger.submit(effect.body, self._answered)
                    if effect.is_nearly_full:
                        self.segment.next_place.look()
                case Acknowledge():
                    lssn, entry_id = effect.lssn, effect.entry_id
                    for slot, future in zip(effect.slots, effect.tickets, strict=True):
                        try:
                            # Tried without a question: each record comes here, and few futures are
                            # cancelled.
                            future.set_result(DLSN(lssn, entry_id, slot))
                        except asyncio.InvalidStateError:
                            assert future.cancelled()  # its caller did that
                case Refuse():
                    for future in effect.tickets:
                        refuse(future, effect.error)
                case Ended():
                    fulfil(effect.ticket, self.machine.report.last_dlsn or DLSN.INITIAL)
                case (
                    AwaitCapacity()
                    | AwaitTurn()
                    | CloseLedger()
                    | StartSegment()
                    | CompleteSegment()
                    | RecoverLog()
                ):
                    self._step = effect
                    if self.is_asleep:
                        self.wake.set()
                case _:
                    assert_never(effect)
        self._capacity.set()

    def fail(self, error: DLError) -> None:
        """End the writer with its first failure."""
        if not self.machine.is_over:
            name = type(error).__name__
            logger.warning(
                "writer of log=%s failed: %s: %s; to do: open a new writer; if it fails as well, "
                "see to the reason",
                self.machine.log.name,
                name,
                error,
            )
            self.handle(Fail(error))

    def on_defect(self, error: BaseException) -> None:
        """Fail, since callers that wait for an answer must not wait for ever."""
        name = self.machine.log.name
        self.fail(UnexpectedError(f"the writer of log {name!r} broke: {error!r}"))

    async def wait_for_capacity(self) -> None:
        """Return once at most a quarter of the limits is pending."""
        while not self.machine.has_room:
            self._capacity.clear()
            await self._capacity.wait()

    async def answer(self, ticket: asyncio.Future[DLSN]) -> DLSN:
        """Return the machine's answer to a flush or an end.  Raises: the writer's failure."""
        self.wake.set()
        try:
            return await ticket
        except DLError:
            self.machine.report.failure_was_reported()
            raise

    async def verify(self) -> None:
        """Check that the log is still ours.  Raises: WriteError: it is not; MetadataError."""
        async with self.changing:
            at = await self._read_head()
            self.handle(HeadChanged(at, self.now_ms()))
        self.machine.require_usable()

    async def untouched_version(self) -> int | None:
        """Return the head's version if the log is as this writer left it, else None."""
        async with self.changing:
            at = await self._read_head()
            return at.version if self.machine.log.is_untouched(at) else None

    @property
    def head(self) -> LogHead:
        """The log's head as the machine knows it."""
        return self.machine.log.at.head

    async def pause(self) -> None:
        """Answer all that was accepted, and close the extent; take no record from now on.

        Raises: WriteError, AlreadyClosedError, EndOfStreamError; the writer's failure.
        """
        paused: asyncio.Future[DLSN] = asyncio.get_running_loop().create_future()
        self.machine.end_with(Ending.PAUSE, paused)
        self.handle(Accepted(self.now_ms()))
        await paused

    def continue_from(self, at: VersionedHead) -> None:
        """End the pause: the others left this head."""
        self.handle(SteppedBack(at, self.now_ms()))

    def ownership_changed(self, lock: WriterLock) -> None:
        """Go on, wait or fail, as the lock says now."""
        if lock.denial is not None:
            self.fail(lock.denial)
        elif lock.is_owner:
            self.handle(Resumed(self.now_ms()))
            self.wake.set()  # to look at the segment's age
        else:
            self.handle(Suspended())

    def now_ms(self) -> int:
        """Return the time by the clock."""
        return self._clock.now_ms()

    def stop_alarm(self) -> None:
        """Do not wake up for the age of the segment, until it is looked at again."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _look_at_age(self) -> None:
        """Wake up when the segment is old: it is completed then, even if no record waits."""
        if self._alarm is None:
            old_in_s = self.machine.old_in_s(now_ms=self.now_ms())
            if old_in_s is not None:
                delay_s = max(old_in_s, _AGE_LOOKS_EVERY_S_MIN)
                self._alarm = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.wake.set()

    def _take_step(self) -> Step | None:
        step, self._step = self._step, None
        return step

    async def _change_in_turn(self, step: Step) -> None:
        assert isinstance(step, AwaitTurn)
        async with self.changing:
            self.handle(MayChange(self.now_ms()))
            change = self._take_step()
            if change is not None:
                assert not isinstance(change, AwaitCapacity | AwaitTurn)
                self.handle(await self.segment.perform(change))

    async def _append(self) -> None:
        assert self.segment.ledger is not None
        await self.segment.ledger.wait_for_capacity()
        self.handle(HasCapacity(self.now_ms()))

    def _answered(self, error: DLError | None) -> None:
        if error is None:
            if self.machine.transmitter.queued_bytes and self.segment.ledger is not None:
                self.segment.ledger.tell_lac()
            self.handle(EntryDurable())
            # The pump runs right behind the callers that are answered now.  What they write goes at
            # once, and takes the LAC along; later the ledger would send it in a message of its own.
            self.wake.set()
        else:
            self.fail(error)


def encryptor_of(context: LogContext, log: LogMetadata, config: LogConfig) -> EntryEncryptor | None:
    """Return the encryptor of a log's entries; None if they are not to be encrypted.

    Raises: EncryptionKeyError: the key is missing.
    """
    keys = context.encryption_keys
    return encryptor_for(keys, log.name, log.log_id, encrypted=config.encrypted)


class SettingsFollower(NodeFollower):
    """Configures a writer by the settings of its log, soon after each change.

    Args:
        context: the ports.
        log: the log.
        config: applies where the log has no setting.
        pump: drives the writer.
    """

    def __init__(
        self, context: LogContext, log: LogMetadata, config: LogConfig, pump: Pump
    ) -> None:
        self._context = context
        self._log = log
        self._config = config
        self._pump = pump
        path, what = context.logs.paths_of(log).settings, f"settings of log={log.name}"
        super().__init__(context.store, path, self._read, what=what)

    async def _read(self) -> None:
        settings = await self._context.logs.read_settings(self._log)
        config, pump = self._config.with_settings(settings), self._pump
        try:
            pump.machine.configure(config, encryptor_of(self._context, self._log, config))
        except EncryptionKeyError as error:
            pump.fail(error)  # it must not go on in the clear
        pump.stop_alarm()  # the age limit may have changed
        pump.wake.set()


class DirectWriter(AsyncLogWriter):
    """Appends to one log, as its only writer.  Use `DirectLog.open_writer`."""

    _log: LogMetadata

    def __init__(
        self,
        context: LogContext,
        log: LogMetadata,
        at: VersionedHead,
        lock: WriterLock | None,
        config: LogConfig,
        settings: LogSettings,
        ledger_metadata: Mapping[str, str],
        extension: WriterExtension | None = None,
    ) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._lock = lock
        self._config = config
        now = config.with_settings(settings)
        machine: LogAppender[asyncio.Future[DLSN]] = LogAppender(
            at,
            now,
            None if extension is None else extension.stamper,
            encryptor_of(context, log, now),
        )
        segment = OpenSegment(context, log, ledger_metadata)
        pump = self.pump = Pump(machine, segment, context.clock, lambda: context.logs.read(log))
        self.machine = machine
        # Bound once, because each record calls it.
        self._add_record = machine.transmitter.add_record
        tasks = BackgroundTasks(pump.on_defect)
        self._pump_task = tasks.start(self._run(), name=f"log-writer-{log.name}")
        self._attendants: list[Attendant] = [SettingsFollower(context, log, config, pump)]
        context.open_objects.add(self)
        left_open.add(self)
        if lock is not None:
            if extension is not None:
                self._attendants.append(extension.attend(context, log, lock, pump))
            lock.verify = pump.untouched_version
            lock.on_change = partial(pump.ownership_changed, lock)
            # The lock may have been lost since it was acquired, before anything listened.
            lock.on_change()

    def __repr__(self) -> str:
        return f"<AsyncLogWriter {self.machine!r}>"

    @property
    @override
    def last_txid(self) -> int:
        return self.machine.transmitter.last_txid

    @property
    @override
    def last_dlsn(self) -> DLSN | None:
        return self.machine.report.last_dlsn

    @override
    def _describe_unwritten(self, waiting: Sequence[Any]) -> str | None:
        parts = (Unwritten.of(getattr(each, "batch", each)) for each in waiting)
        unwritten = Unwritten.joined([self.machine.report.lost, *parts])
        return None if unwritten is None else str(unwritten)

    # Accepting

    @override
    def write(self, record: LogRecord) -> asyncio.Future[DLSN]:
        future: asyncio.Future[DLSN] = self._loop.create_future()
        self._add_record(*parts_of(record), future)
        if self.pump.is_asleep:
            self.pump.wake.set()
        return future

    @override
    def write_batch(self, batch: pa.RecordBatch) -> asyncio.Future[DLSN]:
        if batch.num_rows == 0:
            raise ConfigurationError("a batch without rows has no position")
        return self.write_fitted(self.fitted(batch, last_txid=self.last_txid))

    @override
    def fitted(self, batch: pa.RecordBatch, *, last_txid: int) -> Any:
        txid = present_txid(now_ms=self._context.clock.now_ms(), last_txid=last_txid)
        return byte_log_batch(batch, assigned_txid=txid)

    async def fitted_latest(self, batch: pa.RecordBatch) -> Any:
        """Return a batch as entries hold it; rows without transaction ids get the present time."""
        now_ms = self._context.clock.now_ms()
        return timed_rows(batch, now_ms=now_ms, last_txid=self.last_txid)

    @override
    def write_fitted(
        self, rows: Any, *, mark: RowMark | None = None, whole: bool = False
    ) -> asyncio.Future[DLSN]:
        future: asyncio.Future[DLSN] = self._loop.create_future()
        self.machine.transmitter.add_batch(rows, future, mark=mark, whole=whole)
        self.pump.wake.set()
        return future

    @override
    async def wait_for_capacity(self) -> None:
        await self.pump.wait_for_capacity()

    # Waiting

    @override
    async def flush(self) -> DLSN | None:
        barrier: asyncio.Future[DLSN] = self._loop.create_future()
        if not self.machine.flush(barrier):
            return self.last_dlsn
        return await self.pump.answer(barrier)

    async def find_last(self) -> DLSN | None:
        """Flush, and return the position of the log's last record.  Raises: as `commit`."""
        while True:
            await self.flush()
            # An append or a truncation may change the log during the read: then read again.
            log = self.machine.log
            at = log.at
            last = None if log.end else await find_last_dlsn(self._context, self._log)
            if at is log.at:
                return self.last_dlsn if log.end else last

    @override
    async def commit(self) -> DLSN | None:
        last = await self.flush()
        if self.pump.segment.ledger is not None:
            try:
                await self.pump.segment.ledger.publish_lac()
            except DLError as error:
                self.pump.fail(error)
                raise
        return last or await find_last_dlsn(self._context, self._log)

    @override
    async def truncate(
        self, dlsn: DLSN | None = None, *, txid: int | None = None, timestamp_ms: int | None = None
    ) -> bool:
        start = ReadStart.given(dlsn, txid, timestamp_ms)
        machine = self.machine
        machine.require_usable()
        snapshot = LogFollower(self._context, self._log).take
        dlsn = await first_to_keep(self._context, snapshot, start)
        async with self.pump.changing:
            changed, at = await truncate_log(
                self._context, machine.log.at, dlsn, end=machine.log.end
            )
            self.pump.handle(HeadChanged(at, self.pump.now_ms()))
        # The head that was read may show that another writer has the log.
        if machine.error is not None:
            raise machine.error
        # The removal may take long, and does not need the writer.
        await remove_truncated(self._context, at)
        return changed

    @override
    async def mark_end_of_stream(self) -> None:
        await self._end(Ending.SEAL)

    async def _end(self, ending: Ending) -> None:
        ended: asyncio.Future[DLSN] = self._loop.create_future()
        self.machine.end_with(ending, ended)
        await self.pump.answer(ended)

    @override
    async def aclose(self) -> None:
        if self.machine.is_closing:
            return
        left_open.discard(self)  # the caller gets any error
        try:
            await self._end(Ending.CLOSE)
        finally:
            await self._stop()

    @override
    async def abort(self) -> None:
        if self.machine.is_closing:
            return
        left_open.discard(self)
        await self._stop()

    async def abandon(self, reason: str) -> None:
        """Stop at once because no caller will close it; log unwritten records as an error."""
        self.report_unwritten(reason)
        await self.abort()

    async def __aexit__(self, kind: object = None, error: object = None, *_: object) -> None:
        try:
            await self.aclose()
        except WriteError:
            # An error in place of the cancellation would hide it from the task that asked for it.
            if not isinstance(error, asyncio.CancelledError):
                raise
            logger.info("log=%s: the writer had failed when it was cancelled", self.log_name)

    async def _stop(self) -> None:
        try:
            await end_tasks(self._pump_task)
        finally:  # also if this is cancelled again
            await self._let_go("the writer was aborted")

    async def _let_go(self, reason: str) -> None:
        self.pump.handle(Abort(WriteCancelledError(f"log {self.log_name!r}: {reason}")))
        self._context.open_objects.discard(self)
        left_open.discard(self)
        ledger = self.pump.segment.let_go()
        self.pump.stop_alarm()
        # The last one pushed ends first.  The lock comes last: the next owner must not meet a
        # ledger or an attendant of this one at work.
        async with AsyncExitStack() as ending:  # each one, even if one before it fails
            if self._lock is not None:
                ending.push_async_callback(self._lock.release)
            if ledger is not None:
                ending.push_async_callback(ledger.abandon)
            for attendant in self._attendants:
                ending.push_async_callback(attendant.aclose)

    async def _run(self) -> None:
        """Pump until `_stop`; if the event loop ends before, log that and release the lock."""
        try:
            await self.pump.run()
        except asyncio.CancelledError:
            if self in left_open:
                self.report_unwritten("its event loop ended")
                await self._let_go("its event loop ended")
            raise
        except GeneratorExit:
            self.report_unwritten("its event loop was dropped")
            raise

    def report_unwritten(self, reason: str) -> None:
        """Log the unwritten records as an error, if this writer was not closed."""
        unwritten = self.machine.report.unwritten
        if unwritten is not None and self in left_open:
            text = f"{unwritten}: the writer was not closed, and {reason}"
            logger.error(
                "log %r: not written: %s; to do: write these records again if they are needed",
                self.log_name,
                text,
            )
        left_open.discard(self)  # report it once
