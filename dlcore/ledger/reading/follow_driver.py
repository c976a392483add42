"""Runs a `LedgerFollow`: streams of bookies, reads, the ticks, and steps for the caller."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING, TypeVar, assert_never

from dlcore.base.background import BackgroundTasks, fulfil, in_turn, refuse
from dlcore.base.errors import DLError
from dlcore.ledger.reading.follow import (
    AskMembers,
    Broke,
    Call,
    CallFailed,
    Checked,
    CheckLac,
    Control,
    EndFound,
    EndRead,
    Fail,
    Follow,
    FollowStep,
    LedgerFollow,
    MembersAnswered,
    MetadataRead,
    Offer,
    Pause,
    Pushed,
    RangeRead,
    ReadRange,
    Refused,
    Signal,
    TellDamage,
    Tick,
    TickAt,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from dlcore.ledger.port import FollowedLedger
    from dlcore.ledger.reading.follow import Asked, Effect, Event
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import FollowUpdate

ItemT = TypeVar("ItemT")

logger = logging.getLogger(__name__)


class LedgerFollower:
    """One run of `LedgerReader.follow`; iterate over `steps` once."""

    def __init__(
        self,
        reader: FollowedLedger,
        *,
        first: int,
        on_answer: Callable[[], None],
        on_entry: Callable[[EntryFrame], bool],
    ) -> None:
        now = asyncio.get_running_loop().time()
        self._machine = LedgerFollow(reader.metadata, first=first, now=now)
        self._reader = reader
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
                step = None
                while step is None or not step.closed:
                    self._step = loop.create_future()
                    self._handle(Signal.STEP_WANTED)
                    step = await self._step
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
        try:
            for effect in self._machine.handle(event):
                self._perform(effect)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._handle(Broke(error))

    def _perform(self, effect: Effect) -> None:  # noqa: C901 - one case for each kind
        match effect:
            case Offer(entries):
                refused = list(dropwhile(self._on_entry, entries))
                if refused:
                    self._handle(Refused(refused))
                else:
                    self._listens.set()
            case Control.LISTEN:
                self._listens.set()
            case FollowStep():
                fulfil(self._step, effect)
            case Fail(error):
                refuse(self._step, error)
            case Control.READ_ON:
                self._reads_on.set()
            case Control.UNFOLLOW:
                assert self._following is not None
                self._following.cancel()
                self._listens.clear()
            case Follow():
                self._following = self._tasks.start(self._feed(effect))
            case Call() | AskMembers() | CheckLac() | TickAt() | Pause() | ReadRange():
                self._tasks.start(self._feed(effect))
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

    async def _feed(self, asked: Asked) -> None:
        try:
            event = await self._answer_of(asked)
            if event is not None:
                self._handle(event)
        except DLError as error:
            logger.info("%s failed ledger=%d: %r", asked, self._machine.metadata.ledger_id, error)
            self._handle(CallFailed(asked, error))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._handle(Broke(error))

    async def _answer_of(self, asked: Asked) -> Event | None:
        reader = self._reader
        match asked:
            case Follow(bookie, first):
                self._listens = goes_on = asyncio.Event()
                updates = reader.updates(bookie, first, partial(self._take, goes_on))
                await self._feed_each(updates, goes_on, self._pushed)
                return Signal.STREAM_ENDED
            case ReadRange(first, last):
                self._reads_on = goes_on = asyncio.Event()
                await self._feed_each(reader.read(first, last), goes_on, RangeRead)
                return None
            case Call.READ_METADATA:
                return MetadataRead(await reader.refresh())
            case Call.READ_END:
                return EndRead(await reader.read_last_add_confirmed(), reader.metadata)
            case AskMembers(bookies):
                return MembersAnswered(await reader.ask_all(bookies, self._on_answer))
            case CheckLac(ensemble, vouched, claimed):
                confirmed = await reader.disprove(ensemble, vouched=vouched, claimed=claimed)
                return Checked(claimed, confirmed)
            case TickAt(at_s):
                loop = asyncio.get_running_loop()
                await asyncio.sleep(at_s - loop.time())
                return Tick(loop.time())
            case Pause(after_s):
                await asyncio.sleep(after_s)
                return Signal.PAUSE_OVER
            case _:
                assert_never(asked)

    async def _feed_each(
        self,
        items: AsyncGenerator[ItemT, None],
        goes_on: asyncio.Event,
        event_of: Callable[[ItemT], Event],
    ) -> None:
        goes_on.set()
        async with aclosing(in_turn(items, goes_on)) as taken:
            async for item in taken:
                self._handle(event_of(item))

    def _take(self, goes_on: asyncio.Event, update: FollowUpdate) -> bool:
        """Take an update at once, without a turn of the event loop, unless the caller is slow."""
        if not goes_on.is_set():
            return False
        goes_on.clear()
        self._handle(self._pushed(update))
        return True

    def _pushed(self, update: FollowUpdate) -> Pushed:
        self._on_answer()
        return Pushed(*update, asyncio.get_running_loop().time())
