"""The only place that starts tasks outside of an `asyncio.TaskGroup`: an owner ends each of them.

A task of its own may fail unseen, or go on when all that it uses is closed.  Therefore
its error is always retrieved, and reported or left to callers: `BackgroundTasks` are those of an
object, which closes them, and `side_tasks` those of a block.  A `TaskGroup` fits where the block
waits for its tasks, and the first error ends them; it raises an `ExceptionGroup`.  `start_task` is
for hot paths.  `in_turn` slows down a stream that such a task reads for a slow caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")
W = TypeVar("W")


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
    try:
        return future.result()
    finally:
        del future  # its error refers to this frame: only Python's collector would free both


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


def start_task(
    work: Coroutine[Any, Any, T], on_end: Callable[[asyncio.Task[T]], object]
) -> asyncio.Task[T]:
    """Run `work` in a task that the caller keeps; `on_end` gets the task, which may have failed.

    It costs 1 µs less than a task of `BackgroundTasks`, which keep and report it.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(on_end)
    return task


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and return when all have ended; their results and errors are left to others.

    If the caller is cancelled meanwhile, they are cancelled once more, and have ended as well when
    this call raises.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@overload
async def all_of(
    first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U], /
) -> tuple[T, U]: ...


@overload
async def all_of(*works: Coroutine[Any, Any, T]) -> tuple[T, ...]: ...


async def all_of(*works: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """Run all at once, also the others if one fails; return their results when all have ended.

    If the caller is cancelled, all are cancelled, and have ended when this call raises.

    Raises:
        The first error in the order of `works`; the others are logged.
    """
    results = await asyncio.gather(*works, return_exceptions=True)
    errors = [each for each in results if isinstance(each, BaseException)]
    for error in errors[1:]:
        logger.warning(
            "beside the error that is raised: %s: %s; to do: as for the error that is raised",
            type(error).__name__,
            error,
        )
    if errors:
        raise errors[0]
    return tuple(results)


@overload
async def together(
    first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U], /
) -> tuple[T, U]: ...


@overload
async def together(
    first: Coroutine[Any, Any, T],
    second: Coroutine[Any, Any, U],
    third: Coroutine[Any, Any, V],
    fourth: Coroutine[Any, Any, W],
    /,
) -> tuple[T, U, V, W]: ...


@overload
async def together(*works: Coroutine[Any, Any, T]) -> tuple[T, ...]: ...


async def together(*works: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """Run all at once; if one fails, or the caller is cancelled, the others are cancelled.

    They have ended when this call raises: `asyncio.gather` leaves them running.  `all_of` lets the
    others end by themselves.

    Raises:
        The error of the first that fails.
    """
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    try:
        return tuple(await asyncio.gather(*tasks))
    except BaseException:
        await end_tasks(*tasks)
        raise
    finally:
        del tasks  # the error refers to this frame: only Python's collector would free both


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

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(self._tasks)

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
            # In a loop, because a task may start another one before it ends.
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


@contextlib.asynccontextmanager
async def side_tasks() -> AsyncGenerator[BackgroundTasks, None]:
    """Run tasks beside a block; after it they have been cancelled and have ended, as `end_tasks`.

    An error of a task does not end the block: it is raised where the block awaits the task.
    """
    tasks = BackgroundTasks(reported_to_callers)
    try:
        yield tasks
    finally:
        await end_tasks(*tasks)


def reported_to_callers(error: BaseException) -> None:
    """Leave `error` to the callers that await the task: for tasks that compute an answer."""
    logger.debug("reported to callers: %r", error)


def fulfil(future: asyncio.Future[T], result: T) -> None:
    """End a future with a result, unless its caller has cancelled it."""
    if not future.done():
        future.set_result(result)


def answer(future: asyncio.Future[None], error: BaseException | None) -> None:
    """End a future, with an error if there is one, unless its caller has cancelled it."""
    if error is None:
        fulfil(future, None)
    elif not future.done():
        future.set_exception(error)


def refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future that may never be awaited, because the error is reported elsewhere, too."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # else asyncio would log it as never retrieved


def failed(error: BaseException) -> asyncio.Future[Any]:
    """Return a future that has failed with an error that the caller expected and caught.

    Without its traceback: this refers to the frames of the caller and of its callers, which may
    have the future in a variable, and only Python's collector frees such a cycle.
    """
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error.with_traceback(None))
    return future


async def in_turn(
    items: AsyncGenerator[T, None], goes_on: asyncio.Event
) -> AsyncGenerator[T, None]:
    """Yield each item when `goes_on` is set, which is cleared before it.

    The next item is not requested until `goes_on` is set again: a slow caller slows the source
    down.  The first one is requested at once.
    """
    async with contextlib.aclosing(items):
        async for item in items:
            await goes_on.wait()
            goes_on.clear()
            yield item
            await goes_on.wait()
