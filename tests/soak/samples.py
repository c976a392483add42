"""The looks of a soak at its cluster, kept as a table and drawn as a picture."""

from __future__ import annotations

import asyncio
import csv
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore import DLError
from tests.soak.slopes import Point

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.soak.cluster import SoakCluster
    from tests.soak.slopes import Slope

MB = 1e6
ROLES = {"bookie": "bookies", "proxy": "proxies", "autorecovery": "auto-recovery"}
OTHERS = {"driver": "Spark's driver"}
NODES, LEDGERS, DISK = "nodes of ZooKeeper", "ledgers", "MB of bookies' disks"
CLUSTER = (NODES, LEDGERS, DISK)
JUDGED = (
    tuple([f"{what} of {role}" for what in ("MB", "descriptors") for role in ROLES.values()])
    + CLUSTER
)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_COLUMNS = 3
_ALL = "all"


class Samples:
    """Points by series, from the start on."""

    def __init__(self) -> None:
        self.series: dict[str, list[Point]] = defaultdict(list)
        self._began_s = time.monotonic()

    async def look(self, cluster: SoakCluster) -> None:
        """Take a point of each series that can be had now."""
        at_s = time.monotonic() - self._began_s
        for name, service in cluster.services.items():
            role = (ROLES | OTHERS).get(name.partition("-")[0])
            pid = service.pid
            if role is None or pid is None:
                continue
            found = _look_at(pid)
            if found is None:
                continue  # it has just ended
            life = f"{name}/{pid}"
            for what, value in zip(("MB", "descriptors"), found, strict=True):
                self.series[f"{what} of {role}"].append(Point(at_s, life, value))
        disk = await asyncio.to_thread(cluster.disk_bytes)
        self.series[DISK].append(Point(at_s, _ALL, disk / MB))
        try:
            async with asyncio.timeout(5):
                nodes, ledgers = await cluster.count_nodes(), await cluster.count_ledgers()
        except (DLError, OSError, TimeoutError, IndexError):
            return  # ZooKeeper is paused
        self.series[NODES].append(Point(at_s, _ALL, nodes))
        self.series[LEDGERS].append(Point(at_s, _ALL, ledgers))

    def keep(self, folder: Path, slopes: Mapping[str, Slope | None], title: str) -> None:
        """Write soak.csv and soak.png."""
        folder.mkdir(parents=True, exist_ok=True)
        self._write(folder / "soak.csv")
        if self.series:
            self._draw(folder / "soak.png", slopes, title)

    def _write(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(("series", "life", "seconds", "value"))
            for series, points in self.series.items():
                for point in points:
                    row = (series, point.life, f"{point.at_s:.1f}", f"{point.value:.6g}")
                    table.writerow(row)

    def _draw(self, path: Path, slopes: Mapping[str, Slope | None], title: str) -> None:
        from matplotlib.figure import Figure

        rows = -(-len(self.series) // _COLUMNS)
        figure = Figure(figsize=(4.5 * _COLUMNS, 2.6 * rows), layout="constrained")
        figure.suptitle(title)
        axes = figure.subplots(rows, _COLUMNS, squeeze=False, sharex=True)
        for number, (series, points) in enumerate(sorted(self.series.items())):
            panel = axes[number // _COLUMNS][number % _COLUMNS]
            lives: dict[str, list[Point]] = defaultdict(list)
            for point in points:
                lives[point.life].append(point)
            names = sorted({life.partition("/")[0] for life in lives})
            for life, those in lives.items():
                colour = f"C{names.index(life.partition('/')[0])}"
                minutes = [point.at_s / 60 for point in those]
                panel.plot(minutes, [point.value for point in those], color=colour, linewidth=0.9)
            slope = slopes.get(series)
            slope_text = "" if slope is None else f" ({slope.per_hour:+.3g} an hour)"
            panel.set_title(f"{series}{slope_text}", fontsize=9)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        for panel in axes.flat[len(self.series) :]:
            panel.set_visible(False)
        figure.supxlabel("minutes", fontsize=9)
        figure.savefig(path, dpi=100)


def _look_at(pid: int) -> tuple[float, float] | None:
    """Return a process's memory in MB and its descriptors."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * _PAGE / MB, len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return None
