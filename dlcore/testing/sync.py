"""The blocking API of `dlcore.testing`: the same names, over one background event loop.

with MemoryCluster() as cluster:
    namespace = cluster.open_namespace()
    namespace.create_log("clicks")
    my_program(namespace)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore import testing
from dlcore.sync import Namespace
from dlcore.sync.portal import shared_portal
from dlcore.sync.twin import Blocking

if TYPE_CHECKING:
    from dlcore.base.config import LogConfig
    from dlcore.wire.memory_bookies import MemoryBookie

__all__ = ["MemoryCluster"]


class MemoryCluster(Blocking):
    """A cluster in the memory of this process.

    Each namespace that is opened is a client of its own, with its own session: writers of two
    namespaces fence each other, as in two processes.

    Args:
        bookies: how many bookies there are; the default is enough for the default quorums.
    """

    def __init__(self, *, bookies: int = 3) -> None:
        portal = shared_portal()

        async def make() -> testing.MemoryCluster:
            return testing.MemoryCluster(bookies=bookies)

        self._cluster = portal.call(make())
        self._opened: list[Namespace] = []
        super().__init__(portal, self._cluster.aclose)

    def __repr__(self) -> str:
        return repr(self._cluster)

    @property
    def bookies(self) -> list[MemoryBookie]:
        """The bookies; `is_running` of one may be set to False, and to True again."""
        return self._cluster.bookies

    def open_namespace(self, *, config: LogConfig | None = None) -> Namespace:
        """Open the namespace for another client.  Arguments: those of the async method."""
        namespace = Namespace(self._portal, self._call(self._cluster.open_namespace(config=config)))
        self._opened.append(namespace)
        return namespace

    def close(self) -> None:
        """Close every namespace, and forget all logs; harmless if it is closed already."""
        for namespace in self._opened:
            namespace.close()
        super().close()
