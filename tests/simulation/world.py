"""One seed's world: bookies, network, metadata store and clients on one virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from dlcore.backends.direct.ports import NamespacePorts
from dlcore.base.background import side_tasks
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.paths import NamespacePaths
from dlcore.ops.autorecovery.config import AutoRecoveryConfig
from dlcore.ops.autorecovery.service import AutoRecovery
from tests.fixtures.simulated_store import SimulatedTree
from tests.simulation.checkers import Checkers
from tests.simulation.clients import SimClient
from tests.simulation.cold_store import LIST_FAULTS, PUT_FAULTS, ColdStore
from tests.simulation.log_checkers import LogCheckers
from tests.simulation.network import Network
from tests.simulation.plan import BookieSettings
from tests.simulation.processes import SimBookie
from tests.simulation.tables import TABLE_FAULTS, Catalog
from tests.simulation.wire_connections import CONNECTION_TIMEOUT_S, new_bookie_client

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.metadata.port import Op
    from tests.simulation.clients import Deaths
    from tests.simulation.plan import Plan
    from tests.simulation.trace import Trace

EPOCH_MS = 1_700_000_000_000
RECOVERY_TIMEOUT_S = 2.0
MERGED_GRACE_S = 1.5
"""How long the ledgers that merges emptied stay."""
TIER_GRACE_S = 3.0
"""How long those stay whose entries are in objects."""
METADATA_LAGS_S = (0.0, 0.0, 0.1, 1.0, 3.0)
"""How far the metadata server of a session may be behind the leader, one as likely as the other."""
AUTO_RECOVERY = AutoRecoveryConfig(
    lost_bookie_delay_s=2.0,
    open_ledger_grace_s=3.0,
    audit_interval_s=4.0,
    check_interval_s=5.0,
    poll_interval_s=0.5,
    retry_pause_s=0.5,
    retry_pause_s_max=4.0,
)


class SimClock:
    """Wall clock and identities of one process; the wall clock may be wrong, and jump."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self.skew_ms = 0

    def now_ms(self) -> int:
        """Return virtual time after a fixed epoch, as this process sees it."""
        return EPOCH_MS + int(self._loop.time() * 1000) + self.skew_ms

    def new_token(self) -> str:
        """Return 32 hex digits."""
        return f"{self._rng.getrandbits(128):032x}"


class WatchedTree(SimulatedTree):
    """A metadata tree that tells at once what was changed, so that checkers see every state."""

    on_applied: Callable[[Sequence[Op]], None] = staticmethod(lambda _: None)

    def _apply(self, ops: Sequence[Op], session: int) -> None:
        super()._apply(ops, session)
        self.on_applied(ops)


