"""The node of a log's writer lock in the metadata: who makes it, reads it, and changes it."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.errors import MetadataVersionError, NoNodeError
from dlcore.base.features import own_release
from dlcore.log.metadata.store import persistently
from dlcore.log.metadata.values import LockHolder
from dlcore.log.writing.ownership import LockRead
from dlcore.metadata.port import UNANSWERED, Check, Create, Delete, Put
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.clock import Clock
    from dlcore.log.metadata.store import LogStore
    from dlcore.log.metadata.values import LogKey, Turn
    from dlcore.metadata.port import SessionState, Unsubscribe, Versioned

logger = logging.getLogger(__name__)


class LockNode:
    """One log's, as one client sees it.

    Args:
        log: the log.
        client_id: this client, which the node names as its owner.
        clock: gives the token of each attempt to make it.
        gives_turns: whether the node says that others may ask for turns.
        is_own: whether an attempt of ours made a node.
    """

    def __init__(
        self,
        logs: LogStore,
        log: LogKey,
        *,
        client_id: str,
        clock: Clock,
        gives_turns: bool,
        is_own: Callable[[LockHolder], bool],
    ) -> None:
        self.log = log
        self.gives_turns = gives_turns
        self._store = logs.metadata_store
        self._paths = logs.paths_of(log)
        self._client_id = client_id
        self._clock = clock
        self._is_own = is_own

    def watch(
        self, on_change: Callable[[], None], on_session: Callable[[SessionState], None]
    ) -> list[Unsubscribe]:
        """Call when the node, or the session, has changed; return what ends the calls."""
        return [
            self._store.watch(self._paths.lock, on_change, children=False),
            self._store.on_session(on_session),
        ]

    async def create(self, guard: int | None, on_attempt: Callable[[str], None]) -> None:
        """Make the node, if the head has the version `guard`; give `on_attempt` its token before.

        Raises: MetadataError.
        """
        holder = LockHolder(
            owner=self._client_id,
            token=self._clock.new_token(),
            turn="free" if self.gives_turns else "refused",
            since_ms=self._clock.now_ms(),
            release=own_release(),
        )
        on_attempt(holder.token)
        create = Create(self._paths.lock, encode(holder), ephemeral=True)
        await self._store.multi(
            [create] if guard is None else [Check(self._paths.head, guard), create]
        )

    async def read(self, now: float) -> LockRead:
        """Return who holds the lock.  Raises: MetadataError."""
        node = await persistently(lambda: self._store.get(self._paths.lock, fresh=True))
        if node is None:
            return LockRead(None, -1, False, now)
        is_current = node.session == self._store.session_token
        return LockRead(self._holder_of(node), node.version, is_current, now)

    async def ask(self, holder: LockHolder, version: int) -> None:
        """Ask its holder to release it.  Raises: MetadataError."""
        value = encode(replace(holder, wanted_by=self._client_id))
        try:
            await self._store.multi([Put(self._paths.lock, value, version)])
        except (MetadataVersionError, NoNodeError):
            return  # it has changed, and the watch fires
        except UNANSWERED as error:
            # After a reconnection the watch fires, and the next look asks again.
            name = self.log.name
            logger.info("log=%s: its owner may have no request to release: %s", name, error)
        else:
            logger.info("log=%s: its owner %s is asked to release it", self.log.name, holder.owner)

    async def own_holder(self) -> LockHolder | None:
        """Return what our node says, None if there is none.  Raises: MetadataError."""
        found = await self._own()
        return None if found is None else self._holder_of(found)

    async def set_turn(self, before: Turn, turn: Turn) -> bool:
        """Change the turn in our node from `before`; return False if it was another one.

        Raises: MetadataError.
        """
        node = await self._own()
        if node is None or self._holder_of(node).turn != before:
            return False
        # Compare-and-set: an append may ask for its turn, or end it, at the same time.
        value = encode(replace(self._holder_of(node), turn=turn))
        try:
            await self._store.multi([Put(self._paths.lock, value, node.version)])
        except (MetadataVersionError, NoNodeError):
            return False
        return True

    async def delete_own(self) -> None:
        """Delete our node, if there is one.  Raises: MetadataError."""

        async def delete() -> None:
            if await self._own() is not None:
                with contextlib.suppress(NoNodeError):  # it vanished with its session
                    await self._store.multi([Delete(self._paths.lock)])

        await persistently(delete)

    async def _own(self) -> Versioned | None:
        node = await self._store.get(self._paths.lock, fresh=True)
        return node if node is not None and self._is_own(self._holder_of(node)) else None

    def _holder_of(self, node: Versioned) -> LockHolder:
        return decode(LockHolder, node.value, source=self._paths.lock)
