"""One node of the metadata store: a look at it after each change, and changes by compare-and-set.

A change reads, decides, and writes if the node is unchanged, else again.  Promises:

* What is written was decided by the value that it replaces.
* A change whose answer was lost is decided again by what is stored then.  Therefore `change` must
  do no harm when it meets its own result.
* Each lost race is another client's success, so nothing waits between attempts.  After the last of
  them the caller gets its error: without an answer, the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import AlreadyClosedError, DLError, MetadataConnectionError
from dlcore.metadata.port import CONFLICTS, UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.metadata.port import MetadataStore, Versioned


logger = logging.getLogger(__name__)


class NodeFollower:
    """Calls `look` once soon, and after each change of a node, until it is closed.

    Several changes may cause one look.  After a look that failed the last knowledge stays in force:
    the watch fires again after a reconnection.

    Args:
        store: the metadata store; once it is closed there is nothing to follow.
        path: the node.
        look: reads the node, and uses what it has.
        what: the name of what is not known after a failed look, for the log.
        children: whether the list of the node's children is followed as well.
    """

    def __init__(
        self,
        store: MetadataStore,
        path: str,
        look: Callable[[], Awaitable[object]],
        *,
        what: str,
        children: bool = False,
    ) -> None:
        self._look = look
        self._what = what
        self._changed = asyncio.Event()
        self._unsubscribe = store.watch(path, self._changed.set, children=children)
        self._tasks = BackgroundTasks()
        self._tasks.start(self._follow(), name=f"following {what}")

    async def aclose(self) -> None:
        """Stop following."""
        self._unsubscribe()
        await self._tasks.aclose()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._look()
            except AlreadyClosedError:
                return
            except DLError as error:
                logger.warning(
                    "%s: a change is not known yet: %s; to do: see to ZooKeeper if this goes on; "
                    "the earlier state counts until then",
                    self._what,
                    error,
                )


_Result = TypeVar("_Result")

RETRY_DELAYS_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0)
"""Pauses between attempts to read: together longer than a session time-out of 10 s."""


async def persistently(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return the result of `call`, which is idempotent; try again while there is no answer."""
    for delay_s in RETRY_DELAYS_S:
        try:
            return await call()
        except UNANSWERED:
            await asyncio.sleep(delay_s)
    return await call()


ATTEMPTS_MAX = 10
"""Most lost races and lost replies of one change."""


async def change_node(
    store: MetadataStore,
    path: str,
    change: Callable[[Versioned | None], tuple[_Result, bytes | None]],
    *,
    make_parents: bool = False,
) -> _Result:
    """Change a node; return the result that belongs to what is stored.

    Args:
        store: the store.
        path: the node's.
        change: gets the node, None if there is none; returns the result, and the new value, None
            to leave the node as it is.  A refusal that it raises ends the change.
        make_parents: whether a new node's missing parents are made too.

    Raises:
        MetadataVersionError, NodeExistsError, NoNodeError: other clients were first each time, or
            the node's parent does not exist.
        MetadataError: the store failed; without an answer, the change may have been made.
    """
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            node = await store.get(path, fresh=True)
            result, value = change(node)
            if value is None:
                return result
            if node is None:
                await store.create(path, value, make_parents=make_parents)
            else:
                await store.put(path, value, version=node.version)
        except (*CONFLICTS, MetadataConnectionError) as error:
            if attempt == ATTEMPTS_MAX:
                raise
            logger.debug("%s is read again: %s", path, error)
        else:
            return result
    raise AssertionError("unreachable: the last attempt returns or raises")
