"""Planning a read of many logs with long histories: its time, and the memory of the planner.

The logs have metadata as commits leave it, and no entries, of which planning reads none.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.counted_client import counted_client
from benchmarks.figures import Figure, Target
from benchmarks.logs import CONFIG
from benchmarks.written_history import write_history
from dlcore.metadata.paths import parse_uri
from dlspark.batch import DlogReader
from dlspark.options import Mode, ReadOptions
from dlspark.planning import DlogPartition
from dlspark.sessions import close_shared_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

LOGS = 1_000
EXTENTS = 100_000
_AT_ONCE = 16
_PREFIX = "planned/"
_LIMIT_S = 2.0
_LIMIT_MB = 500.0


class _Plan(NamedTuple):
    """The cost of planning, and its result."""

    seconds: float
    peak_mb: float
    partitions: int
    extents: int


def plan_many(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """A batch read of 1,000 logs of 100,000 extents planned, in a process of its own."""
    asyncio.run(_write(sandbox))
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        plan = pool.submit(_plan, sandbox.uri).result()
    assert plan.extents == EXTENTS, plan
    print(f"{plan.partitions:,d} partitions")
    target = Target(ratio=1.0, is_rate=False)
    return [
        Figure(name="plan_many", unit="s", value=plan.seconds, limit=_LIMIT_S, target=target),
        Figure(
            name="plan_many_memory", unit="MB", value=plan.peak_mb, limit=_LIMIT_MB, target=target
        ),
    ]


def _plan(uri: str) -> _Plan:
    """Plan as a process of Spark's does that was just started, partitions pickled included."""
    given = {"uri": uri, "logsPattern": f"{_PREFIX}.*"}
    options = ReadOptions.parse(given, Mode.BATCH)
    started = time.perf_counter()
    planned = DlogReader(options).partitions()
    pickled = [pickle.dumps(each) for each in planned]
    seconds = time.perf_counter() - started
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    close_shared_namespace(options.address)
    scans = [scan for part in planned if isinstance(part, DlogPartition) for scan in part.scans]
    extents = sum(len(scan.extents) for scan in scans)
    return _Plan(seconds, peak_mb, len(pickled), extents)


async def _write(sandbox: Sandbox) -> None:
    uri = parse_uri(sandbox.uri)
    numbers = iter(range(LOGS))
    async with counted_client(uri.servers, uri.root) as client:

        async def write() -> None:
            for number in numbers:
                log = f"{_PREFIX}{number:04d}"
                await client.namespace.create_log(log, config=CONFIG)
                await write_history(client.context, log, EXTENTS // LOGS)

        await asyncio.gather(*(write() for _ in range(_AT_ONCE)))
