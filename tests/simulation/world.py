"""One seed's world: bookies, network, metadata store and clients on one virtual clock."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.memory import MemoryTree
from dlcore.metadata.paths import NamespacePaths
from tests.simulation.checkers import Checkers
from tests.simulation.clients import SimClient
from tests.simulation.network import Network
from tests.simulation.processes import SimBookie, SimBookieClient

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Sequence

    from dlcore.ids import BookieId
    from dlcore.metadata.port import Op

EPOCH_MS = 1_700_000_000_000


class SimClock:
    """Wall clock and identities of a run."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._loop = asyncio.get_running_loop()

    def now_ms(self) -> int:
        """Return virtual time after a fixed epoch."""
        return EPOCH_MS + int(self._loop.time() * 1000)

    def new_token(self) -> str:
        """Return 32 hex digits."""
        return f"{self._rng.getrandbits(128):032x}"


class WatchedTree(MemoryTree):
    """A metadata tree that tells at once what was changed, so that checkers see every state."""

    on_applied: Callable[[Sequence[Op]], None] = staticmethod(lambda _: None)

    def _apply(self, ops: Sequence[Op], session: int) -> None:
        super()._apply(ops, session)
        self.on_applied(ops)


class World:
    """Everything that one seed makes."""

    def __init__(self, rng: random.Random, trace: list[str]) -> None:
        self.rng = rng
        self.loop = asyncio.get_running_loop()
        self.lines = trace
        self.clock = SimClock(rng)
        self.network = Network(rng)
        self.metadata_latency_s = 0.002
        self.tree = WatchedTree(latency=lambda: rng.uniform(0.2, 1.8) * self.metadata_latency_s)
        self.paths = NamespacePaths("/dlog")
        self.bookies: list[SimBookie] = []
        self.clients: list[SimClient] = []
        self.failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.checkers = Checkers(
            tree=self.tree, paths=self.paths, bookies=self.bookies, trace=self.trace
        )
        self.tree.on_applied = self._on_metadata

    def trace(self, line: str) -> None:
        """Record what happens, for the reader of a failed seed."""
        self.lines.append(f"{self.loop.time():9.4f}  {line}")

    def _on_metadata(self, ops: Sequence[Op]) -> None:
        try:
            for op in ops:
                self.checkers.on_metadata(op.path)
        except AssertionError as violation:
            self.fail(violation)

    async def start(self, *, bookie_count: int, disk_latency_s: float) -> None:
        """Make the namespace and start the bookies."""
        session = self.tree.connect()
        await ensure_namespace(session, self.paths, self.clock)
        await session.aclose()
        for number in range(bookie_count):
            slow = 50.0 if self.rng.random() < 0.25 else 1.0
            bookie = SimBookie(
                f"bookie-{number}",
                rng=self.rng,
                network=self.network,
                tree=self.tree,
                paths=self.paths,
                clock=self.clock,
                trace=self.trace,
                disk_latency_s=disk_latency_s * slow,
            )
            self.bookies.append(bookie)
            await bookie.start()

    def new_client(self, name: str) -> SimClient:
        """Start a client process."""
        connections = SimBookieClient(name, network=self.network, bookies=self.bookies)
        client = SimClient(
            name,
            seed=self.rng.getrandbits(32),
            network=self.network,
            bookies=connections,
            tree=self.tree,
            paths=self.paths,
            clock=self.clock,
        )
        self.clients.append(client)
        return client

    def bookie_of(self, bookie: BookieId) -> SimBookie:
        """Return a bookie by its identity."""
        return next(each for each in self.bookies if each.bookie == bookie)

    def spawn(
        self, work: Coroutine[Any, Any, None], *, client: SimClient | None = None
    ) -> asyncio.Task[None]:
        """Run a part of the workload, in `client`'s process if given; its error ends the run."""
        task = self.loop.create_task(work)
        owned = self._tasks if client is None else client.tasks
        owned[task] = None

        def on_done(done: asyncio.Task[None]) -> None:
            owned.pop(done, None)
            if not done.cancelled() and (error := done.exception()) is not None:
                self.fail(error)

        task.add_done_callback(on_done)
        return task

    def fail(self, error: BaseException) -> None:
        """End the run."""
        if self.failure is None:
            self.failure = error
            self._failed.set()

    async def until(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, or raise as soon as anything failed."""
        task = self.loop.create_task(work)
        failed = self.loop.create_task(self._failed.wait())
        await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if self.failure is not None:
            task.cancel()
            await asyncio.wait([task])
            raise self.failure
        task.result()

    async def aclose(self) -> None:
        """Stop everything."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self.clients:
            await client.aclose()
        for bookie in self.bookies:
            await bookie.aclose()
