"""Reads a ledger: its last add confirmed, ranges of entries, entries as they are confirmed."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.errors import (
    ConfigurationError,
    DLError,
    LedgerReadError,
    MetadataError,
    NoSuchLedgerError,
)
from dlcore.ledger.metadata.quorum import is_covered
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.ledger.reading.claims import confirmed_of, vouched_and_claimed
from dlcore.ledger.reading.follower import FollowStep, LedgerFollower
from dlcore.ledger.reading.range_read_driver import RangeRead

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from dlcore.config import LedgerClientConfig
    from dlcore.ids import BookieId
    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.ledger.placing.health import BookieHealth
    from dlcore.ledger.port import BookieClient, EntryRange
    from dlcore.wire.digest import EntryFrame

__all__ = ["FollowStep", "LedgerReader"]

logger = logging.getLogger(__name__)


class LedgerReader:
    """A view of one ledger; made by `LedgerClient`, used on one event loop, holds nothing open."""

    def __init__(
        self,
        metadata: LedgerMetadata,
        *,
        bookies: BookieClient,
        ledger_store: LedgerStore | None,
        config: LedgerClientConfig,
        health: BookieHealth,
    ) -> None:
        self._metadata = metadata
        self._bookies = bookies
        self._ledger_store = ledger_store
        self._config = config
        self._health = health

    def __repr__(self) -> str:
        return f"<LedgerReader {self._metadata.ledger_id} {self._metadata.state.name}>"

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as last read."""
        return self._metadata

    @property
    def is_closed(self) -> bool:
        """Whether the ledger is known to have its end."""
        return self._metadata.state is LedgerState.CLOSED

    async def refresh(self, *, fresh: bool = False) -> LedgerMetadata:
        """Read the metadata again, if there is a store and anything can have changed.

        With `fresh` as it is now, otherwise as it was a moment ago.
        """
        if self._ledger_store is not None and not self.is_closed:
            stored = await self._ledger_store.read(self._metadata.ledger_id, fresh=fresh)
            self._metadata = stored.metadata
        return self._metadata

    async def read_last_add_confirmed(self) -> int:
        """Return the last entry of a closed ledger, else the LAC that the bookies know; -1: none.

        Sees at least every LAC whose `LedgerWriter.publish_lac` returned before this was called.
        One that a bookie tells alone counts as far as no quorum proves that it cannot be true.

        Raises:
            LedgerReadError: too few bookies answered.
            LedgerNotFoundError: the ledger was deleted.
            MetadataError: the store did not answer.
        """
        if self.is_closed:
            return self._metadata.last_entry_id
        while True:
            ensemble = self._metadata.last_ensemble
            # At once: what bookies say counts if the ensemble is theirs still, as read after the
            # call.  Those that were replaced answer too, without what came after them.
            asked = asyncio.create_task(self._ask_lac(ensemble))
            try:
                metadata = await self.refresh(fresh=True)
                if metadata.state is LedgerState.CLOSED:
                    return metadata.last_entry_id
                if metadata.last_ensemble == ensemble:
                    # Entries of earlier ensembles are confirmed, whatever these bookies know.
                    floor = ensemble.first_entry_id - 1
                    return await self._confirmed_of(ensemble, await asked, floor=floor)
            finally:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    async def _ask_lac(self, ensemble: Ensemble) -> dict[int, int]:
        """Return LACs by position, of so many bookies that they know every published one."""
        tasks = {
            asyncio.create_task(self.ask_lac_of(bookie)): position
            for position, bookie in enumerate(ensemble.bookies)
        }
        lacs: dict[int, int] = {}
        answers: list[str] = []
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=tasks.__getitem__):  # so that a seed is one trace
                    position = tasks[task]
                    try:
                        lacs[position] = task.result()
                    except DLError as error:
                        answers.append(f"{ensemble.bookies[position]}: {error}")
                if is_covered(self._metadata.quorum, lacs.keys()):
                    return lacs
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise LedgerReadError(
            f"ledger {self._metadata.ledger_id}: too few bookies told its LAC: {'; '.join(answers)}"
        )

    async def _confirmed_of(
        self, ensemble: Ensemble, lacs: Mapping[int, int], *, floor: int
    ) -> int:
        vouched, claimed = vouched_and_claimed(lacs.values(), floor=floor)
        if claimed == vouched:
            return claimed
        return await self.disprove(ensemble, vouched=vouched, claimed=claimed)

    async def disprove(self, ensemble: Ensemble, *, vouched: int, claimed: int) -> int:
        """Return up to where a LAC stands that is a claim, by what the bookies prove to hold."""
        held = await asyncio.gather(*map(self._held_by, ensemble.bookies))
        confirmed = confirmed_of(
            self._metadata.quorum,
            {position: ranges for position, ranges in enumerate(held) if ranges is not None},
            vouched=vouched,
            claimed=claimed,
        )
        if confirmed < claimed:
            logger.warning(
                "ledger=%d: a bookie says that entry %d is confirmed, others prove that %d is not",
                self._metadata.ledger_id,
                claimed,
                confirmed + 1,
            )
        return confirmed

    async def _held_by(self, bookie: BookieId) -> Sequence[EntryRange] | None:
        """Return what a bookie proves to hold of the ledger; None: unknown."""
        try:
            return await self._bookies.list_entries(bookie, ledger_id=self._metadata.ledger_id)
        except NoSuchLedgerError:
            return ()
        except DLError:
            return None

    async def ask_lac_of(self, bookie: BookieId) -> int:
        """Return the LAC that one bookie knows, -1 if it knows nothing of the ledger.

        Raises:
            BookieError: it did not say.
        """
        try:
            return await self._bookies.read_lac(
                bookie, ledger_id=self._metadata.ledger_id, fence=False
            )
        except NoSuchLedgerError:
            return -1

    async def read(self, first: int, last: int) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield verified entries `first` to `last`, both included, in order, many at a time.

        The caller keeps `last` at or below the LAC: what is beyond may vanish with its writer.

        Raises:
            LedgerReadError: no replica could give an entry; the message has each one's answer.
            ConfigurationError: the range is not within the ledger.
        """
        self._check_range(first, last)
        next_entry_id = first
        while next_entry_id <= last:
            ensemble, end = self._fragment(next_entry_id, last)
            chunks = RangeRead(
                self._bookies,
                self._config,
                self._health,
                ledger_id=self._metadata.ledger_id,
                ensemble=ensemble,
                quorum=self._metadata.quorum,
                first_entry_id=next_entry_id,
                last_entry_id=end,
            ).chunks()
            try:
                async with aclosing(chunks):
                    async for entries in chunks:
                        next_entry_id = entries[-1].entry_id + 1
                        yield entries
            except LedgerReadError:
                if not await self._has_moved(next_entry_id, ensemble):
                    raise

    def _check_range(self, first: int, last: int) -> None:
        if first < 0:
            raise ConfigurationError(f"first={first}: entry ids start at 0")
        if self.is_closed and last > self._metadata.last_entry_id:
            raise ConfigurationError(
                f"last={last}: ledger {self._metadata.ledger_id} ends with entry "
                f"{self._metadata.last_entry_id}"
            )

    def _fragment(self, entry_id: int, last: int) -> tuple[Ensemble, int]:
        """Return the ensemble of an entry, and the last entry up to `last` that it stores."""
        ensemble = self._metadata.ensemble_of(entry_id)
        following = (
            each.first_entry_id - 1
            for each in self._metadata.ensembles
            if each.first_entry_id > entry_id
        )
        return ensemble, min(last, next(following, last))

    async def _has_moved(self, entry_id: int, ensemble: Ensemble) -> bool:
        """Read the metadata again and tell whether other bookies store the entry now."""
        if self._ledger_store is None:
            return False
        try:
            stored = await self._ledger_store.read(self._metadata.ledger_id, fresh=True)
        except MetadataError as error:
            logger.warning("metadata not refreshed ledger=%d: %s", self._metadata.ledger_id, error)
            return False
        self._metadata = stored.metadata
        return stored.metadata.ensemble_of(entry_id).bookies != ensemble.bookies

    def follow(
        self,
        first: int,
        *,
        on_answer: Callable[[], None] = lambda: None,
        on_entry: Callable[[EntryFrame], bool] = lambda _: False,
    ) -> AsyncGenerator[FollowStep, None]:
        """Yield entries from `first` on as they are confirmed, until the ledger is closed.

        One bookie pushes; another takes over when it fails or falls behind, and entries that it
        does not hold are read from others.  The first step comes soon and may be empty: it tells
        the LAC. Without a metadata store the end of the ledger is not seen.

        It waits for bookies for ever; `on_answer` is called whenever one of them said something,
        which they are asked for about once a second, so that the caller may give up.

        An entry that comes while the caller waits for a step is offered to `on_entry`, at once;
        where that returns True it was taken, and no step brings it.

        Raises:
            LedgerReadError: no replica could give a confirmed entry.
            LedgerNotFoundError: the ledger was deleted.
        """
        if first < 0:
            raise ConfigurationError(f"first={first}: entry ids start at 0")
        return LedgerFollower(
            self,
            first=first,
            bookies=self._bookies,
            ledger_store=self._ledger_store,
            on_answer=on_answer,
            on_entry=on_entry,
        ).steps()
