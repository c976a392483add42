"""Control of auto-recovery's work: it runs only without a pause, and only in a live session."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from dlcore.base.background import fulfil, side_tasks
from dlcore.base.errors import DLError
from dlcore.base.isolating import report_defect
from dlcore.metadata.port import SessionState
from dlcore.ops.autorecovery.metrics import RecoveryFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Unsubscribe
    from dlcore.ops.autorecovery.listing import RepairList

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


async def run_together(*works: Coroutine[Any, Any, None]) -> None:
    """Run works until one of them ends or fails; cancel the others, and raise its error."""
    async with side_tasks() as together:
        tasks = [together.start(work) for work in works]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if not task.cancelled():
            task.result()


class PausableRunner:
    """Runs works, one task each, while this is allowed; otherwise cancels them at once.

    A work that failed begins again after a while.  A defect in one work must not end the process,
    which does the others, too.
    """

    def __init__(
        self,
        store: MetadataStore,
        paths: NamespacePaths,
        repairs: RepairList,
        figures: RecoveryFigures | None = None,
    ) -> None:
        self._store = store
        self._paths = paths
        self._repairs = repairs
        self._figures = figures or RecoveryFigures()
        self._loop = asyncio.get_running_loop()
        self._is_paused = True  # until the pause is read
        self._may_differ = asyncio.Event()
        self._is_open = asyncio.Event()
        self._closed: asyncio.Future[None] = self._loop.create_future()

    async def run(self, works: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Run `works` until cancelled."""
        unsubscribes: list[Unsubscribe] = [
            self._store.watch(self._paths.autorecovery_paused, self._may_differ.set),
            self._store.on_session(self._on_session),
        ]
        try:
            await run_together(self._follow_pause(), *map(self._run_one, works))
        finally:
            for unsubscribe in unsubscribes:
                unsubscribe()

    def _on_session(self, state: SessionState) -> None:
        if state is SessionState.EXPIRED:
            self._close()
        self._may_differ.set()

    def _close(self) -> None:
        self._is_open.clear()
        fulfil(self._closed, None)

    def _open(self) -> None:
        if not self._is_open.is_set():
            self._closed = self._loop.create_future()
            self._is_open.set()

    async def _follow_pause(self) -> None:
        while True:
            try:
                is_paused = await self._repairs.is_paused()
            except DLError as error:
                logger.info("whether auto-recovery is paused is not known: %s", error)
                self._loop.call_later(_RETRY_S, self._may_differ.set)
            else:
                if is_paused:
                    self._close()
                elif self._store.session_state is SessionState.CONNECTED:
                    self._open()
                if is_paused != self._is_paused:
                    logger.info("auto-recovery %s", "is paused" if is_paused else "is at work")
                self._is_paused = self._figures.is_paused = is_paused
            await self._may_differ.wait()
            self._may_differ.clear()

    async def _run_one(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await self._is_open.wait()
            # The future of this opening; after a pause the next one has another.
            closed = self._closed
            async with side_tasks() as tasks:
                task = tasks.start(work())
                await asyncio.wait([task, closed], return_when=asyncio.FIRST_COMPLETED)
            if not task.cancelled():
                error = task.exception()
                if error is not None and not isinstance(error, DLError):
                    # The other works continue, and this one begins again later.
                    report_defect("auto-recovery begins again", error)
                else:
                    logger.warning(
                        "auto-recovery begins again: %s; to do: see to ZooKeeper if this comes "
                        "often",
                        error,
                    )
                await asyncio.sleep(_RETRY_S)
