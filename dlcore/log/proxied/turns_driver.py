"""Gives turns to appends beside a proxy's writer: runs a `Turns` over the lock and the writer."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import DLError, UnexpectedError
from dlcore.base.machines import CallFailed
from dlcore.log.proxied.turns import (
    After,
    AskForUpkeep,
    Broken,
    Call,
    Effect,
    Event,
    FailWriter,
    HeadRead,
    Looked,
    Note,
    ReportWanted,
    SetTurn,
    Signal,
    StepBack,
    Turns,
    TurnSet,
)
from dlcore.log.upkeep.requests import ask_for_upkeep

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.writing.lock import WriterLock
    from dlcore.log.writing.port import PausableWriter

logger = logging.getLogger(__name__)


class TurnGiver:
    """Gives turns for one writer, until it is closed.

    Args:
        context: the namespace's adapters.
        log: the log.
        lock: the writer's lock.
        writer: is paused while it is the turn of an append.
    """

    def __init__(
        self,
        context: LogContext,
        log: LogMetadata,
        lock: WriterLock,
        writer: PausableWriter,
    ) -> None:
        self._context = context
        self._log = log
        self._lock = lock
        self._writer = writer
        self._turns = Turns(writer.head)
        self._wanted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks(self._on_defect)
        path = context.logs.paths_of(log).lock
        on_change = partial(self._handle, Signal.CHANGED)
        self._unsubscribe = context.store.watch(path, on_change, children=False)

    def tell_when_wanted(self, on_wanted: Callable[[str], None]) -> None:
        """Call `on_wanted` with the client that waits for the lock itself, once there is one."""
        self._wanted.add_done_callback(lambda wanted: on_wanted(wanted.result()))

    def _on_defect(self, error: BaseException) -> None:
        text = f"turns of appends to log {self._log.name!r} broke: {error!r}"
        self._handle(Broken(UnexpectedError(text)))  # no caller of the writer may wait for ever
        raise error  # for the loop's exception handler

    def _handle(self, event: Event) -> None:
        for effect in self._turns.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Call() | SetTurn():
                self._tasks.start(self._call(effect), name=f"turns-{self._log.name}")
            case After(after_s, event):
                self._tasks.start(self._feed_later(after_s, event))
            case StepBack(at):
                self._writer.continue_from(at)
            case AskForUpkeep(lssn):
                self._tasks.start(self._ask_for_upkeep(lssn))
            case ReportWanted(client):
                self._wanted.set_result(client)
            case FailWriter(error):
                self._writer.fail(error)
            case Note(what, None):
                logger.warning(
                    "log=%s: %s; to do: nothing, the writers agree by themselves; restart the one "
                    "named if this goes on",
                    self._log.name,
                    what,
                )
            case Note(what, error):
                logger.info("log=%s: %s: %s", self._log.name, what, error)
            case _:
                assert_never(effect)

    async def _call(self, call: Call | SetTurn) -> None:
        try:
            event = await self._answer_of(call)
        except DLError as error:
            event = CallFailed(error)
        self._handle(event)

    async def _answer_of(self, call: Call | SetTurn) -> Event:
        loop = asyncio.get_running_loop()
        match call:
            case Call.LOOK:
                return Looked(await self._lock.node.own_holder(), loop.time())
            case Call.PAUSE:
                await self._writer.pause()
                return Signal.PAUSED
            case SetTurn(before, turn):
                return TurnSet(await self._lock.node.set_turn(before, turn))
            case Call.READ_HEAD:
                return HeadRead(await self._context.logs.read(self._log), loop.time())
            case _:
                assert_never(call)

    async def _feed_later(self, after_s: float, event: Event) -> None:
        await asyncio.sleep(after_s)
        self._handle(event)

    async def _ask_for_upkeep(self, lssn: int) -> None:
        try:
            await ask_for_upkeep(self._context, {self._log: lssn})
        except DLError as error:  # the next turn asks again
            logger.info("log=%s: its upkeep is not asked for: %s", self._log.name, error)

    async def aclose(self) -> None:
        """Give no more turns; a turn in progress ends with the lock."""
        self._unsubscribe()
        await self._tasks.aclose()
