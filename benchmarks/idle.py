"""A cluster that does nothing: its CPU and its memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, Target
from benchmarks.logs import cpu_of, memory_mb
from dlcore.ops.sandbox import Sandbox

if TYPE_CHECKING:
    from pathlib import Path

CPU_PERCENT_MAX = 2.0
MEMORY_MB_MAX = 400.0
_SETTLING_S = 10.0
_WATCHED_S = 30.0


def idle(_: Sandbox, folder: Path) -> list[Figure]:
    """All processes of `dlog sandbox` together, half a minute long, as a share of one core."""
    with Sandbox(3, data_dir=folder / "idle", proxies=1) as cluster:
        recovery = cluster.autorecovery
        assert recovery is not None
        servers = [each.pid for each in (*cluster.bookies, *cluster.proxies)]
        pids = [cluster.metadata_server.pid, recovery.pid, *servers]
        time.sleep(_SETTLING_S)
        began_s, before_s = time.perf_counter(), cpu_of(pids)
        time.sleep(_WATCHED_S)
        used_s, passed_s = cpu_of(pids) - before_s, time.perf_counter() - began_s
        memory = sum(map(memory_mb, pids))
    target = Target(ratio=1.0, is_rate=False)
    percent = 100 * used_s / passed_s
    return [
        Figure(
            name="idle_cpu", unit="% of a core", value=percent, limit=CPU_PERCENT_MAX, target=target
        ),
        Figure(name="idle_memory", unit="MB", value=memory, limit=MEMORY_MB_MAX, target=target),
    ]
