"""The writer of an open ledger: futures for appends, the LAC for readers, the close."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.backoff import Backoff
from dlcore.base.config import ENTRY_SIZE_BYTES_MAX
from dlcore.base.errors import (
    DLError,
    EntryTooLargeError,
    LedgerClosedError,
    LedgerFencedError,
    LedgerNotFoundError,
    MetadataError,
    MetadataVersionError,
    NotEnoughBookiesError,
)
from dlcore.ledger.metadata.quorum import first_followed, is_covered
from dlcore.ledger.metadata.store import VersionedLedger
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.ledger.writing.append import LedgerAppender
from dlcore.ledger.writing.append_driver import METADATA_PATIENCE_S, AppendDriver
from dlcore.ledger.writing.lac import LacPublisher
from dlcore.wire.digest import FRAME_BYTES, BytesLike

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from dlcore.ledger.context import LedgerContext
    from dlcore.metadata.port import Op

logger = logging.getLogger(__name__)

_LAC_DELAY_S = 0.005
"""After this time, or twice that, all bookies are told a LAC that no add has carried.  At once it
goes only to the bookie that followers listen to: messages to all would delay each other and the
entries that it pushes."""
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 2.0


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
        self._recover = recover
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._driver = AppendDriver(
            LedgerAppender(versioned.metadata),
            context,
            version=versioned.version,
            is_recovery=False,
            on_confirmed=self._on_confirmed,
            on_failed=self._on_failed,
        )
        self._appender = self._driver.appender
        self._lac = LacPublisher(
            context.bookies,
            ledger_id=versioned.metadata.ledger_id,
            on_accepted=self._driver.notify,
            on_fenced=self._on_fenced,
        )
        self._lac_soon: asyncio.Handle | None = None
        self._is_answered = False  # callers appended in response to the last acknowledgement
        self._lac_timer: asyncio.TimerHandle | None = None
        self._waiting: deque[Callable[[DLError | None], None]] = deque()  # in entry order
        self._closed: LedgerMetadata | None = None
        self._close_lock = asyncio.Lock()
        self._is_closing = False

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
        return self._closed or self._appender.metadata

    @property
    def ledger_id(self) -> int:
        """The ledger's id."""
        return self._appender.metadata.ledger_id

    @property
    def last_add_confirmed(self) -> int:
        """The last acknowledged entry; -1 for none."""
        return self._appender.last_add_confirmed

    @property
    def last_add_pushed(self) -> int:
        """The last appended entry, acknowledged or not; -1 for none."""
        return self._appender.last_add_pushed

    @property
    def length_bytes(self) -> int:
        """Body bytes of all appended entries."""
        return self._appender.pushed_bytes

    @property
    def confirmed_bytes(self) -> int:
        """Body bytes of all acknowledged entries."""
        return self._appender.confirmed_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes of entries that some bookie of their write set has not answered."""
        return self._appender.pending_bytes

    @property
    def is_idle(self) -> bool:
        """Whether every appended entry is acknowledged."""
        return self._appender.is_idle

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
        self._waiting.append(on_answer)
        self._driver.perform(self._appender.append(body))

    def _refusal(self, body: Sequence[BytesLike]) -> DLError | None:
        if self._appender.error is not None:
            return self._appender.error
        if self._is_closing:
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
        target = self._appender.last_add_pushed
        await self._driver.wait_until(
            lambda: self._appender.last_add_confirmed >= target or self._is_over
        )
        if self._appender.last_add_confirmed < target:
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
        if self._closed is not None:
            return
        self._raise_if_failed()
        if lac < 0:
            return
        self._send_lac(to_all=True)
        try:
            async with asyncio.timeout(self._context.config.add_timeout_s):
                await self._driver.wait_until(lambda: self._is_published(lac) or self._is_over)
        except TimeoutError as error:
            raise NotEnoughBookiesError(
                f"ledger {self.ledger_id}: too few bookies accepted the LAC {lac} in time"
            ) from error
        if not self._is_published(lac):
            self._raise_if_failed()

    def _is_published(self, lac: int) -> bool:
        if self._closed is not None:
            return True  # the metadata says it
        ensemble = self._appender.metadata.last_ensemble
        if lac < ensemble.first_entry_id:
            return True  # the metadata implies it
        unaware = {
            position
            for position, bookie in enumerate(ensemble.bookies)
            if not self._lac.has_accepted(bookie, lac)
        }
        return not is_covered(self._appender.metadata.quorum, unaware)

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
        self._is_closing = True
        async with self._close_lock:
            if self._closed is None:
                async with self._stopped_if_taken():
                    await self._settle()
                    if self._appender.is_idle:
                        closed = await self._store_end()
                    else:
                        closed = await self._recover(self.ledger_id)
                await self.was_closed(closed)
            assert self._closed is not None
            return self._closed

    async def prepare_close(self) -> tuple[LedgerMetadata, Op]:
        """Wait for the appended entries; return the closed metadata, and the operation to store it.

        The operation is for a transaction of the caller.  After that was applied, call
        `was_closed`; if it was not, `close` finds out the ledger's state.

        Raises:
            LedgerFencedError, LedgerClosedError: another client took the ledger over.
            DLError: the error that ended the writer while entries were not acknowledged.
        """
        self._is_closing = True
        async with self._close_lock, self._stopped_if_taken():
            await self._settle()
            if not self._appender.is_idle:
                self._raise_if_failed()
            closed = self._appender.metadata.closed(
                last_entry_id=self._appender.last_add_confirmed,
                length_bytes=self._appender.confirmed_bytes,
            )
            return closed, self._context.ledger_store.put(closed, version=self._driver.version)

    async def was_closed(self, metadata: LedgerMetadata) -> None:
        """Stop: the metadata store holds this end of the ledger now."""
        self._closed = metadata
        await self._stop(LedgerClosedError(f"ledger {self.ledger_id} is closed"))

    @asynccontextmanager
    async def _stopped_if_taken(self) -> AsyncGenerator[None, None]:
        try:
            yield
        except (LedgerFencedError, LedgerClosedError, LedgerNotFoundError) as error:
            await self._stop(error)  # nothing is left to do here, and a retry would not help
            raise

    async def _settle(self) -> None:
        """Wait until all adds are confirmed or failed and no ensemble change is under way."""
        self._raise_if_taken_over()
        await self._driver.wait_until(lambda: self._appender.is_idle or self._is_over)
        self._appender.seal()
        await self._driver.wait_until(lambda: not self._appender.is_changing or self._is_over)
        self._raise_if_taken_over()

    async def abandon(self) -> None:
        """Stop without closing the ledger, as a crash would: recovery decides about its end."""
        await self._stop(LedgerClosedError(f"the writer of ledger {self.ledger_id} was abandoned"))

    async def _stop(self, error: DLError) -> None:
        self._driver.perform(self._appender.fail(error))
        self._stop_lac()
        await self._driver.aclose()
        self._on_end(self)

    async def _store_end(self) -> LedgerMetadata:
        """Compare-and-set OPEN to CLOSED at the LAC, and find out whether it was applied."""
        last = self._appender.last_add_confirmed
        length = self._appender.confirmed_bytes
        stored = VersionedLedger(self._appender.metadata, self._driver.version)
        deadline = self._loop.time() + METADATA_PATIENCE_S
        backoff = Backoff(_BACKOFF_S, _BACKOFF_S_MAX)
        while True:
            try:
                if stored.metadata.state is not LedgerState.OPEN:
                    return self._accept_end(stored.metadata)
                closed = stored.metadata.closed(last_entry_id=last, length_bytes=length)
                await self._context.ledger_store.write(closed, version=stored.version)
            except MetadataVersionError:
                stored = await self._context.ledger_store.read(self.ledger_id)
            except MetadataError as error:
                pause_s = backoff.failed(self._loop.time())
                if not error.retriable or backoff.due_s > deadline:
                    raise
                await asyncio.sleep(pause_s)
            else:
                return closed

    def _accept_end(self, stored: LedgerMetadata) -> LedgerMetadata:
        if stored.state is LedgerState.IN_RECOVERY:
            raise self._fenced(LedgerFencedError(f"ledger {self.ledger_id} is being recovered"))
        last = self._appender.last_add_confirmed
        if stored.last_entry_id != last:
            raise LedgerClosedError(
                f"ledger {self.ledger_id} was closed by another client at entry "
                f"{stored.last_entry_id}, this writer's LAC is {last}"
            )
        return stored

    @property
    def _is_over(self) -> bool:
        return self._appender.error is not None

    def _raise_if_failed(self) -> None:
        if self._appender.error is not None:
            raise _copy(self._appender.error)

    def _raise_if_taken_over(self) -> None:
        if isinstance(self._appender.error, LedgerFencedError | LedgerClosedError):
            raise _copy(self._appender.error)

    def tell_lac(self) -> None:
        """Tell the LAC to the bookie that followers listen to, unless an add is under way.

        Call this when more records are already waiting.  Otherwise followers see the new LAC only
        once the next entry has been built and sent.  It is one message to one bookie for each entry
        of writers that share a log; the bookie syncs it to disk together with the next add.
        """
        if self.is_idle and not self._is_over:
            self._send_lac(to_all=False)

    def _on_confirmed(self, first_entry_id: int, last_entry_id: int) -> None:
        if not self._is_answered:
            self.tell_lac()
        for _ in range(first_entry_id, last_entry_id + 1):
            self._waiting.popleft()(None)
        if self._lac_soon is None:
            # It runs after the callers that were just answered and may append in response.
            self._lac_soon = self._loop.call_soon(self._offer_lac)

    def _offer_lac(self) -> None:
        self._lac_soon = None
        self._is_answered = not self._appender.has_news
        if self._is_over or self._is_answered:
            return
        if self.is_idle:
            self._send_lac(to_all=False)
        if self._lac_timer is None:
            self._spread_later()

    def _spread_later(self) -> None:
        lac = self.last_add_confirmed
        self._lac_timer = self._loop.call_later(_LAC_DELAY_S, self._spread_lac, lac)

    def _spread_lac(self, lac: int) -> None:
        self._lac_timer = None
        if self._is_over or not self._appender.has_news:
            return
        if self._appender.lac_carried < lac:
            self._send_lac(to_all=True)
        else:
            self._spread_later()  # the current LAC is newer, and an add may still carry it

    def _send_lac(self, *, to_all: bool) -> None:
        bookies = self._appender.metadata.last_ensemble.bookies
        followed = bookies[first_followed(self.ledger_id, len(bookies))]
        self._lac.publish(self.last_add_confirmed, bookies, only=None if to_all else followed)

    def _on_fenced(self, error: LedgerFencedError) -> None:
        self._fenced(error)
        self._driver.notify()

    def _fenced(self, error: LedgerFencedError) -> LedgerFencedError:
        self._driver.perform(self._appender.fail(error))
        return error

    def _on_failed(self, error: DLError) -> None:
        logger.info(
            "writer ended ledger=%d lac=%d: %s", self.ledger_id, self.last_add_confirmed, error
        )
        self._stop_lac()
        while self._waiting:
            self._waiting.popleft()(error)

    def _stop_lac(self) -> None:
        self._lac.close()
        if self._lac_timer is not None:
            self._lac_timer.cancel()
            self._lac_timer = None
        if self._lac_soon is not None:
            self._lac_soon.cancel()
            self._lac_soon = None


def _answer(future: asyncio.Future[int], entry_id: int, error: DLError | None) -> None:
    if future.done():  # its caller may have cancelled it
        return
    if error is None:
        future.set_result(entry_id)
        return
    future.set_exception(_copy(error))
    # Mark it as retrieved: a caller that only flushes gets the failure there.
    future.exception()


def _copy(error: DLError) -> DLError:
    """Return an equal error without a traceback: an instance raised twice collects frames."""
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
