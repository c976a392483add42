"""The base of blocking writers, which buffer records, and the namespace that closes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import abstractmethod
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from dlcore.base.background import all_of
from dlcore.base.errors import AlreadyClosedError, DLError, LogNotReadyError
from dlcore.sync.portal import close_at_exit, fail_exit, forget
from dlcore.sync.twin import Blocking

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecord
    from dlcore.log.writing.records_writer import AsyncLogWriter
    from dlcore.sync.portal import Portal

logger = logging.getLogger(__name__)

_EXIT_FLUSH_S = 10.0
"""How long a writer may take at exit."""
_EXIT_CLOSE_S = 10.0
"""How long a namespace may take at exit, after its writers."""
_NOT_READY_S = 0.02
"""Pause before a closing writer tries again to pass on records that are refused for the moment."""

_Failed: TypeAlias = "Callable[[BaseException], None]"


class _Outbox:
    """Batches and rows that were passed on, in order, until the async writer accepts them.

    The calling thread fills it, and so does the event loop's thread, which alone hands batches on.
    """

    def __init__(self, writer: AsyncLogWriter) -> None:
        self._writer = writer
        self._waiting: deque[Any] = deque()
        self._accepting = asyncio.Lock()
        self.taking = threading.Lock()
        """Guards the order of what waits, and who takes from the buffer."""
        self.is_last = False
        """Whether the process ends: what is refused stays, to be named in its log."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._waiting)

    def append(self, batch: Any) -> None:
        self._waiting.append(batch)

    def clear(self) -> None:
        self._waiting.clear()

    async def empty(
        self, failed: _Failed, *, waits: bool = False, keeps_refused: bool = False
    ) -> None:
        """Let the writer accept all; an interrupt neither loses nor doubles a batch.

        A refused batch is dropped, and the error is raised.  There are three exceptions.  A batch
        that is refused only for the moment stays; with `waits` it is tried until it is accepted.
        With `keeps_refused` a refused batch stays, so that a later call raises the error.  At the
        end of the process it stays as well.  `failed` gets the error of a batch that was accepted,
        and then not written.
        """
        async with self._accepting:
            while self._waiting:
                await self._writer.wait_for_capacity()
                try:
                    self._accept_next(failed, keeps_refused=keeps_refused or self.is_last)
                except LogNotReadyError:
                    if not waits:
                        raise
                    await asyncio.sleep(_NOT_READY_S)

    def _accept_next(self, failed: _Failed, *, keeps_refused: bool) -> None:
        with self.taking:
            if not self._waiting:  # the writer was aborted
                return
            try:
                accepted = self._writer.write_fitted(self._waiting[0])
            except LogNotReadyError:
                raise
            except DLError:
                if not keeps_refused:
                    self._waiting.popleft()
                raise
            self._waiting.popleft()
        accepted.add_done_callback(partial(_report, failed))

    def has_forked(self) -> None:
        """In a child: the holder of the lock is not in this process."""
        self.taking = threading.Lock()


def _report(failed: _Failed, accepted: Any) -> None:
    error = None if accepted.cancelled() else accepted.exception()
    if error is not None:
        failed(error)


class _Interval:
    """How long records wait until the background passes them on; 0: for ever."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self.first_waits = asyncio.Event()
        """A record waits that no call passes on yet."""
        self._turn = 0  # counts how often the calling thread passed records on
        self._running: concurrent.futures.Future[None] | None = None

    def begin(self, portal: Portal, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to wait; `work` runs in the background from the first time on."""
        if self._running is None:
            self._running = portal.submit(work())
        portal.post(self.first_waits.set)

    def restart(self) -> None:
        """Let the background wait for another interval: the caller passes records on."""
        self._turn += 1

    async def has_passed(self) -> bool:
        """Wait for half of it; return whether the caller passed nothing on meanwhile.

        Records that came after the caller's last turn wait for the second half, and none waits for
        longer than the interval.
        """
        turn = self._turn
        await asyncio.sleep(self.length_s / 2)
        return turn == self._turn

    def stop(self) -> None:
        """End the work in the background."""
        if self._running is not None:
            self._running.cancel()


