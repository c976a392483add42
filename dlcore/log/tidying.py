"""Work that follows an answer: done in the background, with a limit, failures are logged.

Work that is not done because the process ends is done later by upkeep: nothing depends on it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks, end_tasks
from dlcore.base.errors import DLError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_JOBS_MAX = 100
_PATIENCE_S = 10.0


class Tidier:
    """Runs jobs one after the other."""

    def __init__(self) -> None:
        self._jobs: asyncio.Queue[tuple[str, Callable[[], Awaitable[None]]]] = asyncio.Queue(
            _JOBS_MAX
        )
        self._tasks = BackgroundTasks()
        self._worker: asyncio.Task[None] | None = None
        self._is_closed = False

    async def submit(self, what: str, job: Callable[[], Awaitable[None]]) -> None:
        """Take a job; it waits only if very many do.  `what` names the job in messages."""
        if self._is_closed:
            logger.info("%s is left to other clients: the namespace is closed", what)
            return
        if self._worker is None:
            self._worker = self._tasks.start(self._work(), name="tidier")
        await self._jobs.put((what, job))

    async def settled(self) -> None:
        """Wait until all jobs are done."""
        await self._jobs.join()

    async def _work(self) -> None:
        while True:
            what, job = await self._jobs.get()
            try:
                await job()
            except DLError as error:
                logger.warning(
                    "%s failed: %s: %s; to do: nothing, other clients or auto-recovery do it later",
                    what,
                    type(error).__name__,
                    error,
                )
            except Exception:
                # A bug.  If this task ended, nothing would be tidied any more, without any message.
                logger.exception("%s failed; to do: report this as a defect", what)
            finally:
                self._jobs.task_done()

    async def aclose(self) -> None:
        """Do the remaining jobs, within a time limit, and stop."""
        self._is_closed = True
        if self._worker is None:
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._jobs.join()
        except TimeoutError:
            logger.warning(
                "%d jobs of tidying are left to other clients; to do: nothing, auto-recovery does "
                "them",
                self._jobs.qsize(),
            )
        await end_tasks(self._worker)
        while not self._jobs.empty():  # so that no `submit` waits for ever
            self._jobs.get_nowait()
            self._jobs.task_done()
            # Lets a `submit` that waited for room put its job, which is dropped in the next round.
            await asyncio.sleep(0)
