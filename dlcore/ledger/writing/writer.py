"""The public writer of an open ledger: futures for appends, bounds, and the close."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.config import ENTRY_SIZE_BYTES_MAX
from dlcore.base.errors import DLError, EntryTooLargeError, LedgerClosedError, NotEnoughBookiesError
from dlcore.base.statistics import WriteStatistics
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.writing.appender import (
    TAKEN,
    Append,
    Fail,
    LedgerClosed,
    Signal,
)
from dlcore.ledger.writing.appender_driver import AppenderDriver, copy_of
from dlcore.wire.frames import FRAME_BYTES, BytesLike

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from dlcore.ledger.context import LedgerContext
    from dlcore.ledger.metadata.store import VersionedLedger
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.metadata.port import Op


class LedgerWriter:
    """Appends entries; made by `LedgerClient.create_ledger`, used on one event loop.

    After any failure the writer has ended: every later call raises that error again.  `close` still
    closes the ledger, unless another client took it over.  If entries were not acknowledged, it
    closes the ledger by a recovery, since readers may have seen those that an ack quorum holds.
    """

    def __init__(
        self,
        versioned: VersionedLedger,
        context: LedgerContext,
        *,
        recover: Callable[[int], Awaitable[LedgerMetadata]],
        on_end: Callable[[LedgerWriter], None],
    ) -> None:
        self._context = context
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._driver = AppenderDriver(versioned, context, recover=recover)
        self._appender = self._driver.appender
        self._close_lock = asyncio.Lock()

    def __repr__(self) -> str:
        quorum = self.metadata.quorum
        return (
            f"<LedgerWriter {self.ledger_id} {self.metadata.state.name} "
            f"lac={self.last_add_confirmed} pushed={self.last_add_pushed} "
            f"E{quorum.ensemble_size}/Qw{quorum.write_quorum_size}/Qa{quorum.ack_quorum_size}>"
        )

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as this writer knows it is stored."""
        return self._appender.metadata

    @property
    def ledger_id(self) -> int:
        """The ledger's id."""
        return self._appender.metadata.ledger_id

    @property
    def last_add_confirmed(self) -> int:
        """The last acknowledged entry; -1 for none."""
        return self._appender.window.last_add_confirmed

    @property
    def last_add_pushed(self) -> int:
        """The last appended entry, acknowledged or not; -1 for none."""
        return self._appender.window.last_add_pushed

    @property
    def length_bytes(self) -> int:
        """Body bytes of all appended entries."""
        return self._appender.window.pushed_bytes

    @property
    def confirmed_bytes(self) -> int:
        """Body bytes of all acknowledged entries."""
        return self._appender.window.confirmed_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes of entries that some bookie of their write set has not answered."""
        return self._appender.window.pending_bytes

    def append(self, body: Sequence[BytesLike]) -> asyncio.Future[int]:
        """Append one entry; the future gives its id once it and all before it are acknowledged.

        `body` is not copied: its bytes must not change until all its replicas have answered.

        Nothing blocks here; call `wait_for_capacity` first to bound the bytes in flight.  An entry
        that is too large is refused, and the writer stays usable.

        Raises:
            Nothing: the future holds LedgerFencedError, NotEnoughBookiesError, LedgerClosedError,
            EntryTooLargeError or a MetadataError.  Unless it is EntryTooLargeError, the entry may
            have been written.
        """
        future: asyncio.Future[int] = self._loop.create_future()
        self.submit(body, partial(_answer, future, self.last_add_pushed + 1))
        return future

    def submit(
        self, body: Sequence[BytesLike], on_answer: Callable[[DLError | None], None]
    ) -> None:
        """Append one entry, as `append` does; `on_answer` gets the error, None for success.

        It is called from the event loop, in entry order.  Entries appended from the callback carry
        the new LAC.  While callers always append in response, no separate LAC message is sent.
        """
        error = self._refusal(body)
        if error is not None:
            self._loop.call_soon(on_answer, error)
            return
        self._driver.append(Append(body), on_answer)

    def _refusal(self, body: Sequence[BytesLike]) -> DLError | None:
        if self._appender.error is not None:
            return self._appender.error
        if self._appender.is_closing:
            return LedgerClosedError(f"ledger {self.ledger_id} was closed by this writer")
        size = FRAME_BYTES + sum(map(len, body))
        if size > ENTRY_SIZE_BYTES_MAX:
            return EntryTooLargeError(
                f"an entry of {size} bytes, the limit is {ENTRY_SIZE_BYTES_MAX}"
            )
        return None

    async def wait_for_capacity(self) -> None:
        """Return once the bytes and entries in flight of the whole client are below its limits.

        Writers get their turn in order; one that has nothing in flight may always append an entry.
        An entry is in flight until its whole write set answered or was given up, so a slow third
        replica does not take memory without bound.
        """
        if not self._has_capacity():
            try:
                await self._driver.wait_until(lambda: self._has_capacity() or self._is_over)
            finally:
                self._driver.share.leave()
        self._raise_if_failed()

    def _has_capacity(self) -> bool:
        return self._driver.share.may_append()

    async def flush(self) -> None:
        """Return once all entries appended so far are acknowledged."""
        target = self._appender.window.last_add_pushed
        await self._driver.wait_until(
            lambda: self._appender.window.last_add_confirmed >= target or self._is_over
        )
        if self._appender.window.last_add_confirmed < target:
            self._raise_if_failed()

    async def publish_lac(self) -> None:
        """Tell the bookies the present LAC, so that followers are sent all entries up to it.

        It waits until enough bookies accepted it that no read can reach coverage without one of
        them.  A read that begins later sees acknowledged entries even without this call.  A bookie
        accepts a LAC once it is durable there, so a killed bookie does not forget it.

        Raises:
            NotEnoughBookiesError: too few accepted it within the add time-out; the writer keeps
                trying.
        """
        lac = self.last_add_confirmed
        if self.metadata.state is LedgerState.CLOSED:
            return
        self._raise_if_failed()
        if lac < 0:
            return
        self._driver.handle(Signal.PUBLISH_LAC)
        try:
            async with asyncio.timeout(self._context.config.add_timeout_s):
                await self._driver.wait_until(
                    lambda: self._appender.is_published(lac) or self._is_over
                )
        except TimeoutError as error:
            raise NotEnoughBookiesError(
                f"ledger {self.ledger_id}: too few bookies accepted the LAC {lac} in time"
            ) from error
        if not self._appender.is_published(lac):
            self._raise_if_failed()

    async def close(self) -> LedgerMetadata:
        """Wait for the appended entries, close the ledger at its LAC, and return the metadata.

        If appends failed because bookies or metadata were missing, a recovery finds the ledger's
        end and closes it.  It is safe to call this again after an error.

        Raises:
            LedgerRecoveryError: the recovery could not find the end.
            LedgerFencedError: a recoverer took the ledger over and decides its end.
            LedgerClosedError: another client closed it, at another entry.
            LedgerNotFoundError: it was deleted.
            MetadataError: it is unknown whether it is closed.
        """
        async with self._close_lock:
            if self.metadata.state is not LedgerState.CLOSED:
                async with self._stopped_if_taken():
                    await self._driver.close(Signal.CLOSE)
                await self._stop()
            return self.metadata

    async def prepare_close(self) -> tuple[LedgerMetadata, Op]:
        """Wait for the appended entries; return the closed metadata, and the operation to store it.

        The operation is for a transaction of the caller.  After that was applied, call
        `was_closed`; if it was not, `close` finds out the ledger's state.

        Raises:
            LedgerFencedError, LedgerClosedError: another client took the ledger over.
            DLError: the error that ended the writer while entries were not acknowledged.
        """
        async with self._close_lock, self._stopped_if_taken():
            await self._driver.close(Signal.PREPARE_CLOSE)
            closed = self._appender.window.closed(self._appender.metadata)
            return closed, self._context.ledger_store.put(closed, version=self._appender.version)

    async def was_closed(self, metadata: LedgerMetadata) -> None:
        """Stop: the metadata store holds this end of the ledger now."""
        self._driver.handle(LedgerClosed(metadata))
        await self._stop()

    @asynccontextmanager
    async def _stopped_if_taken(self) -> AsyncGenerator[None, None]:
        try:
            yield
        except TAKEN:
            await self._stop()  # nothing is left to do here, and a retry would not help
            raise

    async def abandon(self) -> None:
        """Stop without closing the ledger, as a crash would: recovery decides about its end."""
        error = LedgerClosedError(f"the writer of ledger {self.ledger_id} was abandoned")
        self._driver.handle(Fail(error))
        await self._stop()

    async def _stop(self) -> None:
        await self._driver.aclose()
        self._on_end(self)

    @property
    def _is_over(self) -> bool:
        return self._appender.error is not None

    def _raise_if_failed(self) -> None:
        if self._appender.error is not None:
            raise copy_of(self._appender.error)

    def tell_lac(self) -> None:
        """Tell the LAC to the bookie that followers listen to, unless an add is under way.

        Call this when more records are already waiting.  Otherwise followers see the new LAC only
        once the next entry has been built and sent.  It is one message to one bookie for each entry
        of writers that share a log; the bookie syncs it to disk together with the next add.
        """
        self._driver.handle(Signal.TELL_LAC)


def _answer(future: asyncio.Future[int], entry_id: int, error: DLError | None) -> None:
    if future.done():  # its caller may have cancelled it
        return
    if error is None:
        future.set_result(entry_id)
        return
    future.set_exception(copy_of(error))
    # Mark it as retrieved: a caller that only flushes gets the failure there.
    future.exception()


class OpenWriters:
    """The open writers of a client, and what those that ended have written."""

    def __init__(self) -> None:
        self.open: set[LedgerWriter] = set()
        self._entries = self._bytes = 0  # of those that ended

    def add(self, writer: LedgerWriter) -> None:
        """Add a new one."""
        self.open.add(writer)

    def ended(self, writer: LedgerWriter) -> None:
        """Count what a writer has written, once."""
        if writer in self.open:
            self.open.discard(writer)
            self._entries += writer.last_add_confirmed + 1
            self._bytes += writer.confirmed_bytes

    def statistics(self) -> WriteStatistics:
        """Return counts of the entries and bytes that were written until now."""
        writers = list(self.open)  # a copy: a collector may ask in another thread
        return WriteStatistics(
            open_ledgers=len(writers),
            pending_bytes=sum(each.pending_bytes for each in writers),
            entries=self._entries + sum(each.last_add_confirmed + 1 for each in writers),
            size_bytes=self._bytes + sum(each.confirmed_bytes for each in writers),
        )

    async def aclose(self) -> None:
        """Abandon those that are open."""
        for writer in list(self.open):
            await writer.abandon()