class BufferingWriter(Blocking):
    """A writer that buffers records in the calling thread, and then passes them to its async twin.

    Records are passed on when the buffer is full, at a call that waits for them, and in the
    background once the first of them has waited for `flush_interval_s`.  With 0 this does not
    happen in the background.

    An open writer is closed with its namespace, or at exit.  If records cannot be written at exit
    within 10 s, an error is logged, and the exit status is 120.
    """

    # The calling thread appends to the buffer without a lock, which would cost a tenth of a
    # `write`.  The event loop's thread takes from the front of the buffer.  Both are single
    # operations on a list, which Python makes atomic.  After each append the caller reads
    # `_look_from_bytes`.  The thread that ends the background work first sets it to 0, and then
    # reads the buffer.  Therefore at least one of the two sees the other's change, and every record
    # is passed on.
    #
    # That is why the buffer is no `Batcher`, which keeps a record in three lists: an interrupt, or
    # the other thread, may come between two operations, and would find the lists of unequal length.

    def __init__(
        self,
        portal: Portal,
        writer: AsyncLogWriter,
        opened: dict[BufferingWriter, None],
        *,
        buffer_bytes: int,
        flush_interval_s: float,
    ) -> None:
        super().__init__(portal, writer.aclose)
        self._writer = writer
        self._opened = opened  # open writers of the namespace, in order
        self._outbox = _Outbox(writer)
        self._records: list[LogRecord] = []
        self._buffered_bytes = 0  # since the calling thread last passed records on
        self._buffer_bytes = buffer_bytes
        self._look_from_bytes = 0 if flush_interval_s else buffer_bytes
        self._has_failed = False  # in the background; the next call raises the error
        self._interval = _Interval(flush_interval_s)
        opened[self] = None

    @abstractmethod
    def write(self, record: LogRecord) -> None:
        """Buffer a record; raise at once if its transaction id or size is not acceptable."""

    @abstractmethod
    def write_batch(self, batch: Any) -> None:
        """Write the rows of a batch."""

    def write_bulk(self, records: Iterable[LogRecord]) -> int:
        """Write each of `records`; return how many.  Raises: as `write`."""
        count = 0
        for record in records:
            self.write(record)
            count += 1
        return count

    def write_table(self, table: Any) -> None:
        """Write the rows of an Arrow table, a frame, or an Arrow stream, as `write_batch` does."""
        from dlcore.log.entries.batches import batches_from

        for batch in batches_from(table):
            self.write_batch(batch)

    def flush(self) -> None:
        """Transmit the buffered records and wait until they are durable.

        Raises: as the async twin.
        """
        self._hand_over()
        self._call(self._writer.flush())

    def commit(self) -> DLSN | None:
        """Flush and make all records visible; return the last position, if there is one.

        Raises: as the async twin.
        """
        self._hand_over()
        return self._call(self._writer.commit())

    def mark_end_of_stream(self) -> None:
        """Flush and seal the log: no record can follow.  Raises: as `flush`."""
        self._hand_over()
        self._call(self._writer.mark_end_of_stream())

    def abort(self) -> None:
        """Close without flushing, as a crash would; acknowledged records stay."""
        self._closed = True
        self._stop_background()
        with self._outbox.taking:
            self._records.clear()
            self._buffered_bytes = 0
            self._outbox.clear()
        self._opened.pop(self, None)
        self._call(self._writer.abort())

    def close(self) -> None:
        """Flush and close; harmless if it is closed already.

        Raises: as `flush`: records failed; acknowledged records are durable.
        """
        if self._closed:
            return
        self._opened.pop(self, None)
        try:
            if not self._portal.is_inherited:
                self._hand_over(waits=True)
        finally:
            self._stop_background()
            super().close()

    def _require_usable(self) -> None:
        """Raise if the writer is closed, or in a forked child: no record would be passed on."""
        self._portal.check_process()
        if self._closed:
            raise AlreadyClosedError(f"the writer of log {self._writer.log_name!r} is closed")

    def _hand_over(self, *, waits: bool = False) -> None:
        self._buffer_to_outbox()
        self._buffered_bytes = 0
        self._interval.restart()
        if self._outbox:
            self._call(self._outbox.empty(self._failed, waits=waits))

    def _buffer_to_outbox(self) -> None:
        with self._outbox.taking:
            self._take_buffered()

    def _take_buffered(self) -> None:
        taken = self._records[:]
        if not taken:
            return
        from dlcore.log.entries.body import batch_of

        batch = batch_of([each.txid for each in taken], [each.payload for each in taken])
        self._outbox.append(batch)
        del self._records[: len(taken)]  # more records may have come meanwhile

    def _tell_failure(self) -> None:
        """Raise the error of a background write, and raise it again at each call while it lasts."""
        if self._has_failed:
            self._hand_over()
            self._call(self._writer.flush())
            self._has_failed = False

    # Background work

    def _look_around(self) -> None:
        """Pass on a full buffer, or make sure that the background passes on its records."""
        if self._buffered_bytes >= self._buffer_bytes:
            self._hand_over()
        elif self._interval.length_s and not self._has_failed:
            self._look_from_bytes = self._buffer_bytes
            self._interval.begin(self._portal, self._hand_over_in_time)

    async def _hand_over_in_time(self) -> None:
        """Pass on records that have waited for the interval, counted from the first of them."""
        while not self._closed:
            self._look_from_bytes = 0
            if not self._records and not self._outbox:
                await self._interval.first_waits.wait()
            self._interval.first_waits.clear()
            if not self._has_failed:
                self._look_from_bytes = self._buffer_bytes
            if await self._interval.has_passed():
                await self._hand_over_in_background()

    async def _hand_over_in_background(self) -> None:
        if self._has_failed or not self._outbox.taking.acquire(blocking=False):
            return  # the next call passes them on and raises; or a call is about to do so
        try:
            if not self._outbox:  # else the outbox comes first
                self._take_buffered()
        finally:
            self._outbox.taking.release()
        try:
            await self._outbox.empty(self._failed, keeps_refused=True)
        except LogNotReadyError:
            return  # refused for the moment: try again in the next turn
        except DLError as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Make the next call raise, because records that the background passed on failed."""
        if self._has_failed or self._closed:
            return
        self._has_failed = True
        self._look_from_bytes = 0
        logger.warning(
            "log %r: records are refused, the next call raises the error: %s; to do: handle the "
            "error of the next call; write again what it names",
            self._writer.log_name,
            error,
        )

    def _stop_background(self) -> None:
        if not self._portal.is_inherited:
            self._interval.stop()

    async def finish(self) -> None:
        """Flush and close at exit; log what could not be written."""
        self._closed = self._outbox.is_last = True
        self._stop_background()
        reason = f"it took more than {_EXIT_FLUSH_S:g} s"
        try:
            async with asyncio.timeout(_EXIT_FLUSH_S):
                self._buffer_to_outbox()
                await self._outbox.empty(self._failed, waits=True)
                await self._writer.aclose()
        except DLError as error:
            reason = f"{type(error).__name__}: {error}"
        except TimeoutError:
            logger.warning(
                "log %r: its writer was not closed: %s; to do: close writers before the program "
                "ends",
                self._writer.log_name,
                reason,
            )
        self._report_unwritten(reason)
        await self._writer.abort()

    def _report_unwritten(self, reason: str) -> None:
        unwritten = self._writer._describe_unwritten(list(self._outbox))
        if unwritten is None:
            return
        logger.error(
            "log %r: not written: %s: the process ended with the writer open: %s; to do: write "
            "these records again if they are needed, and close writers",
            self._writer.log_name,
            unwritten,
            reason,
        )
        fail_exit()


class WritersNamespace(Blocking):
    """A namespace that closes its open writers when it closes, and at exit."""

    def __init__(self, portal: Portal, namespace: Any) -> None:
        super().__init__(portal, namespace.aclose)
        self._writers: dict[BufferingWriter, None] = {}  # open writers, in order
        close_at_exit(self, self._finish)

    def close(self) -> None:
        """Close the open writers and every connection; readers stop working."""
        forget(self)
        # From the last to the first, even if some of them fail.
        with contextlib.ExitStack() as steps:
            steps.callback(super().close)
            for writer in reversed(self._writers):
                steps.callback(writer.close)

    async def _finish(self) -> None:
        """Close at exit, if the caller has not closed it."""
        await all_of(*(writer.finish() for writer in list(self._writers)))
        async with asyncio.timeout(_EXIT_CLOSE_S):
            await self._aclose()
