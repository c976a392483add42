"""Tasks that outlive the call that starts them: kept, with reported failures, ended by `aclose`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def outcome_of(future: asyncio.Future[T]) -> T:
    """Wait for a future that others may also wait for: a cancelled caller does not cancel it.

    `asyncio.shield` does the same.  But after a caller was cancelled, Python 3.14 logs a later
    error of the future, although other callers still wait and get it.

    Raises:
        The error of the future.
    """
    if not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            future.add_done_callback(_retrieve)
            raise
    return future.result()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the error, which this caller does not wait for any more."""
    if not future.cancelled():
        future.exception()


def forget_frames(*tasks: asyncio.Task[Any]) -> None:
    """Release the frames that cancelled tasks keep in the traceback of their cancellation.

    An object that holds such a task, and is held by one of these frames, is part of a cycle.
    Python frees the cycle at its next full collection, which may be much later.
    """
    for task in tasks:
        if task.cancelled():
            with contextlib.suppress(asyncio.CancelledError):
                task.result()  # to retrieve it releases its traceback


class BackgroundTasks:
    """The tasks of one owner, which closes them.

    A failed task is reported: `on_failure` is called with its error from the event loop.  Without
    it, the loop's exception handler logs the error as a defect.  Callers that await the task get
    the error as well.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[Any], None] = {}  # a set that keeps its order

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run `work` in a task; `name` appears in reports of a failure."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if self._on_failure is not None:
            self._on_failure(error)
        else:
            message = f"{task.get_name()} failed"
            task.get_loop().call_exception_handler({"message": message, "exception": error})

    async def finish(self) -> None:
        """Return when all tasks have ended by themselves."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def aclose(self) -> None:
        """Cancel the running tasks, and return when they have ended.  Idempotent."""
        while self._tasks:
            self.cancel()
            ended = list(self._tasks)
            await asyncio.wait(ended)
            forget_frames(*ended)  # which refer to the owner, or to what it holds

    def cancel(self) -> None:
        """Cancel the running tasks without waiting."""
        for task in self._tasks:
            task.cancel()


def told_to_callers(error: BaseException) -> None:
    """Leave `error` to the callers that await the task: for tasks that compute an answer."""
    logger.debug("told to callers: %r", error)


def refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future that may never be awaited, because the error is reported elsewhere, too."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # else asyncio would log it as never retrieved
