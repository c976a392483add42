"""The repairer fetches good copies from where the metadata says they are, and gives up on none."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie import housekeeping
from bookie.config import StorageConfig
from bookie.files.format import file_name
from bookie.server import BookieServer
from bookie.server_config import BookieConfig
from bookie.upkeep.repair import Repairer
from dlcore.base.clock import SystemClock
from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import BookieStorageError
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import BookieRegistration, LedgerState
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.stored import encode
from dlcore.wire.frames import encode_frame
from dlcore.wire.memory_bookies import MemoryBookie, MemoryBookieClient
from tests.fixtures import served_bookie
from tests.fixtures.aio import until
from tests.fixtures.ledger_cluster import PATHS, TokenClock
from tests.fixtures.ledgers import LEDGER_ID, bookie, frame_of, metadata_of, quorum_of
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.served_bookie import ANY_SPACE
from tests.fixtures.simulated_store import SimulatedTree
from tests.fixtures.storage import open_storage
from tests.simulation.loop import run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bookie.ledger_storage import LedgerStorage
    from dlcore.ledger.metadata.values import LedgerMetadata
    from tests.fixtures.simulated_store import SimulatedStore

ENTRIES = 6
STRIPED = metadata_of((0, "ABCD"), quorum=quorum_of(4, 2, 2))
"""Entry n is on the n-th bookie and its neighbour: A has 0 and 3, with B and D."""


@dataclass
class Scene:
    """Bookie A with a real storage, and its peers in memory, which hold what they should."""

    storage: LedgerStorage
    disk: MemoryDisk
    peers: dict[str, MemoryBookie]
    store: SimulatedStore

    def damage(self, entry_id: int) -> None:
        """Change a byte of an entry of A."""
        found = self.storage.core.reader.find(LEDGER_ID, entry_id)
        assert found is not None
        self.disk.folder.corrupt(
            file_name(found.file_number), found.offset + found.size - 1, b"\xff"
        )

    async def meet(self, entry_id: int) -> None:
        """Read a damaged entry, as a client would."""
        with pytest.raises(BookieStorageError):
            await self.storage.reads.read_entry(LEDGER_ID, entry_id, fence=False)

    async def until_mended(self) -> float:
        """Wait until no damage is known; return the time."""
        loop = asyncio.get_running_loop()
        while self.storage.core.damage.entries():  # noqa: ASYNC110  # virtual time
            await asyncio.sleep(0.1)
        return loop.time()

    async def check(self, *entry_ids: int) -> None:
        """Check that A holds the entries."""
        for entry_id in entry_ids:
            frame = await self.storage.reads.read_entry(LEDGER_ID, entry_id, fence=False)
            assert frame == frame_of(entry_id)


@asynccontextmanager
async def scene_of(metadata: LedgerMetadata = STRIPED) -> AsyncIterator[Scene]:
    """Set up a ledger and run A's repairer."""
    store = SimulatedTree().connect()
    await ensure_namespace(store, PATHS, TokenClock())
    ledgers = LedgerStore(store, PATHS)
    await ledgers.create(metadata)
    peers = {name: MemoryBookie(bookie(name)) for name in "BCD"}
    disk = MemoryDisk()
    async with open_storage(disk) as storage:
        for entry_id in range(ENTRIES):
            await storage.writes.add_entry(frame_of(entry_id))
            for peer in peers.values():
                peer.add_entry(frame_of(entry_id), is_recovery=False)
        repairer = Repairer(
            storage.writes,
            storage.core.damage,
            bookie=bookie("A"),
            ledgers=ledgers,
            client=MemoryBookieClient(peers.values()),
        )
        task = asyncio.create_task(repairer.run())
        yield Scene(storage, disk, peers, store)
        task.cancel()
        await asyncio.wait([task])


def test_an_entry_that_a_read_found_damaged_is_fetched_from_another_holder() -> None:
    """Goal: only the write set is asked, and not for fences; the entry is whole at once."""

    async def main() -> None:
        async with scene_of() as scene:
            for entry_id in (0, 3):
                scene.damage(entry_id)
                await scene.meet(entry_id)
            assert await scene.until_mended() < 1.0
            await scene.check(*range(ENTRIES))
            assert scene.storage.status.stats().repaired_entry_count == 2
            assert scene.peers["B"].requests == 1
            assert scene.peers["D"].requests == 1
            assert scene.peers["C"].requests == 0
            assert not any(peer.is_fenced(LEDGER_ID) for peer in scene.peers.values())

    run(main())


def test_a_bad_copy_is_not_taken_and_the_next_holder_is_asked() -> None:
    """Goal: what a peer sends is verified; its own damage does not spread."""

    async def main() -> None:
        async with scene_of(metadata_of((0, "ABC"))) as scene:
            scene.peers["B"].entries(LEDGER_ID)[1] = frame_of(1)[:-1] + b"?"
            scene.peers["B"].entries(LEDGER_ID)[2] = frame_of(1)
            for entry_id in (1, 2):
                scene.damage(entry_id)
                await scene.meet(entry_id)
            await scene.until_mended()
            await scene.check(1, 2)

    run(main())


