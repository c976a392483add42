"""One run: work under faults, heal, read everything back, judge, report."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore import DLError
from tests.chaos.cluster import BOOKIES, CLIENTS, LOGS, PROXIES, READER, Cluster
from tests.chaos.disks import can_mount
from tests.chaos.history import Verdict, judge, longest_gap_s
from tests.chaos.nemesis import Nemesis, NemesisError
from tests.chaos.plan import KINDS, MIXED_KINDS, Fault, make_plan
from tests.chaos.services import Deadline
from tests.chaos.threads import in_thread
from tests.upgrade.releases import install

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.chaos.history import Found

_PROGRESS_TIMEOUT_S = 180.0
"""After healing every log must be written again within this time: a bound for a busy machine."""
_TAIL_TIMEOUT_S = 120.0
_COPY_TIMEOUT_S = 180.0
"""All that lost disks held must be copied by then."""
_WARM_UP_TIMEOUT_S = 120.0
_AFTERMATH_S = 3.0
"""How long the healed cluster works on before everything is read."""


@dataclass
class Report:
    """The faults of a run, and its findings."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)
    impossible: tuple[str, ...] = ()
    sync_method: str = ""
    seconds: float = 0.0
    appends: int = 0
    acked: int = 0
    acked_entries: int = 0
    read: int = 0
    tailed: int = 0
    gap_during_s: float = 0.0
    gap_after_s: float = 0.0
    written_again_s: float = 0.0
    copied_s: float = 0.0
    taken_back: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    failures: list[str] = field(default_factory=list)
    """Failures beyond the records: no progress, processes that broke."""

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return self.verdict.is_clean and not self.failures

    def __str__(self) -> str:
        counts = self.verdict.counts
        lines = [
            f"seed {self.seed}: {self.seconds:.0f} s of faults; syncs broken by {self.sync_method}",
            f"faults: {_listed(self.faults)} (in all {self.faults.total()})",
            f"left out: {_listed(self.left_out) or 'none'}",
            f"not possible here: {', '.join(self.impossible) or 'none'}",
            *(
                f"most of a release at once: {each}"
                for each in [_counted_releases(self.releases)]
                if each
            ),
            f"taken back by losses of power: {self.taken_back} sectors, ends of files and names",
            f"records: appended {self.appends}, acknowledged {self.acked}, read back {self.read}",
            f"acknowledged entries {self.acked_entries}, records tailed {self.tailed}",
            ", ".join(f"{kind} {counts[kind]}" for kind in Verdict.KINDS[:3]),
            ", ".join(f"{kind} {counts[kind]}" for kind in Verdict.KINDS[3:]),
            f"longest time without an acknowledgement under faults: {self.gap_during_s:.1f} s",
            f"longest time without an acknowledgement after healing: {self.gap_after_s:.1f} s",
            f"every log written again after healing: {self.written_again_s:.1f} s",
            f"all that lost disks held copied after healing: {self.copied_s:.1f} s",
            *self.verdict.examples,
            *(f"FAILED: {each}" for each in self.failures),
        ]
        return "\n".join(lines)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {counts[kind]}" for kind in MIXED_KINDS if counts[kind])


