"""Reads a ledger: its end, ranges of entries, and new entries as they are confirmed."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from dlcore.base.background import side_tasks, together
from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    LedgerReadError,
    MetadataError,
    NoSuchLedgerError,
)
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.ledger.reading.confirmed import confirmed_of, judge_end
from dlcore.ledger.reading.follow import FollowStep
from dlcore.ledger.reading.follow_driver import LedgerFollower
from dlcore.ledger.reading.range_read_driver import RangeRead
from dlcore.wire.port import ENTRY_ID_MAX, HeldEntries

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from dlcore.base.config import LedgerClientConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.ledger.placing.health import BookieHealth
    from dlcore.ledger.port import ColdEntries, Follower
    from dlcore.ledger.reading.confirmed import LedgerEnd
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import BookieClient, EntryRange, FollowUpdate

__all__ = ["FollowStep", "LedgerReader"]

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.005
"""The first wait for answers that could decide a ledger's end; each next one is twice as long."""
_PATIENCE_S_MAX = 1.0
_CLAIM_PATIENCE_S = 0.1
"""The wait from which on a LAC that one bookie alone returns is checked by lists of entries."""


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
        cold: ColdEntries | None = None,
    ) -> None:
        self._metadata = metadata
        self._cold = cold
        self._bookies = bookies
        self._ledger_store = ledger_store
        self._config = config
        self._health = health
        self._followers: set[Follower] = set()

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
        """Read the metadata again, if there is a store and the ledger was not closed.

        With `fresh` the metadata is that of now, otherwise it may be a moment old.
        """
        if self._ledger_store is not None and not self.is_closed:
            stored = await self._ledger_store.read(self._metadata.ledger_id, fresh=fresh)
            self._metadata = stored.metadata
        return self._metadata

    async def read_last_add_confirmed(self) -> int:
        """Return the last entry that may be read now; -1: none.

        Every entry whose acknowledgement any client got before this call is at or below the
        result, and every entry up to the result stays in the ledger.  If too few bookies say which
        entries they hold, and their LAC does not suffice, they are asked again, for at most
        `read_timeout_s`.  A LAC that one bookie alone returns counts up to where no quorum proves
        that it is false.

        Raises:
            LedgerReadError: too few bookies answered, or it could not be found out whether an
                entry is acknowledged.
            LedgerNotFoundError: the ledger was deleted.
            MetadataError: the store did not answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.read_timeout_s
        patience_s = _PATIENCE_S
        while not self.is_closed:
            ensemble = self._metadata.last_ensemble
            # Both at once: the answers count if the metadata, read after the call, still has this
            # ensemble.  Bookies that were replaced answer too, but lack the later entries.
            async with side_tasks() as tasks:
                asked = tasks.start(self._ask_end(ensemble, patience_s))
                metadata = await self.refresh(fresh=True)
                if metadata.state is LedgerState.CLOSED or metadata.last_ensemble != ensemble:
                    continue
                end = await asked
            # The LAC of one bookie alone may be false: the entries that bookies hold decide.  But
            # the others may only be late, and to list all entries costs more than to ask again.
            if not end.is_vouched:
                if patience_s < _CLAIM_PATIENCE_S:
                    await asyncio.sleep(patience_s)
                    patience_s *= 2
                    continue
                confirmed = await self.disprove(ensemble, vouched=end.vouched, claimed=end.claimed)
                if confirmed < end.claimed:
                    return confirmed
            # Entries above the LAC count only if no ensemble change or recovery drops them.
            if end.is_decided and (end.held == end.claimed or await self._stays(ensemble)):
                return end.held
            if self._ledger_store is None:
                return end.claimed  # held entries count only together with the current metadata
            if loop.time() >= deadline:
                raise self._undecided(end)
            await asyncio.sleep(patience_s)
            patience_s = min(2 * patience_s, _PATIENCE_S_MAX)
        return self._metadata.last_entry_id

    def note_end(self, last_entry_id: int) -> None:
        """Tell the followers of this reader that entries may be read up to this one."""
        for follower in tuple(self._followers):
            follower.note_end(last_entry_id)

    async def _stays(self, ensemble: Ensemble) -> bool:
        """Return whether the entries that these bookies hold are sure to stay in the ledger."""
        if self._ledger_store is None:
            return False
        metadata = await self.refresh(fresh=True)
        return metadata.state is LedgerState.OPEN and metadata.last_ensemble == ensemble

    def _undecided(self, end: LedgerEnd) -> LedgerReadError:
        state = self._metadata.state.name
        return LedgerReadError(
            f"ledger {self._metadata.ledger_id} ({state}): its last acknowledged entry is unknown "
            f"after {self._config.read_timeout_s} s: entry {end.claimed} is acknowledged, but too "
            "few bookies answer about later ones, or a recovery does not end; recover the log to "
            "decide it"
        )

    async def _ask_end(self, ensemble: Ensemble, patience_s: float) -> LedgerEnd:
        """Return the ledger's end by enough bookies to know of every acknowledgement.

        If their answers do not decide it, or one alone claims a LAC, the others get `patience_s`
        more to answer.
        """
        held: dict[int, HeldEntries] = {}
        errors: list[str] = []
        end: LedgerEnd | None = None
        async with side_tasks() as asking:
            tasks = {
                asking.start(self._ask_held_by(bookie)): position
                for position, bookie in enumerate(ensemble.bookies)
            }
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=None if end is None else patience_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in sorted(done, key=tasks.__getitem__):  # sorted: one seed gives one trace
                    position = tasks[task]
                    try:
                        held[position] = task.result()
                    except DLError as error:
                        errors.append(f"{ensemble.bookies[position]}: {error}")
                end = judge_end(self._metadata.quorum, ensemble.first_entry_id, held)
                if end is not None and ((end.is_decided and end.is_vouched) or not done):
                    break
        if end is None:
            raise LedgerReadError(
                f"ledger {self._metadata.ledger_id}: too few bookies returned its LAC: "
                f"{'; '.join(errors)}"
            )
        return end

    async def disprove(self, ensemble: Ensemble, *, vouched: int, claimed: int) -> int:
        """Return up to where a claimed LAC holds, by the entries that the bookies hold."""
        held = await together(*map(self._held_by, ensemble.bookies))
        confirmed = confirmed_of(
            self._metadata.quorum,
            {position: ranges for position, ranges in enumerate(held) if ranges is not None},
            vouched=vouched,
            claimed=claimed,
        )
        if confirmed < claimed:
            logger.warning(
                "ledger=%d: a bookie claims the LAC %d, but entry %d is not on an ack quorum; to "
                "do: see which bookie lies or lost data (dlog ledger check); readers are not "
                "given more",
                self._metadata.ledger_id,
                claimed,
                confirmed + 1,
            )
        return confirmed

    async def _held_by(self, bookie: BookieId) -> Sequence[EntryRange] | None:
        """Return the ranges of the ledger that a bookie holds; None: unknown."""
        try:
            return await self._bookies.list_entries(bookie, ledger_id=self._metadata.ledger_id)
        except NoSuchLedgerError:
            return ()
        except DLError:
            return None

    def updates(
        self, bookie: BookieId, first: int, take: Callable[[FollowUpdate], bool]
    ) -> AsyncGenerator[FollowUpdate, None]:
        """Yield what a bookie pushes from an entry on; see `BookieClient.follow`."""
        return self._bookies.follow(
            bookie, ledger_id=self._metadata.ledger_id, first_entry_id=first, take=take
        )

    async def ask_all(
        self, bookies: Sequence[BookieId], on_answer: Callable[[], None]
    ) -> Sequence[tuple[BookieId, HeldEntries]]:
        """Return what the bookies know that answer; `on_answer` is called at each answer."""

        async def ask(bookie: BookieId) -> tuple[BookieId, HeldEntries] | None:
            try:
                held = await self._ask_held_by(bookie)
            except DLError:
                return None
            on_answer()
            return bookie, held

        answers = await together(*map(ask, bookies))
        return [each for each in answers if each is not None]

    async def _ask_held_by(self, bookie: BookieId) -> HeldEntries:
        """Return the LAC that a bookie knows, and the entries that it holds above it.

        Raises:
            BookieError: the bookie gave no answer.
        """
        try:
            return await self._bookies.read_held(bookie, ledger_id=self._metadata.ledger_id)
        except NoSuchLedgerError:
            # A complete answer: the bookie holds no entry of the ledger.
            return HeldEntries(-1, ENTRY_ID_MAX, ())

    async def read(self, first: int, last: int) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield verified entries `first` to `last`, both included, in order, many at a time.

        The caller keeps `last` at or below the LAC: later entries may vanish with their writer.

        Raises:
            LedgerReadError: no replica could give an entry; the message has each one's answer.
            ConfigurationError: the range is not within the ledger.
        """
        self._check_range(first, last)
        if self._metadata.is_cold:
            if self._cold is None:
                raise ConfigurationError(
                    f"ledger {self._metadata.ledger_id} is cold, and this client reads from "
                    "bookies only"
                )
            async with aclosing(self._read_cold(self._cold, first, last)) as found:
                async for entries in found:
                    yield entries
            return
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

    async def _read_cold(
        self, cold: ColdEntries, first: int, last: int
    ) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield entries of objects; if one is missing or damaged, of those that took its place."""
        next_entry_id = first
        while next_entry_id <= last:
            objects = self._metadata.objects
            try:
                async with aclosing(cold.read(self._metadata, next_entry_id, last)) as found:
                    async for entries in found:
                        next_entry_id = entries[-1].entry_id + 1
                        yield entries
            except LedgerReadError:
                await self._read_metadata_again()
                if self._metadata.objects == objects:
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
        """Read the metadata again and return whether other bookies store the entry now."""
        await self._read_metadata_again()
        return self._metadata.ensemble_of(entry_id).bookies != ensemble.bookies

    async def _read_metadata_again(self) -> None:
        """Read the metadata, if there is a store and it answers.

        Raises:
            LedgerNotFoundError: the ledger was deleted.
        """
        if self._ledger_store is None:
            return
        try:
            stored = await self._ledger_store.read(self._metadata.ledger_id, fresh=True)
        except MetadataError as error:
            logger.warning(
                "metadata not refreshed ledger=%d: %s; to do: see to ZooKeeper if this goes on; "
                "the reader goes on with what it knows",
                self._metadata.ledger_id,
                error,
            )
        else:
            self._metadata = stored.metadata

    def follow(
        self,
        first: int,
        *,
        on_answer: Callable[[], None] = lambda: None,
        on_entry: Callable[[EntryFrame], bool] = lambda _: False,
    ) -> AsyncGenerator[FollowStep, None]:
        """Yield entries from `first` on as they are confirmed, until the ledger is closed.

        One bookie pushes.  Another replaces it when it fails or falls behind, and entries that it
        does not hold are read from others.  The first step comes soon and may be empty: it reports
        the LAC.  Without a metadata store the end of the ledger is not seen.

        It waits for bookies for ever.  `on_answer` is called at each answer of a bookie; they are
        asked about once a second.  By this the caller can decide to give up.  It must not raise.

        An entry that comes while the caller waits for a step is passed to `on_entry` at once.  If
        that returns True, the entry was taken, and no step contains it.

        Raises:
            LedgerReadError: no replica could give a confirmed entry.
            LedgerNotFoundError: the ledger was deleted.
        """
        if first < 0:
            raise ConfigurationError(f"first={first}: entry ids start at 0")
        return LedgerFollower(self, first=first, on_answer=on_answer, on_entry=on_entry).steps()

    @contextmanager
    def informing(self, follower: Follower) -> Iterator[None]:
        """Tell a follower of changes of the metadata, and of entries that may be read."""
        store, ledger_id = self._ledger_store, self._metadata.ledger_id
        unwatch = None if store is None else store.watch(ledger_id, follower.metadata_changed)
        self._followers.add(follower)
        try:
            yield
        finally:
            self._followers.discard(follower)
            if unwatch is not None:
                unwatch()
