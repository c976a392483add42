"""A real process on a real directory is killed while it compacts; everything needed holds."""

from __future__ import annotations

import asyncio
import random
import subprocess
from pathlib import Path

from bookie.config import CompactionConfig, GarbageConfig
from bookie.disks.real import RealDisk
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lengths import amount
from tests.fixtures.storage import make_frame, open_storage, read_all, small_config

ROOT = Path(__file__).resolve().parents[2]
KILLS = amount(4, sampled=2)
COMPACTED_MIN = 3
"""Files, before each kill: a busy machine writes many entries before it first compacts."""
CONFIG = small_config(
    file_bytes_max=10_000,
    garbage=GarbageConfig(age_ms=0),
    compact=CompactionConfig(bytes_per_second=10**9, below_live_share=0.9),
)

WORKER = """
import asyncio, pathlib, sys
from bookie.disks.real import RealDisk
from bookie.ledger_storage import LedgerStorage
from tests.bookie.test_compaction_kill import CONFIG
from tests.fixtures.storage import ManualClock, make_frame

async def is_deleted(ledger_id):
    return ledger_id == 9

async def write(storage, entry_id):
    await storage.reads.read_lac(7, fence=True)
    while True:
        frames = [make_frame(9, 3 * entry_id + i, b"x" * 300) for i in range(3)]
        dead = [storage.writes.add_entry(frame) for frame in frames]
        await storage.writes.add_entry(make_frame(1, entry_id, b"x" * 300))
        await asyncio.gather(*dead)
        print("kept", entry_id, flush=True)
        entry_id += 1

async def compact(storage):
    while True:
        for _ in range(2):
            await storage.upkeep.collect_garbage(is_deleted)
        report = await storage.upkeep.compact()
        if report.files_compacted:
            print("compacted", report.files_compacted, flush=True)
        await asyncio.sleep(0.001)

async def main():
    disk = RealDisk(pathlib.Path(sys.argv[1]))
    storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write(storage, int(sys.argv[2])))
        tasks.create_task(compact(storage))

asyncio.run(main())
"""


def work_until_killed(directory: Path, next_entry_id: int, lines: int) -> tuple[int, int]:
    """Run the worker and kill it after some lines, and some compactions.

    Returns: its next entry, and files compacted.
    """
    command = [LOADED_PYTHON, "-c", WORKER, str(directory), str(next_entry_id)]
    compacted = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            if number >= lines and compacted >= COMPACTED_MIN:
                process.kill()
            if line.endswith("\n"):
                what, count = line.split()
                if what == "kept":
                    next_entry_id = int(count) + 1
                else:
                    compacted += int(count)
    assert process.returncode == -9
    return next_entry_id, compacted


def test_nothing_needed_is_lost_by_sigkill_during_compaction(tmp_path: Path) -> None:
    """Goal: acknowledged entries and a fence are there after every kill, each entry once.

    Method: kills at random times of a process that writes, deletes and compacts all the time.
    """
    rng = random.Random(12)
    next_entry_id = 0

    async def check() -> int:
        disk = RealDisk(tmp_path)
        async with open_storage(disk, CONFIG) as storage:
            frames = await read_all(storage, 1, first=0, last=next_entry_id - 1)
            assert frames == [make_frame(1, e, b"x" * 300) for e in range(next_entry_id)]
            assert await storage.reads.read_lac(7, fence=False) == -1
            assert storage.core.ledgers[7].is_fence_durable
            (held,) = storage.reads.list_entries(1)
            assert held.first_entry_id == 0
            last = held.last_entry_id
        await disk.aclose()
        return last

    compacted = 0
    for _ in range(KILLS):
        next_entry_id, files = work_until_killed(tmp_path, next_entry_id, rng.randrange(30, 200))
        compacted += files
        next_entry_id = asyncio.run(check()) + 1
    assert compacted > 5
