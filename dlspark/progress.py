"""The progress of streaming queries: printed, kept for a plot, and exported."""

from __future__ import annotations

import heapq
import importlib.util
import logging
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from dlspark.admission import ADVICE_WITHOUT_LAG, has_admission_control
from dlspark.lag import Lag, LagReport, total

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import TextIO

    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryProgress,
    )

logger = logging.getLogger(__name__)
POINTS_MAX = 10_000
"""Points that are kept; the oldest are dropped.  With a batch each second this is some hours of a
query."""


LOGS_MAX = 10
"""Logs whose lag a point holds: those that are furthest behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressPoint:
    """One progress of one query.

    `behind_by_log` has the logs that are furthest behind, by records, at most `LOGS_MAX`.
    `records_behind`, `bytes_behind` and `seconds_behind` are for all logs together.  They are None
    if Spark does not let a source report its latest offset (PySpark 4.1), or if the query has no
    dlog source.
    """

    query: str
    batch_id: int
    timestamp: str
    """When the batch began, ISO-8601 in UTC."""
    input_rows: int
    input_rows_per_s: float
    processed_rows_per_s: float
    batch_ms: int
    records_behind: int | None = None
    bytes_behind: int | None = None
    seconds_behind: float | None = None
    records_skipped: int = 0
    behind_by_log: Mapping[str, Lag] = field(default_factory=dict)

    @classmethod
    def of(cls, progress: StreamingQueryProgress) -> ProgressPoint:
        """Return the point of a progress."""
        found = [LagReport.parse(source.latestOffset) for source in progress.sources]
        reports = {str(n): report for n, report in enumerate(found) if report is not None}
        behind = total({name: report.behind for name, report in reports.items()})
        by_log: dict[str, Lag] = {}
        for report in reports.values():
            for log, lag in report.logs.items():
                # For a log that is read twice, show the larger lag.
                by_log[log] = max(by_log.get(log, lag), lag, key=_by_records)
        furthest = heapq.nlargest(LOGS_MAX, by_log, key=lambda log: _by_records(by_log[log]))
        return cls(
            query=progress.name or str(progress.id),
            batch_id=progress.batchId,
            timestamp=progress.timestamp,
            input_rows=progress.numInputRows,
            input_rows_per_s=_number(progress.inputRowsPerSecond),
            processed_rows_per_s=_number(progress.processedRowsPerSecond),
            batch_ms=progress.batchDuration,
            records_behind=behind.records if reports else None,
            bytes_behind=behind.size_bytes if reports else None,
            seconds_behind=behind.seconds if reports else None,
            records_skipped=sum(report.skipped_records for report in reports.values()),
            # Thousands of points name the same logs, so each name is in memory once.
            behind_by_log={sys.intern(log): by_log[log] for log in furthest},
        )

    def __str__(self) -> str:
        text = (
            f"{self.timestamp} {self.query} batch {self.batch_id}: {self.input_rows} rows in "
            f"{self.batch_ms} ms, {self.processed_rows_per_s:.0f} rows/s"
        )
        if self.records_behind is not None:
            text += (
                f"; behind by {self.records_behind} records, {self.bytes_behind} bytes, "
                f"{self.seconds_behind:.1f} s"
            )
        return text + (f"; skipped {self.records_skipped}" if self.records_skipped else "")


def _by_records(lag: Lag) -> int:
    return lag.records


def _number(value: float | None) -> float:
    # Spark reports NaN for no value.
    return 0.0 if value is None or value != value else float(value)


class ProgressListener(StreamingQueryListener):
    """Follows the streaming queries of a session: ``spark.streams.addListener(listener)``.

    It prints a line per progress, and keeps the last points for a plot.  If `prometheus_client` is
    installed, it exports the newest point of each running query as gauges ``dlog_stream_…``.

    Args:
        prints: whether to print.
        points_max: how many points to keep.
        registry: registry of `prometheus_client`; None for its default.
    """

    def __init__(
        self, *, prints: bool = True, points_max: int = POINTS_MAX, registry: Any = None
    ) -> None:
        self._output: TextIO | None = sys.stdout if prints else None
        self._points: deque[ProgressPoint] = deque(maxlen=points_max)
        self._latest: dict[str, ProgressPoint] = {}
        if not has_admission_control():
            logger.warning("%s; to do: follow this advice, or nothing", ADVICE_WITHOUT_LAG)
        if importlib.util.find_spec("prometheus_client") is not None:
            from prometheus_client import REGISTRY

            (registry or REGISTRY).register(_Gauges(self._latest))

    @property
    def points(self) -> list[ProgressPoint]:
        """The points so far, the oldest first; ``pandas.DataFrame(listener.points)`` works."""
        return list(self._points)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: the query's first progress has all information."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Print and keep a progress."""
        point = ProgressPoint.of(event.progress)
        self._points.append(point)
        # By run: the end of an earlier run, which may come late, must not remove a new run's
        # gauges.
        self._latest[str(event.progress.runId)] = point
        if self._output is not None:
            print(point, file=self._output, flush=True)  # the purpose of the listener is output

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing: the last point is still valid."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Stop exporting the gauges of the query."""
        self._latest.pop(str(event.runId), None)


class _Gauges:
    """A collector of `prometheus_client`."""

    def __init__(self, latest: Mapping[str, ProgressPoint]) -> None:
        self._latest = latest

    def describe(self) -> list[Any]:
        """Return nothing: several listeners may export gauges with the same names."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the gauges of all running queries."""
        from prometheus_client.core import GaugeMetricFamily

        points = list(self._latest.values())
        for name, text in _EXPORTED.items():
            gauge = GaugeMetricFamily(f"dlog_stream_{name}", text, labels=["query"])
            for point in points:
                value = getattr(point, name)
                if value is not None:
                    gauge.add_metric([point.query], value)
            yield gauge
        for name, (attribute, text) in _EXPORTED_BY_LOG.items():
            gauge = GaugeMetricFamily(f"dlog_stream_log_{name}", text, labels=["query", "log"])
            for point in points:
                for log, lag in point.behind_by_log.items():
                    gauge.add_metric([point.query, log], getattr(lag, attribute))
            yield gauge


_EXPORTED = {
    "batch_id": "The last micro-batch.",
    "input_rows": "Rows of the last micro-batch.",
    "input_rows_per_s": "Rows that arrived, per second.",
    "processed_rows_per_s": "Rows that were processed, per second.",
    "batch_ms": "Milliseconds that the last micro-batch took.",
    "records_behind": "Records that are not read yet.",
    "bytes_behind": "Bytes that are not read yet.",
    "seconds_behind": "Seconds between the next record to read and the last one.",
    "records_skipped": "Lost records that the run skipped.",
}
_EXPORTED_BY_LOG = {
    "records_behind": ("records", "Records of a log that are not read yet."),
    "bytes_behind": ("size_bytes", "Bytes of a log that are not read yet."),
    "seconds_behind": ("seconds", "Seconds between a log's next record to read and its last."),
}
