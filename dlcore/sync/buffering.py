"""The base of blocking writers, which buffer records, and the namespace that closes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

from dlcore.base.background import all_of
from dlcore.base.errors import AlreadyClosedError, DLError, LogNotReadyError
from dlcore.sync.portal import close_at_exit, fail_exit, forget
from dlcore.sync.twin import Blocking

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterable

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
        self._accepting = asyncio.Lock()
        self._outbox: deque[Any] = deque()  # batches or rows passed on, not yet accepted
        self._taking = threading.Lock()  # guards the outbox, and takes from the buffer
        self._records: list[LogRecord] = []
        self._buffered_bytes = 0  # since the calling thread last passed records on
        self._buffer_bytes = buffer_bytes
        self._flush_interval_s = flush_interval_s
        self._look_from_bytes = 0 if flush_interval_s else buffer_bytes
        self._turn = 0  # counts how often the calling thread passed records on
        self._has_failed = False  # in the background; the next call raises the error
        self._first_waits = asyncio.Event()  # a record waits that no call passes on yet
        self._clock: concurrent.futures.Future[None] | None = None
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
        self._stop_clock()
        with self._taking:
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
            self._stop_clock()
            super().close()

    def _require_usable(self) -> None:
        """Raise if the writer is closed, or in a forked child: no record would be passed on."""
        self._portal.check_process()
        if self._closed:
            raise AlreadyClosedError(f"the writer of log {self._writer.log_name!r} is closed")

    def _hand_over(self, *, waits: bool = False) -> None:
        self._buffer_to_outbox()
        self._buffered_bytes = 0
        self._turn += 1  # the background waits for another interval
        if self._outbox:
            self._call(self._empty_outbox(waits=waits))

    def _buffer_to_outbox(self) -> None:
        with self._taking:
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
        elif self._flush_interval_s and not self._has_failed:
            self._look_from_bytes = self._buffer_bytes
            if self._clock is None:
                self._clock = self._portal.submit(self._hand_over_in_time())
            self._portal.post(self._first_waits.set)

    async def _hand_over_in_time(self) -> None:
        """Pass on records that have waited for the interval, counted from the first of them."""
        while not self._closed:
            self._look_from_bytes = 0
            if not self._records and not self._outbox:
                await self._first_waits.wait()
            self._first_waits.clear()
            if not self._has_failed:
                self._look_from_bytes = self._buffer_bytes
            turn = self._turn
            # Records that came after the caller's last turn wait for the second half, and none
            # waits for longer than the interval.
            await asyncio.sleep(self._flush_interval_s / 2)
            if turn == self._turn:
                await self._hand_over_in_background()

    async def _hand_over_in_background(self) -> None:
        if self._has_failed or not self._taking.acquire(blocking=False):
            return  # the next call passes them on and raises; or a call is about to do so
        try:
            if not self._outbox:  # else the outbox comes first
                self._take_buffered()
        finally:
            self._taking.release()
        try:
            await self._empty_outbox(in_background=True)
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

    def _watch(self, accepted: Any) -> None:
        error = None if accepted.cancelled() else accepted.exception()
        if error is not None:
            self._failed(error)

    def _stop_clock(self) -> None:
        if self._clock is not None and not self._portal.is_inherited:
            self._clock.cancel()

    async def _empty_outbox(self, *, waits: bool = False, in_background: bool = False) -> None:
        """Let the writer accept the outbox; an interrupt neither loses nor doubles a batch.

        A refused batch is dropped, and the error is raised.  There are three exceptions.  A batch
        that is refused only for the moment stays; with `waits` it is tried until it is accepted.
        With `in_background` a refused batch stays, so that a later call raises the error.  At exit
        it stays as well, so that the log says how much was not written.
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
                accepted = self._writer.write_fitted(self._outbox[0])
            except LogNotReadyError:
                raise
            except DLError:
                if not keeps_refused:
                    self._outbox.popleft()
                raise
            self._outbox.popleft()
        accepted.add_done_callback(self._watch)

    async def finish(self) -> None:
        """Flush and close at exit; log what could not be written."""
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
