"""A process is killed at each of its steps on a real disk: rolling, replaying, compacting.

SIGKILL keeps what the kernel has, so a step is a write (cut in half), a sync, or a change of names.
A loss of power takes back what was not synced, too: each step is left as both leave it.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bookie.disks.real import RealDisk
from bookie.ledger_storage import LedgerStorage
from tests.bookie import test_compaction as compaction
from tests.fixtures import killed_steps
from tests.fixtures.acknowledged import Acknowledged
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lengths import sample
from tests.fixtures.power import take_power
from tests.fixtures.storage import ManualClock, make_frame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from bookie.config import StorageConfig

ROOT = Path(__file__).resolve().parents[2]
STEPS_MAX = 2000
ONE_IN = 16
"""A sample takes one of so many steps."""


def killed(
    scenario: str, prepared: Path, folder: Path, *, power: bool = False
) -> Iterator[tuple[Path, list[str]]]:
    """Run a scenario to each of its steps; yield its folders, and what it was promised.

    With `power` that is lost, too, in another way at each step.
    """
    folder.mkdir()
    name = f"{killed_steps.UNSYNCED}{scenario}" if power else scenario
    command = [LOADED_PYTHON, "-m", "tests.fixtures.killed_steps", name]
    one_in = 2 * ONE_IN if power else ONE_IN
    steps = map(str, sample(range(1, STEPS_MAX), STEPS_MAX // one_in))
    subprocess.run([*command, str(prepared), str(folder), *steps], check=True, cwd=ROOT)
    for path in folder.glob("*.promised"):
        if power:
            rng = random.Random(path.stem)
            take_power(path.with_suffix(""), path.with_suffix(".unsynced"), rng)
        yield path.with_suffix(""), path.read_text().splitlines()


def number_of(step: tuple[Path, list[str]]) -> int:
    """Return which step of the process it was."""
    return int(step[0].name)


def last_of(steps: list[tuple[Path, list[str]]]) -> int:
    """Return the number of the step that was not reached."""
    return max(map(number_of, steps))


def promised_by(lines: list[str]) -> Acknowledged:
    """Return what the storage promised to the rolling process."""
    promised = Acknowledged()
    for line in lines:
        kind, number = line.split()
        if kind == "fence":
            promised.fenced.add(int(number))
        else:
            promised.entries |= {(1, each): make_frame(1, each) for each in range(int(number))}
    return promised


async def with_storage(
    directory: Path, config: StorageConfig, test: Callable[[LedgerStorage], Awaitable[None]]
) -> None:
    """Run `test` on the storage of a folder."""
    disk = RealDisk(directory)
    storage = await LedgerStorage.open(disk, config, clock=ManualClock())
    try:
        await test(storage)
    finally:
        await storage.aclose()
        await disk.aclose()


async def check(directory: Path, promised: Acknowledged) -> None:
    """See that the folder opens and holds all that was promised."""
    outcome = await promised.check(directory, killed_steps.ROLLING)
    assert not outcome.is_refused, directory
    assert outcome.returned == len(promised.entries)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
def test_killed_while_files_fill_and_are_sealed(tmp_path: Path, power: bool) -> None:
    """Goal: what was promised before a step is there after it."""
    (tmp_path / "empty").mkdir()
    steps = list(killed("roll", tmp_path / "empty", tmp_path / "rolled", power=power))
    assert last_of(steps) > killed_steps.BATCHES * 2

    async def main() -> None:
        for directory, lines in steps:
            await check(directory, promised_by(lines))

    asyncio.run(main())
    assert max(len(list(directory.glob("*.log"))) for directory, _ in steps) >= 3


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
def test_killed_while_it_replays_and_repairs(tmp_path: Path, power: bool) -> None:
    """Goal: an opening that was cut short leaves nothing that the next one misunderstands.

    Method: the folder needs its tail cut and two footers made again.
    """
    (tmp_path / "empty").mkdir()
    rolled = killed("roll", tmp_path / "empty", tmp_path / "rolled")
    *_, (prepared, lines) = sorted(rolled, key=number_of)
    promised = promised_by(lines)
    files = sorted(prepared.glob("*.log"))
    files[0].write_bytes(files[0].read_bytes()[:-20])
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"?")
    files[-1].write_bytes(files[-1].read_bytes() + b"\xb1\x0c torn")
    steps = list(killed("replay", prepared, tmp_path / "replayed", power=power))
    assert last_of(steps) > 6

    async def main() -> None:
        for directory, _ in steps:
            await check(directory, promised)

    asyncio.run(main())


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
def test_killed_while_it_compacts(tmp_path: Path, power: bool) -> None:
    """Goal: copies, garbage records and deletions cut anywhere lose nothing that is needed."""
    prepared = tmp_path / "filled"
    asyncio.run(with_storage(prepared, compaction.CONFIG, compaction.fill))
    files = len(list(prepared.glob("*.log")))
    steps = list(killed("compact", prepared, tmp_path / "compacted", power=power))

    async def main() -> None:
        for directory, _ in steps:
            await with_storage(directory, compaction.CONFIG, compaction.check_kept)

    asyncio.run(main())
    assert min(len(list(directory.glob("*.log"))) for directory, _ in steps) < files // 2
