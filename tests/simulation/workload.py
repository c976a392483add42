"""The work of one seed: writers, readers and recoverers go on while things go wrong.

A run has two parts.  In the first, faults come at random times while the clients work.  Then
everything heals, and a fresh client must be able to recover, close and read every ledger.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

from dlcore.backends.flight import endpoint, staging as remote_staging, writing
from dlcore.base.errors import DLError, LedgerNotFoundError
from dlcore.flight import producer_client
from dlcore.log.proxied import producers
from dlcore.log.staging import writer as staging
from dlcore.wire import frames
from tests.simulation.faults import Chaos
from tests.simulation.healing import Judgement, check_no_task_is_left
from tests.simulation.logs import Logs
from tests.simulation.loop import LivenessLostError, run as run_loop
from tests.simulation.plan import draw_plan
from tests.simulation.proxy_clients import PATIENCE_S
from tests.simulation.remote_checkers import FORGOTTEN_S, KEPT_S
from tests.simulation.scenes import SCENES, Act
from tests.simulation.sink_hosts import spark_is_simulated
from tests.simulation.tables import tables_are_simulated
from tests.simulation.trace import Trace
from tests.simulation.truth import InvariantViolatedError
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ledger.writing.writer import LedgerWriter
    from tests.simulation.clients import Deaths, SimClient

CHAOS_S = 12.0
HEALING_S_MAX = 600.0
"""Virtual time that recovering and reading everything may take after the last fault."""


@dataclass(slots=True)
class Run:
    """One finished seed."""

    seed: int
    failure: BaseException | None = None
    events: Trace = field(default_factory=Trace)
    faults: Counter[str] = field(default_factory=Counter)
    deaths: Deaths = field(default_factory=Counter)
    acks: int = 0
    steps: int = 0

    @property
    def trace(self) -> list[str]:
        """The events as text."""
        return self.events.text()

    @property
    def invariant(self) -> str:
        """The name of the invariant that failed; empty if none did."""
        if isinstance(self.failure, InvariantViolatedError):
            return self.failure.invariant
        if isinstance(self.failure, LivenessLostError):
            return "I8 LiveAfterHealing"
        return type(self.failure).__name__ if self.failure is not None else ""

    def explain(self) -> str:
        """Return what failed, how to replay it, and what happened."""
        ledger_id = entry_id = None
        if isinstance(self.failure, InvariantViolatedError):
            ledger_id, entry_id = self.failure.ledger_id, self.failure.entry_id
        return (
            f"seed {self.seed} failed: {type(self.failure).__name__}: {self.failure}\n"
            f"replay: python -m tests.simulation --seed {self.seed}\n"
            f"{self.events.explain(ledger_id, entry_id)}"
        )


def run_seed(seed: int) -> Run:
    """Run one seed; the same seed gives the same trace."""
    result = Run(seed)
    try:
        with _few_are_many(), tables_are_simulated(), _by_chance_of(seed):
            _, loop = run_loop(
                _main(seed, result),
                # Where all that tiers died again and again, much is left to do in the end.
                steps_max=500_000,
                seconds_max=CHAOS_S * 3 + HEALING_S_MAX,
            )
        result.steps = loop.steps
    except AssertionError as error:
        result.failure = error
    return result


@contextmanager
def _few_are_many() -> Iterator[None]:
    """Let little be what is much elsewhere.

    Entries are added many at a time from two on, rows staged for several logs wait for each other
    up to a few bytes, and producers whose names were made for one writer are soon forgotten.
    """
    with (
        patch.object(frames, "RUN_FRAMES_MIN", 2),
        patch.object(staging, "QUEUED_BYTES_MAX", 40),
        patch.object(producer_client, "SILENCE_S", PATIENCE_S),
        patch.object(producer_client, "GENERATED_KEPT_MS", round(1000 * KEPT_S)),
        patch.object(producers, "GENERATED_KEPT_MS", round(1000 * KEPT_S)),
        patch.object(producers, "GENERATED_FORGOTTEN_MS", round(1000 * FORGOTTEN_S)),
    ):
        yield


@contextmanager
def _by_chance_of(seed: int) -> Iterator[None]:
    """Let clients of proxies wait as long, and take the same names, each time a seed is played."""
    names = random.Random(seed)
    clock = SimpleNamespace(new_token=lambda: f"{names.getrandbits(128):032x}")
    with (
        patch.object(endpoint, "random", random.Random(seed)),
        patch.object(writing, "SystemClock", lambda: clock),
        patch.object(remote_staging, "SystemClock", lambda: clock),
        spark_is_simulated(clock),
    ):
        yield


async def _main(seed: int, result: Run) -> None:
    rng = random.Random(seed)
    world = World(rng, draw_plan(rng), result.events)
    try:
        await world.until(Scenario(world).play())
    except DLError as error:
        raise LivenessLostError(f"a client gave up: {type(error).__name__}: {error}") from error
    finally:
        result.acks = world.checkers.acks
        result.faults = world.faults
        result.deaths = world.deaths
        await world.aclose()
    check_no_task_is_left()


class Scenario:
    """The first part of a run; a `Judgement` is the second."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._rng = world.rng
        self.writers: list[SimClient] = []

    async def play(self) -> None:
        """Run the whole seed."""
        world, plan = self.world, self.world.plan
        await world.start()
        chaos = Chaos(world)
        world.trace.note("plan", f"{plan}")
        logs = Logs(world) if plan.has_logs else None
        if logs is not None:
            await logs.start()
        else:
            await self._start_writers(chaos)
        world.metadata_latency_s = plan.metadata_latency_s
        for number in range(plan.auto_recoveries):
            world.start_auto_recovery(f"recovery-{number}")
        faults = world.spawn(chaos.run())
        await asyncio.sleep(CHAOS_S)
        faults.cancel()
        world.trace.note("chaos", "is over, all heals")
        chaos.stop()
        await Judgement(world).pass_on(self.writers, logs)

    async def _start_writers(self, chaos: Chaos) -> None:
        world, plan = self.world, self.world.plan
        self.writers += [world.new_client(f"writer-{number}") for number in range(plan.writers)]
        for client in list(self.writers):
            writer = await self.create(client)
            world.spawn(self._write(client, writer), client=client)
            if not plan.scene:
                self._start_company(client, writer, chaos)

    # Clients

    async def create(self, client: SimClient) -> LedgerWriter:
        """Create a ledger."""
        writer = await client.ledgers.create_ledger(self.world.plan.quorum)
        self.world.checkers.on_created(writer.ledger_id)
        names = ",".join(each.name for each in writer.metadata.last_ensemble.bookies)
        self.world.trace.note(client.name, f"created on {names}", ledger_id=writer.ledger_id)
        return writer

    async def _write(self, client: SimClient, writer: LedgerWriter) -> None:
        scene = self.world.plan.scene
        try:
            if scene:
                await SCENES[scene](Act(self, client, writer))
            else:
                await self._append_all(client, writer)
            await self._end(client, writer)
        except DLError as error:
            self._note_error(client, error, writer.ledger_id)

    def _note_error(self, client: SimClient, error: DLError, ledger_id: int) -> None:
        self.world.trace.note(client.name, f"{type(error).__name__}: {error}", ledger_id=ledger_id)

    async def _append_all(self, client: SimClient, writer: LedgerWriter) -> None:
        rng = self._rng
        pause_s = rng.choice((0.001, 0.05, 0.5))
        for _ in range(rng.choice((1, 3, 10, 30))):
            await writer.wait_for_capacity()
            self._check_bounds(client, writer)
            self.append(client, writer)
            if rng.random() < 0.4:
                await asyncio.sleep(rng.expovariate(1 / pause_s))
            if rng.random() < 0.1:
                await writer.flush()
            if rng.random() < 0.1:
                await self.publish(writer)

    async def publish(self, writer: LedgerWriter) -> None:
        """Publish the LAC."""
        await writer.publish_lac()

    def append(self, client: SimClient, writer: LedgerWriter) -> None:
        """Append one entry; what comes of it is judged."""
        number = len(self.world.checkers.appended(writer.ledger_id))
        size = self._rng.choice((0, 20, 200))
        body = b"%d:%d:" % (writer.ledger_id, number) + self._rng.randbytes(size)
        self.world.checkers.on_append(writer.ledger_id, body)
        writer.append([body]).add_done_callback(partial(self._on_ack, client, writer))

    def _check_bounds(self, client: SimClient, writer: LedgerWriter) -> None:
        """I9: what the writers of a client have in flight stays within its limits.

        A writer that has nothing in flight may still append an entry.
        """
        appenders = [each._appender for each in client.ledgers.writers.open]
        size = sum(each.window.pending_bytes for each in appenders)
        count = sum(each.window.pending_count for each in appenders)
        limits = client.config
        is_over = size >= limits.pending_bytes_max or count >= limits.pending_entries_max
        if is_over and writer._appender.window.pending_count:
            raise InvariantViolatedError(
                "I9 ResourcesAreBounded",
                f"{client.name} has {size} bytes in flight of {limits.pending_bytes_max}, "
                f"{count} entries of {limits.pending_entries_max}, and takes more",
                ledger_id=writer.ledger_id,
            )

    def _on_ack(self, client: SimClient, writer: LedgerWriter, future: asyncio.Future[int]) -> None:
        if future.cancelled() or not client.is_alive:
            return
        error = future.exception()
        if error is not None:
            return
        entry_id = future.result()
        self.world.trace.note(client.name, "acked", ledger_id=writer.ledger_id, entry_id=entry_id)
        try:
            self.world.checkers.on_ack(writer.ledger_id, entry_id)
        except Exception as violation:  # noqa: BLE001  # whatever it is, it ends the run
            self.world.fail(violation)

    async def _end(self, client: SimClient, writer: LedgerWriter) -> None:
        choice = self._rng.random()
        if choice < 0.3:
            await self.close(client, writer)
        elif choice < 0.5:
            await writer.flush()
            await writer.abandon()
        elif choice < 0.7:
            self.world.trace.note(client.name, "crashed", ledger_id=writer.ledger_id)
            client.crash()
        else:
            await writer.flush()  # and stays open: another writer will take it over

    async def close(self, client: SimClient, writer: LedgerWriter) -> None:
        """Close a ledger as its writer."""
        metadata = await writer.close()
        self.world.trace.note(client.name, "closed it", ledger_id=writer.ledger_id)
        self.world.checkers.on_closed(metadata)

    def _start_company(self, client: SimClient, writer: LedgerWriter, chaos: Chaos) -> None:
        """Start readers and recoveries of the ledger while it is written."""
        rng, world = self._rng, self.world
        ledger_id = writer.ledger_id
        for number in range(rng.choice((0, 1))):
            follower = world.new_client(f"follower-{ledger_id}-{number}")
            world.spawn(self.follow(follower, ledger_id), client=follower)
        if rng.random() < 0.3:
            observer = world.new_client(f"observer-{ledger_id}")
            world.spawn(self.observe(observer, ledger_id), client=observer)
        recoverers = [
            world.new_client(f"recoverer-{ledger_id}-{number}")
            for number in range(rng.choice((0, 1, 1, 2, 3)))
        ]
        for recoverer in recoverers:
            world.spawn(self._recover_later(recoverer, ledger_id), client=recoverer)
        if rng.random() < 0.5:
            chaos.split(client, writer, recoverers)

    async def _recover_later(self, client: SimClient, ledger_id: int) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 4.0) * self._rng.choice((0.05, 0.05, 1.0)))
        await self.recover(client, ledger_id)

    async def recover(self, client: SimClient, ledger_id: int) -> None:
        """Take a ledger over, and try again until it is closed."""
        while True:
            self.world.trace.note(client.name, "begins", ledger_id=ledger_id)
            try:
                metadata = await client.ledgers.recover_ledger(ledger_id)
            except LedgerNotFoundError:
                return
            except DLError as error:
                self._note_error(client, error, ledger_id)
                await asyncio.sleep(self._rng.uniform(0.05, 1.0))
            else:
                self.world.checkers.on_closed(metadata)
                return

    async def follow(self, client: SimClient, ledger_id: int) -> None:
        """Follow a ledger from its first entry to its end."""
        delivered = self.world.checkers.new_delivery(ledger_id)
        while True:
            try:
                reader = await client.ledgers.open_ledger(ledger_id)
                async for step in reader.follow(len(delivered)):
                    self.world.checkers.on_delivered(ledger_id, delivered, step.frames)
            except LedgerNotFoundError:
                return
            except DLError as error:
                self._note_error(client, error, ledger_id)
                await asyncio.sleep(0.5)
            else:
                self.world.trace.note(
                    client.name, f"got all {len(delivered)} entries", ledger_id=ledger_id
                )
                return

    async def observe(self, client: SimClient, ledger_id: int) -> None:
        """Read the ledger's end all the time."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.05, 1.0) * self._rng.choice((0.01, 0.1, 1.0)))
            floor = self.world.checkers.read_floor(ledger_id)
            try:
                reader = await client.ledgers.open_ledger(ledger_id)
                end = await reader.read_last_add_confirmed()
            except LedgerNotFoundError:
                return
            except DLError:
                continue
            self.world.checkers.on_end_read(ledger_id, end, floor)
