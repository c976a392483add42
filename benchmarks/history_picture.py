"""The curves of `sink_history` as one picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Sheet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchmarks.counted_client import Cost
    from benchmarks.history import Curves

_SIZE_INCHES = (13, 8)
_QUANTITIES = (
    ("ms", "time, ms"),
    ("cpu_ms", "CPU of the client, ms"),
    ("bytes_written", "bytes to ZooKeeper"),
    ("depth", "round trips one after another"),
)


def draw(curves: Curves, path: Path) -> None:
    """Draw each operation's costs over the extents of its log's history."""
    sheet = Sheet(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(sheet)
    for axes, (quantity, label) in zip(sheet.subplots(2, 2).flat, _QUANTITIES, strict=True):
        for what, points in curves.by_extents.items():
            style = "--" if "away" in what else "-"
            axes.plot(*_line(points, quantity), style, marker="o", label=what)
        axes.set_xscale("log")
        if quantity != "depth":
            axes.set_yscale("symlog")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("extents of history")
        axes.set_title(label)
        axes.grid(alpha=0.3)
    handles, labels = sheet.axes[0].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path)


def _line(points: Mapping[int, Cost], quantity: str) -> tuple[list[int], list[float]]:
    return list(points), [getattr(cost, quantity) for cost in points.values()]