def _counted_releases(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{each} {count}" for each, count in sorted(counts.items()))


def plan_of(seed: int, seconds: float, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Return the plan of a run on this machine."""
    possible = [kind for kind in kinds if kind not in impossible_kinds()]
    return make_plan(
        seed,
        seconds=seconds,
        bookies=BOOKIES,
        clients=CLIENTS,
        small_disks=BOOKIES[:2],
        kinds=possible,
    )


def impossible_kinds() -> tuple[str, ...]:
    """Return the kinds of faults that this user cannot make here."""
    return () if can_mount() else ("fill disk",)


async def run_chaos(
    seed: int,
    *,
    seconds: float,
    tell: Callable[[str], None],
    kinds: Sequence[str] = KINDS,
    keeps: bool = False,
    producers: int | None = None,
    is_secure: bool = False,
    last: str | None = None,
) -> Report:
    """Run and judge; the folder with all data and logs stays when something is wrong, or `keeps`.

    Args:
        tell: takes lines of progress.
        producers: how many write through proxies; None: some, more in a longer run.
        is_secure: whether bookies and proxies ask for certificates.
        last: the version of the release that all processes run first, out of the history.
    """
    folder = Path(tempfile.mkdtemp(prefix="dlog-chaos-"))
    is_clean = False
    try:
        async with Cluster(
            folder,
            seed=seed,
            seconds=seconds,
            producers=producers,
            is_secure=is_secure,
            last=await in_thread(install, last, folder / "last-release") if last else None,
        ) as cluster:
            report = await _Run(cluster, seed, seconds, tell).run(plan_of(seed, seconds, kinds))
        is_clean = report.is_clean
    except asyncio.CancelledError:
        is_clean = True  # interrupted: nothing to keep
        raise
    finally:
        if is_clean and not keeps:
            shutil.rmtree(folder)
        else:
            tell(f"seed {seed}: all data and logs are kept in {folder}")
    return report


class _Run:
    def __init__(
        self, cluster: Cluster, seed: int, seconds: float, tell: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._tell = tell
        self._report = Report(seed, impossible=impossible_kinds())
        self._report.sync_method = cluster.syncs.method
        self._seconds = seconds

    async def run(self, plan: Sequence[Fault]) -> Report:
        """Work through all phases as far as they succeed."""
        report, cluster = self._report, self._cluster
        began_s = time.monotonic()
        if not await self._wait_written(began_s, _WARM_UP_TIMEOUT_S):
            report.failures.append("not every log was written before the first fault")
            return report
        began_s = time.monotonic()
        nemesis = Nemesis(cluster)
        self._tell(f"every log is written; {len(plan)} faults follow")
        try:
            await nemesis.run(plan, note=self._tell)
        except* NemesisError as group:
            report.failures += [str(error) for error in group.exceptions]
        report.faults, report.left_out = nemesis.counts, nemesis.left_out
        report.taken_back, report.releases = nemesis.taken_back, nemesis.releases
        healed_s = time.monotonic()
        report.seconds = healed_s - began_s
        self._tell("healed")
        await self._check_progress(healed_s)
        await self._check_copied(nemesis)
        report.copied_s = time.monotonic() - healed_s
        stopped_s = time.monotonic()
        await self._stop_writers()
        await self._judge()
        times_s = cluster.history.ack_times_s
        report.gap_during_s = longest_gap_s(times_s, first_s=began_s, last_s=healed_s)
        report.gap_after_s = longest_gap_s(times_s, first_s=healed_s, last_s=stopped_s)
        return report

    async def _wait_written(self, since_s: float, timeout_s: float) -> bool:
        """Return whether every log got a record, written and acknowledged since then, in time."""

        async def is_written() -> bool:
            self._cluster.poll()
            appends = self._cluster.history.appends.values()
            return {a.log for a in appends if a.acked_s and a.sent_s > since_s} >= set(LOGS)

        return await Deadline(timeout_s).wait(is_written)

    async def _check_progress(self, healed_s: float) -> None:
        report = self._report
        if not await self._cluster.wait_all_serve(_PROGRESS_TIMEOUT_S):
            serving = [b.name for b in self._cluster.bookies.values() if b.serves]
            report.failures.append(f"not all bookies serve after healing, only {serving}")
        if not await self._wait_written(healed_s, _PROGRESS_TIMEOUT_S):
            appends = self._cluster.history.appends.values()
            written = {a.log for a in appends if a.acked_s and a.sent_s > healed_s}
            missing = sorted(set(LOGS) - written)
            report.failures.append(
                f"no progress within {_PROGRESS_TIMEOUT_S:g} s after healing on {missing}"
            )
        report.written_again_s = time.monotonic() - healed_s
        await asyncio.sleep(_AFTERMATH_S)

    async def _check_copied(self, nemesis: Nemesis) -> None:
        if await nemesis.wait_copied(_COPY_TIMEOUT_S):
            return
        missing = await self._cluster.find_missing(nemesis.lost)
        examples = list(missing.items())[:3]
        self._report.failures.append(
            f"{len(missing)} ledgers still rely on a lost disk {_COPY_TIMEOUT_S:g} s after "
            f"healing: {examples}"
        )

    async def _stop_writers(self) -> None:
        """Stop them in good order, the proxies when the producers have ended."""
        names = [name for name in self._cluster.clients if name != READER]
        await self._stop([name for name in names if name not in PROXIES])
        await self._stop(PROXIES)

    async def _stop(self, names: Sequence[str]) -> None:
        clients = [self._cluster.clients[name] for name in names]
        for service, is_orderly in zip(
            clients, await asyncio.gather(*(each.stop() for each in clients)), strict=True
        ):
            if not is_orderly:
                self._report.failures.append(
                    f"{service.name} did not stop in order: {service.output[-2000:]}"
                )

    async def _judge(self) -> None:
        report, cluster = self._report, self._cluster
        services = (*cluster.bookies.values(), *cluster.clients.values())
        report.failures += [end for service in services for end in service.unexpected]
        try:
            finals = await cluster.read_logs()
        except DLError as error:
            report.failures.append(
                f"a log cannot be read after healing: {type(error).__name__}: {error}"
            )
            return
        await self._check_tails(finals)
        cluster.poll()
        history = cluster.history
        report.verdict = judge(history, finals)
        report.appends = len(history.appends)
        report.acked = len(history.ack_times_s)
        report.acked_entries = history.count_acked_entries(finals)
        report.read = sum(map(len, finals.values()))
        report.tailed = sum(map(len, history.tails.values()))

    async def _check_tails(self, finals: Mapping[str, Sequence[Found]]) -> None:
        """The present life of the reader must come to the end of every log."""
        reader = self._cluster.clients[READER]
        life = str(reader.starts - 1)

        def behind() -> list[str]:
            self._cluster.poll()
            tails = self._cluster.history.tails
            return [log for log in LOGS if len(tails.get((log, life), ())) < len(finals[log])]

        async def has_caught_up() -> bool:
            return not behind()

        if not await Deadline(_TAIL_TIMEOUT_S).wait(has_caught_up):
            self._report.failures.append(f"the tail reader does not come to the end of {behind()}")
        if not await reader.stop():
            self._report.failures.append(
                f"the tail reader did not stop in order: {reader.output[-2000:]}"
            )
