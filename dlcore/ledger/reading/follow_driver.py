"""Runs a `LedgerFollow`: streams of bookies, reads, the ticks, and steps for the caller."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Protocol, assert_never

from dlcore.base.background import BackgroundTasks, together
from dlcore.base.errors import DLError
from dlcore.ledger.reading.follow import (
    AskMembers,
    Broke,
    Call,
    CallFailed,
    Checked,
    CheckLac,
    Control,
    Effect,
    EndFound,
    EndRead,
    Event,
    Fail,
    Follow,
    FollowFailed,
    FollowStep,
    LedgerFollow,
    MembersAnswered,
    MetadataRead,
    Offer,
    Pause,
    Pushed,
    RangeRead,
    ReadFailed,
    ReadRange,
    Refused,
    Signal,
    TellDamage,
    Tick,
    TickAt,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import BookieClient, FollowUpdate, HeldEntries

logger = logging.getLogger(__name__)


class FollowedLedger(Protocol):
    """The part of `LedgerReader` that a follower uses."""

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as last read."""

    def informing(self, follower: LedgerFollower) -> AbstractContextManager[None]:
        """Tell a follower of changes of the metadata, and of entries that may be read."""

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


class LedgerFollower:
    """One run of `LedgerReader.follow`; iterate over `steps` once."""

    def __init__(
        self,
        reader: FollowedLedger,
        bookies: BookieClient,
        *,
        first: int,
        on_answer: Callable[[], None],
        on_entry: Callable[[EntryFrame], bool],
    ) -> None:
        now = asyncio.get_running_loop().time()
        self._machine = LedgerFollow(reader.metadata, first=first, now=now)
        self._reader = reader
        self._bookies = bookies
        self._on_answer = on_answer
        self._on_entry = on_entry
        self._tasks = BackgroundTasks()
        self._step: asyncio.Future[FollowStep]
        self._following: asyncio.Task[None] | None = None
        self._listens = asyncio.Event()  # the followed bookie's stream may go on
        self._reads_on = asyncio.Event()  # the reading of a range may go on

    async def steps(self) -> AsyncGenerator[FollowStep, None]:
        """Yield steps until the ledger's end."""
        loop = asyncio.get_running_loop()
        try:
            with self._reader.informing(self):
                self._handle(Tick(loop.time()))
                is_over = False
                while not is_over:
                    self._step = loop.create_future()
                    self._handle(Signal.STEP_WANTED)
                    step = await self._step
                    is_over = step.closed
                    yield step
        finally:
            self._listens.clear()
            self._following = None  # its frames refer to this object
            await self._tasks.aclose()

    def note_end(self, last_entry_id: int) -> None:
        """Deliver up to this entry, which may be read, without waiting for a bookie's message."""
        self._handle(EndFound(last_entry_id))

    def metadata_changed(self) -> None:
        """Read the metadata again."""
        self._handle(Signal.METADATA_CHANGED)

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:  # noqa: C901 - one case for each kind
        match effect:
            case Offer(entries):
                refused = self._refused(entries)
                if refused:
                    self._handle(Refused(refused))
                else:
                    self._listens.set()
            case Control.LISTEN:
                self._listens.set()
            case FollowStep():
                if not self._step.done():  # its caller may have been cancelled
                    self._step.set_result(effect)
            case Fail(error):
                if not self._step.done():
                    self._step.set_exception(error)
            case ReadRange(first, last):
                self._reads_on = asyncio.Event()
                self._start(partial(self._read, first, last, self._reads_on))
            case Control.READ_ON:
                self._reads_on.set()
            case Follow(bookie, first_entry_id):
                self._listens = asyncio.Event()
                self._listens.set()
                follow = partial(self._follow, bookie, first_entry_id, self._listens)
                self._following = self._start(follow)
            case Control.UNFOLLOW:
                assert self._following is not None
                self._following.cancel()
                self._listens.clear()
            case Call():
                self._start(partial(self._feed, partial(self._call, effect)))
            case AskMembers() | CheckLac() | TickAt() | Pause():
                self._start(partial(self._feed, partial(self._answer_of, effect)))
            case TellDamage(bookie, error):
                logger.warning(
                    "damaged entry ledger=%d bookie=%s: %s; to do: nothing, other bookies have "
                    "it; the bookie named repairs its copy",
                    self._machine.metadata.ledger_id,
                    bookie,
                    error,
                )
            case _:
                assert_never(effect)

    def _refused(self, entries: Sequence[EntryFrame]) -> Sequence[EntryFrame]:
        """Return the entries that the caller does not take."""
        for number, entry in enumerate(entries):
            if not self._on_entry(entry):
                return entries[number:]
        return ()

    def _start(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return self._tasks.start(self._watched(work))

    async def _watched(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._handle(Broke(error))

    async def _follow(self, bookie: BookieId, first: int, listens: asyncio.Event) -> None:
        ledger_id = self._machine.metadata.ledger_id
        take = partial(self._take, listens)
        updates = self._bookies.follow(bookie, ledger_id=ledger_id, first_entry_id=first, take=take)
        async with aclosing(updates):
            while True:
                try:
                    update = await anext(updates)
                except (DLError, StopAsyncIteration) as error:
                    logger.info("follow failed ledger=%d bookie=%s: %r", ledger_id, bookie, error)
                    self._handle(FollowFailed())
                    return
                # It came while the caller was slow to take the one before.
                if not listens.is_set():
                    await listens.wait()
                self._push(listens, update)
                # The next update is not requested yet: a slow caller then slows the bookie down.
                if not listens.is_set():
                    await listens.wait()

    def _take(self, listens: asyncio.Event, update: FollowUpdate) -> bool:
        """Take an update at once, without a turn of the event loop, unless the caller is slow."""
        if not listens.is_set():
            return False
        try:
            self._push(listens, update)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._handle(Broke(error))
        return True

    def _push(self, listens: asyncio.Event, update: FollowUpdate) -> None:
        self._on_answer()
        listens.clear()
        self._handle(Pushed(*update, asyncio.get_running_loop().time()))

    async def _read(self, first: int, last: int, reads_on: asyncio.Event) -> None:
        async with aclosing(self._reader.read(first, last)) as chunks:
            while first <= last:
                try:
                    entries = await anext(chunks)
                except DLError as error:
                    self._handle(ReadFailed(error))
                    return
                first = entries[-1].entry_id + 1
                reads_on.clear()
                self._handle(RangeRead(entries))
                if first <= last:
                    await reads_on.wait()

    async def _feed(self, answer: Callable[[], Awaitable[Event]]) -> None:
        self._handle(await answer())

    async def _call(self, call: Call) -> Event:
        reader = self._reader
        try:
            match call:
                case Call.READ_METADATA:
                    return MetadataRead(await reader.refresh())
                case Call.READ_END:
                    last_entry_id = await reader.read_last_add_confirmed()
                    return EndRead(last_entry_id, reader.metadata)
                case _:
                    assert_never(call)
        except DLError as error:
            logger.info("%s failed ledger=%d: %s", call, self._machine.metadata.ledger_id, error)
            return CallFailed(call, error)

    async def _answer_of(self, asked: AskMembers | CheckLac | TickAt | Pause) -> Event:
        loop = asyncio.get_running_loop()
        match asked:
            case AskMembers(bookies):
                answers = await together(*map(self._ask, bookies))
                return MembersAnswered([each for each in answers if each is not None])
            case CheckLac(ensemble, vouched, claimed):
                confirmed = await self._reader.disprove(ensemble, vouched=vouched, claimed=claimed)
                return Checked(claimed, confirmed)
            case TickAt(at_s):
                await asyncio.sleep(at_s - loop.time())
                return Tick(loop.time())
            case Pause(after_s):
                await asyncio.sleep(after_s)
                return Signal.PAUSE_OVER
            case _:
                assert_never(asked)

    async def _ask(self, bookie: BookieId) -> tuple[BookieId, HeldEntries] | None:
        try:
            held = await self._reader.ask_held_by(bookie)
        except DLError:
            return None
        self._on_answer()
        return bookie, held
