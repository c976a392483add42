"""Simulated client processes: a real `LedgerClient` with its own session, connections and luck."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import AlreadyClosedError, MetadataError
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.metadata.port import (
    ANY_VERSION,
    Op,
    SessionState,
    StoreFigures,
    Unsubscribe,
    Versioned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dlcore.base.clock import Clock
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.wire.port import BookieClient
    from tests.fixtures.simulated_store import SimulatedStore, SimulatedTree
    from tests.simulation.network import Network

_CONFIG = LedgerClientConfig(
    add_timeout_s=2.0,
    read_timeout_s=2.0,
    speculative_read_delay_s=0.3,
    pending_bytes_max=4096,
    pending_entries_max=12,
)
SESSION_TIMEOUT_S = 3.0
"""The metadata store ends the session of a dead process after this."""
CONFIGS = (
    _CONFIG,
    replace(_CONFIG, add_timeout_s=5.0, pending_bytes_max=1 << 20, pending_entries_max=1000),
)


Deaths: TypeAlias = Counter[tuple[str, str, str]]
"""How often processes died at a request, by role, request, and before or after it is done."""


class Closable(Protocol):
    """Something with tasks and connections of its own."""

    async def aclose(self) -> None:
        """End it."""
        ...


class GatedStore:
    """A metadata session of a process that can be paused: requests and answers wait at the gate.

    Writes may be slow, as they are in a store that replicates: on their way in or out.
    """

    def __init__(self, inner: SimulatedStore, *, rng: random.Random, write_delay_s: float) -> None:
        self.inner = inner
        self._rng = rng
        self.write_delay_s = write_delay_s
        """How long a write takes at most, on its way in and again on its way out."""
        self.hiding_chance = 0.0
        """How often a read of one of `hidden_paths` finds no node.

        The next read of the same path finds it, whatever other tasks read in between.
        """
        self.hidden_paths: set[str] = set()
        self._hidden = set[str]()
        self.gate = asyncio.Event()
        self.gate.set()
        self._is_dead = False
        self._is_buried = asyncio.Event()
        self._steps_left = 0
        self._on_last_step: Callable[[str], None] = lambda _: None

    def crash_after(self, requests: int, crash: Callable[[str], None]) -> None:
        """Call `crash` with the last of so many requests, before it is sent."""
        self._steps_left, self._on_last_step = requests, crash

    def die(self) -> None:
        """Send nothing any more: what is asked from now on waits."""
        self._is_dead = True
        self.gate.set()

    def bury(self) -> None:
        """Let nothing wait any more, of what a dead process asked."""
        self._is_buried.set()

    async def buried(self) -> None:
        """Wait until then."""
        await self._is_buried.wait()

    async def _pass(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._on_last_step(getattr(work, "__name__", ""))
        try:
            await self.gate.wait()
            if self._is_dead:
                await self._is_buried.wait()
                raise AlreadyClosedError("the process is dead")
            result = await work
            await self.gate.wait()
        except MetadataError:
            await self.gate.wait()
            raise
        else:
            return result
        finally:
            work.close()  # one that never began would warn

    async def _wait_for_write(self) -> None:
        if self.write_delay_s:
            await asyncio.sleep(self._rng.uniform(0.0, self.write_delay_s))

    async def get(self, path: str, *, fresh: bool = False) -> Versioned | None:
        """Return the node."""
        found: Versioned | None = await self._pass(self.inner.get(path, fresh=fresh))
        if path in self._hidden:
            self._hidden.remove(path)
        elif (
            self.hiding_chance
            and path in self.hidden_paths
            and self._rng.random() < self.hiding_chance
        ):
            self._hidden.add(path)
            return None
        return found

    async def get_many(
        self, paths: Sequence[str], *, fresh: bool = False
    ) -> list[Versioned | None]:
        """Return the nodes."""
        found: list[Versioned | None] = await self._pass(self.inner.get_many(paths, fresh=fresh))
        return found

    async def get_children(self, path: str, *, fresh: bool = False) -> list[str] | None:
        """Return the children."""
        found: list[str] | None = await self._pass(self.inner.get_children(path, fresh=fresh))
        return found

    async def get_children_many(self, paths: Sequence[str]) -> list[list[str] | None]:
        """Return the children of many."""
        lists: list[list[str] | None] = await self._pass(self.inner.get_children_many(paths))
        return lists

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, make_parents: bool = False
    ) -> None:
        """Create a node."""
        await self._pass(
            self.inner.create(path, value, ephemeral=ephemeral, make_parents=make_parents)
        )

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """Compare-and-set."""
        await self._wait_for_write()
        new_version: int = await self._pass(self.inner.put(path, value, version=version))
        await self._wait_for_write()
        return new_version

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a node."""
        await self._pass(self.inner.delete(path, version=version))

    async def multi(self, ops: Sequence[Op]) -> None:
        """Apply all or nothing."""
        await self._wait_for_write()
        await self._pass(self.inner.multi(ops))
        await self._wait_for_write()

    async def sync(self, path: str) -> None:
        """Catch up."""
        await self._pass(self.inner.sync(path))

    def watch(
        self, path: str, callback: Callable[[], None], *, children: bool = True
    ) -> Unsubscribe:
        """Watch a node."""
        return self.inner.watch(path, callback, children=children)

    def on_session(self, callback: Callable[[SessionState], None]) -> Unsubscribe:
        """Watch the session."""
        return self.inner.on_session(callback)

    @property
    def session_state(self) -> SessionState:
        """The session's state."""
        return self.inner.session_state

    @property
    def session_token(self) -> str:
        """The session's identity."""
        return self.inner.session_token

    @property
    def figures(self) -> StoreFigures:
        """The session's counts."""
        return self.inner.figures

    async def aclose(self) -> None:
        """End the session."""
        await self.inner.aclose()


