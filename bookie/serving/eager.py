"""Starts a coroutine at once; only one that has to wait becomes a task.

Most reads of new entries wait for nothing, and a task costs them a turn of the event loop.  Eager
tasks of Python 3.12 save the turn but not the task, and Python 3.11 has none, so all versions share
this form.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator


def start(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `coroutine` until it waits; return the task that goes on, None if there is nothing left.

    Up to there it is in no task, so `asyncio.timeout` and the like are not for it.

    Raises:
        What the coroutine raised before it waited.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_go_on(coroutine, awaited))


async def _go_on(coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
    """Wait for what the coroutine waits for, in its place."""
    await _Rest(coroutine, awaited)


class _Rest:
    """The rest of a coroutine that has begun, as an awaitable of its own.

    `create_task` takes a coroutine only, and one that has begun cannot be awaited from its first
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
            except BaseException as error:  # noqa: BLE001  # among them its cancellation
                argument = error
                step = self._coroutine.throw
            try:
                awaited = step(argument)
            except StopIteration:
                return
