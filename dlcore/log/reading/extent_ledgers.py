"""The ledgers of a log's extents, as a reader opens them one after the other."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from dlcore.base.errors import DLError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from dlcore.ledger.reading.reader import LedgerReader
    from dlcore.log.context import LogContext
    from dlcore.log.reading.cursor import FollowExtent, ReadExtent
    from dlcore.wire.frames import EntryFrame


class ExtentLedgers:
    """Opens ledgers, and keeps the last one: extents that follow each other often share it.

    After a failure the next ledger is opened anew, also if it is the one that was read last.
    """

    def __init__(self, context: LogContext) -> None:
        self._context = context
        self._reader: LedgerReader | None = None
        self._followed: LedgerReader | None = None
        self.heard_s = 0.0
        """When a followed bookie answered last, by the event loop's clock."""

    async def chunks(self, step: ReadExtent) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield the entries of a final extent in order, many at a time.

        Raises: as `LedgerReader.read`; LedgerNotFoundError, MetadataError.
        """
        last_entry_id = step.last_entry_id
        assert last_entry_id is not None
        with self._anew_after_failure():
            reader = await self._reader_of(step.extent.ledger_id, last_entry_id)
            known = reader.metadata
            async with aclosing(reader.read(step.first_entry_id, last_entry_id)) as chunks:
                async for frames in chunks:
                    if reader.metadata is not known:
                        # Entries were moved, as the reader found: the next readers need not search.
                        known = reader.metadata
                        self._context.ledger_cache.correct(known)
                    yield frames

    async def _reader_of(self, ledger_id: int, last_entry_id: int) -> LedgerReader:
        reader = self._reader
        if reader is None or reader.metadata.ledger_id != ledger_id:
            known = await self._context.ledger_cache.read({ledger_id: last_entry_id})
            reader = self._reader = self._context.ledgers.open_ledger_of(known[ledger_id])
        return reader

    async def follow(
        self,
        step: FollowExtent,
        *,
        on_begin: Callable[[], None],
        on_entry: Callable[[EntryFrame], bool],
    ) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield the entries of an open extent in order, until its ledger is closed.

        `on_begin` is called once the ledger is open, and `on_entry` as by `LedgerReader.follow`.

        Raises: as `LedgerReader.follow`; MetadataError.
        """
        with self._anew_after_failure():
            reader = await self._context.ledgers.open_ledger(step.extent.ledger_id)
            steps = reader.follow(step.first_entry_id, on_answer=self._heard, on_entry=on_entry)
            self._followed = reader
            self._heard()
            on_begin()
            try:
                async with aclosing(steps):
                    async for each in steps:
                        yield each.frames
            finally:
                if self._followed is reader:
                    self._followed = None

    @contextmanager
    def _anew_after_failure(self) -> Iterator[None]:
        try:
            yield
        except DLError:
            self._reader = None
            raise

    def _heard(self) -> None:
        self.heard_s = asyncio.get_running_loop().time()

    async def is_readable(self, step: FollowExtent) -> bool:
        """Return whether the first entry of an open extent is confirmed; its follower learns it.

        Raises: LedgerNotFoundError, LedgerReadError, MetadataError.
        """
        ledger_id = step.extent.ledger_id
        reader = await self._context.ledgers.open_ledger(ledger_id)
        confirmed = await reader.read_last_add_confirmed()
        followed = self._followed
        if followed is not None and followed.metadata.ledger_id == ledger_id:
            followed.note_end(confirmed)  # its bookies may never get the LAC of a dead writer
        return confirmed >= step.first_entry_id
