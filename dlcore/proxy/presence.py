"""The node of one proxy among the live ones: what it says, and whether it is there."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks, end_tasks
from dlcore.base.errors import MetadataError, NoNodeError
from dlcore.base.features import own_release
from dlcore.log.metadata.owner import SessionNode
from dlcore.log.metadata.store import persistently
from dlcore.metadata.stored import encode
from dlcore.proxy.load import LiveProxy

if TYPE_CHECKING:
    from dlcore.metadata.port import MetadataStore
    from dlcore.proxy.load import ProxyLoad

logger = logging.getLogger(__name__)

_LEAVE_S = 2.0
_SECRET_BYTES = 32


class Presence:
    """One proxy's, from `enter` to `leave`, and again after another `enter`.

    Args:
        path: that of its node.
        kafka: where it listens for Kafka's clients.
    """

    def __init__(self, store: MetadataStore, path: str, *, kafka: str | None) -> None:
        self.secret = secrets.token_hex(_SECRET_BYTES)
        """The proof that a call is this proxy's, for those that may read the metadata."""
        self.kafka = kafka
        self.has_left = False
        """Whether it has left, even if others may still see it."""
        self._store = store
        self._node = SessionNode(store, path)
        self._node.value = encode(self._entry())
        self._tasks = BackgroundTasks()
        self._vanishing: asyncio.Task[None] | None = None

    async def publish_load(self, load: ProxyLoad) -> None:
        """Publish its load.  Raises: MetadataError: it may not be published."""
        await self._node.put(encode(self._entry(load)))

    def _entry(self, load: ProxyLoad | None = None) -> LiveProxy:
        return LiveProxy(secret=self.secret, load=load, release=own_release(), kafka=self.kafka)

    async def enter(self) -> None:
        """Make its node.  Raises: MetadataError."""
        if self.has_left:
            if self._vanishing is not None:
                await end_tasks(self._vanishing)
            entry = self._node.value
            self._node = SessionNode(self._store, self._node.path)
            self._node.value = entry
        await self._node.ensure()
        self.has_left = False

    async def leave(self) -> None:
        """Remove its node, now or in the background.  Idempotent."""
        self.has_left = True
        await self._node.aclose()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._store.delete(self._node.path)
        except NoNodeError:
            pass
        except (MetadataError, TimeoutError):
            # While other proxies still see it, they redirect clients to it; it redirects them back.
            self._vanishing = self._tasks.start(self._vanish(), name="leaving the live proxies")

    async def _vanish(self) -> None:
        try:
            await persistently(lambda: self._store.delete(self._node.path))
        except NoNodeError:
            pass
        except MetadataError as error:
            logger.warning(
                "%s goes with the session: %s; to do: nothing, clients find other proxies after "
                "that",
                self._node.path,
                error,
            )

    async def aclose(self) -> None:
        """Let the node vanish with the session, unless it was removed before."""
        await self._node.aclose()
        await self._tasks.aclose()