def test_a_holder_of_other_bytes_does_not_keep_the_next_from_being_asked() -> None:
    """Goal: a whole frame that is not the one the damaged record speaks of is one peer's matter."""

    async def main() -> None:
        async with scene_of(metadata_of((0, "ABC"))) as scene:
            other = encode_frame(
                ledger_id=LEDGER_ID,
                entry_id=1,
                last_add_confirmed=-1,
                ledger_bytes=7,
                body=[b"another"],
            )
            scene.peers["B"].entries(LEDGER_ID)[1] = other
            scene.damage(1)
            await scene.meet(1)
            assert await scene.until_mended() < 1.0
            await scene.check(1)
            assert [scene.peers[name].requests for name in "BC"] == [1, 1]

    run(main())


def test_it_tries_again_later_and_later_until_a_holder_is_back() -> None:
    """Goal: nothing is forgotten while peers are away, and they are not asked all the time."""

    async def main() -> None:
        async with scene_of() as scene:
            scene.peers["B"].stop()
            scene.damage(0)
            await scene.meet(0)
            await asyncio.sleep(1000)
            assert 5 < scene.peers["B"].requests < 15
            assert scene.storage.core.damage.entries() == [(LEDGER_ID, 0)]
            scene.damage(3)
            await scene.meet(3)
            await asyncio.sleep(1)
            assert scene.storage.core.damage.entries() == [(LEDGER_ID, 0)]
            scene.peers["B"].start()
            await scene.until_mended()
            await scene.check(0, 3)

    run(main(), seconds_max=5000.0)


def test_a_holder_that_does_not_answer_delays_no_other_entry() -> None:
    """Goal: several are tried at once, also those that are found damaged later."""

    async def main() -> None:
        async with scene_of() as scene:
            scene.peers["B"].is_silent = True
            for entry_id in (0, 3):
                scene.damage(entry_id)
                await scene.meet(entry_id)
            await asyncio.sleep(1)
            assert scene.storage.core.damage.entries() == [(LEDGER_ID, 0)]
            await scene.check(3)

    run(main())


def test_entries_that_no_ledger_needs_are_forgotten() -> None:
    """Goal: a deleted ledger, and an entry behind the end of a closed one, need no repair."""

    async def main(*, is_deleted: bool) -> None:
        metadata = metadata_of((0, "ABC"), state=LedgerState.CLOSED, last_entry_id=3)
        async with scene_of(metadata) as scene:
            if is_deleted:
                await scene.store.delete(PATHS.ledger(LEDGER_ID))
            entry_id = 1 if is_deleted else 4
            scene.damage(entry_id)
            await scene.meet(entry_id)
            assert await scene.until_mended() < 1.0
            assert scene.storage.status.stats().repaired_entry_count == 0
            assert all(peer.requests == 0 for peer in scene.peers.values())

    for is_deleted in (False, True):
        run(main(is_deleted=is_deleted))


def test_an_entry_of_a_replaced_ensemble_is_asked_of_the_bookies_of_its_own() -> None:
    """Goal: each entry has its own ensemble, and holders may be others than today's."""

    async def main() -> None:
        async with scene_of(metadata_of((0, "ABC"), (3, "BCD"))) as scene:
            scene.peers["B"].stop()
            scene.peers["C"].stop()
            scene.damage(4)  # A holds it although it is no member any more
            await scene.meet(4)
            await scene.until_mended()
            await scene.check(4)
            assert scene.peers["D"].requests == 1
        async with scene_of(metadata_of((0, "ABC"), (3, "BCD"))) as scene:
            scene.peers["B"].stop()
            scene.peers["C"].stop()
            scene.damage(1)  # D should not hold it, and is not asked
            await scene.meet(1)
            await asyncio.sleep(10.0)
            assert scene.storage.core.damage.entries() == [(LEDGER_ID, 1)]
            assert scene.peers["D"].requests == 0
            scene.peers["B"].start()
            await scene.until_mended()
            await scene.check(1)

    run(main())


def test_others_are_asked_as_the_settings_of_clients_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a holder that is silent is waited for no longer than a bookie's settings allow."""
    monkeypatch.setattr(housekeeping, "_REPAIR_RETRY_S", 0)
    peer = bookie("B")

    async def main(port: int) -> None:
        store = SimulatedTree().connect()
        config = BookieConfig(
            name="a",
            metadata_uri=f"distributedlog://memory:2181{PATHS.root}",
            data_dir=tmp_path,
            storage=StorageConfig(space=ANY_SPACE),
            ledger_client=LedgerClientConfig(read_timeout_s=0.1),
        )
        there = BookieRegistration(
            name=peer.name, incarnation=peer.incarnation, address=f"127.0.0.1:{port}"
        )
        async with await BookieServer.start(config, store=store, clock=SystemClock()) as server:
            await store.create(PATHS.bookie_available(peer.name), encode(there))
            await LedgerStore(store, PATHS).create(metadata_of((0, "B"), quorum=quorum_of(1, 1, 1)))
            loop = asyncio.get_running_loop()
            begun = loop.time()
            server.storage.core.damage.note_entry(LEDGER_ID, 0, 0)
            await until(lambda: "not repaired yet" in caplog.text)
            assert "no answer to a read within 0.1 s" in caplog.text
            assert loop.time() - begun < LedgerClientConfig().read_timeout_s / 2
        await store.aclose()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        served_bookie.run(partial(main, silent.getsockname()[1]))
