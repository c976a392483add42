"""Start of a coroutine without a task; it becomes a task only if it has to wait.

Most reads of new entries wait for nothing, and a task costs a turn of the event loop.  Eager tasks
of Python 3.12 save the turn but not the task, and Python 3.11 has none.  Therefore all versions use
this form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.base.background import start_task

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Generator


def start(
    coroutine: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], None]
) -> asyncio.Task[None] | None:
    """Run `coroutine` until it waits; return the task of the rest, None if it has ended.

    The caller keeps the task, and `on_end` is called at its end, as of `start_task`.
    Before the first wait it runs in no task, so it must not use `asyncio.timeout` and the like
    there.

    Raises:
        The error that the coroutine raises before its first wait.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return start_task(_go_on(coroutine, awaited), on_end)


async def _go_on(coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
    """Wait in place of the coroutine for its first awaitable, and run the rest."""
    await _Rest(coroutine, awaited)


class _Rest:
    """The rest of a coroutine that has begun, as an awaitable.

    A task accepts only a coroutine, and a coroutine that has begun cannot be awaited from its first
    wait on.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, None]:
        awaited = self._awaited
        step: Callable[[Any], Any]
        while True:
            try:
                argument = yield awaited
                step = self._coroutine.send
            except BaseException as error:  # noqa: BLE001  # its cancellation as well
                argument = error
                step = self._coroutine.throw
            try:
                awaited = step(argument)
            except StopIteration:
                return
