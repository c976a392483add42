"""The outbox of the blocking writers, and the namespaces that close them, at exit at the latest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

from dlcore.blocking.portal import close_at_exit, fail_exit, forget
from dlcore.blocking.twin import Blocking
from dlcore.errors import AlreadyClosedError, DLError, LogNotReadyError

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterable

    from dlcore.blocking.portal import Portal
    from dlcore.ids import DLSN
    from dlcore.records import LogRecord

logger = logging.getLogger(__name__)

BUFFERED_RECORD_BYTES = 64
"""What a buffered record costs beyond its payload."""
_EXIT_FLUSH_S = 10.0
"""How long at exit a writer may take."""
_EXIT_CLOSE_S = 10.0
"""How long at exit a namespace may take, after its writers."""
_NOT_READY_S = 0.02
"""After this time a writer that ends asks again one that takes no record at the moment."""


class BufferingWriter(Blocking):
    """A writer whose records wait in the calling thread until they are handed over.

    That happens when the buffer is full, at a call that waits for them, and in the background once
    the first of them has waited for `flush_interval_s`; with 0 not in the background.

    One that is open when its namespace closes, or at exit, is closed then.  What cannot be written
    at exit within 10 s is logged as an error, and the exit status is 120.
    """

    # The calling thread appends to the buffer without a lock, which would cost a tenth of a
    # `write`; the event loop's thread takes from its front.  Both are single operations on a list,
    # which Python makes atomic.  After each append the caller looks at `_look_from_bytes`; whoever
    # ends the background's work first sets it to 0 and then looks at the buffer.  Either of the two
    # so sees what the other did, and no record is left without somebody who hands it over.

    def __init__(
        self,
        portal: Portal,
        writer: Any,
        opened: dict[BufferingWriter, None],
        *,
        buffer_bytes: int,
        flush_interval_s: float,
    ) -> None:
        super().__init__(portal, writer.aclose)
        self._writer = writer
        self._opened = opened  # those of the namespace, in order
        self._accepting = asyncio.Lock()
        self._outbox: deque[Any] = deque()  # batches or rows handed over, not yet accepted
        self._taking = threading.Lock()  # of the outbox, and of who takes from the buffer
        self._records: list[LogRecord] = []
        self._buffered_bytes = 0  # since the calling thread last handed over
        self._buffer_bytes = buffer_bytes
        self._flush_interval_s = flush_interval_s
        self._look_from_bytes = 0 if flush_interval_s else buffer_bytes
        self._turn = 0  # counts how often the calling thread handed over
        self._has_failed = False  # in the background, which the next call tells
        self._first_waits = asyncio.Event()  # a record waits that nobody hands over yet
        self._clock: concurrent.futures.Future[None] | None = None
        opened[self] = None

    @abstractmethod
    def write(self, record: LogRecord) -> None:
        """Buffer a record; raise at once if its transaction id or size is not acceptable."""

    @abstractmethod
    def write_batch(self, batch: Any) -> None:
        """Write the rows of a batch."""

    @abstractmethod
    def _accept(self, waiting: Any) -> asyncio.Future[Any]:
        """Let the async twin, which has room, accept what waited; return the future of it."""

    @abstractmethod
    def _unwritten(self) -> object | None:
        """Return what was written and is not known to be durable."""

    def write_bulk(self, records: Iterable[LogRecord]) -> int:
        """Write each of `records`; return how many.  Raises: as `write`."""
        count = 0
        for record in records:
            self.write(record)
            count += 1
        return count

    def write_table(self, table: Any) -> None:
        """Write, as `write_batch`, what is in an Arrow table, a frame, or an Arrow stream."""
        from dlcore.log.entries.batches import batches_from

        for batch in batches_from(table):
            self.write_batch(batch)

    def flush(self) -> None:
        """Transmit what is buffered and wait until it is durable.

        Raises: as the async twin.
        """
        self._hand_over()
        self._call(self._writer.flush())

    def commit(self) -> DLSN | None:
        """Flush and make all of it visible; return the last position, if there is one.

        Raises: as the async twin.
        """
        self._hand_over()
        last: DLSN | None = self._call(self._writer.commit())
        return last

    def mark_end_of_stream(self) -> None:
        """Flush and seal the log: no record can follow.  Raises: as `flush`."""
        self._hand_over()
        self._call(self._writer.mark_end_of_stream())

    def abort(self) -> None:
        """Give up without flushing, as a crash would; what was acknowledged stays."""
        self._closed = True
        self._stop_clock()
        with self._taking:
            self._records.clear()
            self._buffered_bytes = 0
            self._outbox.clear()
        self._opened.pop(self, None)
        self._call(self._writer.abort())

    def close(self) -> None:
        """Flush, and end; harmless when it is closed.

        Raises: as `flush`: records failed; what was acknowledged is durable.
        """
        if self._closed:
            return
        self._opened.pop(self, None)
        try:
            if not self._portal.is_inherited:
                self._hand_over(waits=True)
        finally:
            self._stop_clock()
            super().close()

    def _require_usable(self) -> None:
        """Raise where nobody would hand over what is buffered: closed, or in a forked child."""
        self._portal.check_process()
        if self._closed:
            raise AlreadyClosedError(f"the writer of log {self._writer.log_name!r} is closed")

    def _hand_over(self, *, waits: bool = False) -> None:
        self._buffer_to_outbox()
        self._buffered_bytes = 0
        self._turn += 1
        if self._outbox:
            self._call(self._empty_outbox(waits=waits))

    def _buffer_to_outbox(self) -> None:
        with self._taking:
            self._take_buffered()

    def _take_buffered(self) -> None:
        taken = self._records[:]
        if not taken:
            return
        from dlcore.log.entries.batches import batch_of

        batch = batch_of([each.txid for each in taken], [each.payload for each in taken])
        self._outbox.append(batch)
        del self._records[: len(taken)]  # others may have come meanwhile

    def _tell_failure(self) -> None:
        """Raise what failed in the background, and go on raising it while it lasts."""
        if self._has_failed:
            self._hand_over()
            self._call(self._writer.flush())
            self._has_failed = False

    # In the background

    def _look_around(self) -> None:
        """Hand over a full buffer, or see to it that somebody will hand over what is in it."""
        if self._buffered_bytes >= self._buffer_bytes:
            self._hand_over()
        elif self._flush_interval_s and not self._has_failed:
            self._look_from_bytes = self._buffer_bytes
            if self._clock is None:
                self._clock = self._portal.submit(self._hand_over_in_time())
            self._portal.post(self._first_waits.set)

    async def _hand_over_in_time(self) -> None:
        """Hand over what has waited for the interval, from the first record on that waits."""
        while not self._closed:
            self._look_from_bytes = 0
            if not self._records and not self._outbox:
                await self._first_waits.wait()
            self._first_waits.clear()
            if not self._has_failed:
                self._look_from_bytes = self._buffer_bytes
            turn = self._turn
            # What came after the caller's last turn is left to the second look, and none waits for
            # longer than the interval.
            await asyncio.sleep(self._flush_interval_s / 2)
            if turn == self._turn:
                await self._hand_over_in_background()

    async def _hand_over_in_background(self) -> None:
        if self._has_failed or not self._taking.acquire(blocking=False):
            return  # the next call hands over and tells; or one is about to hand over
        try:
            if not self._outbox:  # else what waits comes first
                self._take_buffered()
        finally:
            self._taking.release()
        try:
            await self._empty_outbox(in_background=True)
        except LogNotReadyError:
            return  # at the moment, so the next turn tries again
        except DLError as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Let the next call tell that records handed over in the background failed."""
        if self._has_failed or self._closed:
            return
        self._has_failed = True
        self._look_from_bytes = 0
        logger.warning(
            "log %r: records are refused, as the next call will tell: %s",
            self._writer.log_name,
            error,
        )

    def _watch(self, accepted: Any) -> None:
        error = None if accepted.cancelled() else accepted.exception()
        if error is not None:
            self._failed(error)

    def _stop_clock(self) -> None:
        if self._clock is not None and not self._portal.is_inherited:
            self._clock.cancel()

    async def _empty_outbox(self, *, waits: bool = False, in_background: bool = False) -> None:
        """Let the writer accept what is there; when interrupted, no batch is lost or doubled.

        A batch that is refused is dropped, and the caller told.  It stays if it is refused only at
        the moment, `waits` until then; if the call is `in_background`, for a later one to be told;
        and at exit, which tells how much was not written.
        """
        async with self._accepting:
            while self._outbox:
                await self._writer.wait_for_capacity()
                try:
                    self._accept_next(keeps_refused=in_background or self._closed)
                except LogNotReadyError:
                    if not waits:
                        raise
                    await asyncio.sleep(_NOT_READY_S)

    def _accept_next(self, *, keeps_refused: bool) -> None:
        with self._taking:
            if not self._outbox:  # the writer was aborted
                return
            try:
                accepted = self._accept(self._outbox[0])
            except LogNotReadyError:
                raise
            except DLError:
                if not keeps_refused:
                    self._outbox.popleft()
                raise
            self._outbox.popleft()
        accepted.add_done_callback(self._watch)

    async def finish(self) -> None:
        """Flush and close at exit; say what could not be written."""
        self._closed = True
        self._stop_clock()
        reason = f"it took more than {_EXIT_FLUSH_S:g} s"
        try:
            async with asyncio.timeout(_EXIT_FLUSH_S):
                self._buffer_to_outbox()
                await self._empty_outbox(waits=True)
                await self._writer.aclose()
        except DLError as error:
            reason = f"{type(error).__name__}: {error}"
        except TimeoutError:
            logger.warning("log %r: its writer was not closed: %s", self._writer.log_name, reason)
        self._report_unwritten(reason)
        await self._writer.abort()

    def _report_unwritten(self, reason: str) -> None:
        unwritten = self._unwritten()
        if unwritten is None:
            return
        logger.error(
            "log %r: not written: %s: the process ended with the writer open: %s",
            self._writer.log_name,
            unwritten,
            reason,
        )
        fail_exit()


class WritersNamespace(Blocking):
    """A namespace that closes the writers which are still open with itself, and at exit."""

    def __init__(self, portal: Portal, namespace: Any) -> None:
        super().__init__(portal, namespace.aclose)
        self._writers: dict[BufferingWriter, None] = {}  # those that are open, in order
        close_at_exit(self, self._finish)

    def close(self) -> None:
        """Close the writers that are still open, and every connection; readers stop working."""
        forget(self)
        with contextlib.ExitStack() as steps:  # from the last to the first, whichever of them fails
            steps.callback(super().close)
            for writer in reversed(self._writers):
                steps.callback(writer.close)

    async def _finish(self) -> None:
        """Close it, since the process ends and nobody else will."""
        await asyncio.gather(*(writer.finish() for writer in list(self._writers)))
        async with asyncio.timeout(_EXIT_CLOSE_S):
            await self._aclose()
