"""Starts a coroutine at once; only one that has to wait becomes a task.

Most reads of new entries wait for nothing, and a task costs them a turn of the event loop.  Python
3.12 has this as eager tasks.
"""

from __future__ import annotations

import asyncio
import types
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


@types.coroutine
def _go_on(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Wait for what the coroutine waits for, in its place."""
    step: Callable[[Any], Any]
    while True:
        try:
            argument = yield awaited
            step = coroutine.send
        except BaseException as error:  # noqa: BLE001  # among them its cancellation
            argument = error
            step = coroutine.throw
        try:
            awaited = step(argument)
        except StopIteration:
            return
