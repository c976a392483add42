"""A namespace whose requests to ZooKeeper are counted, and what one of its operations took."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from benchmarks.logs import CONFIG
from dlcore.backends.direct.namespace import DirectNamespace
from dlcore.base.clock import SystemClock
from dlcore.base.config import LedgerClientConfig
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.metadata.binding import read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.wire.client import WireBookieClient
from tests.fixtures.recording_store import RecordingStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.log.staging.append import DirectStagedAppend

_QUIET_S = 0.02
"""Long enough that watches which the last call fired are armed again."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an operation: the client's CPU, and requests and bytes of ZooKeeper."""

    ms: float
    cpu_ms: float
    requests: int
    depth: int
    bytes_written: int

    @classmethod
    def typical(cls, costs: Sequence[Cost]) -> Cost:
        """Return medians of times, means of bytes, and the most requests and depth."""
        return cls(
            ms=statistics.median(each.ms for each in costs),
            cpu_ms=statistics.median(each.cpu_ms for each in costs),
            requests=max(each.requests for each in costs),
            depth=max(each.depth for each in costs),
            bytes_written=round(statistics.mean(each.bytes_written for each in costs)),
        )

    def __str__(self) -> str:
        return (
            f"{self.ms:9.2f} ms {self.cpu_ms:9.2f} ms CPU {self.requests:6,d} requests "
            f"{self.depth:3d} deep {self.bytes_written:9,d} bytes written"
        )


class CountedClient:
    """One client with an identity of its own for appends."""

    def __init__(self, namespace: DirectNamespace, store: RecordingStore) -> None:
        self.namespace = namespace
        self._store = store
        self.start_identity()

    def start_identity(self) -> None:
        """Append under an identity of its own from now on."""
        self.identity = f"bench-{uuid4().hex}"
        self._version = 0

    async def count_staged(self) -> int:
        """Return how many staged ledgers its identity has."""
        path = self.context.paths.staging_of(self.identity)
        return len(await self.context.store.get_children(path) or ())

    @property
    def context(self) -> LogContext:
        """The store that the namespace's logs get."""
        return self.namespace.log_context

    async def measure(self, work: Callable[[], Awaitable[object]]) -> Cost:
        """Return what a call took until its answer, begun when nothing else is under way."""
        await self.namespace.log_context.tidier.settled()
        await asyncio.sleep(_QUIET_S)
        with self._store.record() as requests:
            cpu_s, started_s = time.process_time(), time.perf_counter()
            await work()
            taken_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        return Cost(
            taken_s * 1000, cpu_s * 1000, requests.count, requests.depth, requests.bytes_written
        )

    async def begin_append(self) -> DirectStagedAppend:
        """Begin the next append of the identity."""
        self._version += 1
        return await self.namespace.begin_append(self.identity, self._version)

    async def commit(self, extents: Sequence[StagedExtent]) -> Cost:
        """Commit staged extents, as the sink's driver does."""
        append = await self.begin_append()
        return await self.measure(lambda: append.commit(extents))


@asynccontextmanager
async def counted_client(servers: str, root: str) -> AsyncIterator[CountedClient]:
    """Open the namespace at ZooKeeper `servers` and count what is asked of it."""
    paths, clock, config = NamespacePaths(root), SystemClock(), LedgerClientConfig()
    store = RecordingStore(await ZooKeeperStore.connect(servers))
    binding = await read_binding(store, paths)
    registry = BookieRegistry(store, paths)
    namespace = DirectNamespace(
        uri=f"distributedlog://{servers}{root}",
        store=store,
        bookies=WireBookieClient(registry.resolve, cluster_id=binding.cluster_id, config=config),
        paths=paths,
        cluster_id=binding.cluster_id,
        clock=clock,
        rng=random.Random(clock.new_token()),
        config=CONFIG,
        client_config=config,
        client_id="bench",
        registry=registry,
    )
    async with namespace:
        yield CountedClient(namespace, store)
