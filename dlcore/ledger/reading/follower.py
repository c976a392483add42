"""Follows an open ledger: one bookie pushes, and the others replace it and fill its gaps.

A task hands out the pushed entries in steps; it also handles changes of metadata, silence and
failures.  Mostly nothing of that happens, and the pushed entries are the next ones.  Then a caller
that passed `on_entry` gets each entry at once, one turn of the loop earlier and for half the work.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dlcore.base.background import forget_frames
from dlcore.base.errors import (
    BookieUnavailableError,
    DigestMismatchError,
    DLError,
    LedgerReadError,
    MetadataError,
)
from dlcore.ledger.metadata.quorum import first_followed
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.port import HeldEntries
from dlcore.wire.digest import EntryFrame, decode_frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata
    from dlcore.ledger.port import BookieClient, FollowUpdate

logger = logging.getLogger(__name__)

_SILENCE_S = 1.0
"""After this long without news all bookies are asked whether they know more."""
_FIRST_SILENCE_S = 0.02
"""The first such interval: a live writer sends its LAC sooner, and a dead one never does."""
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 1.0


@dataclass(frozen=True, slots=True)
class FollowStep:
    """Confirmed entries that come next, the LAC known now, and whether the ledger ends with them.

    `closed` is True in the last step only, once every entry was delivered.
    """

    frames: Sequence[EntryFrame]
    last_add_confirmed: int
    closed: bool


class FollowedLedger(Protocol):
    """The part of `LedgerReader` that a follower uses."""

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as last read."""

    @property
    def is_closed(self) -> bool:
        """Whether the ledger is known to have its end."""

    async def refresh(self, *, fresh: bool = False) -> LedgerMetadata:
        """Read the metadata again."""

    async def read_last_add_confirmed(self) -> int:
        """Return the last entry that may be read now."""

    async def ask_held_by(self, bookie: BookieId) -> HeldEntries:
        """Return the LAC that a bookie knows, and the entries that it holds above it."""

    async def disprove(self, ensemble: Ensemble, *, vouched: int, claimed: int) -> int:
        """Return up to where a claimed LAC holds."""

    def read(self, first: int, last: int) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield verified entries in order."""


class _Subscription:
    """The stream of updates from one bookie, one at a time."""

    def __init__(
        self,
        bookie: BookieId,
        updates: AsyncIterator[FollowUpdate],
        use_at_once: Callable[[FollowUpdate], bool],
        on_news: Callable[[], None],
    ) -> None:
        self.bookie = bookie
        self._updates = updates
        self._use_at_once = use_at_once
        self._on_news = on_news
        self._update: FollowUpdate | None = None
        self._is_in_use = False
        self._is_used = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._fetch())
        self._task.add_done_callback(lambda _: on_news())

    async def _fetch(self) -> None:
        async for update in self._updates:
            if self._use_at_once(update):
                continue
            self._update = update
            self._on_news()
            # The next update is not requested yet: a slow caller then slows the bookie down.
            await self._is_used.wait()
            self._is_used.clear()

    @property
    def has_news(self) -> bool:
        """Whether `take` has an update or an error."""
        return self._update is not None or self._task.done()

    def take(self) -> FollowUpdate:
        """Return the update that arrived, or raise the error that ended the stream."""
        update, self._update = self._update, None
        if update is None:
            self._task.result()
            raise BookieUnavailableError(f"{self.bookie} ended the stream")
        self._is_in_use = True
        return update

    def go_on(self) -> None:
        """Ask for the next update, if one was taken: the caller is done with it."""
        if self._is_in_use:
            self._is_in_use = False
            self._is_used.set()

    async def aclose(self) -> None:
        """End the request, also if the caller that waits here is cancelled."""
        try:
            await _end(self._task)
        finally:
            close = getattr(self._updates, "aclose", None)
            if close is not None:
                await close()


class LedgerFollower:
    """One run of `LedgerReader.follow`; iterate over `steps` once."""

    def __init__(
        self,
        reader: FollowedLedger,
        *,
        first: int,
        bookies: BookieClient,
        ledger_store: LedgerStore | None,
        followers: set[LedgerFollower],
        on_answer: Callable[[], None],
        on_entry: Callable[[EntryFrame], bool],
    ) -> None:
        self._reader = reader
        self._bookies = bookies
        self._on_answer = on_answer
        self._on_entry = on_entry
        self._ledger_store = ledger_store
        self._followers = followers
        self._ledger_id = reader.metadata.ledger_id
        self._loop = asyncio.get_running_loop()
        self._next = first
        self._last_add_confirmed = -1
        self._told_end = -1  # from a read of the ledger's end, not from the followed bookie
        self._subscription: _Subscription | None = None
        self._asking: asyncio.Task[tuple[int, BookieId | None]] | None = None
        # Which bookie to follow next, modulo the ensemble's size.
        self._position = first_followed(self._ledger_id, self._reader.metadata.quorum.ensemble_size)
        self._failures = 0  # in a row
        self._backoff_s = _BACKOFF_S
        self._news = asyncio.Event()
        self._is_first = True  # the first step, which reports the LAC, is due
        self._is_waiting = False  # for news: everything known was handed out
        self._is_stale = False  # the metadata must be read again
        self._is_silent = False
        self._silence_s = _FIRST_SILENCE_S
        self._heard_s = self._loop.time()
        self._ticker: asyncio.TimerHandle | None = None
        self._is_fenced = False
        self._told_by: BookieId | None = None  # the bookie that sent the LAC
        self._distrusted: set[BookieId] = set()  # bookies that sent a false LAC

    async def steps(self) -> AsyncGenerator[FollowStep, None]:
        """Yield steps until the ledger's end."""
        unsubscribe = (
            self._ledger_store.watch(self._ledger_id, self._metadata_changed)
            if self._ledger_store is not None
            else None
        )
        self._heard_s = self._loop.time()
        self._listen()
        self._followers.add(self)
        try:
            while not self._reader.is_closed:
                entries = await self._next_entries()
                if self._is_stale:
                    self._is_stale = False
                    await self._refresh()
                if entries is None:
                    continue
                async with aclosing(self._deliver(entries)) as delivered:
                    async for step in delivered:
                        self._is_first = False
                        yield step
                if self._is_first:
                    self._is_first = False
                    yield FollowStep((), self._last_add_confirmed, closed=False)
            async with aclosing(self._finish()) as rest:
                async for step in rest:
                    yield step
        finally:
            if unsubscribe is not None:
                unsubscribe()
            assert self._ticker is not None
            self._ticker.cancel()
            self._followers.discard(self)
            try:
                await self._stop_asking()
            finally:
                await self._unsubscribe()

    def tell_end(self, last_entry_id: int) -> None:
        """Deliver up to this entry, which may be read, without waiting for a bookie's message."""
        if last_entry_id > max(self._told_end, self._last_add_confirmed):
            self._told_end = last_entry_id
            self._news.set()

    def _metadata_changed(self) -> None:
        self._is_stale = True
        self._news.set()

    async def _refresh(self) -> None:
        """Read the metadata again; follow another bookie if the followed one was replaced."""
        try:
            metadata = await self._reader.refresh()
        except MetadataError as error:
            # The watch fires again after a reconnection; until then the bookies go on.
            logger.info("metadata not refreshed ledger=%d: %s", self._ledger_id, error)
            return
        members = metadata.last_ensemble.bookies
        if self._subscription is not None and self._subscription.bookie not in members:
            await self._unsubscribe()

    async def _next_entries(self) -> Sequence[EntryFrame] | None:
        """Wait for news, and return the entries that came with it; None: there was nothing."""
        if self._subscription is None:
            self._subscribe()
        subscription = self._subscription
        assert subscription is not None
        subscription.go_on()
        self._is_waiting = True
        try:
            await self._news.wait()
        finally:
            self._is_waiting = False
        self._news.clear()
        self._heard_s = self._loop.time()
        is_silent, self._is_silent = self._is_silent, False
        asking = self._asking
        is_answered = asking is not None and asking.done()
        if subscription.has_news:
            if is_answered or self._told_end > self._last_add_confirmed:
                self._news.set()  # the answers are handled by the next call
            return await self._take_update(subscription)
        if is_answered:
            assert asking is not None
            await self._take_answers(asking)
        if self._told_end > self._last_add_confirmed:
            self._last_add_confirmed = self._told_end
            return ()
        if is_silent and asking is None:
            self._asking = self._loop.create_task(self._ask_members())
            self._asking.add_done_callback(lambda _: self._news.set())
        return None

    def _listen(self) -> None:
        """Set `_is_silent` if there was no news for `_silence_s`."""
        now_s = self._loop.time()
        if now_s >= self._heard_s + self._silence_s:
            self._heard_s = now_s
            self._silence_s = _SILENCE_S
            self._is_silent = True
            self._news.set()
        self._ticker = self._loop.call_at(self._heard_s + self._silence_s, self._listen)

    def _subscribe(self) -> None:
        members = self._reader.metadata.last_ensemble.bookies
        while members[self._position % len(members)] in self._distrusted and not (
            self._distrusted.issuperset(members)
        ):
            self._position += 1
        bookie = members[self._position % len(members)]
        updates = self._bookies.follow(bookie, ledger_id=self._ledger_id, first_entry_id=self._next)
        self._subscription = _Subscription(bookie, updates, self._use_at_once, self._news.set)

    def _use_at_once(self, update: FollowUpdate) -> bool:
        """Hand out the entries of an update if nothing else is due; return whether all were taken.

        The remaining ones come with a step.
        """
        # Only while `steps` waits, else entries could pass those of a step that is being delivered.
        if not self._is_waiting or self._is_first or update.fenced:
            return False
        lac = max(self._last_add_confirmed, update.last_add_confirmed)
        for frame in update.frames:
            try:
                entry = decode_frame(frame, ledger_id=self._ledger_id)
            except DigestMismatchError:
                return False
            if entry.entry_id != self._next or entry.entry_id > lac or not self._on_entry(entry):
                return False
            self._next += 1
        if self._next <= lac:
            return False  # confirmed entries are missing here: `_deliver` reads them from others
        self._heard_s = self._loop.time()
        self._heed(update)
        return True

    async def _take_update(self, subscription: _Subscription) -> Sequence[EntryFrame] | None:
        try:
            update = subscription.take()
        except DLError as error:
            await self._switch(error)
            return None
        self._heed(update)
        # A fence announces a recovery, which changes the metadata; the watch may come late.
        if update.fenced and not self._is_fenced:
            self._is_fenced = True
            self._is_stale = True
        return self._verify(subscription.bookie, update)

    def _heed(self, update: FollowUpdate) -> None:
        """Note that the followed bookie works."""
        self._on_answer()
        self._failures = 0
        self._backoff_s = _BACKOFF_S
        if update.last_add_confirmed > self._last_add_confirmed:
            self._last_add_confirmed = update.last_add_confirmed
            self._told_by = None if self._subscription is None else self._subscription.bookie

    def _verify(self, bookie: BookieId, update: FollowUpdate) -> Sequence[EntryFrame]:
        entries: list[EntryFrame] = []
        for frame in update.frames:
            try:
                entries.append(decode_frame(frame, ledger_id=self._ledger_id))
            except DigestMismatchError as error:
                # Another replica has the entry: the gap is read from there.
                logger.warning(
                    "damaged entry ledger=%d bookie=%s: %s", self._ledger_id, bookie, error
                )
        return entries

    async def _switch(self, error: DLError) -> None:
        """Go on to the next bookie; after a round without success, pause and read the metadata."""
        logger.info("follow failed ledger=%d: %s", self._ledger_id, error)
        await self._unsubscribe()
        self._position += 1
        self._failures += 1
        if self._failures % self._reader.metadata.quorum.ensemble_size == 0:
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, _BACKOFF_S_MAX)
            await self._refresh()

    async def _ask_members(self) -> tuple[int, BookieId | None]:
        """Return the last entry that may be read, and the bookie that sent that LAC, if one did.

        The followed bookie is asked too: its pushed message may have been lost.
        """
        if self._is_fenced:
            await self._refresh()
        members = self._reader.metadata.last_ensemble.bookies
        answers = await asyncio.gather(*map(self._ask, members), return_exceptions=True)
        best, best_bookie, is_more_held = self._last_add_confirmed, None, False
        for bookie, answer in zip(members, answers, strict=True):
            if isinstance(answer, HeldEntries):
                if answer.last_add_confirmed > best and bookie not in self._distrusted:
                    best, best_bookie = answer.last_add_confirmed, bookie
                is_more_held |= any(last > best for _, last in answer.ranges)
            elif not isinstance(answer, DLError):
                raise answer
        # Bookies hold entries above every known LAC: their writer may be dead, and its last LAC
        # may never arrive.  Then the entries themselves decide.
        if best_bookie is None and is_more_held:
            best = await self._read_end(best)
        return best, best_bookie

    async def _ask(self, bookie: BookieId) -> HeldEntries:
        held = await self._reader.ask_held_by(bookie)
        self._on_answer()
        return held

    async def _read_end(self, known: int) -> int:
        """Return the last entry that may be read if no bookie got the LAC: the writer is gone."""
        try:
            return await self._reader.read_last_add_confirmed()
        except (LedgerReadError, MetadataError) as error:
            logger.info("end not known ledger=%d: %s", self._ledger_id, error)
            return known

    async def _take_answers(self, asking: asyncio.Task[tuple[int, BookieId | None]]) -> None:
        """Follow the bookie that knows a higher LAC than the followed one sent, if there is one."""
        self._asking = None
        last_entry_id, bookie = asking.result()
        members = self._reader.metadata.last_ensemble.bookies
        if bookie in members and last_entry_id > self._last_add_confirmed:
            self._position = members.index(bookie)
            await self._unsubscribe()
        if last_entry_id > self._told_end:
            self._told_end, self._told_by = last_entry_id, bookie

    async def _stop_asking(self) -> None:
        if self._asking is not None:
            await _end(self._asking)

    async def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.aclose()

    async def _deliver(self, entries: Sequence[EntryFrame]) -> AsyncGenerator[FollowStep, None]:
        """Yield all entries up to the LAC: pushed ones, and the gaps between them from others."""
        lac = self._last_add_confirmed
        wanted = {e.entry_id: e for e in entries if self._next <= e.entry_id <= lac}
        pushed = [wanted[entry_id] for entry_id in sorted(wanted)]
        taken = 0
        while self._next <= lac:
            run_end = taken
            while (
                run_end < len(pushed) and pushed[run_end].entry_id == self._next + run_end - taken
            ):
                run_end += 1
            if run_end > taken:
                run = pushed[taken:run_end]
                taken = run_end
                self._next = run[-1].entry_id + 1
                yield FollowStep(run, lac, closed=False)
                continue
            gap_end = pushed[taken].entry_id - 1 if taken < len(pushed) else lac
            try:
                async with aclosing(self._read(gap_end)) as chunks:
                    async for chunk in chunks:
                        yield FollowStep(chunk, lac, closed=False)
            except LedgerReadError:
                if not await self._is_disproved(lac):
                    raise
                return

    async def _is_disproved(self, lac: int) -> bool:
        """Check a LAC if an entry below it cannot be read; return whether the LAC is false.

        If it is, it counts up to the entry that may be true.  The bookie that sent it is neither
        followed nor asked any more, unless all bookies are like that.
        """
        metadata = self._reader.metadata
        if metadata.state is LedgerState.CLOSED:
            return False
        vouched = self._next - 1  # these entries were read, so they exist
        confirmed = await self._reader.disprove(
            metadata.last_ensemble, vouched=vouched, claimed=lac
        )
        if confirmed >= lac:
            return False
        self._last_add_confirmed = confirmed
        self._told_end = min(self._told_end, confirmed)
        if self._told_by is not None:
            self._distrusted.add(self._told_by)
        # Some bookie must be followed: each LAC is checked again when an entry is missing.
        if self._distrusted.issuperset(metadata.last_ensemble.bookies):
            self._distrusted.clear()
        await self._unsubscribe()
        return True

    async def _read(self, last: int) -> AsyncGenerator[Sequence[EntryFrame], None]:
        chunks = self._reader.read(self._next, last)
        async with aclosing(chunks):
            async for chunk in chunks:
                self._next = chunk[-1].entry_id + 1
                yield chunk

    async def _finish(self) -> AsyncGenerator[FollowStep, None]:
        """Yield the rest of the closed ledger."""
        metadata = self._reader.metadata
        assert metadata.state is LedgerState.CLOSED
        last = metadata.last_entry_id
        await self._unsubscribe()
        if self._next > last:
            yield FollowStep((), last, closed=True)
            return
        async with aclosing(self._read(last)) as chunks:
            async for chunk in chunks:
                yield FollowStep(chunk, last, closed=self._next > last)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task whose result is not needed, and wait for its end, also if cancelled."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    forget_frames(task)
