"""One run: stream under faults, first in one process, then on a cluster; heal, drain, judge."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dlcore import DLError
from tests.chaos.services import Deadline
from tests.chaos.threads import in_thread
from tests.chaos_spark.checker import Verdict, judge
from tests.chaos_spark.cluster import BOOKIES, DRIVER, HOSTS, MASTER, WORKERS, ZOOKEEPER, Cluster
from tests.chaos_spark.driver import EVEN, ODD, SURVIVORS, TARGETS, TWICE
from tests.chaos_spark.hosts import can_have_hosts
from tests.chaos_spark.plan import CUTS, GAP_S, KILLS, KINDS, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos_spark.plan import Fault

T = TypeVar("T")
LOCAL_ONLY, CLUSTER_ONLY, BOTH = WHERE = ("local", "cluster", "both")
_LOCAL_SHARE = 0.35
_WARM_UP_TIMEOUT_S = 240.0
_DRAIN_TIMEOUT_S = 300.0
_HEALED_TIMEOUT_S = 120.0
"""Bounds for a busy machine."""
_LOOK_EVERY_S = 1.0
_PROCESS_TIMEOUT_S = 60.0
_STARTS_MAX = 3
"""A driver that ends more often without being killed is broken."""
_ONLY_ON_CLUSTER = ("kill executor",)


@dataclass
class Report:
    """The faults of a run, and its findings."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    none_there: Counter[str] = field(default_factory=Counter)
    has_hosts: bool = False
    passed: int = 0
    """Records that came to the targets while there were faults."""
    records: int = 0
    drivers: int = 0
    drained_s: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)
    churn: Counter[str] = field(default_factory=Counter)
    """The requests to the logs that come and go."""
    survivors: Verdict = field(default_factory=Verdict)
    """The progress of the query that follows those logs."""
    failures: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return self.verdict.is_clean and self.survivors.is_clean and not self.failures

    @property
    def kills(self) -> int:
        """How many processes were killed."""
        return sum(self.faults[kind] for kind in KILLS)

    def __str__(self) -> str:
        where = "hosts of their own" if self.has_hosts else "one machine"
        faults = ", ".join(f"{kind} {self.faults[kind]}" for kind in KINDS if self.faults[kind])
        return "\n".join(
            [
                f"seed {self.seed}: {self.seconds:.0f} s of faults, processes on {where}",
                f"kills {self.kills}; faults: {faults}",
                f"met none: {dict(self.none_there) or 'none'}; drivers started {self.drivers}",
                f"records that reached a target under faults {self.passed}",
                f"records of the sources {self.records}, checked in all {self.verdict.checked}",
                str(self.verdict),
                "logs that come and go: " + ", ".join(f"{k} {n}" for k, n in self.churn.items()),
                f"of these, read {self.survivors.checked}, gone before {self.survivors.excused}",
                f"of these: {self.survivors}",
                f"every record in every channel after healing: {self.drained_s:.1f} s",
                *self.verdict.examples,
                *self.survivors.examples,
                *(f"FAILED: {each}" for each in self.failures),
            ]
        )


async def run_chaos(
    seed: int,
    *,
    seconds: float,
    where: str = BOTH,
    tell: Callable[[str], None],
    keeps: bool = False,
    is_secure: bool = False,
) -> Report:
    """Run and judge; the folder with all data stays when something is wrong, or `keeps`."""
    folder = Path(tempfile.mkdtemp(prefix="dlog-chaos-spark-"))
    is_clean = False
    try:
        async with Cluster(folder, seed, is_secure=is_secure) as cluster:
            report = await Run(cluster, seed, tell).run(seconds, where)
        is_clean = report.is_clean
    except asyncio.CancelledError:
        is_clean = True  # interrupted: nothing to keep
        raise
    finally:
        if is_clean and not keeps:
            shutil.rmtree(folder)
        else:
            tell(f"kept in {folder}")
    return report


