"""The listener of progresses: what it prints, keeps and exports.

Goal: the numbers of a query reach its user.  Method: progresses as Spark hands them
over, made up; the exporter's own text format.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dlcore.base.errors import ConfigurationError
from dlspark import ProgressListener, follow_progress, plot_progress
from dlspark.lag import Lag, LagReport
from dlspark.progress import LOGS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

REPORT = LagReport(
    logs={"clicks": Lag(records=40, size_bytes=4096, seconds=1.5)},
    ends={"clicks": "3:17:0"},
    skipped_records=12,
    losses=1,
)


def progress(name: str | None = "etl", *offsets: str | None, batch_id: int = 7) -> Any:
    """Return an event as Spark makes it."""
    return SimpleNamespace(
        progress=SimpleNamespace(
            name=name,
            id="the-id",
            runId=f"run of {name}",
            batchId=batch_id,
            timestamp="2026-05-01T12:00:00.000Z",
            numInputRows=100,
            inputRowsPerSecond=float("nan"),
            processedRowsPerSecond=250.0,
            batchDuration=400,
            sources=[SimpleNamespace(latestOffset=offset) for offset in offsets],
        )
    )


def test_points_are_kept_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """With the lag of all dlog sources of a query; of other sources nothing is known."""
    listener = ProgressListener(registry=CollectorRegistry())
    text = json.dumps(REPORT.to_json())
    listener.onQueryStarted(SimpleNamespace())  # type: ignore[arg-type]
    listener.onQueryProgress(progress("etl", text, text, '{"clicks": {"0": 5}}'))
    listener.onQueryIdle(SimpleNamespace())  # type: ignore[arg-type]
    listener.onQueryProgress(progress(None, None))
    first, second = listener.points
    assert (first.records_behind, first.bytes_behind, first.seconds_behind) == (80, 8192, 1.5)
    assert (first.records_skipped, first.input_rows_per_s) == (24, 0.0)
    assert (second.query, second.records_behind) == ("the-id", None)
    printed = "2026-05-01T12:00:00.000Z {} batch 7: 100 rows in 400 ms, 250 rows/s"
    behind = "; behind by 80 records, 8192 bytes, 1.5 s; skipped 24"
    lines = capsys.readouterr().out.splitlines()
    assert lines == [printed.format("etl") + behind, printed.format("the-id")]


def test_no_more_points_are_kept_than_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The oldest go first; and nothing is printed unless wanted."""
    listener = ProgressListener(prints=False, points_max=3, registry=CollectorRegistry())
    for batch_id in range(5):
        listener.onQueryProgress(progress(batch_id=batch_id))
    assert [point.batch_id for point in listener.points] == [2, 3, 4]
    assert capsys.readouterr().out == ""


def test_gauges_for_prometheus() -> None:
    """The newest of each running query; none of one that has ended."""
    registry = CollectorRegistry()
    listener = ProgressListener(prints=False, registry=registry)
    ProgressListener(prints=False, registry=registry)
    listener.onQueryProgress(progress("etl", json.dumps(REPORT.to_json())))
    listener.onQueryProgress(progress("other"))
    text = generate_latest(registry).decode()
    assert 'dlog_stream_records_behind{query="etl"} 40.0' in text
    assert 'dlog_stream_records_behind{query="other"}' not in text
    assert 'dlog_stream_processed_rows_per_s{query="other"} 250.0' in text
    listener.onQueryTerminated(SimpleNamespace(runId="run of etl"))  # type: ignore[arg-type]
    assert 'query="etl"' not in generate_latest(registry).decode()


def test_lag_by_log_is_that_of_the_logs_furthest_behind() -> None:
    """However many a query reads: no more are kept, nor exported."""
    logs = {f"log-{n}": Lag(records=n, size_bytes=n * 100, seconds=n / 10) for n in range(1, 51)}
    text = json.dumps(LagReport(logs=logs, ends=dict.fromkeys(logs, "1:0:0")).to_json())
    again = LagReport(logs={"log-50": Lag(records=3)}, ends={"log-50": "1:0:0"})
    registry = CollectorRegistry()
    listener = ProgressListener(prints=False, registry=registry)
    listener.onQueryProgress(progress("etl", text, json.dumps(again.to_json())))
    (point,) = listener.points
    assert list(point.behind_by_log) == [f"log-{n}" for n in range(50, 50 - LOGS_MAX, -1)]
    assert point.behind_by_log["log-50"] == logs["log-50"]
    exported = generate_latest(registry).decode()
    assert 'dlog_stream_log_records_behind{log="log-50",query="etl"} 50.0' in exported
    assert 'dlog_stream_log_seconds_behind{log="log-50",query="etl"} 5.0' in exported
    assert exported.count("dlog_stream_log_bytes_behind{") == LOGS_MAX
    listener.onQueryTerminated(SimpleNamespace(runId="run of etl"))  # type: ignore[arg-type]
    assert "log-50" not in generate_latest(registry).decode()


def test_a_plot_of_rates_and_lag() -> None:
    """A line per query and rate, and one for what is behind; without points empty panels."""
    listener = ProgressListener(prints=False, registry=CollectorRegistry())
    assert all(not panel.lines for panel in plot_progress(listener.points).axes)
    text = json.dumps(REPORT.to_json())
    for batch_id, name in enumerate(("etl", "other", "etl")):
        listener.onQueryProgress(progress(name, text, batch_id=batch_id))
    rates, lag = plot_progress(listener.points).axes
    assert [line.get_label() for line in rates.lines] == [
        "etl arrived", "etl processed", "other arrived", "other processed"
    ]  # fmt: skip
    assert [list(line.get_ydata()) for line in lag.lines] == [[40, 40], [40]]


def test_a_plot_that_follows_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn anew until the query ends, or the time is up."""
    drawn: list[Any] = []
    shown = SimpleNamespace(update=drawn.append)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: shown)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", object)
    listener = ProgressListener(prints=False, registry=CollectorRegistry())

    class Query:
        """Ends while it is waited for the second time."""

        waits = 0

        @property
        def isActive(self) -> bool:
            """Whether it runs."""
            return self.waits < 2

        def awaitTermination(self, timeout: float) -> None:
            """Wait no time."""
            self.waits += 1

    query: Any = Query()
    follow_progress(listener, query, seconds=60)
    assert len(drawn) == 2
    query.waits = 0
    follow_progress(listener, query, seconds=0)
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("module", "draw"),
    [
        ("matplotlib.figure", lambda: plot_progress([])),
        ("IPython.display", lambda: follow_progress(None, None, seconds=1)),  # type: ignore[arg-type]
    ],
)
def test_a_plot_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, module: str, draw: Callable[[], object]
) -> None:
    """Neither library comes with dlog."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=r"a plot .*needs"):
        draw()


def test_a_plot_that_follows_needs_a_notebook() -> None:
    """In a program it ended in an AttributeError, once it had printed invisible output."""
    listener = ProgressListener(prints=False, registry=CollectorRegistry())
    with pytest.raises(ConfigurationError, match=r"needs a notebook; plot_progress"):
        follow_progress(listener, None, seconds=1)  # type: ignore[arg-type]
