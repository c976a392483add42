"""Atomic appends to a log whose lock a proxy holds: its writer gives them their turn.

An append asks for a turn in the lock's node.  The writer answers everything that it accepted,
closes its extent, and sets the turn to given.  The append commits, and ends the turn in the same
transaction.  The segment stays in progress, and the writer continues after the appended extents.
Therefore small extents are merged whichever side wrote them, and turns make no further segments.
Records are never lost or overwritten, because each change is guarded by the version of the head.
Turns only keep the two sides from overtaking each other for ever, and the writer's transaction ids
above those of the append.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import DLError
from dlcore.log.metadata.changes import lssn_to_merge
from dlcore.log.metadata.store import UNANSWERED
from dlcore.log.upkeep.requests import ask_for_upkeep
from dlcore.log.writing.steps import Ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogHead, LogMetadata
    from dlcore.log.writing.append import LogAppender
    from dlcore.log.writing.lock import WriterLock
    from dlcore.log.writing.steps import Effect

logger = logging.getLogger(__name__)

TURN_S = 5.0
"""An append that has not committed after this time loses its turn."""
_LOOK_S = 0.2


class TurnGiver:
    """Gives turns for one writer, until it is closed.

    Args:
        context: the namespace's adapters.
        log: the log.
        lock: the writer's lock.
        machine: the writer's machine.
        perform: performs effects of the machine.
        fail: makes the writer fail.
    """

    def __init__(
        self,
        context: LogContext,
        log: LogMetadata,
        lock: WriterLock,
        machine: LogAppender[asyncio.Future[Any]],
        perform: Callable[[Iterable[Effect[asyncio.Future[Any]]]], None],
        fail: Callable[[DLError], None],
    ) -> None:
        self._context = context
        self._logs = context.logs
        self._seen = machine.at.head
        self._log = log
        self._lock = lock
        self._machine = machine
        self._perform = perform
        self._fail = fail
        self._wanted_by = ""
        self._on_wanted: Callable[[str], None] | None = None
        self._changed = asyncio.Event()
        path = context.logs.paths_of(log).lock
        self._unsubscribe = context.store.watch(path, self._changed.set, children=False)
        self._tasks = BackgroundTasks()
        self._tasks.start(self._run(), name=f"turns-{log.name}")

    def tell_when_wanted(self, on_wanted: Callable[[str], None]) -> None:
        """Call `on_wanted` with the client that waits for the lock itself, once there is one."""
        self._on_wanted = on_wanted
        if self._wanted_by:
            on_wanted(self._wanted_by)

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while not self._machine.is_over:
            await self._changed.wait()
            # Cleared before the look: a change during the look wakes the loop again.
            self._changed.clear()
            try:
                if not await self._is_turn_asked_for():
                    continue
                begun_s = clock()
                try:
                    await self._give()
                finally:
                    # The turn took the news of changes that were not about it, as that a writer
                    # waits for the lock: look once more.
                    self._changed.set()
            except UNANSWERED as error:
                # The append asks as long as it waits; after a reconnection the watch fires.
                logger.info(
                    "log=%s: cannot read whether a turn is asked for: %s", self._log.name, error
                )
                continue
            except DLError as error:
                logger.info("log=%s gives no turns any more: %s", self._log.name, error)
                return  # sealed, failed or closed
            # The waiting writers get the same time: consecutive appends must not block them.
            await asyncio.sleep(min(clock() - begun_s, TURN_S))

    async def _is_turn_asked_for(self) -> bool:
        """Return whether a turn is asked for; report a client that wants the lock itself."""
        holder = await self._lock.look()
        if holder is None:
            return False
        if holder.wanted_by and not self._wanted_by:
            self._wanted_by = holder.wanted_by
            if self._on_wanted is not None:
                self._on_wanted(holder.wanted_by)
        return holder.turn == "asked"

    async def _give(self) -> None:
        # The writer first completes its extent: an append may change only a head without an open
        # extent, and "given" promises this.
        aside: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._machine.end_with(Ending.ASIDE, aside)
        self._perform(())
        await aside
        try:
            if await self._lock.set_turn("asked", "given"):
                await self._wait_taken()
        except UNANSWERED as error:
            logger.info("log=%s: cannot read whether its turn is over: %s", self._log.name, error)
        await self._go_on()

    async def _go_on(self) -> None:
        # Always with the stored head: an append may have committed although we got no answer.
        while True:
            try:
                at = await self._logs.read(self._log)
            except UNANSWERED:
                await asyncio.sleep(_LOOK_S)
            except DLError as error:
                self._fail(error)
                raise
            else:
                self._perform(self._machine.step_back(at))
                await self._ask_for_upkeep(at.head)
                return

    async def _ask_for_upkeep(self, now: LogHead) -> None:
        """Ask to merge the extents since the last turn, the writer's own ones too."""
        before, self._seen = self._seen, now
        lssn = lssn_to_merge(before, now)
        if lssn is not None:
            with contextlib.suppress(*UNANSWERED):  # the next turn asks again
                await ask_for_upkeep(self._context, {self._log: lssn})

    async def _wait_taken(self) -> None:
        try:
            async with asyncio.timeout(TURN_S):
                while await self._lock.has_turn("given"):
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            logger.warning("log=%s: an append did not use its turn", self._log.name)
            await self._lock.set_turn("given", "free")

    async def aclose(self) -> None:
        """Give no more turns; a turn in progress ends with the lock."""
        self._unsubscribe()
        await self._tasks.aclose()
