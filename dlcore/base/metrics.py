"""Metrics: what each is called and means, and the samples that a scrape gets.

Nothing is computed until a caller asks: the code that works counts in plain attributes, and
durations in fixed buckets (`Durations`); a source makes samples of them when it is scraped.
`exposition` turns samples into Prometheus' format, for registries of `prometheus_client` too.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dlcore.base.extras import missing_packages_explained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets: from a sync of a fast device to what an operator is woken for."""


class Durations:
    """Counts of durations in the buckets of `BOUNDS_S`, and one above."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def note(self, seconds: float) -> None:
        """Count one duration; it costs about 0.2 µs."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        """The number of all durations."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return for each bound as text how many durations were not above it."""
        found, below = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


class Kind(enum.Enum):
    """The types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `of` makes its samples."""

    name: str
    """With its unit at the end; that of a counter ends in `_total`."""
    kind: Kind
    text: str
    """A sentence without a full stop."""
    labels: tuple[str, ...] = ()

    def of(self, value: float | Durations, *labels: str) -> Sample:
        """Return a sample with a value for each label."""
        assert len(labels) == len(self.labels), self.name
        assert isinstance(value, Durations) == (self.kind is Kind.HISTOGRAM), self.name
        return Sample(self, value, labels)


class Sample(NamedTuple):
    """The value of a metric now."""

    metric: Metric
    value: float | Durations
    labels: tuple[str, ...]


Source: TypeAlias = "Callable[[], Iterable[Sample]]"
"""Returns the present samples; quick, because it runs on the event loop of a server."""


def counter(name: str, text: str, *labels: str) -> Metric:
    """Return a metric that only grows."""
    return Metric(f"dlog_{name}", Kind.COUNTER, text, labels)


def gauge(name: str, text: str, *labels: str) -> Metric:
    """Return a metric that grows and shrinks."""
    return Metric(f"dlog_{name}", Kind.GAUGE, text, labels)


def histogram(name: str, text: str) -> Metric:
    """Return a metric of durations."""
    return Metric(f"dlog_{name}", Kind.HISTOGRAM, text)


def defined_in(names: Mapping[str, object]) -> tuple[Metric, ...]:
    """Return the metrics among the names of a module, in the order of their definitions."""
    return tuple(each for each in names.values() if isinstance(each, Metric))


class TopRates:
    """The names with the highest rates between two scrapes, and no more than `count_max` of them.

    A label for each name would let the number of logs decide how much a scrape costs.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._before: dict[str, float] = {}
        self._at_s = float("-inf")

    def take(self, totals: Mapping[str, float], *, now_s: float) -> list[tuple[str, float]]:
        """Return names and rates since the last call, highest first; none at the first call.

        A name that is new, or whose total shrank, began at 0 meanwhile.
        """
        before, passed_s = self._before, now_s - self._at_s
        self._before, self._at_s = dict(totals), now_s
        if passed_s <= 0 or passed_s == float("inf"):
            return []
        rates = (
            (name, (total - (then if (then := before.get(name, 0.0)) <= total else 0.0)) / passed_s)
            for name, total in totals.items()
        )
        return heapq.nlargest(self._count_max, rates, key=lambda each: (each[1], each[0]))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class SampleCollector:
    """A collector for a registry of `prometheus_client`: it asks its sources at each scrape.

    Args:
        metrics: the metrics that may occur.
        sources: return the samples.
    """

    def __init__(self, metrics: Sequence[Metric], *sources: Source) -> None:
        with missing_packages_explained():
            import prometheus_client.core  # noqa: F401  # fails now, and not at the first scrape
        self._metrics = metrics
        self._sources = sources

    def describe(self) -> Iterator[Any]:
        """Yield the empty families; a registry refuses two of one name."""
        for each in self._metrics:
            yield _family(each)

    def collect(self) -> Iterator[Any]:
        """Yield the families with their samples."""
        samples = [sample for source in self._sources for sample in source()]
        families = {each: _family(each) for each in dict.fromkeys(s.metric for s in samples)}
        for sample in samples:
            _add(families[sample.metric], sample)
        yield from families.values()


def exposition(collectors: Iterable[SampleCollector]) -> bytes:
    """Return what collectors have, with the figures of this process, in Prometheus' format."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for each in collectors:
        registry.register(each)
    return generate_latest(registry)


def _family(metric: Metric) -> Any:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    kinds = {
        Kind.COUNTER: CounterMetricFamily,
        Kind.GAUGE: GaugeMetricFamily,
        Kind.HISTOGRAM: HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.name, metric.text, labels=metric.labels)


def _add(family: Any, sample: Sample) -> None:
    value = sample.value
    if isinstance(value, Durations):
        family.add_metric(sample.labels, value.cumulative(), value.total_s)
    else:
        family.add_metric(sample.labels, value)
