"""Ephemeral nodes: one that shows others that a process lives, and locks that go with a session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks
from dlcore.base.backoff import Backoff
from dlcore.base.errors import AlreadyClosedError, DLError, NodeExistsError, NoNodeError
from dlcore.metadata.one_node import persistently
from dlcore.metadata.port import ANY_VERSION, Create, Delete, Put, SessionState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_PAUSE_MAX_S = 60.0
"""Pauses between attempts to create a node again."""


class SessionNode:
    """An ephemeral node by which others see that this process lives.

    After a lost session the node is created again, with the value that was put last.

    Args:
        store: the session.
        path: that of the node.
        until_then: for people: the loss while the node is gone, as a clause of its own.
    """

    def __init__(self, store: MetadataStore, path: str, *, until_then: str) -> None:
        self._store = store
        self.path = path
        self._until_then = until_then
        self._session = ""
        self.value: bytes | None = None
        """The value that was put last; None: the node holds the session's token."""
        self._making = asyncio.Lock()
        self._renewals = BackgroundTasks()
        self._unsubscribe = self._store.on_session(self._session_changed)
        self._used = False

    async def ensure(self) -> None:
        """Make sure that the node exists in this session."""
        self._used = True
        async with self._making:
            if self._session != self._store.session_token:
                await persistently(self._make)

    async def put(self, value: bytes) -> None:
        """Put a value there for others.  Raises: MetadataError: others may not see it."""
        self.value = value
        async with self._making:
            if self._session == self._store.session_token:
                await self._store.multi([Put(self.path, value, ANY_VERSION)])

    async def _make(self) -> None:
        # Taken before the call: if the session changes meanwhile, the node counts as one of the old
        # session, and is made again.
        session = self._store.session_token
        value = session.encode() if self.value is None else self.value
        try:
            await self._store.create(self.path, value, ephemeral=True, make_parents=True)
        except NodeExistsError:
            node = await self._store.get(self.path)
            # It is ours if the answer to an earlier attempt was lost.
            if node is None or node.session != session:
                await self._replace(value)
        self._session = session

    async def _replace(self, value: bytes) -> None:
        """Replace a node that an earlier session left and that will soon vanish."""
        try:
            await self._store.multi([Delete(self.path), Create(self.path, value, ephemeral=True)])
        except NoNodeError:
            await self._store.create(self.path, value, ephemeral=True)

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED and self._used:
            self._renewals.cancel()  # those of earlier sessions
            self._renewals.start(self._renew(), name=f"creating {self.path} again")

    async def _renew(self) -> None:
        backoff, now_s = Backoff(_FIRST_PAUSE_S, _PAUSE_MAX_S), asyncio.get_running_loop().time
        while True:
            try:
                await self.ensure()
            except AlreadyClosedError:
                return
            except DLError as error:
                pause_s = backoff.failed(now_s())
                logger.warning(
                    "%s could not be created again: %s; dlog tries again in %.0f s, and until then "
                    "%s; to do: see to ZooKeeper",
                    self.path,
                    error,
                    pause_s,
                    self._until_then,
                )
                await asyncio.sleep(pause_s)
            else:
                return

    async def aclose(self) -> None:
        """Stop renewing; the node vanishes with the session."""
        self._unsubscribe()
        await self._renewals.aclose()


@contextlib.asynccontextmanager
async def session_lock(store: MetadataStore, path: str, token: bytes) -> AsyncGenerator[bool, None]:
    """Take a lock that vanishes with the session; yield whether it was free.

    If two holders both believe that they hold it, they do the same work twice.

    Args:
        store: the session.
        path: the lock's.
        token: the holder, so that it knows its own lock when the answer to the creation was lost.
    """
    try:
        await store.create(path, token, ephemeral=True)
    except NodeExistsError:
        node = await store.get(path)
        if node is None or node.value != token:
            yield False
            return
        # It is ours: the answer to its creation or deletion was lost.
    try:
        yield True
    finally:
        with contextlib.suppress(DLError):  # without an answer it vanishes with the session
            await store.delete(path)
