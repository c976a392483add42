"""The log's writer: accepts records, sends entries, rolls segments, and answers in order.

One task, the pump, takes groups from the transmitter and appends them to the active segment's
ledger; it alone starts and rolls segments.  The first failure ends the writer: what was in flight
fails with it, what was queued is cancelled, and a new writer recovers what is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from dlcore.errors import (
    DLError,
    MetadataError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    UnexpectedError,
    WriteCancelledError,
    WriteError,
)
from dlcore.ids import DLSN
from dlcore.log.entries.batches import txid_out_of_order
from dlcore.log.entries.body import ipc_options
from dlcore.log.metadata.changes import Change, plan_complete, plan_start
from dlcore.log.reading.snapshot import find_last_dlsn
from dlcore.log.recovery import delete_ledger, recover_log, taken_over
from dlcore.log.upkeep.removal import remove_truncated
from dlcore.log.writing.accepting import Acceptor
from dlcore.log.writing.active import ActiveSegment
from dlcore.log.writing.rolling import RollingPolicy
from dlcore.log.writing.truncation import truncate_log

if TYPE_CHECKING:
    from types import TracebackType

    from dlcore.config import LogConfig
    from dlcore.ledger.writer import LedgerWriter
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.log.writing.lock import WriterLock

logger = logging.getLogger(__name__)

_START_ATTEMPTS_MAX = 20
_CONFLICTS = (MetadataVersionError, NodeExistsError, NoNodeError)


class AsyncLogWriter(Acceptor):
    """Appends to one log, as its only writer.

    Use `DistributedLogManager.open_writer`.  The methods that return futures may be called from any
    coroutine of one loop; positions follow the order of the calls.
    """

    def __init__(
        self,
        context: LogContext,
        log: LogMetadata,
        at: VersionedHead,
        lock: WriterLock | None,
        config: LogConfig,
    ) -> None:
        super().__init__(at.name, config, last_txid=at.head.max_txid)
        self._context = context
        self._quorum = log.quorum
        self._at = at
        self._lock = lock
        self._paths = context.logs.paths_of(at.log)
        self._policy = RollingPolicy(
            size_bytes_max=config.segment_bytes_max,
            age_max_ms=int(config.segment_age_max_s * 1000),
        )
        self._options = ipc_options(config.compression)
        self._last_dlsn: DLSN | None = None
        self._active: ActiveSegment | None = None
        self._withheld: deque[tuple[ActiveSegment, int]] = deque()  # durable, but we lost the lock
        self._own_ledger_id: int | None = None  # of our open extent, as the metadata has it
        self._changing = asyncio.Lock()  # one change of the log's metadata at a time
        self._pump_task = asyncio.create_task(self._run(), name=f"log-writer-{at.name}")
        self._pump_task.add_done_callback(self._pump_ended)
        context.open_objects.add(self)
        if lock is not None:
            lock.verify = self._verify_untouched
            lock.on_change = self._ownership_changed

    def __repr__(self) -> str:
        condition = "FAILED" if self._failure else "CLOSED" if self._closed else "OPEN"
        return f"<AsyncLogWriter {self._at.name!r} {condition} {self._active!r}>"

    @property
    def last_dlsn(self) -> DLSN | None:
        """Position of the last record that this writer knows to be durable."""
        return self._last_dlsn

    # Waiting

    async def flush(self) -> DLSN | None:
        """Transmit everything accepted and wait until it is durable.

        Returns: the last position that this writer wrote, if it wrote anything.
        """
        self._require_usable()
        try:
            return await self._flush()
        except DLError:
            self._untold = None
            raise

    async def _flush(self) -> DLSN | None:
        barrier = self._new_future()
        if not self._transmitter.add_barrier(barrier):
            return self._last_dlsn
        self._wake.set()
        return await barrier

    async def commit(self) -> DLSN | None:
        """Flush, and make everything visible to readers; return the log's last position.

        Records become visible shortly after they are durable in any case; this waits for it.

        Returns: the position of the log's last record, whoever wrote it; None if it holds none.
        """
        last = await self.flush()
        async with self._changing:
            if self._active is not None:
                try:
                    await self._active.ledger.publish_lac()
                except DLError as error:
                    self._fail(error)
                    raise
        if last is not None:
            return last
        return await find_last_dlsn(self._context, self._at.log)

    async def truncate(self, dlsn: DLSN) -> bool:
        """Drop the records below `dlsn`; return whether that changed anything."""
        self._require_usable()
        async with self._changing:
            changed, at = await truncate_log(
                self._context, self._at, dlsn, end=self._end_of_active()
            )
            if self._is_ours(at):
                self._at = at
        # Removing may take long, and needs nothing of the writer.
        await remove_truncated(self._context, at)
        return changed

    def _is_ours(self, at: VersionedHead) -> bool:
        """Return whether `at` can be gone on from; raise if another took our segment over."""
        if self._active is None:
            # An open segment is another writer's.  The head known before makes our next change
            # fail, and only then is the log taken over.
            return at.head.open_extent is None
        ledger_id = self._active.ledger.ledger_id
        if not at.is_open_over(ledger_id):
            error = taken_over(at.name, ledger_id)
            self._fail(error)
            raise error
        return True

    def _end_of_active(self) -> DLSN | None:
        last = self._last_dlsn
        if self._active is None or last is None or last.lssn != self._active.lssn:
            return None
        return DLSN(last.lssn, last.entry_id + 1, 0)

    async def mark_end_of_stream(self) -> None:
        """Flush and seal the log: no record can follow, and readers learn that they are done."""
        self._require_writable()
        self._ended = True
        try:
            await self.flush()
            await self._complete_active(seal=True)
        except DLError as error:
            self._fail(error)
            raise

    async def aclose(self) -> None:
        """Flush, complete the segment and release the lock; harmless when it is closed.

        Raises:
            WriteError: records failed; what was acknowledged is durable.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._failure is None:
                await self._flush()
                await self._complete_active(seal=False)
        except DLError as error:
            self._fail(error)
            raise
        finally:
            await self._stop()
        if self._failure is not None:
            raise self._write_error() from self._failure

    async def abort(self) -> None:
        """Stop at once, as a crash would: the segment stays in progress until it is recovered."""
        if self._closed:
            return
        self._closed = True
        self._give_up(WriteCancelledError(f"the writer of log {self._at.name!r} was aborted"))
        await self._stop()

    async def abandon(self, reason: str) -> None:
        """Stop at once because nobody will close it; log what was not written as an error."""
        self._report_unwritten(reason)
        await self.abort()

    async def __aenter__(self) -> AsyncLogWriter:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except WriteError:
            if not isinstance(error, asyncio.CancelledError):
                raise
            logger.info("log=%s: the writer had failed when it was cancelled", self._at.name)

    async def _stop(self) -> None:
        self._pump_task.cancel()
        await asyncio.gather(self._pump_task, return_exceptions=True)
        await self._let_go()

    async def _let_go(self) -> None:
        self._context.open_objects.discard(self)
        self._forget()
        active, self._active = self._active, None
        try:
            if active is not None:
                await active.ledger.abandon()
        finally:
            if self._lock is not None:
                await self._lock.release()

    # The pump

    async def _run(self) -> None:
        """Pump until `_stop`; if the event loop ends before that, say so and release the lock."""
        try:
            await self._pump()
            await asyncio.get_running_loop().create_future()  # failed: what follows is `_stop`
        except asyncio.CancelledError:
            if not self._closed:
                self._report_unwritten("its event loop ended")
                self._closed = True
                self._give_up(WriteCancelledError(f"log {self._at.name!r}: the loop ended"))
                await self._let_go()
            raise
        except GeneratorExit:
            self._report_unwritten("its event loop was dropped")
            raise

    async def _pump(self) -> None:
        try:
            while True:
                self._wake.clear()
                while self._has_next():
                    async with self._changing:
                        await self._send_next()
                await self._wake.wait()
        except DLError as error:
            self._fail(error)

    def _pump_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # A defect; whoever waits for an answer must not wait for ever.
            self._fail(UnexpectedError(f"the writer of log {self._at.name!r} broke: {error!r}"))

    async def _send_next(self) -> None:
        if self._lock is not None and not self._lock.is_owner:
            await self._lock.wait_owned()
        active = self._active
        if not self._has_next():
            return  # given up meanwhile
        if active is None or self._should_roll(active):
            active = await self._next_segment(self._transmitter.next_txid)
        await active.ledger.wait_for_capacity()
        if not self._has_next():
            return
        segment = active
        segment.push(
            self._transmitter.next_group(),
            now_ms=self._context.clock.now_ms(),
            options=self._options,
            on_answer=lambda future, timestamp_ms: self._answered(segment, future, timestamp_ms),
        )

    def _has_next(self) -> bool:
        return self._transmitter.has_next

    def _should_roll(self, active: ActiveSegment) -> bool:
        return self._policy.should_roll(
            size_bytes=active.bytes_pushed,
            age_ms=self._context.clock.now_ms() - active.started_ms,
        )

    def _answered(
        self, active: ActiveSegment, future: asyncio.Future[int], timestamp_ms: int
    ) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._fail(error if isinstance(error, DLError) else WriteError(repr(error)))
            return
        if self._given_up:
            return
        if self._withheld or (self._lock is not None and not self._lock.is_owner):
            self._withheld.append((active, timestamp_ms))
            return
        self._acknowledge(active, timestamp_ms)

    def _acknowledge(self, active: ActiveSegment, timestamp_ms: int) -> None:
        group = self._transmitter.acknowledged()
        first = active.acknowledged(group, timestamp_ms=timestamp_ms)
        self._last_dlsn = DLSN(first.lssn, first.entry_id, group.record_count - 1)
        for slot, future in group.tickets:
            if not future.done():
                future.set_result(DLSN(first.lssn, first.entry_id, slot))
        self._capacity.set()
        self._wake.set()

    # Segments

    async def _next_segment(self, first_txid: int) -> ActiveSegment:
        """Complete the active segment, if any, and start the next one: one transaction."""
        closing = await self._close_ledger()
        for _ in range(_START_ATTEMPTS_MAX):
            at = self._at
            if first_txid < at.head.max_txid:
                # An atomic append came between our opening and our first record.
                raise txid_out_of_order(first_txid, at.head.max_txid)
            now_ms = self._context.clock.now_ms()
            try:
                ledger, self._at = await self._create_ledger(at, closing, now_ms=now_ms)
            except _CONFLICTS as error:
                closing = await self._reread(closing, error)
                continue
            lssn = self._at.head.max_lssn
            self._own_ledger_id = ledger.ledger_id
            self._active = ActiveSegment(
                lssn,
                ledger,
                started_ms=now_ms,
                timestamp_ms=self._at.head.last_timestamp_ms,
            )
            logger.info("started log=%s segment=%d ledger=%d", at.name, lssn, ledger.ledger_id)
            return self._active
        raise WriteError(
            f"log {self._at.name!r}: {_START_ATTEMPTS_MAX} attempts to start a segment were "
            "overtaken"
        )

    async def _create_ledger(
        self, at: VersionedHead, closing: Extent | None, *, now_ms: int
    ) -> tuple[LedgerWriter, VersionedHead]:
        """Create the next segment's ledger together with the segment; return the head after."""

        def plan(ledger_id: int) -> Change:
            return plan_start(self._paths, at, ledger_id=ledger_id, now_ms=now_ms, closing=closing)

        ledger = await self._context.ledgers.create_ledger(
            self._quorum,
            custom={"log": at.name, "log_id": at.log.log_id},
            extra_ops=lambda ledger_id: plan(ledger_id).ops,
        )
        return ledger, plan(ledger.ledger_id).after

    async def _close_ledger(self) -> Extent | None:
        """Close the active segment's ledger, everything in it acknowledged; return its extent."""
        active = self._active
        if active is None:
            return None
        await active.ledger.flush()
        await self._acknowledged_all(active)
        metadata = await active.ledger.close()
        self._active = None
        return active.extent(last_entry_id=metadata.last_entry_id, size_bytes=metadata.length_bytes)

    async def _acknowledged_all(self, active: ActiveSegment) -> None:
        """Wait until answers that are in were handled: not while the lock is lost."""
        while active.entries_acknowledged < active.entries_pushed:
            if self._failure is not None:
                raise self._write_error() from self._failure
            self._capacity.clear()
            await self._capacity.wait()

    async def _reread(self, closing: Extent | None, error: MetadataError) -> Extent | None:
        """Look again after a lost compare-and-set; return the extent that is still to be closed.

        Raises:
            OwnershipAcquireFailedError: another writer took over.
        """
        known, at = self._at, await self._context.logs.read(self._at.log)
        logger.info("log=%s changed under its writer: %s", at.name, error)
        if closing is not None and not at.is_open_over(closing.ledger_id):
            # Whoever completed our segment read the same ledger to its end.
            if at.head.end != (known.head.max_lssn, closing.entry_count):
                raise taken_over(at.name, closing.ledger_id) from error
            closing = None
        if closing is None and at.head.open_extent is not None:
            if self._lock is not None and not self._lock.is_owner:
                await self._lock.wait_owned()
            at = await recover_log(self._context, at)
        self._at = at
        return closing

    async def _complete_active(self, *, seal: bool) -> None:
        async with self._changing:
            if self._lock is not None and not self._lock.is_owner:
                await self._lock.wait_owned()
            ledger = self._active.ledger if self._active is not None else None
            closing = await self._close_ledger()
            if ledger is None and not seal:
                return
            while True:
                change = plan_complete(
                    self._paths,
                    self._at,
                    now_ms=self._context.clock.now_ms(),
                    closing=closing,
                    empty_ledger_id=None if ledger is None else ledger.ledger_id,
                    seal=seal,
                )
                try:
                    self._at = await self._context.logs.apply(change)
                except MetadataVersionError as error:
                    closing = await self._reread(closing, error)
                    if closing is None and not seal:
                        return
                    continue
                break
            self._own_ledger_id = None
        if closing is None and ledger is not None:
            await delete_ledger(self._context, ledger.ledger_id)

    # Ownership and failure

    async def _verify_untouched(self) -> int | None:
        """Return the head's version if the log is as this writer left it, else None."""
        at = await self._context.logs.read(self._at.log)
        if self._own_ledger_id is not None:
            return at.version if at.is_open_over(self._own_ledger_id) else None
        head, known = at.head, self._at.head
        is_same = (head.max_lssn, head.sealed) == (known.max_lssn, known.sealed)
        return at.version if is_same and head.open_extent is None else None

    def _ownership_changed(self) -> None:
        assert self._lock is not None
        if self._lock.denial is not None:
            self._fail(self._lock.denial)
        elif self._lock.is_owner:
            while self._withheld and self._failure is None:
                self._acknowledge(*self._withheld.popleft())
            self._wake.set()

    def _give_up(self, error: DLError) -> None:
        self._withheld.clear()
        super()._give_up(error)
