"""The machine crashes at every step: what was answered stays true, what was not may go either way.

One run is one seed: a workload of adds, fences, explicit LACs and garbage collection on a disk that
crashes at its n-th write, sync or name change, and again while it is opened.  The test keeps its
own truth of what was answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from bookie.config import GarbageConfig
from bookie.ledger_storage import LedgerStorage
from dlcore.base.errors import (
    BookieError,
    BookieStorageError,
    LedgerFencedError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from tests.fixtures.lengths import sample
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import ManualClock, make_frame, open_storage, small_config

CONFIG = small_config(file_bytes_max=900, batch_bytes_max=400, garbage=GarbageConfig(age_ms=0))
DOOMED = 100
"""The ledger that the workload deletes."""
ENTRIES_MAX = 60
OPEN_ATTEMPTS_MAX = 30


class Answers:
    """The answers of the storage: only they must hold afterwards."""

    def __init__(self) -> None:
        self.acked: set[tuple[int, int]] = set()
        self.attempted: set[tuple[int, int]] = set()
        self.denied: set[tuple[int, int]] = set()
        """Absent according to a fencing read."""
        self.fenced: set[int] = set()
        self.lacs: dict[int, int] = {}
        """Highest explicit LAC that was answered."""

    def note_add(
        self, ledger_id: int, entry_id: int, future: asyncio.Future[None], *, is_recovery: bool
    ) -> None:
        """Remember an add, and its acknowledgement when it comes."""
        self.attempted.add((ledger_id, entry_id))
        if is_recovery:
            self.denied.discard((ledger_id, entry_id))

        def done(each: asyncio.Future[None]) -> None:
            if each.exception() is None:
                self.acked.add((ledger_id, entry_id))

        future.add_done_callback(done)

    def note_lac(self, ledger_id: int, lac: int, future: asyncio.Future[None]) -> None:
        """Remember an explicit LAC once it is answered."""

        def done(each: asyncio.Future[None]) -> None:
            if each.exception() is None:
                self.lacs[ledger_id] = max(lac, self.lacs.get(ledger_id, -1))

        future.add_done_callback(done)


async def work(storage: LedgerStorage, answers: Answers, rng: random.Random) -> None:
    """Use the storage at random until it fails or the workload ends."""
    next_entry = {1: 0, 2: 0, 3: 0, DOOMED: 0}
    reads: list[asyncio.Task[None]] = []
    for ledger_id, entry_id in answers.attempted:
        next_entry[ledger_id] = max(next_entry[ledger_id], entry_id + 1)
    try:
        for _ in range(ENTRIES_MAX):
            ledger_id = rng.choice(sorted(next_entry))
            entry_id = next_entry[ledger_id]
            choice = rng.random()
            if choice < 0.75:
                is_recovery = ledger_id in answers.fenced
                future = storage.writes.add_entry(
                    make_frame(ledger_id, entry_id), is_recovery=is_recovery
                )
                answers.note_add(ledger_id, entry_id, future, is_recovery=is_recovery)
                next_entry[ledger_id] += 1
                if rng.random() < 0.3:
                    with contextlib.suppress(LedgerFencedError):
                        await future
            elif choice < 0.8:
                lac = max(0, entry_id - 1)
                answers.note_lac(ledger_id, lac, storage.writes.write_lac(ledger_id, lac))
            elif choice < 0.9 and ledger_id == 3:
                reads.append(asyncio.ensure_future(fence(storage, answers, entry_id)))
            elif choice < 0.95:
                await storage.upkeep.collect_garbage(is_doomed)
            else:
                await asyncio.sleep(0)
        await asyncio.gather(*reads)
    except BookieStorageError:
        await asyncio.gather(*reads, return_exceptions=True)


async def fence(storage: LedgerStorage, answers: Answers, entry_id: int) -> None:
    """Fence ledger 3 by reading an entry."""
    try:
        await storage.reads.read_entry(3, entry_id, fence=True)
    except NoSuchEntryError:
        answers.denied.add((3, entry_id))
    answers.fenced.add(3)


async def is_doomed(ledger_id: int) -> bool:
    """Say which ledgers the metadata store no longer knows."""
    return ledger_id == DOOMED


async def check(storage: LedgerStorage, answers: Answers) -> None:
    """Compare what is readable with what was answered."""
    held = set()
    for ledger_id, entry_id in sorted(answers.attempted):
        with contextlib.suppress(NoSuchEntryError, NoSuchLedgerError):
            frame = await storage.reads.read_entry(ledger_id, entry_id, fence=False)
            assert frame == make_frame(ledger_id, entry_id)
            held.add((ledger_id, entry_id))
    lost = {each for each in answers.acked - held if each[0] != DOOMED}
    assert not lost
    assert not held & answers.denied
    for ledger_id, lac in answers.lacs.items():
        if ledger_id != DOOMED:
            assert await storage.reads.read_lac(ledger_id, fence=False) >= lac
    for ledger_id in answers.fenced:
        with pytest.raises(LedgerFencedError):
            await storage.writes.add_entry(make_frame(ledger_id, 1000))
    for ledger_id in storage.core.live_ledgers():
        listed = {
            (ledger_id, entry_id)
            for each in storage.reads.list_entries(ledger_id)
            for entry_id in range(each.first_entry_id, each.last_entry_id + 1)
        }
        assert listed == {each for each in held if each[0] == ledger_id}


async def reopen(disk: MemoryDisk, rng: random.Random) -> LedgerStorage:
    """Open the storage on a disk that crashes while it is being opened, some times."""
    for attempt in range(OPEN_ATTEMPTS_MAX):
        if attempt < 3 and rng.random() < 0.5:
            disk.device.crash_at_step = disk.device.steps + rng.randint(1, 4)
        try:
            storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
        except BookieStorageError as error:
            if "crashed" not in str(error):
                raise
        else:
            disk.device.crash_at_step = None
            return storage
    raise AssertionError("it never opened")


async def run(crash_at_step: int | None, seed: int) -> int:
    """Run the workload twice with a crash in each; return the steps of the first without one."""
    rng = random.Random(seed)
    disk = MemoryDisk(rng)
    answers = Answers()
    steps = 0
    for _ in range(2):
        storage = await reopen(disk, rng)
        if crash_at_step is not None:
            disk.device.crash_at_step = disk.device.steps + crash_at_step
        before = disk.device.steps
        await work(storage, answers, rng)
        steps = disk.device.steps - before
        disk.crash(keep_cache=rng.random() < 0.3)
        await storage.aclose()
        storage = await reopen(disk, rng)
        await check(storage, answers)
        disk.crash()
        await storage.aclose()
    return steps


@pytest.mark.parametrize("seed", range(4))
def test_a_crash_at_every_step(seed: int) -> None:
    """Goal: acknowledged entries, answered fences and proven noes survive a crash at any step."""
    steps = asyncio.run(run(None, seed))
    assert steps > 30
    for step in sample(range(1, steps + 20), 20):
        try:
            asyncio.run(run(step, seed * 1000 + step))
        except BaseException as error:
            error.add_note(f"asyncio.run(run({step}, {seed * 1000 + step}))")
            raise


def test_no_fencing_request_is_answered_before_the_fence_is_durable() -> None:
    """Goal: yes, no, and the LAC alike wait.  Method: the disk crashes at the fence's own sync."""

    async def main(crash_at: int) -> None:
        disk = MemoryDisk(random.Random(crash_at))
        storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
        await storage.writes.add_entry(make_frame(1, 0))
        disk.device.crash_at_step = disk.device.steps + crash_at
        answers = await asyncio.gather(
            storage.reads.read_entry(1, 0, fence=True),
            storage.reads.read_entry(1, 1, fence=True),
            storage.reads.read_entry(2, 0, fence=True),
            storage.reads.read_lac(1, fence=True),
            return_exceptions=True,
        )
        assert {type(each) for each in answers} == {BookieStorageError}
        await storage.aclose()

    for crash_at in (1, 2):
        asyncio.run(main(crash_at))


