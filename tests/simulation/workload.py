"""What happens in one seed: writers, readers, recoverers, and all that goes wrong around them.

A run has two parts.  In the first, faults come at random times while the clients work.  Then
everything heals, and a fresh client must be able to recover, close and read every ledger.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dlcore.config import QuorumConfig
from dlcore.errors import DLError, LedgerReadError
from tests.simulation.loop import LivenessLostError, run as run_loop
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.ledger.metadata import LedgerMetadata
    from dlcore.ledger.writer import LedgerWriter
    from tests.simulation.clients import SimClient
    from tests.simulation.processes import SimBookie

QUORUMS = ((3, 3, 2), (3, 3, 2), (3, 3, 2), (4, 3, 2), (5, 3, 2), (3, 2, 2), (3, 3, 3), (2, 2, 1))
CHAOS_S = 12.0
HEALING_S_MAX = 240.0
"""Virtual time that recovering and reading everything may take after the last fault."""


@dataclass(slots=True)
class Run:
    """One finished seed."""

    seed: int
    failure: BaseException | None = None
    trace: list[str] = field(default_factory=list)
    acks: int = 0
    steps: int = 0

    def explain(self) -> str:
        """Return what failed, how to replay it, and what happened."""
        lines = "\n".join(self.trace)
        return (
            f"seed {self.seed} failed: {type(self.failure).__name__}: {self.failure}\n"
            f"replay: python -m tests.simulation --seed {self.seed}\n{lines}"
        )


def run_seed(seed: int) -> Run:
    """Run one seed; the same seed gives the same trace."""
    result = Run(seed)
    try:
        _, loop = run_loop(_main(seed, result), seconds_max=CHAOS_S * 3 + HEALING_S_MAX)
        result.steps = loop.steps
    except AssertionError as error:
        result.failure = error
    return result


async def _main(seed: int, result: Run) -> None:
    rng = random.Random(seed)
    world = World(rng, result.trace)
    try:
        await world.until(Scenario(world).play())
    except DLError as error:
        raise LivenessLostError(f"a client gave up: {type(error).__name__}: {error}") from error
    finally:
        result.acks = world.checkers.acks
        await world.aclose()


class Scenario:
    """The first part of a run, and the judgement."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._ledgers: list[int] = []
        self._hunt_chance = 0.0
        self._hunts_by_crash = False
        self._is_healed = False

    async def play(self) -> None:
        """Run the whole seed."""
        world, rng = self._world, self._rng
        quorum = QuorumConfig(
            **dict(
                zip(
                    ("ensemble_size", "write_quorum_size", "ack_quorum_size"),
                    rng.choice(QUORUMS),
                    strict=True,
                )
            )
        )
        spare = rng.choice((0, 1, 1, 2))
        await world.start(
            bookie_count=quorum.ensemble_size + spare,
            disk_latency_s=rng.choice((0.0005, 0.003, 0.05)),
        )
        self._hunt_chance = rng.choice((0.0, 0.3, 0.6))
        self._hunts_by_crash = rng.random() < 0.5
        for bookie in world.bookies:
            bookie.on_fence_answered = self._hunt
        world.trace(f"quorum {quorum} bookies {len(world.bookies)}")
        writers = [world.new_client(f"writer-{number}") for number in range(rng.choice((1, 1, 2)))]
        for client in writers:
            writer = await client.ledgers.create_ledger(quorum)
            self._ledgers.append(writer.ledger_id)
            world.trace(f"{client.name} created {writer} on {_names(writer.metadata)}")
            world.spawn(self._write(client, writer), client=client)
            self._start_company(client, writer)
        world.metadata_latency_s = rng.choice((0.002, 0.002, 0.05, 0.2))
        chaos = world.spawn(self._chaos())
        await asyncio.sleep(CHAOS_S)
        chaos.cancel()
        await self._heal()
        for client in writers:
            if client.is_alive and client.tasks:
                await asyncio.wait(list(client.tasks))
        await self._judge()

    # Clients

    async def _write(self, client: SimClient, writer: LedgerWriter) -> None:
        try:
            await self._append_all(client, writer)
            await self._end(client, writer)
        except DLError as error:
            self._world.trace(f"{client.name} stopped: {type(error).__name__}: {error}")

    async def _append_all(self, client: SimClient, writer: LedgerWriter) -> None:
        rng = self._rng
        pause_s = rng.choice((0.001, 0.05, 0.5))
        for number in range(rng.choice((1, 3, 10, 30))):
            await writer.wait_for_capacity()
            body = b"%d:%d:" % (writer.ledger_id, number) + rng.randbytes(rng.choice((0, 20, 200)))
            self._world.checkers.on_append(writer.ledger_id, body)
            writer.append([body]).add_done_callback(partial(self._on_ack, client, writer))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.expovariate(1 / pause_s))
            if rng.random() < 0.1:
                await writer.flush()
            if rng.random() < 0.1:
                lac = writer.last_add_confirmed
                await writer.publish_lac()
                self._world.checkers.on_published(writer.ledger_id, lac)

    def _on_ack(self, client: SimClient, writer: LedgerWriter, future: asyncio.Future[int]) -> None:
        if future.cancelled() or not client.is_alive:
            return
        error = future.exception()
        if error is not None:
            return
        entry_id = future.result()
        self._world.trace(f"{client.name} acked {writer.ledger_id}:{entry_id}")
        try:
            self._world.checkers.on_ack(writer.ledger_id, entry_id)
        except Exception as violation:  # noqa: BLE001  # whatever it is, it ends the run
            self._world.fail(violation)

    async def _end(self, client: SimClient, writer: LedgerWriter) -> None:
        choice = self._rng.random()
        if choice < 0.3:
            self._world.checkers.on_closed(await writer.close())
        elif choice < 0.5:
            await writer.flush()
            await writer.abandon()
        elif choice < 0.7:
            self._world.trace(f"{client.name} crashed")
            client.crash()
        else:
            await writer.flush()  # and stays open: somebody will take it over

    def _start_company(self, client: SimClient, writer: LedgerWriter) -> None:
        """Start those who read and recover the ledger while it is written."""
        rng, world = self._rng, self._world
        ledger_id = writer.ledger_id
        for number in range(rng.choice((0, 1))):
            follower = world.new_client(f"follower-{ledger_id}-{number}")
            world.spawn(self._follow(follower, ledger_id), client=follower)
        if rng.random() < 0.3:
            observer = world.new_client(f"observer-{ledger_id}")
            world.spawn(self._observe(observer, ledger_id), client=observer)
        recoverers = [
            world.new_client(f"recoverer-{ledger_id}-{number}")
            for number in range(rng.choice((0, 1, 1, 2, 3)))
        ]
        for recoverer in recoverers:
            world.spawn(self._recover(recoverer, ledger_id), client=recoverer)
        if rng.random() < 0.5:
            self._split(client, writer, recoverers)

    def _split(self, client: SimClient, writer: LedgerWriter, recoverers: list[SimClient]) -> None:
        """The writer is close to some bookies only, and those who take over rather to the others.

        Half-written entries are what this makes, and most ways to lose one begin with them.
        """
        rng, world = self._rng, self._world
        members = [world.bookie_of(each) for each in writer.metadata.last_ensemble.bookies]
        near = rng.sample(members, max(1, writer.metadata.quorum.ack_quorum_size - 1))
        world.trace(f"{client.name} is near {','.join(each.name for each in near)} only")
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
            world.loop.call_later(rng.uniform(0.0, 0.5), self._crash, rng.choice(near))

    def _disturb(self, source: str, target: str, disturb: Callable[[str, str], None]) -> None:
        disturb(source, target)
        self._later(3.0, lambda: self._world.network.unblock(source, target))

    async def _recover(self, client: SimClient, ledger_id: int) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 4.0) * self._rng.choice((0.05, 0.05, 1.0)))
        while True:
            self._world.trace(f"{client.name} begins")
            try:
                metadata = await client.ledgers.recover_ledger(ledger_id)
            except DLError as error:
                self._world.trace(f"{client.name}: {type(error).__name__}: {error}")
                await asyncio.sleep(self._rng.uniform(0.05, 1.0))
            else:
                self._world.checkers.on_closed(metadata)
                return

    async def _follow(self, client: SimClient, ledger_id: int) -> None:
        delivered = self._world.checkers.new_delivery(ledger_id)
        while True:
            try:
                reader = await client.ledgers.open_ledger(ledger_id)
                async for step in reader.follow(len(delivered)):
                    self._world.checkers.on_delivered(ledger_id, delivered, step.frames)
            except DLError as error:
                self._world.trace(f"{client.name}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
            else:
                self._world.trace(f"{client.name} got all {len(delivered)} entries")
                return

    async def _observe(self, client: SimClient, ledger_id: int) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.05, 1.0))
            floor = self._world.checkers.lac_floor(ledger_id)
            try:
                reader = await client.ledgers.open_ledger(ledger_id)
                lac = await reader.read_last_add_confirmed()
            except DLError:
                continue
            self._world.checkers.on_lac_read(ledger_id, lac, floor)

    # Faults

    async def _chaos(self) -> None:
        rng = self._rng
        interval_s = rng.choice((0.1, 0.5, 2.0))
        faults: list[Callable[[], Awaitable[None]]] = [
            self._fault_bookie_dies,
            self._fault_bookie_pauses,
            self._fault_partition,
            self._fault_lag,
            self._fault_weather,
            self._fault_client_dies,
            self._fault_client_pauses,
            self._fault_metadata,
        ]
        chosen = rng.sample(faults, rng.randint(1, len(faults)))
        while True:
            await asyncio.sleep(rng.expovariate(1 / interval_s))
            await rng.choice(chosen)()

    async def _fault_bookie_dies(self) -> None:
        self._crash(self._rng.choice(self._world.bookies))

    def _crash(self, bookie: SimBookie) -> None:
        if self._is_healed:
            return
        keep_cache = self._rng.random() < 0.3
        self._world.checkers.has_lost_bookie = True
        bookie.crash(keep_cache=keep_cache)
        self._later(self._rng.choice((0.05, 0.05, 2.0)), lambda: self._world.spawn(bookie.start()))

    def _later(self, mean_s: float, action: Callable[[], object]) -> None:
        self._world.loop.call_later(self._rng.expovariate(1 / mean_s), action)

    def _hunt(self, bookie: SimBookie, client: str) -> None:
        """A bookie that has just answered a fencing request is the most interesting to lose."""
        if self._is_healed or self._rng.random() >= self._hunt_chance:
            return
        if self._hunts_by_crash:
            self._world.loop.call_later(self._rng.uniform(0.0, 0.02), self._crash, bookie)
        else:
            # The answer is on its way already; what is asked next gets none.
            self._disturb(client, bookie.name, self._world.network.block)

    async def _fault_bookie_pauses(self) -> None:
        name = self._rng.choice(self._world.bookies).name
        self._world.trace(f"{name} paused")
        self._world.network.pause(name)
        self._later(1.5, lambda: self._world.network.resume(name))

    def _some_link(self) -> tuple[str, str]:
        client = self._rng.choice(self._world.clients).name
        bookie = self._rng.choice(self._world.bookies).name
        return (client, bookie) if self._rng.random() < 0.6 else (bookie, client)

    async def _fault_partition(self) -> None:
        if self._world.clients:
            source, target = self._some_link()
            self._world.trace(f"{source} -> {target} cut")
            self._disturb(source, target, self._world.network.block)

    async def _fault_lag(self) -> None:
        if self._world.clients:
            source, target = self._some_link()
            self._world.trace(f"{source} -> {target} lags")
            network = self._world.network
            self._disturb(source, target, self._rng.choice((network.lag, network.make_flaky)))

    async def _fault_weather(self) -> None:
        network = self._world.network
        network.loss = self._rng.choice((0.0, 0.0, 0.1))
        network.duplication = self._rng.choice((0.0, 0.1, 0.5))
        network.slowness = self._rng.choice((0.0, 0.2, 0.8))
        self._world.trace(
            f"weather loss={network.loss} dup={network.duplication} slow={network.slowness}"
        )

    async def _fault_client_dies(self) -> None:
        alive = [each for each in self._world.clients if each.is_alive]
        if alive and self._rng.random() < 0.3:
            client = self._rng.choice(alive)
            self._world.trace(f"{client.name} killed")
            client.crash()

    async def _fault_client_pauses(self) -> None:
        alive = [each for each in self._world.clients if each.is_alive]
        if alive:
            client = self._rng.choice(alive)
            self._world.trace(f"{client.name} paused")
            client.pause()
            self._later(2.0, client.resume)

    async def _fault_metadata(self) -> None:
        alive = [each for each in self._world.clients if each.is_alive]
        if not alive:
            return
        client = self._rng.choice(alive)
        session = client.store.inner
        kind = self._rng.choice(("lose", "lose", "disconnect", "expire"))
        self._world.trace(f"{client.name} metadata {kind}")
        if kind == "lose":
            session.lose_next_reply(applied=self._rng.random() < 0.6)
        elif kind == "expire":
            session.expire()
        else:
            session.disconnect()
            self._later(1.0, session.reconnect)

    # The end

    async def _heal(self) -> None:
        world = self._world
        world.trace("healing")
        self._is_healed = True
        world.network.heal()
        for client in world.clients:
            if client.is_alive:
                client.resume()
                client.store.inner.reconnect()
        for bookie in world.bookies:
            await bookie.start()
        for bookie in world.bookies:
            await bookie.up.wait()  # some were starting already

    async def _judge(self) -> None:
        world = self._world
        final = world.new_client("final")
        for ledger_id in self._ledgers:
            while True:
                try:
                    metadata = await final.ledgers.recover_ledger(ledger_id)
                except DLError as error:
                    # Bookies may just be coming back; the budget of virtual time ends this.
                    world.trace(f"final: {type(error).__name__}: {error}")
                    await asyncio.sleep(1.0)
                else:
                    world.checkers.on_closed(metadata)
                    break
        for ledger_id in self._ledgers:
            await self._read_whole(final, ledger_id)
        await self._finish_followers()
        world.checkers.check_all(self._ledgers)

    async def _read_whole(self, client: SimClient, ledger_id: int) -> None:
        reader = await client.ledgers.open_ledger(ledger_id)
        delivered = self._world.checkers.new_delivery(ledger_id)
        last = reader.metadata.last_entry_id
        try:
            async for frames in reader.read(0, last):
                self._world.checkers.on_delivered(ledger_id, delivered, frames)
        except LedgerReadError as error:
            self._world.trace(f"final: {error}")
        self._world.checkers.on_read_whole(ledger_id, delivered)

    async def _finish_followers(self) -> None:
        """Followers see the end of a closed ledger by themselves."""
        for client in self._world.clients:
            if client.name.startswith("follower") and client.is_alive and client.tasks:
                await asyncio.wait(list(client.tasks))


def _names(metadata: LedgerMetadata) -> str:
    return ",".join(bookie.name for bookie in metadata.last_ensemble.bookies)
