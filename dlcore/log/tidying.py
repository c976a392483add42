"""Work that comes after an answer: done in the background, bounded, its failures logged.

What is not done, because the process ends, is found by whoever sweeps: nothing rests on it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.errors import DLError

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
        self._worker: asyncio.Task[None] | None = None
        self._is_closed = False

    async def submit(self, what: str, job: Callable[[], Awaitable[None]]) -> None:
        """Take a job; waits only while very many others do.  `what` names it where it fails."""
        if self._is_closed:
            logger.info("%s is left to others: the namespace is closed", what)
            return
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="tidier")
        await self._jobs.put((what, job))

    async def settled(self) -> None:
        """Wait until nothing is left to do."""
        await self._jobs.join()

    async def _work(self) -> None:
        while True:
            what, job = await self._jobs.get()
            try:
                await job()
            except DLError as error:
                logger.warning("%s failed: %s: %s", what, type(error).__name__, error)
            except Exception:
                # A bug.  Were this to end, nothing would be tidied any more, and nobody told.
                logger.exception("%s failed", what)
            finally:
                self._jobs.task_done()

    async def aclose(self) -> None:
        """Do what is left, within a time, and stop."""
        self._is_closed = True
        if self._worker is None:
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._jobs.join()
        except TimeoutError:
            logger.warning("%d jobs of tidying are left to others", self._jobs.qsize())
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        while not self._jobs.empty():  # so that nobody waits for ever to hand one over
            self._jobs.get_nowait()
            self._jobs.task_done()
            await asyncio.sleep(0)
