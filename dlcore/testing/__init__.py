"""Namespaces in memory, for the tests of programs that use dlog: no processes, ports or files.

    async with MemoryCluster() as cluster:
        namespace = await cluster.open_namespace()
        await namespace.create_log("clicks")
        await my_program(namespace)

The namespace is a `DirectNamespace` over a metadata store and bookies that live in this process;
therefore it is of the same code, and passes the same tests, as one over ZooKeeper and real bookies.
Nothing is durable.  `dlcore.scan` and Spark connect to real bookies, and cannot read it.
`dlcore.testing.sync` is the blocking API with the same names.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from dlcore.base.clock import SystemClock
from dlcore.base.closing import AsyncClosing
from dlcore.base.config import LedgerClientConfig, LogConfig, require_count
from dlcore.base.errors import AlreadyClosedError
from dlcore.base.extras import missing_packages_explained
from dlcore.base.ids import BookieId

with missing_packages_explained():
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ledger.metadata.values import BookieRegistration
    from dlcore.metadata.binding import ensure_namespace
    from dlcore.metadata.memory import MemoryTree
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.stored import encode
    from dlcore.wire.memory_bookies import MemoryBookie, MemoryBookieClient

if TYPE_CHECKING:
    from dlcore.api.namespace import Namespace

__all__ = ["MemoryCluster"]


class MemoryCluster(AsyncClosing):
    """A cluster in the memory of this process; used on one event loop.

    Each namespace that is opened is a client of its own, with its own session: writers of two
    namespaces fence each other, as in two processes.

    Args:
        bookies: how many bookies there are; the default is enough for the default quorums.
    """

    def __init__(self, *, bookies: int = 3) -> None:
        require_count(bookies)
        self.bookies = [
            MemoryBookie(BookieId(f"memory-{number}", f"{number:032x}"))
            for number in range(1, bookies + 1)
        ]
        """The bookies; `is_running` of one may be set to False, and to True again."""
        self._tree = MemoryTree()
        self._paths = NamespacePaths("/memory")
        self._clock = SystemClock()
        self._cluster_id: str | None = None
        self._opened: list[Namespace] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryCluster of {len(self.bookies)} bookies>"

    async def open_namespace(self, *, config: LogConfig | None = None) -> Namespace:
        """Open the namespace for another client.

        Args:
            config: configuration of logs, unless `open_log` gets another one.

        Raises: AlreadyClosedError: the cluster is closed.
        """
        if self._closed:
            raise AlreadyClosedError("the memory cluster is closed")
        store = self._tree.connect()
        if self._cluster_id is None:
            binding = await ensure_namespace(store, self._paths, self._clock)
            self._cluster_id = binding.cluster_id
            for number, each in enumerate(self.bookies, start=1):
                name = each.bookie.name
                found = BookieRegistration(
                    name=name, incarnation=each.bookie.incarnation, address=f"memory:{number}"
                )
                await store.create(self._paths.bookie_available(name), encode(found))
        namespace = DirectNamespace(
            uri="memory:",
            store=store,
            bookies=MemoryBookieClient(self.bookies),
            paths=self._paths,
            cluster_id=self._cluster_id,
            clock=self._clock,
            rng=random.Random(self._clock.new_token()),
            config=config or LogConfig(),
            client_config=LedgerClientConfig(),
            client_id=f"memory-client-{len(self._opened) + 1}",
        )
        self._opened.append(namespace)
        return namespace

    async def aclose(self) -> None:
        """Close every namespace, and forget all logs."""
        self._closed = True
        for namespace in self._opened:
            await namespace.aclose()
