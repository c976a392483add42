"""The election of one auditor at a time, by an ephemeral node.

For a moment two processes may both believe that they are the auditor.  This does no harm: each of
their writes is a compare-and-set, or may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.errors import MetadataConnectionError, MetadataError, NodeExistsError, NoNodeError
from dlcore.metadata.stored import decode_or_tell, encode
from dlcore.ops.autorecovery.runner import run_together
from dlcore.ops.autorecovery.values import ElectedAuditor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)


class Election:
    """Holds the auditor's role for one process, or waits for it."""

    def __init__(
        self, store: MetadataStore, paths: NamespacePaths, candidate: ElectedAuditor
    ) -> None:
        self._store = store
        self._path = paths.auditor
        self._candidate = candidate

    async def serve(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the role and do `work` in it, until it fails or the role is lost.

        Raises:
            MetadataError: the store failed.
            DLError: `work` failed.
        """
        changed = asyncio.Event()
        unsubscribe = self._store.watch(self._path, changed.set)
        try:
            while not await self._take():
                await changed.wait()
                changed.clear()
            logger.info("auditor: %s", self._candidate.owner)
            await run_together(work(), self._wait_until_lost(changed))
        finally:
            unsubscribe()
            await self._leave()

    async def _take(self) -> bool:
        """Try to create the node; return whether it belongs to this process."""
        try:
            await self._store.create(
                self._path, encode(self._candidate), ephemeral=True, make_parents=True
            )
        except NodeExistsError:
            return await self._is_ours()
        except MetadataConnectionError:
            if not await self._is_ours():
                raise  # the create may not have been sent, so no change of the node would come
        return True

    async def _is_ours(self) -> bool:
        node = await self._store.get(self._path)
        # A damaged node belongs to another process; it is removed with that session.
        tell = partial(logger.warning, "cannot read which process is the auditor: %s")
        found = decode_or_tell(ElectedAuditor, node, source=self._path, tell=tell)
        return found is not None and found.token == self._candidate.token

    async def _wait_until_lost(self, changed: asyncio.Event) -> None:
        while await self._is_ours():
            await changed.wait()
            changed.clear()
        logger.warning(
            "auditor: %s lost the role; to do: nothing, another process takes it; see to "
            "ZooKeeper if this comes often",
            self._candidate.owner,
        )

    async def _leave(self) -> None:
        """Remove the node if it is ours; without an answer it is removed with the session."""
        with contextlib.suppress(MetadataError):
            if await self._is_ours():
                with contextlib.suppress(NoNodeError):
                    await self._store.delete(self._path)