class SimClient:
    """One client process."""

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        network: Network,
        bookies: BookieClient,
        tree: SimulatedTree,
        paths: NamespacePaths,
        clock: Clock,
    ) -> None:
        self.name = name
        self.is_alive = True
        self.died = asyncio.Event()
        rng = random.Random(seed)
        self.store = GatedStore(
            tree.connect(), rng=rng, write_delay_s=rng.choice((0.0, 0.0, 0.3, 1.5))
        )
        self._network = network
        self.config = rng.choice(CONFIGS)
        self.rng = rng
        self.clock = clock
        self.bookies = bookies
        self.registry = BookieRegistry(self.store, paths)
        self.ledger_store = LedgerStore(self.store, paths)
        self.ledgers = LedgerClient(
            ledger_store=self.ledger_store,
            registry=self.registry,
            bookies=bookies,
            config=self.config,
            clock=clock,
            rng=rng,
        )
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.parts: list[Closable] = []
        """The other objects of the process, which end with it."""
        self.deaths: Deaths = Counter()
        """Where it is counted that it died at a request."""

    def crash_at(self, request: str, step: str = "before") -> None:
        """Die at a step of a request to the metadata or the object store."""
        if self.is_alive:
            self.deaths[re.sub(r"[-.\d]+$", "", self.name), request, step] += 1
        self.crash()

    def crash(self) -> None:
        """Die at once; a metadata request under way may still arrive, and the session lives on."""
        self.is_alive = False
        self.died.set()
        asyncio.get_running_loop().call_later(SESSION_TIMEOUT_S, self.store.inner.expire)
        self._network.kill(self.name)
        self.store.die()
        for task in self.tasks:
            task.cancel()

    def pause(self) -> None:
        """Stop sending and receiving."""
        self._network.pause(self.name)
        self.store.gate.clear()

    def resume(self) -> None:
        """Go on as if nothing had happened."""
        self.store.gate.set()
        self._network.resume(self.name)

    async def aclose(self) -> None:
        """Stop in good order."""
        self.store.gate.set()
        self.store.bury()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for part in self.parts:
            await part.aclose()
        await self.ledgers.aclose()
        await self.bookies.aclose()
        await self.store.aclose()
