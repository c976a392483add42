"""The outbox of the blocking writers, and the namespaces that close them, at exit at the latest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

from dlcore.blocking.portal import close_at_exit, fail_exit, forget
from dlcore.blocking.twin import Blocking
from dlcore.errors import AlreadyClosedError, DLError, LogNotReadyError

if TYPE_CHECKING:
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

    One that is open when its namespace closes, or at exit, is closed then.  What cannot be written
    at exit within 10 s is logged as an error, and the exit status is 120.
    """

    def __init__(self, portal: Portal, writer: Any, opened: dict[BufferingWriter, None]) -> None:
        super().__init__(portal, writer.aclose)
        self._writer = writer
        self._opened = opened  # those of the namespace, in order
        self._accepting = asyncio.Lock()
        self._outbox: deque[Any] = deque()  # batches or rows handed over, not yet accepted
        self._txids: list[int] = []
        self._payloads: list[bytes] = []
        self._buffered_bytes = 0
        opened[self] = None

    @abstractmethod
    def write(self, record: LogRecord) -> None:
        """Buffer a record; raise at once if its transaction id or size is not acceptable."""

    @abstractmethod
    def write_batch(self, batch: Any) -> None:
        """Write the rows of a batch."""

    @abstractmethod
    def _accept(self, waiting: Any) -> None:
        """Let the async twin, which has room, accept what waited."""

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
        self._drop_buffer()
        self._outbox.clear()
        self._closed = True
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
            super().close()

    def _require_usable(self) -> None:
        """Raise where nobody would hand over what is buffered: closed, or in a forked child."""
        self._portal.check_process()
        if self._closed:
            raise AlreadyClosedError(f"the writer of log {self._writer.log_name!r} is closed")

    def _hand_over(self, *, waits: bool = False) -> None:
        self._buffer_to_outbox()
        if self._outbox:
            self._call(self._empty_outbox(waits=waits))

    def _buffer_to_outbox(self) -> None:
        if not self._txids:
            return
        from dlcore.log.entries.batches import batch_of

        self._outbox.append(batch_of(self._txids, self._payloads))
        self._drop_buffer()

    def _drop_buffer(self) -> None:
        self._txids, self._payloads, self._buffered_bytes = [], [], 0

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
                    self._accept(self._outbox[0])
                except LogNotReadyError:
                    if not waits:
                        raise
                    await asyncio.sleep(_NOT_READY_S)
                    continue
                except DLError:
                    if not (in_background or self._closed):
                        self._outbox.popleft()
                    raise
                self._outbox.popleft()

    async def finish(self) -> None:
        """Flush and close at exit; say what could not be written."""
        self._closed = True
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
