"""One soak: the chaos of Spark with fewer faults, and all that goes on beside it, for hours."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos_spark.run import LOCAL_ONLY, Report, Run
from tests.soak.cluster import SoakCluster
from tests.soak.samples import CLUSTER, JUDGED
from tests.soak.slopes import Slope, slope_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.soak.samples import Samples

_FAULTS_GAP_S = (8.0, 40.0)
_ROLLS = 4
"""Times that all processes are restarted; each so has some lives that are long enough."""
_ROLL_EVERY_S_MAX = 1500.0
_WARM_SHARE = 0.2
_WARM_SHARES = {"MB of auto-recovery": 0.5}
"""It loads the code of each kind of work, such as Arrow, when it first does it."""
_BOUND_S = 900.0
"""Until records come through, and until all have come, on a busy machine."""
_LOOKS = 500
_LOOK_EVERY_S_MIN, _LOOK_EVERY_S_MAX = 2.0, 10.0


@dataclass
class SoakReport:
    """The work of a soak, and its findings."""

    chaos: Report
    restarts: int
    kills: int
    trimmed: int
    slopes: dict[str, Slope | None]
    failures: list[str] = field(default_factory=list)

    @property
    def growing(self) -> list[str]:
        """The judged series that grow."""
        found = {name: self.slopes.get(name) for name in JUDGED}
        return [name for name, slope in found.items() if slope is not None and slope.grows]

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept, and nothing grows."""
        return self.chaos.is_clean and not self.failures and not self.growing

    def __str__(self) -> str:
        lines = [
            str(self.chaos),
            f"restarts in order {self.restarts}, other kills {self.kills}, cuts {self.trimmed}",
            f"{'series':32}{'level':>10}{'an hour':>10}{'growth':>10}{'noise':>10}",
        ]
        for name, slope in self.slopes.items():
            if slope is None:
                lines.append(f"{name:32} too short to say")
                continue
            numbers = (slope.level, slope.per_hour, slope.growth, slope.noise)
            row = "".join(f"{each:10.3g}" for each in numbers)
            lines.append(f"{name:32}{row}{'  GROWS' if name in self.growing else ''}")
        return "\n".join([*lines, *(f"FAILED: {each}" for each in self.failures)])


async def run_soak(
    seed: int, *, seconds: float, out: Path, tell: Callable[[str], None]
) -> SoakReport:
    """Run and judge; `out` takes soak.csv and soak.png.  All data stays when something is wrong."""
    folder, is_clean = Path(tempfile.mkdtemp(prefix="dlog-soak-")), False
    roll_every_s = min(_ROLL_EVERY_S_MAX, seconds / _ROLLS)
    look_every_s = min(_LOOK_EVERY_S_MAX, max(_LOOK_EVERY_S_MIN, seconds / _LOOKS))
    try:
        async with SoakCluster(
            folder, seed, roll_every_s=roll_every_s, look_every_s=look_every_s
        ) as cluster:
            run = Run(
                cluster, seed, tell, gap_s=_FAULTS_GAP_S, warm_up_s=_BOUND_S, drain_s=_BOUND_S
            )
            try:
                chaos = await run.run(seconds, LOCAL_ONLY)
            finally:
                slopes = _slopes(cluster.samples, seconds, roll_every_s)
                title = f"{seconds / 60:.0f} minutes of faults, seed {seed}"
                cluster.samples.keep(out, slopes, title)
            ends = [end for each in cluster.services.values() for end in each.unexpected]
        done = (cluster.restarts, cluster.kills, cluster.trimmed)
        report = SoakReport(chaos, *done, slopes, [*cluster.failures, *ends])
        is_clean = report.is_clean
    finally:
        if is_clean:
            shutil.rmtree(folder)
        else:
            tell(f"kept in {folder}")
    return report


def _slopes(samples: Samples, seconds: float, roll_every_s: float) -> dict[str, Slope | None]:
    """Return what each series shows, without the first part of the run, or of a process."""
    warm_s = dict.fromkeys(CLUSTER, _WARM_SHARE * seconds)
    return {
        name: slope_of(
            points,
            warm_s=warm_s.get(name, _WARM_SHARES.get(name, _WARM_SHARE) * roll_every_s),
        )
        for name, points in sorted(samples.series.items())
    }
