"""Goal: a real bookie answers nothing before it is durable, and loses nothing of it later.

Method: its process notes its calls of the disk and its answers (`recorded_bookie.py`) while clients
write, publish LACs, fence, read, delete and make it compact; it is killed twice in the middle, and
replays what it finds.  The history of all its lives goes to the checker (`disk_promises.py`).  The
first and the last life write directly where the disk can do that, the second one never does.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from dlcore import LedgerClientConfig, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.disk_changes import Promised, decode
from tests.fixtures.disk_promises import broken_promises
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lengths import amount

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper
    from tests.fixtures.disk_changes import Event

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it watches the calls of Linux")
ONE = QuorumConfig(1, 1, 1)
CLIENT = LedgerClientConfig(add_timeout_s=20.0, read_timeout_s=20.0)
ROUNDS = amount(12, sampled=1)
DROPPED_MIN = 2
"""Files that are to go in each life."""
ENTRIES = 12
LARGE_BYTES = 30_000
OPTIONS = {
    "file-bytes-max": 100_000,
    "settle-interval-s": 0.02,
    "lac-delay-s": 0.005,
    "session-timeout-s": 4.0,
    "garbage-interval-s": 0.1,
    "garbage-age-ms": 20,
    "garbage-brake-count": 1000,
    "compact-interval-s": 0.1,
    "compact-below-live-share": 0.95,
    "compact-floor-bytes": 1,
    "compact-bytes-per-second": 1_000_000_000,
    "space-read-only-below-bytes": 0,
    "space-writable-above-bytes": 0,
    "space-minimum-bytes": 0,
}
KINDS = {"identity", "add", "read", "LAC", "fence", "garbage"}


def events_of(path: Path) -> list[Event]:
    """Return the history so far."""
    return [event for event, _ in decode(path.read_bytes())]


def counts_of(history: list[Event]) -> Counter[str]:
    """Return how often what was answered."""
    return Counter(each.what.split()[0] for each in history if isinstance(each, Promised))


@asynccontextmanager
async def life(folder: Path, uri: str, way: str, mutant: str) -> AsyncIterator[int]:
    """Run the bookie from where it serves, and yield its process id; kill it at the end."""
    options = [part for key, value in OPTIONS.items() for part in (f"--{key}", str(value))]
    process = await asyncio.create_subprocess_exec(
        *(LOADED_PYTHON, "-m", "tests.fixtures.recorded_bookie", str(folder / "history")),
        *(way, mutant, "--name", "bookie-1", "--metadata-uri", uri, "--host", "127.0.0.1"),
        *("--data-dir", str(folder / "watched" / "new" / "data"), "--port", "0", *options),
        "--watch-parent",
        cwd=REPOSITORY,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert "serving on" in line, line
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def work(namespace: DirectNamespace, number: int) -> int:
    """Write two ledgers side by side, fence one, delete the other; return the one that stays."""
    kept = await namespace.ports.ledgers.create_ledger(ONE)
    doomed = await namespace.ports.ledgers.create_ledger(ONE)
    for entry in range(ENTRIES):
        size = LARGE_BYTES if entry == ENTRIES // 2 else 50 * entry
        await asyncio.gather(
            kept.append([b"%d:%d " % (number, entry) + b"k" * size]),
            doomed.append([b"%d:%d " % (number, entry) + b"d" * LARGE_BYTES]),
        )
        if entry % 4 == 3:
            await kept.publish_lac()
    reader = await namespace.ports.ledgers.open_ledger(kept.ledger_id)
    async for _ in reader.read(0, ENTRIES - 2):
        pass
    await namespace.ports.ledgers.recover_ledger(kept.ledger_id)
    await namespace.log_context.ledger_store.delete(doomed.ledger_id)
    return kept.ledger_id


async def live_three_times(folder: Path, uri: str, mutant: str, kept: set[int]) -> None:
    """Work until files were dropped, be killed amid adds, come back; note what was kept."""
    for way in ("direct", "cached", "direct"):
        async with (
            life(folder, uri, way, mutant),
            asyncio.timeout(60),
            await open_namespace(uri, client_config=CLIENT) as namespace,
        ):
            rounds = 0
            seen = files_of(folder)
            while rounds < ROUNDS or len(seen - files_of(folder)) < DROPPED_MIN:
                kept.add(await work(namespace, rounds))
                rounds += 1
                seen |= files_of(folder)
            writer = await namespace.ports.ledgers.create_ledger(ONE)
            adds = [asyncio.ensure_future(writer.append([b"x" * LARGE_BYTES])) for _ in range(9)]
            await adds[0]
        await asyncio.gather(*adds, return_exceptions=True)


def files_of(folder: Path) -> set[str]:
    """Return the names of the log files that there are."""
    return {path.name for path in (folder / "watched").rglob("*.log")}


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_no_answer_comes_before_its_bytes_are_durable(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    zookeeper: EmbeddedZooKeeper,
    zookeeper_root: str,
) -> None:
    """Adds, reads, LACs, fences, the identity, and the end of files; over kills and replays."""
    mutant = request.config.getoption("--mutant", default=None) or "-"
    (tmp_path / "watched").mkdir()
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
    kept: set[int] = set()

    def is_released(promise: Promised) -> bool:
        kind, _, about = promise.what.partition(" ")
        # A LAC ends with the next one, and garbage with the file that names it.
        is_superseded = kind in ("garbage", "LAC")
        return is_superseded or (kind != "identity" and int(about.partition(":")[0]) not in kept)

    try:
        asyncio.run(live_three_times(tmp_path, uri, mutant, kept))
    finally:  # a bookie that is broken may not come back: its history tells why
        history = events_of(tmp_path / "history")
        assert broken_promises(history, is_released=is_released) == []
    counts = counts_of(history)
    assert counts.keys() == KINDS
    assert min(counts.values()) >= 3


WAIT_S = 60
OWNER = """
import asyncio, sys
from pathlib import Path
from tests.bookie.test_synced_bookie import life

async def main():
    async with life(Path(sys.argv[1]), sys.argv[2], "cached", "-") as pid:
        print(pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.integration
def test_the_bookie_does_not_outlive_a_test_that_is_killed(
    tmp_path: Path, zookeeper: EmbeddedZooKeeper, zookeeper_root: str
) -> None:
    """It would serve on amid later ones."""
    (tmp_path / "watched").mkdir()
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
    command = [sys.executable, "-c", OWNER, str(tmp_path), uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        bookie = os.pidfd_open(pid)
        owner.kill()
    ended, _, _ = select.select([bookie], [], [], WAIT_S)
    os.close(bookie)
    assert ended, f"process {pid} is still there"
