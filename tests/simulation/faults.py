"""Faults of a run: of processes, network, metadata store, disks and clocks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from dlcore.base.errors import DLError
from tests.simulation.atlas import FaultAtlas
from tests.simulation.processes import MADE_TO_FAIL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie.ledger_storage import LedgerStorage
    from dlcore.ledger.writing.writer import LedgerWriter
    from tests.simulation.clients import GatedStore, SimClient
    from tests.simulation.processes import SimBookie
    from tests.simulation.world import World

_FREE_BYTES = (300 << 10, 240 << 10, 10 << 10, 1500, 0)
"""A full disk has so much left beside what the bookie holds back: enough for all, for recovery, for
fences, for almost nothing."""
HEALED_LATENCY_S = 0.01
"""Disks are no slower than this at the end: slow ones would make time-outs there for ever."""
_CLOCK_JUMPS_MS = (-86_400_000, -60_000, -1000, 1000, 60_000, 86_400_000)


class Chaos:
    """Makes the faults of a plan, until `stop`; then nothing new goes wrong."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        plan = world.plan
        self._atlas = FaultAtlas(
            [each.name for each in world.bookies], losses_max=plan.losses_max, rng=world.rng
        )
        self.is_over = False
        self._janitor: SimClient | None = None
        self._faults: dict[str, Callable[[], Awaitable[None]]] = {
            "bookie dies": self._bookie_dies,
            "bookie pauses": self._bookie_pauses,
            "client dies": self._client_dies,
            "client pauses": self._client_pauses,
            "partition": self._partition,
            "flapping": self._flapping,
            "lag": self._lag,
            "weather": self._weather,
            "metadata": self._metadata,
            "bookie metadata": self._bookie_metadata,
            "metadata outage": self._metadata_outage,
            "crash at a step": self._crash_at_a_step,
            "write error": self._write_error,
            "sync error": self._sync_error,
            "read error": self._read_error,
            "damage": self._damage,
            "lost disk": self._lost_disk,
            "full disk": self._full_disk,
            "clock jump": self._clock_jump,
            "deletion": self._deletion,
            "made-up ledger": self._made_up_ledger,
        }
        for bookie in world.bookies:
            bookie.on_fence_answered = self._hunt
            bookie.on_died = self._restart_later
        world.trace.note("chaos", f"victims {self._atlas.victims}")

    async def run(self) -> None:
        """Make faults for ever, if the plan has any."""
        plan = self._world.plan
        while plan.faults:
            await asyncio.sleep(self._rng.expovariate(1 / plan.fault_interval_s))
            await self._faults[self._rng.choice(plan.faults)]()

    def stop(self) -> None:
        """End every fault that ends by itself; what is lost stays lost."""
        world = self._world
        self.is_over = True
        world.network.heal()
        world.is_healed = True
        for client in world.clients:
            client.store.write_delay_s = 0.0
            if client.is_alive:
                client.resume()
                client.store.inner.reconnect()
        for bookie in world.bookies:
            disk = bookie.disk
            disk.device.write_error = disk.device.sync_error = disk.device.read_error = (
                disk.device.crash_at_step
            ) = None
            disk.room.filler_bytes = 0
            bookie.disk_latency_s = min(bookie.disk_latency_s, HEALED_LATENCY_S)
            bookie.resume()
            if bookie.session is not None:
                bookie.session.hiding_chance = 0.0
                bookie.session.inner.reconnect()

    def _note(self, kind: str, who: str, what: str) -> None:
        self._world.faults[kind] += 1
        self._world.trace.note(who, what)

    def _later(self, mean_s: float, action: Callable[[], object]) -> None:
        self._world.loop.call_later(self._rng.expovariate(1 / mean_s), action)

    def _some_bookie(self) -> SimBookie:
        return self._rng.choice(self._world.bookies)

    def _some_client(self) -> SimClient | None:
        alive = [each for each in self._world.clients if each.is_alive]
        if self._world.callers and self._rng.random() < 0.5:
            alive = [each for each in alive if each.name.startswith("proxy-")]
        return self._rng.choice(alive) if alive else None

    # Processes

    async def _bookie_dies(self) -> None:
        self.crash(self._some_bookie())

    def crash(self, bookie: SimBookie) -> None:
        """Kill a bookie, or cut its power; it comes back later."""
        if self.is_over:
            return
        self._world.faults["bookie dies"] += 1
        bookie.crash(keep_cache=self._rng.random() < 0.3)
        self._restart_later(bookie)

    def _restart_later(self, bookie: SimBookie) -> None:
        mean_s = self._rng.choice((0.05, 0.05, 2.0))
        self._later(mean_s, lambda: self._world.spawn(bookie.start()))

    def _hunt(self, bookie: SimBookie, client: str) -> None:
        """A bookie that has just answered a fencing request is the most interesting to lose."""
        plan = self._world.plan
        if self.is_over or self._rng.random() >= plan.hunt_chance:
            return
        if plan.hunts_by_crash:
            self._world.loop.call_later(self._rng.uniform(0.0, 0.02), self.crash, bookie)
        else:
            # The answer is on its way already; what is asked next gets none.
            self._disturb(client, bookie.name, self._world.network.block)

    async def _bookie_pauses(self) -> None:
        bookie = self._some_bookie()
        self._note("bookie pauses", bookie.name, "paused")
        bookie.pause()
        self._later(1.5, bookie.resume)

    async def _client_dies(self) -> None:
        client = self._some_client()
        if client is not None and self._rng.random() < 0.3:
            self._note("client dies", client.name, "killed")
            client.crash()

    async def _client_pauses(self) -> None:
        callers = self._world.callers
        if callers and self._rng.random() < 0.3:
            network, caller = self._world.network, self._rng.choice(callers)
            self._note("client pauses", caller, "paused")
            network.pause(caller)
            self._later(2.0, lambda: network.resume(caller))
            return
        client = self._some_client()
        if client is not None:
            self._note("client pauses", client.name, "paused")
            client.pause()
            self._later(2.0, client.resume)

    async def _clock_jump(self) -> None:
        jump_ms = self._rng.choice(_CLOCK_JUMPS_MS)
        self._note("clock jump", "clock", f"jumps by {jump_ms} ms")
        self._rng.choice(self._world.clocks).skew_ms += jump_ms

    async def _deletion(self) -> None:
        ledgers = self._world.checkers.live_ledgers()
        if not ledgers or self._rng.random() < 0.7:
            return
        if self._janitor is None or not self._janitor.is_alive:
            self._janitor = self._world.new_client("janitor")
        self._world.spawn(
            self._delete(self._janitor, self._rng.choice(ledgers)), client=self._janitor
        )

    async def _delete(self, janitor: SimClient, ledger_id: int) -> None:
        self._world.faults["deletion"] += 1
        self._world.trace.note(janitor.name, "deletes", ledger_id=ledger_id)
        try:
            await janitor.ledgers._context().ledger_store.delete(ledger_id)
        except DLError as error:
            self._world.trace.note(janitor.name, f"{type(error).__name__}: {error}")

    async def _made_up_ledger(self) -> None:
        """A client asks a bookie to fence a ledger that no one made."""
        bookie = self._some_bookie()
        storage, ledger_id = bookie.storage, self._rng.choice((1 << 20, 2**63 - 1))
        if storage is not None:
            self._note("made-up ledger", bookie.name, f"is to fence {ledger_id}")
            self._world.spawn(self._fence(storage, ledger_id))

    async def _fence(self, storage: LedgerStorage, ledger_id: int) -> None:
        with contextlib.suppress(DLError):
            await storage.reads.read_lac(ledger_id, fence=True)

    # Network

    def split(self, client: SimClient, writer: LedgerWriter, recoverers: list[SimClient]) -> None:
        """The writer is close to some bookies only, and those who take over rather to the others.

        Half-written entries are what this makes, and most ways to lose one begin with them.
        """
        rng, world = self._rng, self._world
        members = [world.bookie_of(each) for each in writer.metadata.last_ensemble.bookies]
        near = rng.sample(members, max(1, writer.metadata.quorum.ack_quorum_size - 1))
        self._note("split", client.name, f"is near {','.join(each.name for each in near)} only")
        for bookie in members:
            if bookie not in near:
                self._disturb(client.name, bookie.name, world.network.lag)
            for recoverer in recoverers:
                if bookie in near:
                    disturb = rng.choice((world.network.lag, world.network.block))
                    self._disturb(recoverer.name, bookie.name, disturb)
                elif rng.random() < 0.5:
                    disturb = rng.choice((world.network.lag, world.network.make_flaky))
                    self._disturb(recoverer.name, bookie.name, disturb)
        if rng.random() < 0.4:
            world.loop.call_later(rng.uniform(0.0, 0.5), self.crash, rng.choice(near))

    def _disturb(self, source: str, target: str, disturb: Callable[[str, str], None]) -> None:
        disturb(source, target)
        self._later(3.0, lambda: self._world.network.unblock(source, target))

    def _some_link(self) -> tuple[str, str]:
        client = self._rng.choice(self._world.clients).name
        bookie = self._some_bookie().name
        if self._world.callers and self._rng.random() < 0.5:
            live = [each.name for each in self._world.clients if each.is_alive]
            bookie, client = self._rng.choice(live), self._rng.choice(self._world.callers)
        return (client, bookie) if self._rng.random() < 0.6 else (bookie, client)

    async def _partition(self) -> None:
        if self._world.clients:
            source, target = self._some_link()
            self._note("partition", source, f"-> {target} cut")
            self._disturb(source, target, self._world.network.block)

    async def _flapping(self) -> None:
        if self._world.clients:
            source, target = self._some_link()
            self._note("flapping", source, f"-> {target} flaps")
            self._world.spawn(self._flap(source, target))

    async def _flap(self, source: str, target: str) -> None:
        network = self._world.network
        for _ in range(self._rng.randint(2, 10)):
            if self.is_over:
                return
            network.block(source, target)
            await asyncio.sleep(self._rng.uniform(0.01, 0.5))
            network.unblock(source, target)
            await asyncio.sleep(self._rng.uniform(0.01, 0.5))

    async def _lag(self) -> None:
        if self._world.clients:
            source, target = self._some_link()
            self._note("lag", source, f"-> {target} lags")
            network = self._world.network
            self._disturb(source, target, self._rng.choice((network.lag, network.make_flaky)))

    async def _weather(self) -> None:
        network = self._world.network
        network.loss = self._rng.choice((0.0, 0.0, 0.1))
        network.duplication = self._rng.choice((0.0, 0.1, 0.5))
        network.slowness = self._rng.choice((0.0, 0.2, 0.8))
        self._note(
            "weather",
            "network",
            f"loss={network.loss} duplication={network.duplication} slow={network.slowness}",
        )

    # Metadata store

    async def _metadata(self) -> None:
        client = self._some_client()
        if client is not None:
            self._disturb_session("metadata", client.name, client.store)

    async def _bookie_metadata(self) -> None:
        bookie = self._some_bookie()
        if bookie.session is not None:
            self._disturb_session("bookie metadata", bookie.name, bookie.session)

    def _disturb_session(self, kind: str, name: str, store: GatedStore) -> None:
        session = store.inner
        what = self._rng.choice(("lose", "lose", "disconnect", "expire"))
        self._note(kind, name, f"metadata {what}")
        if what == "lose":
            session.lose_next_reply(applied=self._rng.random() < 0.6)
        elif what == "expire":
            session.expire()
        else:
            session.disconnect()
            self._later(1.0, session.reconnect)

    async def _metadata_outage(self) -> None:
        self._note("metadata outage", "metadata", "restarts")
        stores = [each.store for each in self._world.clients if each.is_alive]
        stores += [each.session for each in self._world.bookies if each.session is not None]
        outage_s = self._rng.expovariate(1.0)
        for store in stores:
            store.inner.disconnect()
            self._world.loop.call_later(outage_s, store.inner.reconnect)

    # Disks

    async def _crash_at_a_step(self) -> None:
        bookie = self._some_bookie()
        steps = self._rng.randint(1, 12)
        self._note("crash at a step", bookie.name, f"will lose power in {steps} steps of its disk")
        bookie.disk.device.crash_at_step = bookie.disk.device.steps + steps

    async def _write_error(self) -> None:
        bookie = self._some_bookie()
        self._note("write error", bookie.name, "will fail to write")
        bookie.disk.device.write_error = MADE_TO_FAIL

    async def _sync_error(self) -> None:
        bookie = self._some_bookie()
        self._note("sync error", bookie.name, "will fail to sync")
        bookie.disk.device.sync_error = MADE_TO_FAIL

    async def _read_error(self) -> None:
        bookie = self._some_bookie()
        self._note("read error", bookie.name, "will fail to read")
        bookie.disk.device.read_error = MADE_TO_FAIL

    def _some_victim(self) -> SimBookie | None:
        names = self._atlas.victims
        if not names:
            return None
        name = self._rng.choice(names)
        victim = next(each for each in self._world.bookies if each.name == name)
        return None if victim.is_spent else victim

    async def _damage(self) -> None:
        bookie = self._some_victim()
        if bookie is None or bookie.storage is None:
            return
        what = self._atlas.damage(bookie.disk, bookie.storage)
        if not what:
            return
        bookie.is_damaged = True
        self._note("damage", bookie.name, f"damaged: {what}")
        if self._rng.random() < 0.3:
            self.crash(bookie)

    async def _lost_disk(self) -> None:
        bookie = self._some_victim()
        if bookie is None or self._rng.random() < 0.5:
            return
        self._world.faults["lost disk"] += 1
        bookie.replace_disk()
        self._restart_later(bookie)  # which is refused: the cluster knows better
        self._later(2.0, lambda: self._world.spawn(self._start_anew(bookie)))

    async def _start_anew(self, bookie: SimBookie) -> None:
        if not self.is_over and bookie.is_without_its_disk:
            bookie.forget_identity()
            await bookie.start()

    async def _full_disk(self) -> None:
        bookie = self._some_bookie()
        disk = bookie.disk
        free = self._rng.choice(_FREE_BYTES)
        disk.room.fill(leave_bytes=free)
        self._note("full disk", bookie.name, f"has {free} bytes left")

        def empty() -> None:
            disk.room.filler_bytes = 0

        self._later(2.0, empty)
