"""The lines that the demo shows while it works, and the picture that it leaves."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import pandas as pd

_NEW_YORK = "America/New_York"
_MINUTES_SHOWN_MAX = 60


class Progress:
    """Lines with the seconds since the start; on a terminal also what is being waited for."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a locale's encoding may lack the …
        self._console = Console(highlight=False, soft_wrap=True)
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def step(self, text: str) -> None:
        """Open a step."""
        self._console.print(f"\n[bold]{text}[/bold]")

    def say(self, text: str) -> None:
        """Say one fact."""
        self._console.print(f"[dim]{self.seconds:6.1f} s[/dim]  {escape(text)}")

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Show `text` while the block runs."""
        if self._console.is_terminal:
            return self._console.status(text)
        self.say(f"{text} …")
        return nullcontext()


def writable(path: Path) -> Path:
    """Return `path`, or one of its name among temporary files where its folder is read-only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        is_writable = False
    else:
        is_writable = os.access(path.parent, os.W_OK)
    return path if is_writable else Path(tempfile.gettempdir(), f"dlog-demo-{path.name}")


def save_plot(statistics: pd.DataFrame, path: Path) -> None:
    """Save the mean departure delay per carrier and hour of the day as a PNG."""
    moments = statistics["hour_ms"].astype("datetime64[ms]").dt.tz_localize("UTC")
    totals = (
        statistics.assign(
            hour=moments.dt.tz_convert(_NEW_YORK).dt.hour,
            minutes=statistics["dep_delay_mean"].astype("Float64") * statistics["departed"],
        )
        .groupby(["carrier", "hour"])[["minutes", "departed"]]
        .sum()
    )
    departed = totals["departed"].where(totals["departed"] > 0)
    grid = (totals["minutes"] / departed).astype("float64").unstack("hour")
    # It takes as long to load as all else: what comes before the picture does not wait for it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        grid.to_numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=_MINUTES_SHOWN_MAX
    )
    axes.set_xticks(range(grid.shape[1]), [f"{hour}:00" for hour in grid.columns], rotation=45)
    axes.set_yticks(range(grid.shape[0]), list(grid.index))
    axes.set_xlabel("scheduled departure, New York time")
    axes.set_ylabel("carrier")
    axes.set_title("Mean departure delay of 2013, read from the log delays")
    figure.colorbar(image, label="minutes", extend="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
