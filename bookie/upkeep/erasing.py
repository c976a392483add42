"""Erasures: removes every byte of ledgers that are gone, when the metadata store asks for it.

Garbage collection frees space; what little garbage a file has may stay in it for years.  An erasure
is a promise: its answer says that no file of this bookie has a byte of a ledger that was gone when
the bookie took the request up.  A request that cannot be fulfilled now is answered with the reason,
and taken up again later.  `Upkeep.erase` does the work.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.errors import DLError, NoNodeError
from dlcore.ledger.metadata.values import Erased, Erasure
from dlcore.metadata.one_node import change_node
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from bookie.upkeep.garbage_collector import GarbageCollector
    from bookie.upkeep.rounds import Upkeep
    from dlcore.base.ids import BookieId
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)


class Eraser:
    """Answers the requests to one bookie.

    Args:
        upkeep: of the bookie's storage.
        collector: finds the ledgers that are gone.
        bookie: the bookie.
        store: the session; the caller closes it.
        paths: the namespace.
        retry_s: the pause before a request that could not be fulfilled is taken up again.
    """

    def __init__(
        self,
        upkeep: Upkeep,
        collector: GarbageCollector,
        *,
        bookie: BookieId,
        store: MetadataStore,
        paths: NamespacePaths,
        retry_s: float,
    ) -> None:
        self._upkeep = upkeep
        self._collector = collector
        self._bookie = bookie
        self._store = store
        self._paths = paths
        self._retry_s = retry_s
        self._due_s: dict[str, float] = {}  # by request, on the event loop's clock
        self._awaited: dict[str, frozenset[int]] = {}  # by request: unproven when it was taken up

    async def run(self) -> int:
        """Take up the requests that have no final answer of this bookie; return how many.

        Raises:
            DLError: the metadata store or the storage failed.
        """
        tokens = await self._store.get_children(self._paths.erasures) or []
        now_s = asyncio.get_running_loop().time()
        self._due_s = {each: self._due_s.get(each, now_s) for each in tokens}
        self._awaited = {k: each for k, each in self._awaited.items() if k in self._due_s}
        count = 0
        for token in tokens:
            if self._due_s[token] <= now_s and await self._answer(token):
                count += 1
        return count

    async def _answer(self, token: str) -> bool:
        """Take up a request; return False if there is nothing to do."""
        path, own = self._paths.erasure(token), self._paths.erasure_at(token, self._bookie.name)
        request, known = await self._store.get_many([path, own], fresh=True)
        if request is None:
            return False  # it was withdrawn
        if known is not None:
            before = decode(Erased, known.value, source=own)
            # An answer of an earlier incarnation was about another disk.
            if before.incarnation == self._bookie.incarnation and not before.waits:
                return False
        erasure = decode(Erasure, request.value, source=path)
        collect = partial(self._collector.collect, at_once=frozenset(erasure.ledgers))
        try:
            waits, self._awaited[token] = await self._upkeep.erase(
                collect, awaited=self._awaited.get(token)
            )
        except DLError as error:
            waits = f"{type(error).__name__}: {error}"
        logger.info("erasure=%s bookie=%s: %s", token, self._bookie, waits or "done")
        if waits:
            self._due_s[token] = asyncio.get_running_loop().time() + self._retry_s
        answer = encode(Erased(incarnation=self._bookie.incarnation, waits=waits))
        try:
            await change_node(self._store, own, lambda _: (None, answer))
        except NoNodeError:
            logger.info("%s was withdrawn", own)
        return True
