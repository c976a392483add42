"""Following a node: looking at it again after each of its changes."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import AlreadyClosedError, DLError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.metadata.port import MetadataStore

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