class Run:
    """One run on a cluster.

    Args:
        gap_s: bounds of the time between two faults.
        warm_up_s: a bound on the time until records come through.
        drain_s: a bound on the time until all have come through, after healing.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        tell: Callable[[str], None],
        *,
        gap_s: tuple[float, float] = GAP_S,
        warm_up_s: float = _WARM_UP_TIMEOUT_S,
        drain_s: float = _DRAIN_TIMEOUT_S,
    ) -> None:
        self._drain_s = drain_s
        self._gap_s = gap_s
        self._warm_up_s = warm_up_s
        self._cluster = cluster
        self._tell = tell
        self._killed: set[int] = set()
        self._report = Report(seed=seed, has_hosts=can_have_hosts())

    async def run(self, seconds: float, where: str) -> Report:
        """Work through the phases as far as they succeed, and judge."""
        local_s = {LOCAL_ONLY: seconds, CLUSTER_ONLY: 0.0}.get(where, seconds * _LOCAL_SHARE)
        for is_local, phase_s in ((True, local_s), (False, seconds - local_s)):
            if phase_s and not self._report.failures:
                await self._phase(phase_s, is_local=is_local)
        if not self._report.failures:
            await self._judge()
        return self._report

    async def _phase(self, seconds: float, *, is_local: bool) -> None:
        report, cluster = self._report, self._cluster
        where = "in one process" if is_local else "on a cluster"
        self._tell(f"Spark starts {where}")
        if DRIVER in cluster.spark:
            await cluster.stop_driver()
        before = await self._counted()
        cluster.start_driver(is_local=is_local)

        driver = cluster.spark[DRIVER]

        async def flows() -> bool:
            now = await self._counts()
            has_come = bool(now) and all(count > before[log] for log, count in now.items())
            return has_come or driver.starts > _STARTS_MAX

        if not await Deadline(self._warm_up_s).wait(flows) or driver.starts > _STARTS_MAX:
            output = cluster.spark[DRIVER].output[-3000:]
            report.failures.append(f"no record came through {where}: {output}")
            return
        kinds = tuple(
            kind
            for kind in KINDS
            if (cluster.hosts.can_cut or kind not in CUTS)
            and not (is_local and kind in _ONLY_ON_CLUSTER)
        )
        seed = report.seed * 2 + is_local
        plan = make_plan(seed, seconds=seconds, kinds=kinds, gap_s=self._gap_s)
        begun = await self._counted()
        cluster.begin_faults()
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(max(0.0, started_s + fault.at_s - time.monotonic()))
                group.create_task(self._carry_out(fault))
        report.seconds += time.monotonic() - started_s
        report.passed += (await self._counted()).total() - begun.total()
        report.drivers += driver.starts

    async def _counts(self) -> Counter[str]:
        await asyncio.sleep(_LOOK_EVERY_S)
        try:
            return Counter(await self._cluster.count_targets())
        except DLError:
            return Counter()  # some bookie or ZooKeeper is away

    async def _counted(self) -> Counter[str]:
        """Return the counts while nothing is broken, when they are there for sure."""
        async with asyncio.timeout(_HEALED_TIMEOUT_S):
            while not (counts := await self._counts()):
                continue
        return counts

    async def _carry_out(self, fault: Fault) -> None:
        cluster = self._cluster
        if fault.kind == "kill bookie":
            name = _choose(fault, BOOKIES)
            whom: str | None = name
            async with cluster.bookies[name].turn:
                await cluster.bookies[name].kill()
                await asyncio.sleep(fault.lasts_s)
                cluster.bookies[name].start()
        elif fault.kind == "pause ZooKeeper":
            whom = await self._pause_zookeeper(fault)
        elif fault.kind in CUTS:
            whom = await self._cut(fault)
        else:
            whom = await self._kill(fault)
        self._tell(f"{fault} {whom or '(no process there)'}")
        if whom is None:
            self._report.none_there[fault.kind] += 1
        else:
            self._report.faults[fault.kind] += 1

    async def _kill(self, fault: Fault) -> str | None:
        """Kill one of those that there are, or that come soon after an earlier kill."""
        whom: list[int] = []

        async def has_killed() -> bool:
            pids = [p for p in self._cluster.processes(fault.kind) if p not in self._killed]
            if pids:
                pid = _choose(fault, pids)
                self._killed.add(pid)  # dying takes a while
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    whom.append(pid)
            return bool(whom)

        await Deadline(_PROCESS_TIMEOUT_S).wait(has_killed)
        return f"process {whom[0]}" if whom else None

    async def _pause_zookeeper(self, fault: Fault) -> str:
        async with self._cluster.zookeeper_turn:
            await in_thread(self._cluster.zookeeper.pause)
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                self._cluster.zookeeper.resume()
        return ZOOKEEPER

    async def _cut(self, fault: Fault) -> str:
        hosts = self._cluster.hosts
        used = [h for h in HOSTS if not self._cluster.is_local or h not in (MASTER, *WORKERS)]
        if fault.kind == "cut off host":
            name = _choose(fault, used)
            hosts.cut_off(name)
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                hosts.join(name)
            return name
        pairs = [(a, b) for a in used for b in used if a < b]
        one, other = _choose(fault, pairs)
        hosts.cut(one, other)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            hosts.mend(one, other)
        return f"{one} and {other}"

    async def _judge(self) -> None:
        report, cluster = self._report, self._cluster
        healed_s = time.monotonic()
        self._tell("healed: the sources end")
        report.records = await cluster.end_sources()
        wanted = dict.fromkeys(TARGETS, report.records) | {TWICE: 2 * report.records}

        async def is_drained() -> bool:
            now = await self._counts()
            if not now:
                return False
            del now[SURVIVORS]
            halves = now.pop(EVEN) + now.pop(ODD)
            if halves < report.records or any(now[log] < wanted[log] for log in now):
                return False
            return not (await self._judge_survivors()).counts["lost"]

        if not await Deadline(self._drain_s).wait(is_drained):
            output = cluster.spark[DRIVER].output[-3000:]
            report.failures.append(
                f"not every record came through within {self._drain_s:g} s after healing, of "
                f"{report.records} there are {await self._counts()}; the driver: {output}"
            )
        report.drained_s = time.monotonic() - healed_s
        await cluster.stop_driver()
        report.verdict = judge(cluster.sources, await cluster.read_channels())
        report.survivors = await self._judge_survivors()
        report.churn = Counter(cluster.churn.asked)

    async def _judge_survivors(self) -> Verdict:
        survivors = await self._cluster.read_survivors()
        return judge(self._cluster.churn.sources, {SURVIVORS: survivors})


def _choose(fault: Fault, among: Sequence[T]) -> T:
    return among[int(fault.choice * len(among)) % len(among)]
