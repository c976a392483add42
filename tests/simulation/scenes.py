"""Directed scenarios: rare meetings of faults, brought about on purpose and with much left to luck.

A plan that names a scene plays it in place of the usual writers and recoverers.  Each scene is what
some known bug needs to show itself; without the bug every one of them must pass.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from bookie.files.format import file_name
from dlcore.base.errors import DLError
from dlcore.ledger.writing.appender import AppenderState
from tests.simulation.checkers import LIVE
from tests.simulation.stored_ledger import CLOSED, OPEN
from tests.simulation.truth import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from bookie.ledger_storage import LedgerStorage
    from dlcore.ledger.writing.writer import LedgerWriter
    from tests.simulation.clients import SimClient
    from tests.simulation.processes import SimBookie
    from tests.simulation.workload import Scenario

_POLL_S = 0.0002
_PATIENCE_S = 8.0


class Act:
    """One ledger of a scene, with its writer, its bookies and the means to disturb them."""

    def __init__(self, play: Scenario, client: SimClient, writer: LedgerWriter) -> None:
        self.world = play.world
        self.rng = play.world.rng
        self.client = client
        self.writer = writer
        self.ledger_id = writer.ledger_id
        self._play = play
        self.quorum = writer.metadata.quorum
        self.members = [self.world.bookie_of(b) for b in writer.metadata.last_ensemble.bookies]
        self.rng.shuffle(self.members)
        self.spares = [each for each in self.world.bookies if each not in self.members]
        self.noes_needed = self.quorum.write_quorum_size - self.quorum.ack_quorum_size + 1
        """Number of bookies that decide that an entry is not there."""

    def append(self, count: int = 1) -> None:
        """Append entries at once; no caller waits for them."""
        for _ in range(count):
            self._play.append(self.client, self.writer)

    async def write(self, count: int) -> None:
        """Append entries, and wait until all are acknowledged."""
        self.append(count)
        await self.writer.flush()

    async def publish(self) -> None:
        """Publish the LAC."""
        await self._play.publish(self.writer)

    def start_observers(self, count: int) -> None:
        """Start clients that read the ledger's LAC all the time."""
        for number in range(count):
            client = self.world.new_client(f"observer-{self.ledger_id}-{number}")
            self.world.spawn(self._play.observe(client, self.ledger_id), client=client)

    def start_follower(self) -> None:
        """Start a client that follows the ledger from its first entry on."""
        client = self.world.new_client(f"follower-{self.ledger_id}")
        self.world.spawn(self._play.follow(client, self.ledger_id), client=client)

    async def read_all(self) -> None:
        """Read all that is acknowledged."""
        delivered = self.world.checkers.new_delivery(self.ledger_id)
        reader = await self.client.ledgers.open_ledger(self.ledger_id)
        async for frames in reader.read(0, self.writer.last_add_confirmed):
            self.world.checkers.on_delivered(self.ledger_id, delivered, frames)

    def disturb(
        self, source: str, bookies: Iterable[SimBookie], *ways: Callable[[str, str], None]
    ) -> None:
        """Disturb the links from a client to bookies, each in one of `ways`."""
        for bookie in bookies:
            self.world.network.unblock(source, bookie.name)
            self.rng.choice(ways)(source, bookie.name)

    def new_writer(self, name: str) -> SimClient:
        """Start a client that is going to write ledgers of its own."""
        client = self.world.new_client(name)
        self._play.writers.append(client)
        return client

    async def create(self, client: SimClient) -> Act:
        """Create another ledger, of that client."""
        return Act(self._play, client, await self._play.create(client))

    async def close(self) -> None:
        """Close the ledger as its writer."""
        await self._play.close(self.client, self.writer)

    async def delete(self) -> None:
        """Delete the ledger."""
        await self.client.ledgers._context().ledger_store.delete(self.ledger_id)

    def new_recoverer(self) -> SimClient:
        """Start a client that is going to take the ledger over."""
        return self.world.new_client(f"recoverer-{self.ledger_id}")

    def start_recovery(self, recoverer: SimClient) -> None:
        """Let it take the ledger over."""
        self.world.spawn(self._play.recover(recoverer, self.ledger_id), client=recoverer)

    def holds(self, bookie: SimBookie, entry_id: int) -> bool:
        """Return whether a bookie has called the entry durable."""
        return bookie.record is not None and (self.ledger_id, entry_id) in bookie.acknowledged

    def is_fenced(self, bookie: SimBookie) -> bool:
        """Return whether a bookie has reported to any client that it fenced the ledger."""
        return bookie.record is not None and self.ledger_id in bookie.record.fenced

    def is_fence_complete(self) -> bool:
        """Return whether enough members are fenced."""
        checkers = self.world.checkers
        return checkers.stored(self.ledger_id).is_fenced_by(checkers.fenced_bookies(self.ledger_id))

    async def require(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait for a condition that must come true."""
        await self.until(condition, poll_s=0.01)
        if not condition():
            self.world.fail(InvariantViolatedError(LIVE, otherwise))

    async def until(self, condition: Callable[[], bool], *, poll_s: float = _POLL_S) -> None:
        """Wait for a condition, and go on without it after some seconds."""
        deadline = self.world.loop.time() + _PATIENCE_S
        while True:
            if condition() or self.world.loop.time() > deadline:
                return
            await asyncio.sleep(poll_s)


async def late_add(act: Act) -> None:
    """An add is on its way while a recoverer finds that no one holds its entry.

    It comes to a bookie that did not hear the request that fences, but a read of that entry; and
    perhaps that one loses power between.
    """
    network, rng, writer = act.world.network, act.rng, act.client.name
    near = act.members[: act.quorum.ack_quorum_size - 1]
    late, *others = act.members[len(near) :]
    act.start_follower()
    await act.write(rng.choice((1, 3)))
    act.disturb(writer, [late], network.lag)
    act.disturb(writer, others, network.block)
    act.append()
    entry_id = act.writer.last_add_pushed
    await act.until(lambda: all(act.holds(each, entry_id) for each in near))
    recoverer = act.new_recoverer()
    act.disturb(recoverer.name, [late], network.block)
    act.start_recovery(recoverer)
    await act.until(act.is_fence_complete)
    act.disturb(recoverer.name, near, network.block)
    network.unblock(recoverer.name, late.name)
    if rng.random() < 0.5:
        await act.until(partial(act.is_fenced, late))
        late.crash(keep_cache=False)
        await late.start()
    await act.writer.flush()


async def moved_tail(act: Act) -> None:
    """The last ensemble has bookies that never heard of the ledger when it is taken over."""
    network, rng, writer = act.world.network, act.rng, act.client.name
    gone = act.members[: act.noes_needed]
    await act.write(rng.randint(2, 8))
    act.disturb(writer, gone, network.block)
    act.disturb(writer, act.spares, network.lag, network.block)
    act.append()
    names = {each.bookie for each in gone}
    await act.until(
        lambda: names.isdisjoint(act.world.checkers.stored(act.ledger_id).ensembles[-1].bookies),
        poll_s=0.01,
    )
    recoverer = act.new_recoverer()
    act.disturb(recoverer.name, act.members[len(gone) :], network.lag, network.block)
    act.start_recovery(recoverer)
    await act.writer.flush()


async def damaged_tail(act: Act) -> None:
    """The last entry is acknowledged, its LAC is not known yet, and copies of it are damaged."""
    world, network, rng = act.world, act.world.network, act.rng
    holders = act.members[: act.quorum.ack_quorum_size]
    await act.write(rng.choice((1, 2, 5)))
    act.disturb(act.client.name, act.members[len(holders) :], network.block)
    act.append()
    entry_id = act.writer.last_add_pushed
    await act.until(lambda: all(act.holds(each, entry_id) for each in holders))
    await act.until(lambda: act.writer.last_add_confirmed == entry_id)
    act.disturb(act.client.name, holders, network.block)
    victims = holders[1:] if rng.random() < 0.5 else holders[1:2]
    for bookie in victims:
        await act.until(partial(_damage, act, bookie, entry_id))
    if rng.random() < 0.5:
        for bookie in victims:
            bookie.crash(keep_cache=rng.random() < 0.5)
            await bookie.start()
    recoverer = act.new_recoverer()
    intact = [each for each in holders if each not in victims]
    act.disturb(recoverer.name, intact, network.lag, network.block)
    act.start_recovery(recoverer)
    await asyncio.sleep(rng.uniform(2.5, 4.0))
    for bookie in world.bookies:
        network.unblock(recoverer.name, bookie.name)


def _damage(act: Act, bookie: SimBookie, entry_id: int) -> bool:
    """Flip a bit of a bookie's copy, once its damage can be distinguished from a torn write."""
    storage = bookie.storage
    if (
        storage is None
        or not storage.core.log.is_marked
        or storage.core.log.commits.queue.pending_bytes
    ):
        return False
    location = storage.core.reader.find(act.ledger_id, entry_id)
    if location is None:
        return False
    offset = location.offset + act.rng.randrange(location.size)
    bookie.disk.folder.flip(file_name(location.file_number), offset, 1 << act.rng.randrange(8))
    bookie.is_damaged = True
    act.world.trace.note(bookie.name, "damaged", ledger_id=act.ledger_id, entry_id=entry_id)
    return True


async def damaged_footer(act: Act) -> None:
    """A sealed file loses its footer, and its bookie is restarted."""
    rng = act.rng
    for _ in range(6):
        await act.write(3)
        await asyncio.sleep(rng.uniform(0.0, 0.3))
    bookie = act.members[0]
    storage = bookie.storage
    assert storage is not None
    number = rng.choice(storage.core.files.numbers())
    place = storage.core.handles.place(number)
    assert place is not None
    name = file_name(number)
    bookie.disk.folder.flip(name, rng.randrange(place.offset, bookie.disk.folder.size_of(name)), 1)
    bookie.is_damaged = True
    act.world.trace.note(bookie.name, f"damaged: the footer of {name}")
    bookie.crash(keep_cache=rng.random() < 0.5)
    await bookie.start()


async def rotten_file(act: Act) -> None:
    """A file is compacted, because most of it was deleted, and some of the rest is damaged."""
    second = await act.create(act.new_writer("other"))
    for _ in range(5):
        await act.write(1)
        await second.write(3)
    await act.until(partial(_damage, act, act.members[0], act.rng.randrange(3)))
    await second.delete()
    await asyncio.sleep(act.rng.uniform(3.0, 7.0))


async def torn_change(act: Act) -> None:
    """Acks arrive while an ensemble change is stored that takes some of them away."""
    network, writer = act.world.network, act.client.name
    near, slow, failing = act.members
    await act.write(act.rng.choice((1, 3)))
    network.pause(slow.name)
    network.block(writer, failing.name)
    act.append()  # which the slow one will acknowledge late, and the failing one never
    network.unblock(writer, failing.name)
    await asyncio.sleep(0.02)
    network.block(writer, slow.name)
    act.append()
    entry_id = act.writer.last_add_pushed
    await act.until(lambda: act.holds(near, entry_id) and act.holds(failing, entry_id))
    await asyncio.sleep(act.rng.uniform(0.01, 0.02))  # for the answer
    failing.crash(keep_cache=True)
    act.append()
    await act.until(lambda: act.writer._appender.state is AppenderState.CHANGING)
    network.resume(slow.name)
    await asyncio.sleep(act.rng.uniform(0.5, 3.0))
    network.unblock(writer, slow.name)
    await failing.start()
    await act.writer.flush()


async def changing_recovery(act: Act) -> None:
    """A recoverer loses the bookies that hold what is left, and has to replace them."""
    network, rng, writer = act.world.network, act.rng, act.client.name
    holders = act.members[: act.quorum.ack_quorum_size]
    act.disturb(writer, act.members[len(holders) :], network.block)
    act.append(rng.randint(2, 5))
    last = act.writer.last_add_pushed
    await act.until(lambda: act.writer.last_add_confirmed == last)
    act.disturb(writer, act.members, network.block)  # so that no one hears the LAC
    recoverer = act.new_recoverer()
    act.start_recovery(recoverer)
    await act.until(act.is_fence_complete)
    await asyncio.sleep(rng.uniform(0.001, 0.02))
    act.disturb(recoverer.name, holders, network.block)
    await asyncio.sleep(rng.uniform(2.0, 6.0))
    for bookie in holders:
        network.unblock(recoverer.name, bookie.name)


async def busy_takeover(act: Act) -> None:
    """Another writer takes over from one that goes on writing."""
    act.world.loop.call_later(
        act.rng.uniform(0.1, 1.5), lambda: act.start_recovery(act.new_recoverer())
    )
    await _write_on(act, 100)


async def rough_links(act: Act) -> None:
    """A busy writer whose links are of all kinds, so that ensembles change all the time."""
    network = act.world.network
    ways = (network.unblock, network.unblock, network.lag, network.make_flaky)
    for _ in range(5):
        act.disturb(act.client.name, act.world.bookies, *ways)
        await _write_on(act, 20)


async def _write_on(act: Act, count: int) -> None:
    for _ in range(count):
        await act.writer.wait_for_capacity()
        act.append()
        await asyncio.sleep(act.rng.uniform(0.0, 0.04))


async def missed_bookie(act: Act) -> None:
    """A bookie serves the writer, while the cluster thinks that it is gone."""
    missed, slow = act.members[0], act.members[-1]
    await _unregister(act, missed)
    act.disturb(act.client.name, [slow], act.world.network.lag)
    for _ in range(40):
        await act.write(1)
        await asyncio.sleep(0.25)


async def missed_in_recovery(act: Act) -> None:
    """The cluster thinks that a bookie is gone, while a client recovers a ledger with its help."""
    missed, slow = act.members[0], act.members[-1]
    await _unregister(act, missed)
    act.disturb(act.client.name, [slow], act.world.network.block)
    await act.write(3)
    recoverer = act.new_recoverer()
    act.disturb(recoverer.name, act.members, act.world.network.block, act.world.network.lag)
    act.start_recovery(recoverer)
    await act.until(lambda: act.world.checkers.stored(act.ledger_id).state == CLOSED)


async def _unregister(act: Act, missed: SimBookie) -> None:
    """Cut a member off from the metadata store, whose sessions end, and from no one else."""
    # It asks once about a ledger that is new to it.
    await act.write(1)
    await act.until(partial(act.holds, missed, 0))
    assert missed.session is not None
    missed.session.gate.clear()
    missed.session.inner.expire()
    act.world.trace.note(missed.name, "is cut off from the metadata store")


async def published_lacs(act: Act) -> None:
    """Acknowledged entries are read at the same time, its LAC published or not, over slow links."""
    act.world.network.slowness = 0.6
    act.start_observers(3)
    for _ in range(10):
        await act.write(1)
        if act.rng.random() < 0.5:
            await act.publish()
        await asyncio.sleep(act.rng.uniform(0.0, 0.5))


async def moved_lacs(act: Act) -> None:
    """LACs are published to new ensembles, and clients that may know only the old ones ask."""
    network, rng, writer = act.world.network, act.rng, act.client.name
    act.start_observers(3)
    for _ in range(6):
        await act.write(2)
        await act.publish()
        ensemble = act.world.checkers.stored(act.ledger_id).ensembles[-1].bookies
        for bookie in act.world.bookies:
            network.unblock(writer, bookie.name)
            if bookie.bookie in ensemble:
                network.block(writer, bookie.name)
        await asyncio.sleep(rng.uniform(0.0, 0.5))


async def late_close(act: Act) -> None:
    """A writer closes its ledger while a recovery of it has got no further."""
    network, rng = act.world.network, act.rng
    await act.write(rng.choice((1, 3)))
    recoverer = act.new_recoverer()
    act.disturb(recoverer.name, act.members, network.block, network.lag)
    act.start_recovery(recoverer)
    stored = act.world.checkers.stored
    await act.until(lambda: stored(act.ledger_id).state != OPEN, poll_s=0.01)
    if rng.random() < 0.5:
        act.append()
    try:
        await act.close()
    finally:
        for bookie in act.members:
            network.unblock(recoverer.name, bookie.name)


async def contested_swap(act: Act) -> None:
    """Auto-recovery changes old ensembles while the writer changes the last one, and closes."""
    world, rng = act.world, act.rng
    stored = world.checkers.stored
    lost = act.members[0]
    gone = lost.bookie
    await act.write(rng.randint(1, 4))
    await _write_past(act, act.members[1])
    await _write_past(act, lost)
    lost.replace_disk()
    lost.forget_identity()
    await lost.start()
    for _ in range(60):
        await _write_past(act, rng.choice(world.bookies))
        await asyncio.sleep(rng.uniform(0.0, 0.2))
        if gone not in stored(act.ledger_id).ensembles[0].bookies:
            break
    await act.close()


async def _write_past(act: Act, bookie: SimBookie) -> None:
    """Write while a bookie dies and comes back: if it is in the ensemble it is replaced."""
    bookie.crash(keep_cache=True)
    act.append()
    await asyncio.sleep(0.1)
    await bookie.start()


async def read_again(act: Act) -> None:
    """A ledger is read whole, again and again, while it grows over many files."""
    for _ in range(6):
        await act.write(5)
        await act.read_all()
        await asyncio.sleep(act.rng.uniform(0.0, 0.2))


async def lonely_fence(act: Act) -> None:
    """A fence is the last that bookies hear of a ledger, and comes to lie in a file of its own."""
    world, rng = act.world, act.rng
    await act.write(rng.choice((1, 2)))
    await asyncio.sleep(rng.uniform(0.2, 1.0))
    recoverer = act.new_recoverer()
    act.start_recovery(recoverer)
    await act.until(lambda: any(map(act.is_fenced, act.members)))
    recoverer.crash()
    await asyncio.sleep(rng.uniform(0.2, 0.6))
    second = await act.create(act.new_writer("other"))
    for _ in range(6):
        await second.write(1)
        await asyncio.sleep(rng.uniform(0.1, 0.4))
    await asyncio.sleep(rng.uniform(0.5, 2.0))
    for bookie in world.bookies:
        bookie.crash(keep_cache=rng.random() < 0.5)
        await bookie.start()
    await act.write(2)


async def creations(act: Act) -> None:
    """Clients create ledgers all the time, and the replies to that get lost."""
    others = [act.new_writer(f"creator-{number}") for number in range(2)]
    for client in others:
        act.world.spawn(_create_on(act, client), client=client)
    await _create_on(act, act.client)


async def _create_on(act: Act, client: SimClient) -> None:
    rng = act.rng
    for _ in range(8):
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        if rng.random() < 0.5:
            client.store.inner.lose_next_reply(applied=rng.random() < 0.5)
        try:
            own = await act.create(client)
            await own.write(rng.choice((1, 2)))
            await own.close()
        except DLError as error:
            act.world.trace.note(client.name, f"{type(error).__name__}: {error}")


async def _write_lac(storage: LedgerStorage, ledger_id: int, lac: int) -> None:
    with contextlib.suppress(DLError):
        await storage.writes.write_lac(ledger_id, lac)


async def full_disk(act: Act) -> None:
    """Others take all the space of a bookie's disk, and its writer floods it with LACs before.

    It still fences, starts again, reads and collects garbage.
    """
    doomed = await act.create(act.new_writer("other"))
    for _ in range(6):
        await act.write(1)
        await doomed.write(6)
    bookie = act.members[0]
    disk, storage = bookie.disk, bookie.storage
    assert storage is not None
    await act.until(lambda: disk.held_bytes > 0)
    disk.room.fill(leave_bytes=300 << 10)
    act.world.trace.note(bookie.name, "disk is nearly full")
    for first in range(0, 3000, 50):
        await asyncio.gather(
            *(_write_lac(storage, doomed.ledger_id, first + each) for each in range(50))
        )
    disk.room.fill()
    act.world.trace.note(bookie.name, "disk is full")
    if act.rng.random() < 0.5:
        bookie.crash(keep_cache=act.rng.random() < 0.5)
        disk.room.fill()
        disk.room.is_crowded = True
        await bookie.start()
        disk.room.is_crowded = False
    life = bookie._life
    act.start_recovery(act.new_recoverer())
    await doomed.delete()
    await act.require(partial(act.is_fenced, bookie), f"{bookie.name} is full and does not fence")
    await act.require(
        lambda: (
            bookie.storage is not None
            and doomed.ledger_id not in bookie.storage.core.live_ledgers()
        ),
        f"{bookie.name} is full and collects no garbage",
    )
    await act.require(lambda: bookie._life == life, f"{bookie.name} was ended by a full disk")
    await act.read_all()


SCENES: dict[str, Callable[[Act], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        busy_takeover,
        changing_recovery,
        contested_swap,
        creations,
        damaged_footer,
        damaged_tail,
        full_disk,
        late_add,
        late_close,
        lonely_fence,
        missed_bookie,
        missed_in_recovery,
        moved_lacs,
        moved_tail,
        published_lacs,
        read_again,
        rotten_file,
        rough_links,
        torn_change,
    )
}