def test_entries_read_after_a_failed_sync_and_a_restart_survive_a_power_cut() -> None:
    """Goal: pages of a failed sync look written and are not; replay must not serve them as durable.

    Method: the sync of a batch fails, the process is killed, the next one reads the page cache, and
    then the power goes.
    """
    seen = 0
    for seed in range(30):

        async def main(seed: int = seed) -> int:
            disk = MemoryDisk(random.Random(seed))
            storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
            await storage.writes.add_entry(make_frame(1, 0))
            disk.device.sync_error = "Input/output error"
            with pytest.raises(BookieError):
                await storage.writes.add_entry(make_frame(1, 1, b"x" * 600))
            await storage.aclose()
            disk.crash(keep_cache=True)
            storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
            before = next(iter(storage.reads.list_entries(1))).last_entry_id
            disk.crash()
            await storage.aclose()
            async with open_storage(disk, CONFIG) as storage:
                assert next(iter(storage.reads.list_entries(1))).last_entry_id >= before
            return before

        seen += asyncio.run(main())
    assert seen > 0


def test_a_crash_at_every_step_of_dropping_files() -> None:
    """Goal: a file is missing only after that was logged, and what a crash left is removed later.

    Method: files of a deleted ledger alone; the disk crashes at each step of the collection.
    """

    async def main(seed: int, step: int) -> tuple[bool, bool]:
        disk = MemoryDisk(random.Random(seed * 100 + step))
        async with open_storage(disk, CONFIG) as storage:
            for entry_id in range(40):
                await storage.writes.add_entry(make_frame(DOOMED, entry_id))
            for entry_id in range(40):
                await storage.writes.add_entry(make_frame(1, entry_id))
            await storage.upkeep.collect_garbage(is_doomed)
            disk.device.crash_at_step = disk.device.steps + step
            with contextlib.suppress(BookieError):
                await storage.upkeep.collect_garbage(is_doomed)
            was_alive = disk.device.crash_at_step is not None
            disk.crash()
        async with open_storage(disk, CONFIG) as storage:
            assert len(list(storage.reads.list_entries(1))) == 1
            assert next(iter(storage.reads.list_entries(1))).last_entry_id == 39
            has_files = disk.names()[0] == "0000000001.log"
            assert (storage.status.stats().stored_bytes > 8000) == has_files
            for entry_id in range(40):
                if has_files:
                    frame = await storage.reads.read_entry(DOOMED, entry_id, fence=False)
                    assert frame == make_frame(DOOMED, entry_id)
        return was_alive, has_files

    outcomes = {asyncio.run(main(seed, step)) for seed in range(5) for step in range(1, 8)}
    assert outcomes == {(False, True), (False, False), (True, False)}


def test_the_first_file_of_a_new_directory_may_be_torn() -> None:
    """Goal: a crash at any step of the very first start leaves a directory that opens."""

    async def main(step: int) -> None:
        rng = random.Random(step)
        disk = MemoryDisk(rng)
        disk.device.crash_at_step = step
        with contextlib.suppress(BookieStorageError):
            storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
            disk.crash()
            await storage.aclose()
        async with open_storage(disk, CONFIG) as storage:
            await storage.writes.add_entry(make_frame(1, 0))

    for step in range(1, 6):
        asyncio.run(main(step))
