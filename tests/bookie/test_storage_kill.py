"""A real process on a real directory is killed while it writes; every acknowledgement holds."""

from __future__ import annotations

import asyncio
import random
import subprocess
from pathlib import Path

from bookie.disks.real import RealDisk
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lengths import amount
from tests.fixtures.storage import make_frame, open_storage, read_all, small_config

ROOT = Path(__file__).resolve().parents[2]
LEDGERS = 4
KILLS = amount(5, sampled=2)

WRITER = """
import asyncio, pathlib, sys
from bookie.disks.real import RealDisk
from bookie.ledger_storage import LedgerStorage
from tests.fixtures.storage import ManualClock, make_frame, small_config

async def write(storage, ledger_id, entry_id):
    await storage.reads.read_lac(1000 + ledger_id, fence=True)
    while True:
        frames = [make_frame(ledger_id, entry_id + i, b"x" * 300) for i in range(3)]
        adds = [storage.writes.add_entry(frame) for frame in frames]
        for add in adds:
            await add
            print(ledger_id, entry_id, flush=True)
            entry_id += 1

async def main():
    disk = RealDisk(pathlib.Path(sys.argv[1]))
    config = small_config(file_bytes_max=20_000)
    storage = await LedgerStorage.open(disk, config, clock=ManualClock())
    async with asyncio.TaskGroup() as tasks:
        for ledger_id, entry_id in enumerate(map(int, sys.argv[2:])):
            tasks.create_task(write(storage, ledger_id, entry_id))

asyncio.run(main())
"""


def write_until_killed(directory: Path, next_entries: list[int], acks: int) -> None:
    """Run the writer, kill it after some acknowledgements, and note all of them."""
    command = [LOADED_PYTHON, "-c", WRITER, str(directory), *map(str, next_entries)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            if number == acks:
                process.kill()
            if line.endswith("\n"):
                ledger_id, entry_id = map(int, line.split())
                next_entries[ledger_id] = max(next_entries[ledger_id], entry_id + 1)
    assert process.returncode == -9


def test_nothing_acknowledged_is_lost_by_sigkill(tmp_path: Path) -> None:
    """Goal: each acknowledgement that reached the outside is readable after every kill.

    Method: kills at random times, over several file rolls, on the same directory.
    """
    rng = random.Random(11)
    next_entries = [0] * LEDGERS

    async def check() -> None:
        disk = RealDisk(tmp_path)
        async with open_storage(disk, small_config(file_bytes_max=20_000)) as storage:
            for ledger_id in range(LEDGERS):
                last = next_entries[ledger_id] - 1
                frames = await read_all(storage, ledger_id, first=0, last=last)
                assert frames == [make_frame(ledger_id, e, b"x" * 300) for e in range(last + 1)]
                held = next(iter(storage.reads.list_entries(ledger_id))).last_entry_id
                next_entries[ledger_id] = held + 1
                assert await storage.reads.read_lac(1000 + ledger_id, fence=False) == -1
        await disk.aclose()

    for _ in range(KILLS):
        write_until_killed(tmp_path, next_entries, rng.randrange(20, 300))
        asyncio.run(check())
    assert len(list(tmp_path.glob("*.log"))) > 3