class World:
    """Everything that one seed makes."""

    def __init__(self, rng: random.Random, plan: Plan, trace: Trace) -> None:
        self.rng = rng
        self.plan = plan
        self.loop = asyncio.get_running_loop()
        self.trace = trace
        self.network = Network(rng)
        self.metadata_latency_s = 0.002
        self.is_healed = False
        """Whether nothing new goes wrong any more; then the writes of new clients are not slow."""
        fate = random.Random(rng.getrandbits(32))
        self.tree = WatchedTree(
            latency=lambda: rng.uniform(0.2, 1.8) * self.metadata_latency_s,
            lag=lambda: fate.choice(METADATA_LAGS_S) * fate.random(),
        )
        self.paths = NamespacePaths("/dlog")
        self.clocks: list[SimClock] = []
        self.bookies: list[SimBookie] = []
        self.clients: list[SimClient] = []
        self.callers: list[str] = []
        """The callers of proxies, which only the network knows."""
        self.cluster_id = ""
        self.faults: Counter[str] = Counter()
        self.deaths: Deaths = Counter()
        self.failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.checkers = Checkers(
            tree=self.tree, paths=self.paths, trace=trace, on_violation=self.fail
        )
        self.log_checkers = LogCheckers(
            tree=self.tree,
            paths=self.paths,
            grace_s=MERGED_GRACE_S,
            tier_grace_s=TIER_GRACE_S,
            epoch_ms=EPOCH_MS,
        )
        self.cold: ColdStore | None = None
        self.tree.on_applied = self._on_metadata

    def _on_metadata(self, ops: Sequence[Op]) -> None:
        try:
            for op in ops:
                self.checkers.on_metadata(op)
            self.log_checkers.on_metadata(ops)
        except AssertionError as violation:
            self.fail(violation)

    def new_clock(self) -> SimClock:
        """Return the clock of a new process."""
        clock = SimClock(self.rng)
        self.clocks.append(clock)
        return clock

    async def start(self) -> None:
        """Make the namespace and start the bookies."""
        plan, rng = self.plan, self.rng
        session = self.tree.connect()
        binding = await ensure_namespace(session, self.paths, self.new_clock())
        await session.aclose()
        self.cluster_id = binding.cluster_id
        if plan.has_tier:
            self.cold = self.log_checkers.redactions.cold = self._new_cold_store()
        settings = BookieSettings(
            storage=plan.storage,
            cluster_id=binding.cluster_id,
            maintenance_interval_s=plan.maintenance_interval_s,
            hiding_chance=plan.hiding_chance,
            has_wire=plan.has_wire,
            quick_share=plan.quick_share,
            erases=plan.has_redactions,
        )
        for number in range(plan.quorum.ensemble_size + plan.spare_bookies):
            slow = 50.0 if rng.random() < 0.25 else 1.0
            self.bookies.append(
                SimBookie(
                    f"bookie-{number}",
                    rng=rng,
                    network=self.network,
                    tree=self.tree,
                    paths=self.paths,
                    clock=self.new_clock(),
                    trace=self.trace,
                    settings=settings,
                    disk_latency_s=plan.disk_latency_s * slow,
                    new_record=self.checkers.new_record,
                    on_violation=self.fail,
                    peers=self.bookies,
                )
            )
        await asyncio.gather(*(bookie.start() for bookie in self.bookies))
        for bookie in self.bookies:
            await bookie.registered.wait()
        for bookie in self.bookies[: plan.kept_down]:
            bookie.is_kept_down = True
            bookie.crash(keep_cache=True)

    def _new_cold_store(self) -> ColdStore:
        chance = random.Random(self.rng.getrandbits(32))
        kinds: tuple[str, ...] = (*PUT_FAULTS, *LIST_FAULTS, "reads", "deaths")
        if self.plan.has_tables:
            kinds += (*TABLE_FAULTS, "table stale")
        clock = self.new_clock()
        faults = chance.sample(kinds, chance.randint(0, len(kinds)))
        if self.plan.tier_steps_to_live is not None:
            faults = [*dict.fromkeys((*faults, "deaths"))]
        store = ColdStore(
            chance,
            faults=faults,
            share=chance.choice((0.1, 0.4)),
            now_ms=clock.now_ms,
            is_healed=lambda: self.is_healed,
            counts=self.faults,
        )
        if self.plan.has_tables:
            store.catalog = Catalog(store, self.tree, self.paths, self.fail)
        self.log_checkers.tiers.watch(store)
        return store

    def new_client(self, name: str, *, timeout_s: float = CONNECTION_TIMEOUT_S) -> SimClient:
        """Start a client process, whose connections give up after `timeout_s`."""
        client = SimClient(
            name,
            seed=self.rng.getrandbits(32),
            network=self.network,
            bookies=new_bookie_client(
                name,
                network=self.network,
                bookies=self.bookies,
                cluster_id=self.cluster_id,
                rng=self.rng,
                timeout_s=timeout_s,
                has_wire=self.plan.has_wire,
            ),
            tree=self.tree,
            paths=self.paths,
            clock=self.new_clock(),
        )
        if self.is_healed:
            client.store.write_delay_s = 0.0
        client.deaths = self.deaths
        self.clients.append(client)
        return client

    def start_auto_recovery(self, name: str) -> SimClient:
        """Start a process that makes lost replicas again."""
        client = self.new_client(name, timeout_s=RECOVERY_TIMEOUT_S)
        recovery = AutoRecovery(
            NamespacePorts(
                store=client.store,
                paths=self.paths,
                ledger_store=client.ledger_store,
                registry=client.registry,
                bookies=client.bookies,
                ledgers=client.ledgers,
                client_config=client.config,
                clock=client.clock,
                rng=client.rng,
            ),
            config=AUTO_RECOVERY,
            owner=name,
        )
        self.spawn(recovery.run(), client=client)
        return client

    def bookie_of(self, bookie: BookieId) -> SimBookie:
        """Return the machine of a bookie."""
        return next(each for each in self.bookies if each.name == bookie.name)

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
        """End the run; the first error counts."""
        if self.failure is None:
            self.failure = error
            self.trace.note("VIOLATED", f"{type(error).__name__}: {error}")
            self._failed.set()

    async def until(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, or raise as soon as anything failed."""
        async with side_tasks() as tasks:
            task = tasks.start(work)
            failed = tasks.start(self._failed.wait())
            await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
        if self.failure is not None:
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
