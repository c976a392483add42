"""Plots of the progress of streaming queries: rates and lag, also while the queries run.

matplotlib draws and IPython shows the plots.  Nothing else needs them, and dlog does not install
them.
"""

from __future__ import annotations

import datetime
import io
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql.streaming.query import StreamingQuery

    from dlspark.progress import ProgressListener, ProgressPoint

_SIZE_INCHES = (9.0, 4.5)
_PANELS = (
    ("rows per second", {"arrived": "input_rows_per_s", "processed": "processed_rows_per_s"}),
    ("records behind", {"behind": "records_behind"}),
)


def plot_progress(points: Sequence[ProgressPoint]) -> Any:
    """Return a matplotlib figure of the rates and the lag of each query over time.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("a plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    queries = list(dict.fromkeys(point.query for point in points))
    for panel, (title, lines) in zip(
        figure.subplots(len(_PANELS), sharex=True), _PANELS, strict=True
    ):
        panel.set_ylabel(title)
        for query in queries:
            own = [point for point in points if point.query == query]
            times = [datetime.datetime.fromisoformat(point.timestamp) for point in own]
            for label, name in lines.items():
                panel.plot(times, [getattr(each, name) for each in own], label=f"{query} {label}")
        if queries:
            panel.legend(loc="upper left")
    return figure


def follow_progress(
    listener: ProgressListener, query: StreamingQuery, *, seconds: float, every_s: int = 1
) -> None:
    """Plot the points of `listener` below a notebook's cell, again every `every_s` seconds.

    It returns after about `seconds`, or when the query has ended.

    Raises:
        ConfigurationError: this is no notebook, or matplotlib is not installed.
    """
    no_notebook = (
        "a plot that follows a query needs a notebook; plot_progress(…) gives one anywhere"
    )
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import Image, display
    except ImportError as error:
        raise ConfigurationError(no_notebook) from error
    if get_ipython() is None:
        raise ConfigurationError(no_notebook)

    def picture() -> Any:
        drawn = io.BytesIO()
        plot_progress(listener.points).savefig(drawn, format="png")
        return Image(drawn.getvalue())  # type: ignore[no-untyped-call]

    shown = display(picture(), display_id=True)  # type: ignore[no-untyped-call]
    for _ in range(round(seconds / every_s)):
        if not query.isActive:
            break
        query.awaitTermination(every_s)
        shown.update(picture())
