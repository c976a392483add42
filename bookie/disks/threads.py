"""The threads of a disk, for calls that may wait for the device."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from dlcore.base.background import outcome_of
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

_READ_THREADS = 4
"""Uncached entries of 512 KB come at 440 a second one by one, and at 810 with four or more."""


class DiskThreads:
    """Runs blocking calls of one disk; `name` is for the error after the end."""

    def __init__(self, name: object) -> None:
        self._name = name
        # One, because writes must reach the device in their order, and never overlap.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="bookie-disk-write")
        self._readers = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="bookie-disk-read")
        self.has_ended = False

    async def write(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` after all earlier writes; a cancelled caller does not interrupt it."""
        return await self._run(self._writer, functools.partial(function, *args, **kwargs))

    async def read(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in one of several threads."""
        return await self._run(self._readers, functools.partial(function, *args, **kwargs))

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self.has_ended:
            raise BookieStorageError(f"{self._name} is closed")
        future = asyncio.get_running_loop().run_in_executor(executor, work)
        try:
            return await outcome_of(future)
        finally:
            # A cancelled caller waits too: the thread still uses the descriptor and the buffers.
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            future.exception()  # else asyncio would log an error that a cancelled caller left

    async def aclose(self) -> None:
        """Wait for the calls under way, and end the threads; nothing can be run from now on."""
        self.has_ended = True
        await asyncio.get_running_loop().run_in_executor(None, self._stop)

    def _stop(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()
