"""Runs a `LedgerRecovery`: moves the metadata, asks bookies, writes back through an appender."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from dlcore.base.background import BackgroundTasks
from dlcore.base.clock import steady_s
from dlcore.base.errors import (
    DLError,
    LedgerReadError,
    LedgerRecoveryError,
    MetadataVersionError,
)
from dlcore.ledger.metadata.store import VersionedLedger
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.ledger.reading.range_read_driver import RangeRead
from dlcore.ledger.recovering.recovery import (
    AbortRecovery,
    Effect,
    EndLedger,
    Event,
    FenceBookie,
    Fenced,
    FenceFailed,
    LedgerRecovery,
    ReadEntry,
    Signal,
    StartWriteBack,
    WriteBack,
    WriteBackFailed,
    WrittenBack,
    answer_to,
    closed_over,
)
from dlcore.ledger.writing.appender import AppendRecovered
from dlcore.ledger.writing.writer import AppenderDriver

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dlcore.ledger.writing.context import LedgerContext
    from dlcore.wire.frames import EntryFrame

logger = logging.getLogger(__name__)


async def recover(ledger_id: int, context: LedgerContext) -> LedgerMetadata:
    """Recover and close a ledger; return its CLOSED metadata, whichever client closed it.

    Raises:
        LedgerRecoveryError: an answer that decides is unknown; the ledger stays IN_RECOVERY.
        LedgerNotFoundError: there is no such ledger.
        MetadataError: the metadata store failed.
    """
    stored = await enter_recovery(ledger_id, context)
    if stored.metadata.state is LedgerState.CLOSED:
        return stored.metadata
    begun_s = steady_s()
    recoverer = _Recoverer(stored, context)
    try:
        last_entry_id, length_bytes = await recoverer.run()
        closed = await store_end(
            stored,
            recovered=recoverer.recovered_metadata,
            last_entry_id=last_entry_id,
            length_bytes=length_bytes,
            context=context,
        )
    finally:
        await recoverer.aclose()
    context.recovery_times.note(steady_s() - begun_s)
    logger.info("recovered ledger=%d last_entry=%d", ledger_id, closed.last_entry_id)
    return closed


async def enter_recovery(ledger_id: int, context: LedgerContext) -> VersionedLedger:
    """Compare-and-set OPEN to IN_RECOVERY; return the ledger, which may be in recovery or closed.

    Raises: LedgerNotFoundError, MetadataError.
    """
    while True:
        stored = await context.ledger_store.read(ledger_id)
        if stored.metadata.state is not LedgerState.OPEN:
            return stored
        recovering = replace(stored.metadata, state=LedgerState.IN_RECOVERY)
        try:
            version = await context.ledger_store.write(recovering, version=stored.version)
        except MetadataVersionError:
            continue  # its writer changed the ensemble or closed it: read again
        return VersionedLedger(recovering, version)


async def store_end(
    pinned: VersionedLedger,
    *,
    recovered: LedgerMetadata,
    last_entry_id: int,
    length_bytes: int,
    context: LedgerContext,
) -> LedgerMetadata:
    """Compare-and-set IN_RECOVERY to CLOSED, or adopt the end that another client stored.

    Raises: LedgerNotFoundError, MetadataError.
    """
    stored = pinned
    while True:
        closed = closed_over(
            stored.metadata,
            pinned=pinned.metadata,
            recovered=recovered,
            last_entry_id=last_entry_id,
            length_bytes=length_bytes,
        )
        if closed is None:
            return stored.metadata
        try:
            await context.ledger_store.write(closed, version=stored.version)
        except MetadataVersionError:
            stored = await context.ledger_store.read(closed.ledger_id)
        else:
            return closed


class _Recoverer:
    """The driver of one recovery."""

    def __init__(self, pinned: VersionedLedger, context: LedgerContext) -> None:
        self._pinned = pinned
        self._context = context
        self._machine = LedgerRecovery(pinned.metadata)
        self._writer: AppenderDriver | None = None
        self._start = -1
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[int] = self._loop.create_future()
        self._tasks = BackgroundTasks(self._fail)  # after a defect recovery must not wait for ever

    @property
    def recovered_metadata(self) -> LedgerMetadata:
        """The metadata with the ensembles that recovery wrote to."""
        assert self._writer is not None
        return self._writer.appender.metadata

    async def run(self) -> tuple[int, int]:
        """Return the last entry and the ledger's length in bytes."""
        self._handle(Signal.BEGIN)
        last_entry_id = await self._outcome
        assert self._writer is not None
        if last_entry_id > self._start:
            return last_entry_id, self._writer.appender.window.confirmed_bytes
        # No entry was written back, so no frame with the ledger's length was read.
        return last_entry_id, await self._length_at(last_entry_id)

    async def aclose(self) -> None:
        """Stop all requests."""
        await self._tasks.aclose()
        if self._writer is not None:
            await self._writer.aclose()
        if not self._outcome.cancel() and not self._outcome.cancelled():
            self._outcome.exception()  # mark it as retrieved, also when `run` was cancelled

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case FenceBookie():
                self._tasks.start(self._ask(self._fence(effect)))
            case ReadEntry():
                self._tasks.start(self._ask(self._read(effect)))
            case StartWriteBack():
                self._start_write_back(effect.last_add_confirmed)
            case WriteBack():
                self._write_back(effect.entry)
            case EndLedger():
                self._finish(effect.last_entry_id)
            case AbortRecovery():
                self._fail(effect.error)
            case _:
                assert_never(effect)

    def _start_write_back(self, last_add_confirmed: int) -> None:
        self._start = last_add_confirmed
        self._writer = AppenderDriver(
            self._pinned, self._context, last_add_confirmed=last_add_confirmed
        )

    def _write_back(self, entry: EntryFrame) -> None:
        assert self._writer is not None
        error = self._writer.appender.error
        if error is None:
            self._writer.append(AppendRecovered(entry), partial(self._on_answer, entry.entry_id))
        else:
            self._handle(WriteBackFailed(error))

    def _on_answer(self, entry_id: int, error: DLError | None) -> None:
        self._handle(WrittenBack(entry_id) if error is None else WriteBackFailed(error))

    def _finish(self, last_entry_id: int) -> None:
        if not self._outcome.done():
            self._outcome.set_result(last_entry_id)

    def _fail(self, error: BaseException) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)

    async def _ask(self, answer: Awaitable[Event]) -> None:
        self._handle(await answer)

    async def _fence(self, effect: FenceBookie) -> Event:
        try:
            lac = await self._context.bookies.read_lac(
                effect.bookie, ledger_id=self._pinned.metadata.ledger_id, fence=True
            )
        except DLError as error:
            return FenceFailed(effect.position, error)
        return Fenced(effect.position, lac)

    async def _read(self, effect: ReadEntry) -> Event:
        ledger_id = self._pinned.metadata.ledger_id
        try:
            answer: bytes | memoryview | DLError = await self._context.bookies.read_entry(
                effect.bookie, ledger_id=ledger_id, entry_id=effect.entry_id, fence=True
            )
        except DLError as error:
            answer = error
        return answer_to(effect, answer, ledger_id=ledger_id)

    async def _length_at(self, entry_id: int) -> int:
        """Return the ledger's bytes up to an acknowledged entry, as the entry's frame says."""
        if entry_id < 0:
            return 0
        metadata = self._pinned.metadata
        read = RangeRead(
            self._context.bookies,
            self._context.config,
            self._context.placer.health,
            ledger_id=metadata.ledger_id,
            ensemble=metadata.ensemble_of(entry_id),
            quorum=metadata.quorum,
            first_entry_id=entry_id,
            last_entry_id=entry_id,
        )
        try:
            async with aclosing(read.chunks()) as chunks:
                async for entries in chunks:
                    return entries[-1].ledger_bytes
        except LedgerReadError as error:
            raise LedgerRecoveryError(
                f"ledger {metadata.ledger_id}: its last entry {entry_id} cannot be read, "
                "so its length is unknown"
            ) from error
        raise AssertionError("a range read yields or raises")
