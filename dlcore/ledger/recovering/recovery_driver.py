"""Runs a `LedgerRecovery`: asks the metadata store and bookies, writes back through an appender."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks, fulfil
from dlcore.base.clock import steady_s
from dlcore.base.errors import DLError
from dlcore.base.machines import CallFailed
from dlcore.ledger.metadata.store import VersionedLedger
from dlcore.ledger.reading.range_read_driver import RangeRead
from dlcore.ledger.recovering.recovery import (
    AbortRecovery,
    Effect,
    EndRecovery,
    Event,
    FenceBookie,
    Fenced,
    FenceFailed,
    LedgerRecovery,
    LengthRead,
    ReadEntry,
    ReadLength,
    ReadMetadata,
    Signal,
    StartWriteBack,
    WriteBack,
    WriteBackFailed,
    WrittenBack,
    answer_to,
)
from dlcore.ledger.writing.appender import (
    AppendRecovered,
    MetadataRead,
    MetadataStored,
    StoreMetadata,
)
from dlcore.ledger.writing.writer import AppenderDriver

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dlcore.ledger.metadata.values import LedgerMetadata
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
    begun_s = steady_s()
    recoverer = _Recoverer(ledger_id, context)
    try:
        closed = await recoverer.run()
    finally:
        await recoverer.aclose()
    if recoverer.has_recovered:
        context.recovery_times.note(steady_s() - begun_s)
        logger.info("recovered ledger=%d last_entry=%d", ledger_id, closed.last_entry_id)
    return closed


class _Recoverer:
    """The driver of one recovery."""

    def __init__(self, ledger_id: int, context: LedgerContext) -> None:
        self._ledger_id = ledger_id
        self._context = context
        self._machine = LedgerRecovery(ledger_id)
        self._writer: AppenderDriver | None = None
        self._outcome: asyncio.Future[LedgerMetadata] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks(self._fail)  # after a defect recovery must not wait for ever

    @property
    def has_recovered(self) -> bool:
        """Whether the ledger was not closed already."""
        return self._writer is not None

    async def run(self) -> LedgerMetadata:
        """Return the ledger's metadata once it is closed."""
        self._handle(Signal.BEGIN)
        return await self._outcome

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
            case ReadMetadata() | StoreMetadata() | ReadLength():
                self._tasks.start(self._feed(self._call(effect)))
            case FenceBookie():
                self._tasks.start(self._feed(self._fence(effect)))
            case ReadEntry():
                self._tasks.start(self._feed(self._read(effect)))
            case StartWriteBack(pinned=pinned, last_add_confirmed=last_add_confirmed):
                self._writer = AppenderDriver(
                    VersionedLedger(pinned.metadata, pinned.version),
                    self._context,
                    last_add_confirmed=last_add_confirmed,
                )
            case WriteBack():
                self._write_back(effect.entry)
            case EndRecovery():
                fulfil(self._outcome, effect.closed)
            case AbortRecovery():
                self._fail(effect.error)
            case _:
                assert_never(effect)

    def _write_back(self, entry: EntryFrame) -> None:
        assert self._writer is not None
        # The writer ends with its first failure, but recovered entries may still come behind it.
        error = self._writer.appender.error
        if error is None:
            self._writer.append(AppendRecovered(entry), partial(self._on_answer, entry.entry_id))
        else:
            self._handle(WriteBackFailed(error))

    def _on_answer(self, entry_id: int, error: DLError | None) -> None:
        assert self._writer is not None
        ensembles = self._writer.appender.metadata.ensembles
        self._handle(WriteBackFailed(error) if error else WrittenBack(entry_id, ensembles))

    def _fail(self, error: BaseException) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)

    async def _feed(self, answer: Awaitable[Event]) -> None:
        self._handle(await answer)

    async def _call(self, call: ReadMetadata | StoreMetadata | ReadLength) -> Event:
        store = self._context.ledger_store
        try:
            match call:
                case ReadMetadata():
                    stored = await store.read(self._ledger_id)
                    return MetadataRead(stored.metadata, stored.version)
                case StoreMetadata(metadata, version):
                    return MetadataStored(metadata, await store.write(metadata, version=version))
                case ReadLength(entry_id=entry_id, metadata=metadata):
                    return LengthRead(await self._length_at(entry_id, metadata))
                case _:
                    assert_never(call)
        except DLError as error:
            return CallFailed(error)

    async def _fence(self, effect: FenceBookie) -> Event:
        try:
            lac = await self._context.bookies.read_lac(
                effect.bookie, ledger_id=self._ledger_id, fence=True
            )
        except DLError as error:
            return FenceFailed(effect.position, error)
        return Fenced(effect.position, lac)

    async def _read(self, effect: ReadEntry) -> Event:
        try:
            answer: bytes | memoryview | DLError = await self._context.bookies.read_entry(
                effect.bookie, ledger_id=self._ledger_id, entry_id=effect.entry_id, fence=True
            )
        except DLError as error:
            answer = error
        return answer_to(effect, answer, ledger_id=self._ledger_id)

    async def _length_at(self, entry_id: int, metadata: LedgerMetadata) -> int:
        """Return the ledger's bytes up to an acknowledged entry, as the entry's frame says."""
        read = RangeRead(
            self._context.bookies,
            self._context.config,
            self._context.placer.health,
            ledger_id=self._ledger_id,
            ensemble=metadata.ensemble_of(entry_id),
            quorum=metadata.quorum,
            first_entry_id=entry_id,
            last_entry_id=entry_id,
        )
        async with aclosing(read.chunks()) as chunks:
            async for entries in chunks:
                return entries[-1].ledger_bytes
        raise AssertionError("a range read yields or raises")
